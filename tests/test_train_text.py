"""train() on text: going on after a stop, starting from a checkpoint, and bad input in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file
from small_text import write_text
from test_train import untimed

from mlframe.errors import ConfigError
from mlframe.language import LanguageModeling
from mlframe.train import CONF, train

SMALL = {
    "bert": ["hidden_size=32", "intermediate_size=64", "num_hidden_layers=4", "hidden_dropout_prob=0.1"],
    "gpt": ["n_embd=32", "n_layer=4", "resid_pdrop=0.1"],
    "llama": ["hidden_size=32", "intermediate_size=64", "num_hidden_layers=4", "head_dim=8", "attention_dropout=0.1"],
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), 400)


def config_of(family: str, text: Path, run: Path, *overrides: str) -> DictConfig:
    experiment = "bert_docs" if family == "bert" else "gpt_docs"
    # With a "+" where the model's file does not name the key.
    sizes = [f"{'+' if 'attention_dropout' in size else ''}model.config.{size}" for size in SMALL[family]]
    settings = [
        f"experiment={experiment}", f"model={family}_docs", "data=text_files", f"data.source.train={text}",
        "data.source.holdout=0.1", f"data_dir={text.parent}/data", "model.config.vocab_size=300", *sizes,
        "data.sequence_length=32", "data.batch_size=8", f"run_dir={run}", "steps=20", "trainer.val_check_interval=4",
        "logger=none", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "callbacks.last.every=4",
        "callbacks.progress=null",
    ]  # fmt: skip
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [*settings, *overrides])


def final(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


@pytest.mark.parametrize("family", SMALL)
def test_a_run_that_dies_goes_on_to_the_same_weights_and_rows(
    family: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config_of(family, text, tmp_path / "whole"))
    step = LanguageModeling.training_step
    for dies_at in (6, 13):  # at the small level, and at the full one again
        with monkeypatch.context() as patch:

            def dying(self: LanguageModeling, batch: Any, batch_idx: int, dies_at: int = dies_at) -> torch.Tensor:
                if self.trainer.global_step == dies_at:
                    raise RuntimeError("the power is gone")
                return step(self, batch, batch_idx)

            patch.setattr(LanguageModeling, "training_step", dying)
            with pytest.raises(RuntimeError, match="the power is gone"):
                train(config_of(family, text, tmp_path / "stopped"))
    train(config_of(family, text, tmp_path / "stopped"))
    whole, stopped = final(tmp_path / "whole"), final(tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "stopped")


def test_a_run_starts_from_the_weights_that_another_left(text: Path, tmp_path: Path) -> None:
    train(config_of("gpt", text, tmp_path / "first"))
    still = ["plan=scratch", "steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "schedule.warmup=0"]
    train(config_of("gpt", text, tmp_path / "second", f"init_from={tmp_path / 'first' / 'final'}", *still))
    first, second = final(tmp_path / "first"), final(tmp_path / "second")
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=1e-6)
    small = [f"init_from={tmp_path / 'first' / 'levels' / '1'}", "plan=scratch", "plan.level=1", "steps=1"]
    train(config_of("gpt", text, tmp_path / "small", *small))
    with pytest.raises(ConfigError, match=r"another configuration than model\.config.*n_embd is 16, not 32"):
        train(config_of("gpt", text, tmp_path / "wrong", small[0]))
    assert not (tmp_path / "wrong").exists()
    # Its embeddings would belong to other tokens.
    other = write_text(tmp_path / "other", 300, seed=1)
    with pytest.raises(ConfigError, match=r"another tokenizer: set model\.tokenizer="):
        train(config_of("gpt", other, tmp_path / "wrong", f"init_from={tmp_path / 'first' / 'final'}"))

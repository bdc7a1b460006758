"""Whole runs of some seconds: a configuration of each family down and up three levels, in two ways of training."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from small_images import write_images
from small_text import write_text

from mlframe.train import CONF

_TEXT = ["data=text_files", "data.source.holdout=0.1", "data.sequence_length=32", "model.config.vocab_size=300"]
FAMILIES = {
    "deit": [
        "experiment=deit_fashion", "data=image_folder", "model.config.embed_dim=32", "model.config.depth=4",
        "model.config.drop_path_rate=0.1", "model.task.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}",
    ],
    "bert": [
        "experiment=bert_docs", *_TEXT, "model.config.hidden_size=32", "model.config.intermediate_size=64",
        "model.config.num_hidden_layers=4", "model.config.hidden_dropout_prob=0.1",
    ],
    "gpt": [
        "experiment=gpt_docs", *_TEXT, "model.config.n_embd=32", "model.config.n_layer=4",
        "model.config.resid_pdrop=0.1",
    ],
}  # fmt: skip
WAYS = {
    "plain": ["data.workers=0", "callbacks.last.every=1", "trainer.val_check_interval=3"],
    "accumulated": [
        "data.workers=2", "callbacks.last.every=2", "trainer.val_check_interval=8", "trainer.accumulate_grad_batches=2",
    ],
}  # fmt: skip
_COMMON = [
    "logger=none", "callbacks.progress=null", "+trainer.enable_progress_bar=false", "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1", "trainer.limit_val_batches=3", "data.batch_size=8", "data.eval_batch_size=4",
    "steps=16", "levels.count=3", "plan.e_a=[2, 2]", "plan.e_small=[3, 3]", "plan.alpha=[0.25, 0.5]",
]  # fmt: skip


def write_source(family: str, folder: Path) -> Path:
    """The family's data, of which 16 steps are more than one epoch and less than five."""
    return write_images(folder) if family == "deit" else write_text(folder, lines=200).parent


def config_of(family: str, way: str, source: Path, run: Path) -> DictConfig:
    """Levels 0 1 2 1 0 for 2, 2, 3, 3 and 6 steps. Tokens are made in the run's own folder."""
    where = [f"data.source.{'folder' if family == 'deit' else 'train'}={source}", f"data_dir={run}/data"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [*FAMILIES[family], *WAYS[way], *_COMMON, *where, f"run_dir={run}"])

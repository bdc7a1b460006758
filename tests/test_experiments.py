"""The paper's language experiments: as published, every level on meta; shrunken, two steps in each phase."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from small_text import write_text
from test_configs import composed

from mlframe.flops import short
from mlframe.plan import describe
from mlframe.train import build, train

# experiment: (parameters of level 0, steps of each phase, the levels' layers, alpha)
PAPER = {
    "bert_base": (109_514_298, [15_000, 150_000, 135_000], [12, 6], 0.5),
    "bert_large": (335_174_458, [15_000, 150_000, 135_000], [24, 12], 0.5),
    "bert_large_3": (335_174_458, [15_000, 15_000, 75_000, 60_000, 135_000], [24, 12, 6], 0.5),
    "gpt_base": (124_439_808, [15_000, 150_000, 135_000], [12, 6], 0.25),
    "gpt_base_example": (124_439_808, [5_000, 50_000, 50_000], [12, 6], 0.25),
}
SHRUNKEN = {
    "bert": ["hidden_size=32", "num_attention_heads=4", "intermediate_size=64", "num_hidden_layers=4"],
    "gpt": ["n_embd=32", "n_head=4", "n_layer=4"],
}


@pytest.mark.parametrize("experiment", PAPER)
def test_as_published_on_meta(experiment: str, tmp_path: Path) -> None:
    parameters, steps, layers, alpha = PAPER[experiment]
    config = composed(tmp_path, f"experiment={experiment}")
    plan, data, module = build(config)
    assert plan.levels[0].parameters == parameters
    assert [phase.steps for phase in plan.phases] == steps
    assert [level.sizes["layers"] for level in plan.levels] == layers
    assert plan.phases[-1].alpha == alpha
    assert module.units == data.sample["tokens"] == config.data.sequence_length
    samples = config.data.batch_size * config.trainer.devices
    assert samples == 512
    console = Console(width=80, file=io.StringIO())
    console.print(describe(plan, samples))
    table = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{plan.flops(samples):.4g} FLOPs" in table
    assert "…" not in table, "fits a terminal of 80 columns"
    for phase in plan.phases:
        assert short(phase.steps * samples * plan.levels[phase.level].flops) in table


@pytest.mark.parametrize("experiment", PAPER)
def test_its_baseline_is_the_same_run_without_the_cycle(experiment: str, tmp_path: Path) -> None:
    whole, _, _ = build(composed(tmp_path, f"experiment={experiment}"))
    plan, _, _ = build(composed(tmp_path, f"experiment={experiment}", "plan=scratch"))
    assert [phase.level for phase in plan.phases] == [0]
    assert plan.levels[0].parameters == whole.levels[0].parameters


@pytest.mark.parametrize("plan", ["", "plan=scratch"])
@pytest.mark.parametrize("experiment", PAPER)
def test_two_steps_in_every_phase_when_shrunken(
    experiment: str, plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = experiment.split("_")[0]
    text = write_text(tmp_path / "text", 300)
    vocab = ["model.config.vocab_size=300", f"model.tokenizer={'wordpiece' if family == 'bert' else 'bpe'}"]
    small = [f"model.config.{setting}" for setting in SHRUNKEN[family]] + vocab
    if family == "gpt":
        small += ["model.config.bos_token_id=0", "model.config.eos_token_id=0"]
    machine = ["trainer.devices=1", "trainer.strategy=auto", "trainer.accelerator=cpu", "trainer.precision=32-true"]
    source = ["data=text_files", f"data.source.train={text}", "data.source.holdout=0.1", f"data_dir={tmp_path}/data"]
    run = ["trainer.fast_dev_run=2", "data.batch_size=4", "logger=none", "data.sequence_length=32"]
    overrides = [*small, *machine, *source, *run, *([plan] if plan else [])]
    assert train(composed(tmp_path / "run", f"experiment={experiment}", *overrides)) == {}
    said = capsys.readouterr().out
    phases = 1 if plan else len(PAPER[experiment][1])
    assert f"phase {phases}/{phases}" in said
    assert f"all {phases} phases ran" in said
    assert not (tmp_path / "run").exists(), "nothing is written"

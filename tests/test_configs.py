"""Every config composes, resolves and builds; what is misspelt is named."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from mlframe.loop import VCycleLoop
from mlframe.train import CONF, build, build_trainer, run_name

GROUPS = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in CONF.iterdir() if group.is_dir()}
CHOICES = [
    f"{group}={name}"
    for group, names in GROUPS.items()
    for name in names
    if group not in ("experiment", "debug", "hparams_search")  # which needs a plugin: tests/test_sweep.py
]
WHOLE = [f"{group}={name}" for group in ("experiment", "debug") for name in GROUPS[group]]

COLOUR = ["model.config.in_chans=3", "model.config.img_size=32", "model.config.patch_size=8"]
FITTING = {f"data={name}": COLOUR for name in ("cifar10", "cifar100", "hf_images", "imagenet")}  # by the default model
FITTING["data=hf_images"] = [*COLOUR, "data.source.path=folder"]
FITTING |= {f"data={name}": ["model=gpt_docs"] for name in ("docs", "text_files", "wikipedia_books")}
FITTING["data=hf_text"] = ["model=bert_docs", "data.source.path=folder"]
FITTING |= {f"model={name}": ["data=docs"] for name in GROUPS["model"] if not name.startswith("deit")}
FITTING["plan=vcycle_example"] = ["steps=105000"]
FITTING["plan=vcycle_bert_3"] = ["levels.count=3", "model.config.depth=8"]


def composed(tmp_path: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [f"run_dir={tmp_path}", *overrides])


@pytest.mark.parametrize("choice", CHOICES)
def test_every_config_composes_resolves_and_builds(choice: str, tmp_path: Path) -> None:
    one_cpu = ["trainer.accelerator=cpu", "trainer.devices=1", "trainer.strategy=auto"]
    config = composed(tmp_path, choice, *FITTING.get(choice, []), *one_cpu)
    text = OmegaConf.to_yaml(config, resolve=True)
    assert "${" not in text
    assert "???" not in text
    plan, data, module = build(config)
    assert isinstance(data, pl.LightningDataModule)
    trainer = build_trainer(config, plan)
    VCycleLoop.attach(trainer, module)
    assert trainer.max_steps == plan.steps
    with torch.device("meta"):
        module.configure_model()
    assert sum(p.numel() for p in module.parameters()) == plan.levels[plan.phases[0].level].parameters


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
@pytest.mark.parametrize("other", ["plan=scratch", "levels=depth", "levels=width", "schedule=wsd", "logger=none"])
def test_an_experiment_takes_other_choices(experiment: str, other: str, tmp_path: Path) -> None:
    config = composed(tmp_path, f"experiment={experiment}", other)
    plan, _, _ = build(config)
    assert plan.steps == config.steps


def test_the_imagenet_experiments_are_the_published_recipe(tmp_path: Path) -> None:
    for name, parameters in (("deit_s", 22_050_664), ("deit_b", 86_567_656)):
        config = composed(tmp_path, f"experiment={name}")
        plan, _, _ = build(config)
        assert plan.levels[0].parameters == parameters
        assert [phase.steps for phase in plan.phases] == [18_765, 187_650, 168_885]
        assert plan.phases[-1].alpha == 0.25
        assert config.data.batch_size * config.trainer.devices * config.trainer.accumulate_grad_batches == 1024


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.max_step=3", "max_step"),
        ("model.config.widht=3", "widht"),
        ("data=no_such", "no_such"),
        ("stepz=3", "stepz"),
    ],
)
def test_a_misspelt_key_or_choice_fails_and_is_named(override: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(HydraException, match=named):
        composed(tmp_path, override)


def test_each_config_is_short() -> None:
    for file in CONF.rglob("*.yaml"):
        assert len(file.read_text().splitlines()) <= 50, file


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("", "default"),
        ("seed=2", "seed=2"),
        ("optimizer.lr=1e-3,seed=2", "optimizer.lr=1e-3,seed=2"),
        ("levels.layers=[[0,1],[2,3]]", "levels.layers=[[0,1],[2,3]]"),
    ],
)
def test_run_folders_read_like_the_overrides(overrides: str, name: str) -> None:
    assert run_name(overrides) == name


def test_run_folders_are_safe_and_never_the_same_for_different_overrides() -> None:
    nasty = [
        "data.source.folder=/a/b",
        "data.source.folder=/a_b",
        "x=../../etc",
        "x=" + "y" * 300,
        "x=" + "y" * 301,
        "x= y",
    ]
    names = [run_name(overrides) for overrides in nasty]
    assert len(set(names)) == len(names)
    for name in names:
        assert os.sep not in name
        assert len(name) < 160
        assert not name.startswith(".")


def readme_commands() -> list[list[str]]:
    lines = (CONF.parent / "README.md").read_text().splitlines()
    commands = [line.split("#")[0].split() for line in lines if line.startswith("mlframe-train ")]
    return [
        [word for word in words[1:] if not word.startswith("-")] for words in commands if "--config-dir" not in words
    ]


@pytest.mark.parametrize("overrides", readme_commands(), ids=" ".join)
def test_every_command_of_the_readme_composes_and_builds(overrides: list[str], tmp_path: Path) -> None:
    first = [override.split(",")[0] if "[[" not in override else override for override in overrides]  # of a sweep
    build(composed(tmp_path, *first))

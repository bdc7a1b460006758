"""`mlframe-train` as a user runs it, on 200 small images (cases A9 and A10)."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from fresh_box import ROOT, Box
from small_text import WORDS, write_text
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def box(tmp_path: Path, image_set: Path) -> Box:
    return Box(tmp_path, image_set)


def test_a_run_on_a_fresh_machine_end_to_end(box: Box) -> None:
    done = box.run(*box.smoke("name=smoke"))
    assert done.returncode == 0, done.stderr + done.stdout
    said = done.stdout + done.stderr
    assert not (box.folder / "connections.txt").exists(), (box.folder / "connections.txt").read_text()
    assert not any(prompt in said for prompt in ("Enter your choice", "api key", "wandb: (1)", "Traceback"))
    run = next((box.folder / "runs" / "smoke").iterdir())
    results = json.loads((run / "results.json").read_text())

    # The last lines say how accurate it is, what it cost and where things lie.
    last = done.stdout.strip().splitlines()[-3:]
    assert f"acc {results['test/acc']:.4f}" in last[0]
    assert f"{results['total_flops']:.4g} FLOPs" in last[1]
    assert run.name in last[2]
    for phase in ("phase 1/3 down 0 (level 0)", "phase 2/3 small (level 1)", "phase 3/3 up 0 (level 0)"):
        assert phase in said

    config = (run / "config.yaml").read_text()
    assert "${" not in config
    assert yaml.safe_load(config)["data"]["batch_size"] == 16
    plan = json.loads((run / "plan.json").read_text())
    assert [phase["steps"] for phase in plan["phases"]] == [1, 8, 7]
    assert plan["flops"] == results["total_flops"]
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    flops = [int(row["total_flops"]) for row in rows]
    assert flops == sorted(flops)
    assert flops[-1] == plan["flops"]
    assert len([row for row in rows if row["train/loss"]]) == 16
    assert all(row["images"] and row["wall_time"] for row in rows)
    assert [row["test/acc"] for row in rows if row["test/acc"]] == [str(results["test/acc"])]
    assert torch.load(run / "checkpoints" / "best.ckpt")["vcycle"]["phase"] == 2
    assert list((run / "wandb").glob("offline-run-*")), "W&B is on, offline"

    saved = json.loads((run / "final" / "config.json").read_text())
    weights = str(run / "final" / "model.safetensors")
    network = timm.create_model(saved["architecture"], checkpoint_path=weights, **saved["model_args"])
    assert sum(p.numel() for p in network.parameters()) == results["parameters"]
    assert saved["label_names"][3] == "class_3"

    again = box.run(*box.smoke("name=smoke"))
    assert again.returncode == 0
    assert "This run is finished" in again.stdout
    assert again.stdout.strip().splitlines()[-3:] == last


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_a_language_model_with_a_local_tokenizer_end_to_end(family: str, box: Box, tmp_path: Path) -> None:
    text, tokenizer = write_text(tmp_path / "text"), word_level_tokenizer(tmp_path / "tokenizer", WORDS)
    settings = [
        f"experiment={family}_docs", "data=text_files", f"data.source.train={text}", "data.source.holdout=0.1",
        f"model.tokenizer={tokenizer}", "model.config.vocab_size=64", "data.sequence_length=32", "data.batch_size=8",
        "steps=12", "trainer.val_check_interval=4", "trainer.log_every_n_steps=1", "plan.e_small=[0.5]",
    ]  # fmt: skip
    done = box.run(*settings)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not (box.folder / "connections.txt").exists(), (box.folder / "connections.txt").read_text()
    assert "Writing model shards" not in done.stderr, "no second progress bar"
    run = next((box.folder / "runs" / f"{family}_docs").iterdir())
    results = json.loads((run / "results.json").read_text())
    assert results["test/ppl"] == pytest.approx(math.exp(results["test/loss"]), rel=1e-4)
    assert results["tokens"] == 12 * 8 * 32
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[-1]["tokens"] == str(results["tokens"])
    first = next(float(row["train/loss"]) for row in rows if row["train/loss"])
    assert first == pytest.approx(math.log(64), rel=0.05)
    assert "${" not in (run / "config.yaml").read_text()
    torch.load(run / "checkpoints" / "last.ckpt")  # weights_only, torch's default
    assert "add control=1" in done.stdout

    # What is left loads in a fresh process, the small level's network too.
    kind = "AutoModelForMaskedLM" if family == "bert" else "AutoModelForCausalLM"
    script = (
        f"import sys, torch, transformers as t\n"
        f"net, info = t.{kind}.from_pretrained(sys.argv[1], output_loading_info=True)\n"
        f"tok = t.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        f"ids = torch.tensor([tok.encode('ban dom kert lisk', add_special_tokens=False)])\n"
        f"assert not any(info[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), info\n"
        f"print(net.config.num_hidden_layers, tuple(net(input_ids=ids).logits.shape))"
    )
    for place, layers in (("final", 6), ("levels/1", 3)):
        loaded = box.run(script, str(run / place), command=[sys.executable, "-c"])
        assert loaded.stdout.strip() == f"{layers} (1, 4, 64)", loaded.stderr

    if family == "bert":  # one of them is enough for what follows
        return
    control = box.run(*settings, "control=1")
    assert control.returncode == 0, control.stderr
    table = control.stdout.split("at equal FLOPs")[1]
    assert f"{results['test/loss']:.4f}" in table, "the V-cycle's loss stands beside the control's"


def word_level_tokenizer(folder: Path, words: list[str]) -> Path:
    """A tokenizer file such as people have: one id a word."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>"]
    rust = Tokenizer(WordLevel({word: i for i, word in enumerate([*special, *words, "."])}, unk_token="[UNK]"))
    rust.pre_tokenizer = Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names |= {"mask_token": "[MASK]", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=rust, **names).save_pretrained(folder)
    return folder


def test_online_without_a_key_fails_before_training_and_names_the_way_out(box: Box) -> None:
    done = box.run(*box.smoke("logger.wandb.mode=online"))
    assert done.returncode != 0
    assert "WANDB_API_KEY" in done.stderr
    assert "logger.wandb.mode=offline" in done.stderr
    assert "phase 1/3" not in done.stdout
    assert "Traceback" not in done.stderr


def test_what_is_wrong_is_one_line_before_training(box: Box) -> None:
    done = box.run(*box.smoke("model.config.num_heads=3", "logger=none"))
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith("mlframe-train: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(box.folder.rglob("metrics.csv"))


def test_a_typo_is_rejected_and_named(box: Box) -> None:
    done = box.run(*box.smoke("trainer.max_step=3"))
    assert done.returncode != 0
    assert "max_step" in done.stderr
    assert "Traceback" not in done.stderr


def test_installed_from_a_wheel_it_works_anywhere(box: Box, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    wheel = next((tmp_path / "dist").glob("*.whl"))
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    from_repo = box.run("experiment=deit_b", "--cfg", "job")

    box.path[1] = str(target)
    command = [sys.executable, str(target / "bin" / "mlframe-train")]
    from_wheel = box.run("experiment=deit_b", "--cfg", "job", command=command)
    assert from_wheel.returncode == 0, from_wheel.stderr
    assert from_wheel.stdout == from_repo.stdout
    assert "deit_base_patch16_224" in from_wheel.stdout

    own = tmp_path / "own" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\nname: mine\nsteps: 1\n")
    settings = [setting for setting in box.smoke("logger=none") if not setting.startswith(("experiment=", "steps="))]
    done = box.run("--config-dir", str(own.parent), "experiment=mine", *settings, command=command)
    assert done.returncode == 0, done.stderr
    run = next((box.folder / "runs" / "mine").iterdir())
    assert (run / "final" / "model.safetensors").exists(), "outputs lie under the caller's folder"
    assert json.loads((run / "plan.json").read_text())["steps"] == 1

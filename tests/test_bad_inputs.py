"""Bad input: each is one line that names the key and the way out, before a row or a checkpoint is written.

A row: what stands on the command line, and what the line says; before it, where files are needed, a function that
makes them in `{tmp}`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from small_text import write_text
from test_cli import Box

from mlframe.checks import check
from mlframe.errors import ConfigError
from mlframe.train import CONF, build, train

Rows = list[tuple[Any, ...]]
ALL = [
    "run_dir={tmp}/run", "data_dir={tmp}/data", "steps=4", "trainer.val_check_interval=4", "trainer.accelerator=cpu",
    "callbacks.progress=null", "callbacks.last.every=2", "logger=none", "data.batch_size=8",
]  # fmt: skip
GPT = ["experiment=gpt_docs", "model.config.vocab_size=300", "data.sequence_length=32"]
KINDS = {
    "images": ["experiment=deit_fashion", "data=image_folder", "data.source.folder={images}", "data.workers=0"],
    "fashion": ["experiment=deit_fashion"],
    "hf_images": ["experiment=deit_fashion", "data=hf_images", "data.workers=0"],
    "text": [*GPT, "data=text_files", "data.source.train={text}", "data.source.holdout=0.1"],
    "llama": [*GPT, "model=llama_docs", "data=text_files", "data.source.train={text}", "data.source.holdout=0.1"],
    "hf_text": [*GPT, "data=hf_text"],
}


def composed(kind: str, places: dict[str, Path], *overrides: str) -> DictConfig:
    settings = [setting.format(**places) for setting in (*ALL, *KINDS[kind])]
    for name, place in places.items():
        overrides = tuple(override.replace(f"{{{name}}}", str(place)) for override in overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [*settings, *overrides])


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), 200)


@pytest.fixture
def places(image_set: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return {"tmp": tmp_path, "images": image_set, "text": text}


# the configuration

SETTINGS: Rows = [
    ("steps=abc", "steps=abc: a whole number, 1 or more"),
    ("steps=0", "steps=0: a whole number, 1 or more"),
    ("steps=1.5", "steps=1.5: a whole number, 1 or more"),
    ("seed=-1", "seed=-1: a whole number, 0 to 4294967295"),
    ("resume=maybe", "resume=maybe: auto goes on with an unfinished run, never begins again"),
    ("control=3", "level 3: there are levels 0 to 1 (levels.count=2)"),
    ("trainer.devices=0", "trainer.devices=0: a number of processes, 1 or more"),
    ("trainer.precision=16-true", "trainer.precision=16-true: float16 needs a GPU; use bf16-mixed or 32-true"),
    ("trainer.precision=foo", "Precision 'foo' is invalid. Allowed precision values"),
    ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0: a whole number, 1 or more"),
    ("trainer.limit_train_batches=0", "trainer.limit_train_batches=0: no batch is no training: 1.0 for all"),
    ("trainer.limit_val_batches=0", "trainer.limit_val_batches=0: callbacks.best monitors val/loss, which is then"),
    ("trainer.val_check_interval=0", "trainer.val_check_interval=0: batches from one validation to the next"),
    ("trainer.val_check_interval=99 trainer.check_val_every_n_epoch=1",
     "trainer.val_check_interval=99: an epoch has 15 batches; set it to 15 or less"),
    ("trainer.log_every_n_steps=-1", "trainer.log_every_n_steps=-1: a whole number, 0 or more"),
    ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1: a number, 0 or more, or null"),
    ("trainer.strategy=ddp_spawn", "trainer.strategy=ddp_spawn is not supported"),
    ("trainer.strategy=ddp_notebook", "processes are commands of their own: use auto or ddp"),
    ("trainer.strategy=deepspeed", "trainer.strategy=deepspeed is not supported"),
    ("trainer.max_time=foo", "Expected a string in the format DD:HH:MM:SS"),
    ("trainer.fast_dev_run=-1", "trainer.fast_dev_run=-1: true, false, or so many steps in every phase"),
    ("trainer.deterministic=foo", "trainer.deterministic=foo: true, false or warn"),
    ("trainer.profiler=foo", "it can only be one of ['simple', 'advanced', 'pytorch', 'xla']"),
    ("+trainer.max_steps=3", "trainer.max_steps is set by the run itself: set `steps`"),
    ("+trainer.precison=64", "trainer.precison: Trainer takes no precison; did you mean precision?"),
    ("+trainer.overfit_batches=2", "train on few images instead (debug=overfit)"),
    ("+callbacks.mine._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler",
     "callbacks.mine: the samples of a step, and with them the plan's FLOPs, would change"),
    ("+callbacks.ema._target_=lightning.pytorch.callbacks.WeightAveraging", "WeightAveraging averages the weights"),
    ("+callbacks.mine._target_=no.such.Class", "Error loading 'no.such.Class'"),
    ("callbacks.best.monitor=val/foo", "monitors 'val/foo', which is not logged; there are"),
    ("callbacks.last.every=1.5", "callbacks.last.every=1.5: a whole number, 1 or more"),
    ("optimizer.lr=0", "optimizer.lr=0: the peak rate is a number above 0"),
    ("optimizer.lr=nan", "optimizer.lr=nan: the peak rate is a number above 0"),
    ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1: a number, 0 or more"),
    ("optimizer.betas=[0.9,1.5]", "optimizer.betas=[0.9, 1.5]: two numbers of 0 to below 1"),
    ("+optimizer.momentum=0.9", "optimizer.momentum: AdamW takes no momentum; it takes amsgrad, betas"),
    ("schedule.shape=triangle", "schedule.shape=triangle: one of constant, linear, cosine, wsd"),
    ("schedule.final=nan", "schedule.final=nan: the last rate over the peak, between 0 and 1"),
    ("schedule.levels=[]", "schedule.levels=[]: a list of at least one factor above 0"),
    ("plan.alpha=2", "plan.alpha=2: between 0 (the parked weights) and 1 (the de-coalesced ones)"),
    ("plan.e_a=1.5", "plan.e_a=1.5: a float is a fraction of all steps, between 0 and 1; an int is steps"),
    ("plan.e_a=-1", "plan.e_a=-1: a float is a fraction of all steps, between 0 and 1; an int is steps"),
    ("plan.e_a=0.7 plan.e_small=0.7", "e_a=0.7 and e_small=0.7 take 6 steps, steps=4 has fewer: lower them"),
    ("plan.alpha=[0.1,0.2]", "plan.alpha=[0.1, 0.2]: 2 values for 2 levels, which need 1"),
    ("+plan.beta=1", "plan.beta: vcycle takes no beta; it takes alpha"),
    ("plan=scratch plan.level=5", "level 5: there are levels 0 to 1 (levels.count=2)"),
    ("levels.count=1", "plan=vcycle needs two levels or more: levels.count=2"),
    ("levels.count=9", "use a factor of 3, give the groups as lists, keep them with 1, or have fewer levels"),
    ("levels.heads=3", "levels.heads=3: the 4 heads of level 0 do not divide by 3; use a factor of 4"),
    ("levels.layers=4", "levels.layers=4: the 6 layers of level 0 do not divide by 4; use a factor of 6"),
    ("levels.layers=[[0,1],[1,2],[3,4,5]]", "[[0, 1], [1, 2], [3, 4, 5]] must hold each of 0 to 5 exactly once"),
    ("levels.layers=[0,1]", "levels.layers=[0, 1]: groups are lists of whole numbers, such as [[0,1],[2,3]]"),
    ("+levels.width=2", "levels.width: make_levels takes no width; it takes"),
    ("model.config.num_heads=3", "model.config.num_heads=3 does not divide the width, embed_dim=64"),
    ("model.config.depth=0", "model.config.depth=0: a whole number, 1 or more"),
    ("model.config.patch_size=5", "images of (28, 28) are no whole number of patches of (5, 5)"),
    ("model.config.model_name=deit_huge", "model.config.model_name=deit_huge: timm has no such model; near it: "),
    ("model.config.num_classes=7", "10 classes and the model 7: set model.config.num_classes=10"),
    ("+model.config.dropout=1", "unexpected keyword argument 'dropout'"),
    ("+model.config.pretrained=true", "model.config.pretrained=True: weights to start from are named with init_from"),
    ("model.architecture=mlframe.architectures.GNN", "Error loading 'mlframe.architectures.GNN'"),
    ("model.task.label_smoothing=2", "model.task.label_smoothing=2: a number from 0 to below 1"),
    ("data.std=0", "data.std=0: of values in [0, 1], so a number above 0"),
    ("data.std=nan", "data.std=nan: of values in [0, 1], so a number above 0"),
    ("data.batch_size=0", "data.batch_size=0: a whole number, 1 or more"),
    ("data.batch_size=1.5", "data.batch_size=1.5: a whole number, 1 or more"),
    ("data.batch_size=1000", "120 items, fewer than the 1000 of one step (1000 on 1 process(es), accumulated 1 times)"),
    ("data.eval_batch_size=0", "data.eval_batch_size=0: a whole number, 1 or more"),
    ("data.workers=-1", "data.workers=-1: a whole number, 0 or more"),
    ("+data.augment.shake=1", "data.augment has ['shake'], which timm.data.create_transform does not take: use"),
    ("logger=wandb logger.wandb.mode=online", "set WANDB_API_KEY or run `wandb login`, or stay offline with"),
    ("logger=wandb logger.wandb.mode=on", "logger.wandb.mode=on: one of auto, online, offline, disabled"),
]  # fmt: skip
TEXT_SETTINGS: Rows = [
    ("model.config.vocab_size=10", "entries and the model 10: set model.config.vocab_size=257"),
    ("model.config.n_head=3", "must be divisible by num_heads"),
    ("+model.config.n_heads=4", "GPT2Config has no ['n_heads']; it has"),
    ("+model.config.scale_attn_by_inverse_layer_idx=true", "a layer's function would change with its number"),
    ("model.objective=masked model.tokenizer=wordpiece", "choose a model and data that fit each other"),
    ("model.tokenizer=wordpiece", "the tokenizer has no eos_token, which the objective needs: set model.tokenizer"),
    ("model.tokenizer={tmp}/none", "set model.tokenizer to bpe or wordpiece, to a name on the hub, or to a folder"),
    ("data.vocab_size=400", "data.vocab_size=400: the network has 300 (model.config.vocab_size)"),
    ("data.sequence_length=0", "data.sequence_length=0: a whole number of tokens, 1 or more (causal)"),
    ("data.sequence_length=256", "data.sequence_length=256: the network has 128 positions; shorten it"),
    ("data.mask=0", "data.mask=0: the part of the tokens to predict is above 0 and at most 1"),
    ("data.val_samples=0", "data.val_samples=0: a whole number, 1 or more"),
    ("data.batch_size=-1", "data.batch_size=-1: a whole number, 1 or more"),
    ("data.source.holdout=1.5", "set it above 0 and below 0.5"),
    ("data.source.column=body", "no column 'body', it has ['text']: set data.source.column"),
    ("data.source.train={tmp}/none", "none: no .txt, .jsonl, .json, .parquet files there"),
    ("init_from={tmp}/none", "none is not there: give a folder such as a run's final/, or a name on the hub"),
]
LLAMA_SETTINGS: Rows = [
    ("levels.heads=3", "levels.heads=3: the 2 kv_heads of level 0 do not divide by 3"),
    ("levels.heads=[[0,1],[2,3]]", "levels.heads (kv_heads): the groups [[0, 1], [2, 3]] must hold each of 0 to 1"),
]


# files


def with_images(change: Callable[[Path], Any]) -> Callable[[dict[str, Path]], None]:
    def make(places: dict[str, Path]) -> None:
        shutil.copytree(places["images"], places["tmp"] / "own")
        change(places["tmp"] / "own")

    return make


def file(name: str, content: str | bytes) -> Callable[[dict[str, Path]], None]:
    def make(places: dict[str, Path]) -> None:
        path = places["tmp"] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def hf_images(label: int) -> Callable[[dict[str, Path]], None]:
    """Ten classes by name, and one label that is none of them."""

    def make(places: dict[str, Path]) -> None:
        import datasets

        image = str(next((places["images"] / "train").rglob("*.png")))
        kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        rows = {"image": [image] * 20, "label": [*range(10), *range(9), label]}
        split = Dataset.from_dict(rows, kinds)
        datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(places["tmp"] / "own")

    return make


IMAGE_FILES: Rows = [
    (None, "data.source.folder={tmp}/none", "none holds none of train/, val/, test/: it needs train/ and at least one"),
    (with_images(lambda own: shutil.rmtree(own / "train")), "data.source.folder={tmp}/own", "it needs train/ and at"),
    (with_images(lambda own: [file.unlink() for file in (own / "train" / "class_5").iterdir()]),
     "data.source.folder={tmp}/own", "Found no valid file for the classes class_5"),
    (with_images(lambda own: shutil.rmtree(own / "val" / "class_5")), "data.source.folder={tmp}/own",
     "differ in the classes ['class_5']: make them equal"),
    (with_images(lambda own: (own / "train/class_0/0.png").write_bytes(b"no image")), "data.source.folder={tmp}/own",
     "0.png does not decode (cannot identify image file"),
    (file("no", ""), "run_dir={tmp}/no", "no is no folder that can be written ("),
    (file("no", ""), "run_dir={tmp}/no/run", "no/run is no folder that can be written ("),
    (None, "init_from={tmp}/none", "none is not there: give a file, a folder such as a run's final/, or hf-hub:ORG"),
]  # fmt: skip
OTHER_FILES: dict[str, Rows] = {
    "fashion": [
        (file("data/fashion-mnist/train-images-idx3-ubyte", b"no idx"), "", "is missing beside the other idx files"),
        (lambda places: [file(f"data/fashion-mnist/{name}", b"no idx")(places) for name in (
            "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")],
         "", "it begins with 6e6f2069 and not with an idx header. Delete it and run again"),
    ],
    "hf_images": [
        (None, "", "data.source.path has no value yet: set data.source.path=..."),
        (None, "data.source.path={tmp}/none", "datasets cannot load"),
        (hf_images(-1), "data.source.path={tmp}/own", "has labels -1 to 9, expected 0 to 9: mend them or take another"),
        (hf_images(10), "data.source.path={tmp}/own", "has 11 classes and the model 10: set model.config.num_classes"),
        (hf_images(9), "data.source.path={tmp}/own data.source.label_column=y", "set data.source.image_column and"),
        (hf_images(9), "data.source.path={tmp}/own data.source.val=dev", "['train', 'validation'], and no {"),
    ],
    "hf_text": [(None, "", "data.source.path has no value yet: set data.source.path=...")],
}  # fmt: skip
TEXT_FILES: Rows = [
    (file("own/a.doc", "text"), "data.source.train={tmp}/own", "no .txt, .jsonl, .json, .parquet files there"),
    (file("own/a.txt", ""), "data.source.train={tmp}/own", "no training documents to train a tokenizer on"),
    (file("own/a.jsonl", '{"text": "ban"}\n{"text": "dom"}\n{"text": "kert"}\n'),
     "data.source.train={tmp}/own", "no whole row of 33 tokens: give it more"),
    (file("own/a.txt", b"\xff\xfe\x80" * 9), "data.source.train={tmp}/own", "mend it or name another"),
    (file("own/a.jsonl", ""), "data.source.train={tmp}/own", "no rows in it; name another"),
    (file("own/a.jsonl", '{"text": "a"}\n{"text": \n'), "data.source.train={tmp}/own", "a.jsonl, line 2 is no JSON"),
    (file("own/a.jsonl", '{"text": "a"}\n{"body": "b"}\n'), "data.source.train={tmp}/own",
     "a.jsonl, line 2 has no 'text': add it or take the line out"),
    (file("own/a.jsonl", '{"text": 7}\n'), "data.source.train={tmp}/own", "holds int and not text: name another in"),
    (lambda places: Dataset.from_dict({"body": ["a"]}).to_parquet(str(places["tmp"] / "a.parquet")),
     "data.source.train={tmp}/a.parquet", "a.parquet has no column 'text', it has ['body']: set data.source.column"),
    (file("a.parquet", "no parquet"), "data.source.train={tmp}/a.parquet", "a.parquet"),
    (file("tokenizer/tokenizer.json", "{}"), "model.tokenizer={tmp}/tokenizer", "cannot load the tokenizer"),
    (file("no", ""), "data_dir={tmp}/no", "cannot be made (Not a directory): set data_dir to a folder that can be"),
]  # fmt: skip


def saved_weights(kind: str, *smaller: str, **damage: Any) -> Callable[[dict[str, Path]], None]:
    """`{tmp}/other`: the untrained network of a configuration, in the form of its own library."""

    def make(places: dict[str, Path]) -> None:
        plan, _, _ = build(composed(kind, places, *smaller))
        about = {"label_names": [], "data_config": {}}
        level = plan.levels[0]
        folder = places["tmp"] / "other"
        folder.mkdir()
        level.architecture.save(level.build(), level.config, folder, about)
        weights = folder / "model.safetensors"
        if "cut" in damage:
            weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        elif "nan" in damage:
            state = load_file(weights)
            state[damage["nan"]][0, :3] = float("nan")
            save_file(state, weights, {"format": "pt"})

    return make


INIT_FROM: dict[str, Rows] = {
    "images": [
        (saved_weights("images", cut=True), "", "other cannot be loaded (SafetensorError): is it whole, and weights"),
        (saved_weights("images", nan="blocks.1.mlp.fc1.weight"), "", "3 NaN values, in blocks.1.mlp.fc1.weight"),
        (saved_weights("images"), "model.config.depth=4", "does not fit the network of model.config: unexpected"),
        (saved_weights("images"), "model.config.patch_size=14", "does not fit the network of model.config: mismatched"),
        (saved_weights("text"), "", "other does not fit the network of model.config: missing"),
    ],
    "text": [
        (saved_weights("text", cut=True), "", "other cannot be loaded: SafetensorError"),
        (saved_weights("text", nan="transformer.wte.weight"), "", "NaN values, in transformer.wte.weight"),
        (saved_weights("text"), "model.config.n_layer=4", "which has to follow: n_layer is 6, not 4"),
        (saved_weights("llama"), "", "it is a llama and the model a gpt2"),
        (saved_weights("images"), "", "other cannot be loaded: "),
    ],
}  # fmt: skip
CASES = [
    *(("images", None, *row) for row in SETTINGS), *(("text", None, *row) for row in TEXT_SETTINGS),
    *(("llama", None, *row) for row in LLAMA_SETTINGS), *(("images", *row) for row in IMAGE_FILES),
    *((kind, *row) for kind, rows in OTHER_FILES.items() for row in rows), *(("text", *row) for row in TEXT_FILES),
    *((kind, make, f"init_from={{tmp}}/other {more}", message) for kind, rows in INIT_FROM.items()
      for make, more, message in rows),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "make", "overrides", "message"), CASES, ids=[f"{case[0]} {case[2]} {case[3][-20:]}" for case in CASES]
)
def test_bad_input_is_one_clear_line_and_nothing_is_written(
    kind: str, make: Callable[[dict[str, Path]], Any] | None, overrides: str, message: str, places: dict[str, Path]
) -> None:
    if make is not None:
        make(places)
    with pytest.raises(ConfigError) as failure:
        train(composed(kind, places, *overrides.split()))
    said = str(failure.value)
    assert message in said
    assert "\n" not in said
    assert not list(places["tmp"].rglob("metrics.csv"))
    assert not list(places["tmp"].rglob("*.ckpt"))
    assert not (places["tmp"] / "run").exists()


def test_the_settings_without_what_is_bad_train(places: dict[str, Path]) -> None:
    """The control of the table."""
    for kind in ("images", "text"):
        assert train(composed(kind, places, "run_dir={tmp}/" + kind))["steps"] == 4


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_control_every_experiment_passes_the_checks(experiment: str, tmp_path: Path) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check(compose("train", [f"experiment={experiment}", f"run_dir={tmp_path}"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nosuch=1", "Could not override 'nosuch'"),
        ("trainer.max_step=3", "Could not override 'trainer.max_step'"),
        ("model=nosuch", "(?s)Could not find 'model/nosuch'.*deit_28"),
        ("experiment=nosuch", "(?s)Could not find 'experiment/nosuch'.*gpt_docs"),
    ],
)
def test_hydra_names_what_is_not_there_and_what_is(override: str, message: str, places: dict[str, Path]) -> None:
    with pytest.raises(HydraException, match=message):
        composed("images", places, override)


def test_a_model_and_data_that_do_not_fit_are_named(places: dict[str, Path]) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for choice in (["model=gpt_docs"], ["data=docs"]):  # with the default data, with the default model
            config = compose("train", [f"run_dir={places['tmp']}/run", "logger=none", *choice])
            with pytest.raises(ConfigError, match=r"choose a model and data that fit each other[^\n]*$"):
                train(config)
    assert not (places["tmp"] / "run").exists()


SEVERAL = """
import sys
from mlframe.train import main
settings = sys.argv[1:]
for bad in ("optimizer.lr=nan", "levels.heads=3", "data.std=0", "data.source.folder=/none", "nosuch=1"):
    sys.argv = ["mlframe-train", *settings, bad]
    try:
        main()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        print(bad, "code", stop.code if isinstance(stop.code, int) else 1)
"""


def test_on_the_command_line(tmp_path: Path, image_set: Path) -> None:
    box = Box(tmp_path, image_set)
    done: subprocess.CompletedProcess[str] = box.run(SEVERAL, *box.smoke("logger=none"), command=[sys.executable, "-c"])
    said = [line for line in done.stderr.splitlines() if line.startswith("mlframe-train: ")]
    assert len(said) == 4, done.stderr
    assert "Could not override 'nosuch'" in done.stderr
    assert "Traceback" not in done.stderr
    assert [line.rsplit(" ", 1)[1] for line in done.stdout.splitlines() if " code " in line] == ["1"] * 5
    assert not list(box.folder.rglob("metrics.csv"))
    assert not list(box.folder.rglob("*.ckpt"))

"""What is loaded runs no code, and what a configuration says never reaches a shell."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from test_bad_inputs import composed, places, text  # noqa: F401
from test_cli import Box
from test_pretrained import Evil

import mlframe
from mlframe.errors import ConfigError
from mlframe.train import run_name, train

FORBIDDEN = {"eval", "exec", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "dill.load",
             "joblib.load", "yaml.load", "yaml.unsafe_load", "marshal.loads", "pd.read_pickle"}  # fmt: skip
DANGEROUS = {"trust_remote_code": True, "weights_only": False, "allow_pickle": True, "shell": True}


def dangers(source: str) -> list[str]:
    """The calls in a Python source that could run what is in a file or a string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in FORBIDDEN:
            found.append(f"{node.lineno}: {name}")
        if name == "torch.load" and "weights_only" not in keywords:
            found.append(f"{node.lineno}: torch.load without weights_only")
        for key, bad in DANGEROUS.items():
            if key in keywords and not (isinstance(keywords[key], ast.Constant) and keywords[key].value is not bad):
                found.append(f"{node.lineno}: {key}={ast.unparse(keywords[key])}")
    return found


@pytest.mark.parametrize("path", sorted(Path(mlframe.__file__).parent.rglob("*.py")), ids=lambda path: path.name)
def test_no_call_runs_what_it_reads(path: Path) -> None:
    assert not dangers(path.read_text())


def test_control_such_calls_are_found() -> None:
    for line in (
        "eval('1')", "os.system(x)", "pickle.load(f)", "torch.load(f)", "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)", "subprocess.run(x, shell=True)", "A.load(x, trust_remote_code=asked)",
    ):  # fmt: skip
        assert dangers(line), line
    assert not dangers("torch.load(f, weights_only=True); A.from_pretrained(x, trust_remote_code=False); run([x])")


# files that run code when a careless loader reads them

CODE = "import pathlib\npathlib.Path({ran!r}).touch()\n"


def pickled(*names: str) -> Callable[[Path, Path], None]:
    def make(own: Path, ran: Path) -> None:
        for name in names:
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_bytes(pickle.dumps(Evil(ran)))

    return make


def evil_torch(name: str) -> Callable[[Path, Path], None]:
    return lambda own, ran: torch.save({"state_dict": Evil(ran), "vcycle": {}}, own / name)


def evil_array(own: Path, ran: Path) -> None:
    for part in ("train", "val"):
        (own / part / "a").mkdir(parents=True)
        np.save(own / part / "a" / "1.npy", np.array([Evil(ran)], dtype=object), allow_pickle=True)


def own_code(**files: Any) -> Callable[[Path, Path], None]:
    """A folder of the hub whose configuration names code beside it."""

    def make(own: Path, ran: Path) -> None:
        for name, content in files.items():
            (own / f"{name}.json").write_text(json.dumps(content))
        for name in ("code.py", "own.py"):
            (own / name).write_text(CODE.format(ran=str(ran)))

    return make


def evil_saved(name: str) -> Callable[[Path, Path], None]:
    def make(own: Path, ran: Path) -> None:
        Dataset.from_dict({"text": ["a"] * 9}).save_to_disk(own)
        next(own.glob(name)).write_bytes(pickle.dumps(Evil(ran)))

    return make


AUTO = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
TOKENIZER = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
CIFAR = [f"cifar10/cifar-10-batches-py/{name}" for name in (
    *(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")]  # fmt: skip
EVIL: dict[str, tuple[Callable[[Path, Path], Any], str, str, str]] = {
    "a checkpoint to start from": (evil_torch("w.pth"), "images", "init_from={own}/w.pth", "w.pth cannot be loaded"),
    "a plain pickle to start from": (pickled("w.bin"), "images", "init_from={own}/w.bin", "w.bin cannot be loaded"),
    "weights of transformers": (
        lambda own, ran: (own_code(config={"model_type": "gpt2", "vocab_size": 300, "n_embd": 64, "n_layer": 6,
            "n_head": 4, "n_positions": 128})(own, ran), evil_torch("pytorch_model.bin")(own, ran)),
        "text", "init_from={own}", "own cannot be loaded"),
    "a model with code": (own_code(config=AUTO), "text", "init_from={own}", "needs code of its own, which is not run"),
    "a tokenizer with code": (
        own_code(tokenizer_config=TOKENIZER), "text", "model.tokenizer={own}", "needs code of its own, which is not"),
    "arrays of objects": (evil_array, "images", "data.source.folder={own}", "Found no valid file for the classes a"),
    "an image that is a pickle": (
        pickled("train/a/1.png", "val/a/1.png"), "images", "data.source.folder={own}", "has 1 classes and"),
    "batches of CIFAR-10": (
        pickled(*CIFAR), "fashion", "data=cifar10 data_dir={own} model.config.in_chans=3", "cannot get CIFAR10 into"),
    "a data set with a script": (own_code(), "hf_text", "data.source.path={own}", "scripts are no longer supported"),
    "a data set's arrow file": (evil_saved("*.arrow"), "hf_text", "data.source.path={own}", "datasets cannot load"),
    "a data set's state": (evil_saved("state.json"), "hf_text", "data.source.path={own}", "datasets cannot load"),
    "a folder of pickles": (pickled("a.pkl", "b.pickle"), "hf_text", "data.source.path={own}", "datasets cannot load"),
    "a pickle named parquet": (
        pickled("a.parquet"), "text", "data.source.train={own}", "datasets cannot load the train files"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "overrides", "message"), EVIL.values(), ids=EVIL)
def test_a_file_that_would_run_code_is_refused_in_one_line(
    make: Callable[[Path, Path], Any],
    kind: str,
    overrides: str,
    message: str,
    places: dict[str, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, ran = places["tmp"] / "own", places["tmp"] / "ran"
    own.mkdir()
    make(own, ran)
    monkeypatch.setattr("socket.getaddrinfo", refused)  # CIFAR-10 would be downloaded anew
    with pytest.raises(ConfigError) as failure:
        train(composed(kind, places, *overrides.replace("{own}", str(own)).split()))
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not ran.exists()


def refused(*args: Any, **kwargs: Any) -> None:
    raise OSError("no network here")


def test_control_the_files_are_poison(tmp_path: Path) -> None:
    pickled("a")(tmp_path, tmp_path / "1")
    pickle.loads((tmp_path / "a").read_bytes())
    evil_torch("b")(tmp_path, tmp_path / "2")
    torch.load(tmp_path / "b", weights_only=False)
    assert (tmp_path / "1").exists()
    assert (tmp_path / "2").exists()


def test_tokens_that_were_replaced_by_a_pickle_are_numbers_or_damaged(
    places: dict[str, Path],  # noqa: F811
) -> None:
    train(composed("text", places))
    shutil.rmtree(places["tmp"] / "run")
    ran = places["tmp"] / "ran"
    rows = next((places["tmp"] / "data" / "tokens").glob("*/train.bin"))
    rows.write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(ConfigError, match="lacks rows of train: delete it and run again"):
        train(composed("text", places))
    rows.with_name("index.json").write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(ConfigError, match="is damaged: delete its folder and run again"):
        train(composed("text", places))
    assert not ran.exists()


# names

NAMES = [
    "a;touch ran",
    "$(touch ran)",
    "`touch ran`",
    "a\ntouch ran",
    "a|touch",
    "../../ran",
    "..",
    ".",
    "~",
    "-rf",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_becomes_a_safe_folder(name: str) -> None:
    folder = run_name(name)
    assert set(folder) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.,=+[]-ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert Path(folder).name == folder
    assert folder not in ("", ".", "..")
    assert len({run_name(other) for other in NAMES}) == len(NAMES), "names stay apart"


def test_names_with_shell_characters_never_run(tmp_path: Path, image_set: Path) -> None:
    box = Box(tmp_path, image_set)
    run = box.run(*box.smoke("steps=2", "logger=none", "name='a;touch ran $(touch ran) `touch ran`'"))
    assert run.returncode == 0, run.stderr
    [folder] = (box.folder / "runs").iterdir()
    assert folder.name.startswith("a_touch_ran_")
    assert len(list(folder.glob("*/results.json"))) == 1
    assert not [path for path in tmp_path.rglob("ran") if path.name == "ran"]

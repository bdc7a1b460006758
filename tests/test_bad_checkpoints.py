"""A run folder that is damaged, changed or another's is refused in one line before training goes on in it."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bad_inputs import composed, places, text  # noqa: F401
from test_pretrained import Evil

from mlframe.architectures import VIT
from mlframe.errors import ConfigError
from mlframe.levels import make_levels
from mlframe.plan import vcycle
from mlframe.rows import read_rows
from mlframe.run_folder import read_results
from mlframe.train import train

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def stopped(image_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that died after training, before its evaluation."""
    folder = tmp_path_factory.mktemp("stopped")
    train(composed("images", {"tmp": folder, "images": image_set, "text": folder}))
    (folder / "run" / "results.json").unlink()
    return folder / "run"


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / "checkpoints" / "last.ckpt"
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return damage


def written(name: str, content: bytes | Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / name
        path.write_bytes(content if isinstance(content, bytes) else content(path.read_bytes()))

    return damage


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 16]) + data[middle + 16 :]


def set_nan(state: dict[str, Any]) -> None:
    state["state_dict"]["network.blocks.0.mlp.fc1.bias"][2] = float("nan")


def contents(run: Path) -> dict[Path, bytes]:
    """What is in the folder, but for the word that this attempt failed."""
    own = ("status.json", ".lock")
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name not in own}


LAST = "checkpoints/last.ckpt"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut off": (written(LAST, lambda data: data[: len(data) // 2]), "last.ckpt cannot be read (BadZipFile): remove it"),
    "empty": (written(LAST, b""), "last.ckpt cannot be read (BadZipFile): remove it, or add resume=never"),
    "bytes flipped": (written(LAST, flipped), "last.ckpt was changed after it was written (the checksum of"),
    "other tensors": (lambda run: torch.save({"weights": torch.ones(3)}, run / LAST), "is no checkpoint of a run"),
    "a list": (lambda run: torch.save([1, 2], run / LAST), "last.ckpt is no checkpoint of a run: remove it"),
    "a phase too many": (changed(lambda state: state["vcycle"].update(phase=3)), "in phase 4, which this plan"),
    "another level": (changed(lambda state: state["vcycle"].update(phase=1)), "in phase 2, which this plan"),
    "a tensor less": (changed(lambda state: state["state_dict"].popitem()), "is of another model or plan than this"),
    "NaN": (changed(set_nan), "1 NaN values, in blocks.0.mlp.fc1.bias: training has diverged; begin again (resume=nev"),
    "NaN in what is parked": (
        changed(lambda state: state["vcycle"]["parked"].update({"0": {"x": torch.tensor([float("nan")])}})),
        "1 NaN values, in x: training has diverged"),
    "results": (written("results.json", b'{"test/acc": 0.'), "results.json is damaged: remove it and run again"),
    "results of another kind": (written("results.json", b"[]"), "results.json is damaged: remove it and run again"),
    "configuration": (written("config.yaml", b"steps: [4\n"), "config.yaml is not a whole configuration: remove it"),
    "half a configuration": (written("config.yaml", b"name: x\n"), "config.yaml is not a whole configuration"),
    "YAML that runs code": (
        written("config.yaml", b"run_dir: !!python/object/apply:os.system ['touch ran']\n"),
        "config.yaml is not a whole configuration"),
    "another configuration": (
        written("config.yaml", lambda data: data.replace(b"lr: 0.002", b"lr: 0.5")),
        "another configuration (optimizer.lr was 0.5, is 0.002): name this one differently (name=...)"),
    "a pickle that runs code": (
        lambda run: torch.save({"state_dict": Evil(run / "ran")}, run / LAST), "cannot be read (UnpicklingError)"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_bad_run_folder_is_one_clear_line_and_stays_as_it_is(
    damage: Callable[[Path], None],
    message: str,
    stopped: Path,
    places: dict[str, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = places["tmp"] / "run"
    shutil.copytree(stopped, run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(stopped.parent), str(places["tmp"])))
    damage(run)
    monkeypatch.chdir(run)
    before = contents(run)
    with pytest.raises(ConfigError) as failure:
        train(composed("images", places))
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)
    assert contents(run) == before


def test_control_the_folder_as_it_was_is_gone_on_in(stopped: Path, places: dict[str, Path]) -> None:  # noqa: F811
    run = places["tmp"] / "run"
    shutil.copytree(stopped, run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(stopped.parent), str(places["tmp"])))
    assert train(composed("images", places))["steps"] == 4
    assert read_rows(run / "metrics.csv")
    neighbour = places["tmp"] / "neighbour"
    shutil.copytree(run, neighbour)
    (neighbour / "results.json").write_text("{")
    assert train(composed("images", places))["steps"] == 4, "a damaged neighbour is left out of the comparison"
    with pytest.raises(ConfigError, match="is damaged"):
        read_results(neighbour)


def test_a_disk_without_room_is_named_before_training(
    stopped: Path,
    places: dict[str, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(ConfigError, match=r"run_dir=.*: the disk has 1 MB free, and .* takes 7 MB; make room"):
        train(composed("images", places))
    assert not (places["tmp"] / "run").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 10**9))
    train(composed("images", places))


def test_the_estimate_of_a_checkpoint_is_near_its_size(stopped: Path) -> None:
    plan = json.loads((stopped / "plan.json").read_text())
    levels = make_levels(VIT, {"model_name": "deit_tiny_patch16_224", "img_size": 28, "patch_size": 7, "in_chans": 1,
                               "num_classes": 10, "embed_dim": 64, "depth": 6, "num_heads": 4})  # fmt: skip
    whole = vcycle(levels, 4, 0.05, 0.5, 0.25)
    assert levels[0].parameters == plan["phases"][0]["parameters"]
    assert whole.checkpoint_bytes == pytest.approx((stopped / LAST).stat().st_size, rel=0.1)
    deep = make_levels(VIT, {**levels[0].config, "depth": 4}, count=3)
    large, middle, small = (4 * level.parameters for level in deep)
    below = vcycle(deep, 10, [0, 2], [4, 4], 0.5)
    assert below.checkpoint_bytes == max(3 * large, 3 * middle + large, 3 * small + middle + large)

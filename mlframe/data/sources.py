"""Where images come from: functions that return a `Splits`, for `source:` of `mlframe.data.image.ImageData`."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torchvision.datasets
from PIL import Image

from mlframe.data.text_sources import loaded
from mlframe.errors import ConfigError

TORCHVISION_SETS = ("FashionMNIST", "MNIST", "CIFAR10", "CIFAR100")
SOCKET_SECONDS = 10  # a closed network must fail, not hang
DOWNLOAD_ERRORS = (OSError, RuntimeError, http.client.HTTPException)  # what torchvision's downloads raise


class Images(Protocol):
    """A map-style dataset of `(PIL image or uint8 array, label)` with all labels in `targets`, like torchvision's."""

    targets: Any  # sequence of ints, [N]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, int]: ...


@dataclass(frozen=True)
class Splits:
    """What a source returns. Without `val`, ImageData holds images out of `train`; `where` says where they are."""

    train: Images
    val: Images | None
    test: Images
    classes: tuple[str, ...]
    where: str


class ArrayImages:
    """Images that lie in memory: uint8 [N, H, W] and their labels [N]."""

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self.images, self.targets = images, labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], int(self.targets[index])


def image_folder(folder: str | Path) -> Splits:
    """Own images: `folder/train/<class>/*.jpg`, and `val/` or `test/` or both beside `train/` with the same classes.

    With `val/` and no `test/`, `val/` is also the test set, as is the custom with ImageNet. With `test/` and no `val/`,
    validation images are held out of `train/`.

    Raises:
        FileNotFoundError: for a missing or empty folder; names it.
        ValueError: when the classes of the splits differ.
    """
    folder = Path(folder)
    parts = {part: folder / part for part in ("train", "val", "test") if (folder / part).is_dir()}
    if "train" not in parts or len(parts) == 1:
        raise FileNotFoundError(f"{folder} holds {sorted(parts) or 'none'} of train/, val/, test/: it needs train/ and "
                                "at least one of the others, with a folder per class in each")  # fmt: skip
    sets = {part: _class_folders(path) for part, path in parts.items()}
    for part, images in sets.items():
        if differing := sorted(set(images.classes) ^ set(sets["train"].classes)):
            raise ValueError(f"{parts[part]} and {parts['train']} differ in the classes {differing}: make them equal")
    train, val, test = sets["train"], sets.get("val"), sets.get("test") or sets["val"]
    return Splits(train, val, test, tuple(train.classes), f"{folder} ({', '.join(parts)})")


def _class_folders(folder: Path) -> torchvision.datasets.ImageFolder:
    try:
        return torchvision.datasets.ImageFolder(str(folder), loader=_open)
    except FileNotFoundError as error:  # no class folder, or an empty one: torchvision names it
        raise FileNotFoundError(f"{folder} needs a folder of images per class: {error}") from error


def _open(path: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"{path} does not decode ({error}): repair it or take it away") from error
    if image.mode[0] in "IF":
        raise ConfigError(f"{path} has more than 8 bits a value (PIL mode {image.mode}): convert it to 8 bits first")
    return image


def torchvision_set(name: str, folder: str | Path) -> Splits:
    """FashionMNIST, MNIST, CIFAR10 or CIFAR100 from torchvision, downloaded into `folder` when not there yet."""
    if name not in TORCHVISION_SETS:
        raise ValueError(f"torchvision_set does not know {name!r}: use one of {', '.join(TORCHVISION_SETS)}")
    kind = getattr(torchvision.datasets, name)
    try:
        with short_timeouts():
            train, test = (kind(folder, train=train, download=True) for train in (True, False))
    except DOWNLOAD_ERRORS as error:
        raise RuntimeError(f"torchvision cannot get {name} into {folder} ({last_line(error)}): delete what is broken "
                           "there, or copy the files from a machine with network") from error  # fmt: skip
    return Splits(train, None, test, tuple(train.classes), f"{folder} (torchvision's {name})")


def hf_images(
    path: str,
    name: str | None = None,
    image_column: str = "image",
    label_column: str = "label",
    train: str = "train",
    val: str | None = None,
    test: str | None = None,
) -> Splits:
    """A data set of the Hugging Face hub, a folder that `save_to_disk` wrote, or a folder of images.

    Args:
        path, name: as for `datasets.load_dataset`; no code of the data set is run.
        train, val, test: names of the splits. By default `val` is "validation" if there is one, `test` is "test" if
            there is one, else the validation split, as is the custom with ImageNet.

    Raises:
        ValueError: for a missing split or column, or one of another kind; names those there are.
    """
    import datasets  # 2 s

    saved = any((Path(path) / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
    found: Any = (
        loaded(path, datasets.load_from_disk, path) if saved else loaded(path, datasets.load_dataset, path, name)
    )
    found = dict(found) if isinstance(found, dict) else {"train": found}
    val = val or ("validation" if "validation" in found else None)
    test = test or ("test" if "test" in found else val)
    chosen = {"train": train, "val": val, "test": test}
    if bad := {part: split for part, split in chosen.items() if split not in found and (split or part == "test")}:
        raise ValueError(f"{path} has the splits {sorted(found)}, and no {bad}: set data.source.{next(iter(bad))}")
    sets = {part: HFImages(found[split], image_column, label_column) for part, split in chosen.items() if split}
    kind = found[train].features[label_column]
    highest = int(sets["train"].targets.max(initial=-1))
    names = getattr(kind, "names", None) or [str(label) for label in range(highest + 1)]
    return Splits(sets["train"], sets.get("val"), sets["test"], tuple(names), f"{path} (Hugging Face)")


class HFImages:
    """One split of a Hugging Face data set; decodes an image when it is asked for."""

    def __init__(self, rows: Any, image_column: str, label_column: str):
        import datasets

        if missing := sorted({image_column, label_column} - set(rows.column_names)):
            raise ValueError(f"the data set has no column {missing}, it has {rows.column_names}: set "
                             "data.source.image_column and data.source.label_column")  # fmt: skip
        if not isinstance(rows.features[image_column], datasets.Image):
            raise ValueError(f"column {image_column!r} holds {rows.features[image_column]} and not images: cast it "
                             "with datasets' cast_column(..., datasets.Image())")  # fmt: skip
        self.rows = rows.select_columns([image_column, label_column])
        self.columns = image_column, label_column
        self.targets = np.asarray(self.rows[label_column][:])
        if self.targets.dtype.kind not in "iu":
            raise ValueError(f"column {label_column!r} holds {self.targets.dtype} and not whole numbers: cast it with "
                             "datasets' class_encode_column")  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        row = self.rows[int(index)]
        return row[self.columns[0]], row[self.columns[1]]


@contextmanager
def short_timeouts() -> Iterator[None]:
    """Lets every new socket give up after `SOCKET_SECONDS` without an answer; torchvision's downloads set no limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SOCKET_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def last_line(error: BaseException) -> str:
    """Where torchvision and pip say the reason."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]

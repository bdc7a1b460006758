"""The documentation in small wheels made here; no network."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlframe.data import docs as docs_file
from mlframe.data.docs import docs, html_text, plain_text, split_of

NAMES = {split: next(name for name in map("service{}".format, range(999)) if split_of(name) == split)
         for split in ("train", "val", "test")}  # fmt: skip
PACKAGES = {"botocore": "0.1", "google-api-python-client": "0.2"}


def service(operations: Mapping[str, Any], shapes: Mapping[str, Any], about: str = "") -> dict[str, Any]:
    return {"metadata": {"serviceFullName": "Full Name"}, "documentation": about, "operations": operations,
            "shapes": shapes}  # fmt: skip


def said(text: str, **members: str) -> dict[str, Any]:
    return {"documentation": text, "members": {name: {"documentation": member} for name, member in members.items()}}


def botocore(folder: Path, models: Mapping[str, Mapping[str, Any]], version: str = "0.1") -> None:
    """models: "SERVICE/VERSION" -> the service's model."""
    with zipfile.ZipFile(folder / f"botocore-{version}-py3-none-any.whl", "w") as wheel:
        for place, model in models.items():
            data = gzip.compress(json.dumps(model).encode())
            wheel.writestr(f"botocore/data/{place}/service-2.json.gz", data)
            wheel.writestr(f"botocore/data/{place}/paginators-1.json", "{}")


def google(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """models: "SERVICE.VERSION" -> the service's model."""
    with zipfile.ZipFile(folder / "google_api_python_client-0.2-py3-none-any.whl", "w") as wheel:
        for place, model in {**models, "index": {"items": []}}.items():
            wheel.writestr(f"googleapiclient/discovery_cache/documents/{place}.json", json.dumps(model))


def read(folder: Path, packages: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for split, text in docs(folder, packages).documents(0):
        found[split].append(text)
    return {split: sorted(texts) for split, texts in found.items()}


def test_an_operation_is_a_document_with_its_members(tmp_path: Path) -> None:
    old = service({}, {"Old": said("gone")})
    new = service(
        {"Get": said("<p>Gets <b>it</b>.</p>")}, {"It": said("", a="<p>The a.</p>", b=""), "Bare": {}}, "All."
    )
    botocore(tmp_path, {f"{NAMES['train']}/2019-01-01": old, f"{NAMES['train']}/2020-01-01": new})
    expected = ["Full Name\nAll.", "Get (Full Name)\nGets it.", "It (Full Name)\na: The a."]
    assert read(tmp_path, {"botocore": "0.1"}) == {"train": expected, "val": [], "test": []}


def test_google_methods_and_schemas_with_what_is_below(tmp_path: Path) -> None:
    method = {"id": "s.things.get", "description": "Gets a [thing](https://x.org/y).",
              "parameters": {"name": {"description": "Its  name."}}}  # fmt: skip
    schema = {"description": "A thing.", "properties": {
        "parts": {"description": "Its parts.", "items": {"properties": {"size": {"description": "How large."}}}},
        "kind": {"type": "string"}}}  # fmt: skip
    model = {"name": NAMES["val"], "title": "S API", "description": "Things.", "schemas": {"Thing": schema},
             "resources": {"things": {"methods": {"get": method}, "resources": {}}}}  # fmt: skip
    google(tmp_path, {f"{NAMES['val']}.v1": model, f"{NAMES['val']}.v2": model})  # the second adds nothing
    found = read(tmp_path, {"google-api-python-client": "0.2"})
    assert found == {"train": [], "test": [], "val": [
        "S API\nThings.", "Thing (S API)\nA thing.\nparts: Its parts.\nparts[].size: How large.",
        "s.things.get (S API)\nGets a thing.\nname: Its name."]}  # fmt: skip


def test_no_text_of_a_held_out_service_is_trained_on(tmp_path: Path) -> None:
    shapes = {split: {f"Shape{i}": said(f"{split} text {i}", common="The name.", **{f"m{i}": f"shared {i // 2}"})
                      for i in range(6)} for split in NAMES}  # fmt: skip
    models = {f"{name}/1": service({}, shapes[split]) for split, name in NAMES.items()}
    botocore(tmp_path, models)
    same_name = {"name": NAMES["test"], "schemas": {"S": {"description": "train text 1"}, "T": {"description": "new"}}}
    google(tmp_path, {f"{NAMES['test']}.v1": same_name})
    found = read(tmp_path, PACKAGES)
    lines = {split: [line.split(": ")[-1] for text in texts for line in text.split("\n")[1:]]
             for split, texts in found.items()}  # fmt: skip
    everything = [line for split in lines for line in lines[split]]
    assert len(everything) == len(set(everything)) == 18 + 1 + 3 + 1
    assert {"The name.", "shared 0", "train text 1"} <= set(lines["train"])
    assert set(lines["val"]) == {f"val text {i}" for i in range(6)}
    assert set(lines["test"]) == {*(f"test text {i}" for i in range(6)), "new"}


def test_the_split_follows_the_name_alone_in_the_declared_parts() -> None:
    places = [split_of(f"name{i}") for i in range(4000)]
    assert places.count("val") / 4000 == pytest.approx(0.04, abs=0.012)
    assert places.count("test") / 4000 == pytest.approx(0.04, abs=0.012)


def test_the_order_is_fixed_and_mixes_services(tmp_path: Path) -> None:
    trained = [name for name in map("service{}".format, range(30)) if split_of(name) == "train"][:4]
    shapes = [{f"S{i}": said(f"{name} {i}") for i in range(50)} for name in trained]
    botocore(tmp_path, {f"{name}/1": service({}, one) for name, one in zip(trained, shapes, strict=True)})
    texts = docs(tmp_path, {"botocore": "0.1"})
    whole = list(texts.documents(0))
    assert list(texts.documents(150)) == whole[150:]
    assert {name for name in trained for _, text in whole[:20] if f"{name} " in text} == set(trained)
    (cached,) = tmp_path.glob("docs-*.jsonl")
    cached.unlink()
    assert list(texts.documents(0)) == whole
    (tmp_path / "botocore-0.1-py3-none-any.whl").unlink()
    assert list(texts.documents(0)) == whole  # the documents are kept


def test_the_key_follows_the_versions() -> None:
    packages: list[Any] = [None, PACKAGES, {"botocore": "0.1"}, {"botocore": "0.2"}]
    assert len({docs("a", one).key for one in packages}) == 4
    assert docs("b").key == docs("a", dict(reversed(docs_file.PACKAGES.items()))).key


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>One  <code>two</code>\n three.</p><p>Four</p>", "One two three.\nFour"),
        ("a<br/>b<note> <p>c</p> </note>", "a\nb\nc"),
        ("<ul> <li> <p> <b>x</b> - y</p> </li><li>z</li></ul>", "- x - y\n- z"),
        ("<ul><li><ul><li>deep</li></ul></li></ul>", "- deep"),
        ("<dl><dt>k</dt><dd>v</dd></dl>", "k\nv"),
        ("a &lt;b&gt; &amp; &quot;c&quot; &#8211; d&nbsp;e", 'a <b> & "c" – d e'),  # noqa: RUF001
        ("arn:<partition>:<account-id>", "arn:<partition>:<account-id>"),
        ('See <a href="https://x.org">this &amp; that</a>.', "See this & that."),
        ("<p>x <pre><code> &lt;p&gt;y&lt;/p&gt; </code></pre>", "x\ny"),
        ("a < b and -1", "a < b and -1"),
        ("", ""),
    ],
)
def test_html_becomes_plain_lines(html: str, text: str) -> None:
    assert html_text(html) == text


def test_plain_text_loses_link_targets_and_templates() -> None:
    text = "See [it](https://x.org/a?c=d#e) \n\n now. {% include 'x' %}[0](1) <id>"
    assert plain_text(text) == "See it\nnow. [0](1) <id>"


def test_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"packages has \['boto'\]: use botocore or google-api-python-client$"):
        docs(tmp_path, {"boto": "1"})
    with pytest.raises(ValueError, match=r"^pip cannot download botocore 0\.1 \(.*\): put "
                       rf"botocore-0\.1-py3-none-any\.whl into {tmp_path}$"):  # fmt: skip
        read(tmp_path, {"botocore": "0.1"})
    (tmp_path / "botocore-0.1-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"botocore-0\.1-py3-none-any\.whl is broken \(.*\): delete it and run again$"):
        read(tmp_path, {"botocore": "0.1"})
    botocore(tmp_path, {"service/1": service({}, {})}, version=docs_file.PACKAGES["botocore"])
    with pytest.raises(ValueError, match=r"has the SHA-256 \w{64}, expected \w{64}: delete it and run again$"):
        read(tmp_path, {"botocore": docs_file.PACKAGES["botocore"]})

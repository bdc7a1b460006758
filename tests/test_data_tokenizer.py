"""Tokenizers trained here and loaded from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlframe.data.text_sources import Split, Texts
from mlframe.data.tokenizer import ASKED_THREADS, encoder, find_tokenizer, rust_threads, sample, special_id

WORDS = (
    "the transformer reads Words and predicts the next word; coalescing halves its width, twice. [Mask] a key, up <|> "
    * 3
)
SIZE = 400


def documents(start: int) -> Iterator[tuple[Split, str]]:
    for number in range(start, 60):
        split: Split = "val" if number % 20 == 19 else "train"
        yield split, f"{number}: {WORDS[number:]} naïve Ünï {chr(0x3B1 + number % 20) * 2} {number * 7919:x}"


TEXTS = Texts(documents, "the test's words", "words")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def test_bpe_has_one_special_token_and_keeps_text_as_it_is(folder: Path) -> None:
    bpe = find_tokenizer("bpe", TEXTS, SIZE, folder)
    assert len(bpe) == SIZE
    assert bpe.all_special_ids == [0]
    assert {bpe.bos_token_id, bpe.eos_token_id, bpe.pad_token_id, bpe.unk_token_id} == {0}
    text = " The  transformer\n\treads 中文 🙂"
    assert bpe.decode(bpe(text).input_ids) == text
    assert len(bpe(WORDS).input_ids) < len(WORDS) / 2


def test_wordpiece_is_berts(folder: Path) -> None:
    wordpiece = find_tokenizer("wordpiece", TEXTS, SIZE, folder)
    assert len(wordpiece) <= SIZE
    assert wordpiece.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert set(wordpiece.all_special_ids) == {0, 1, 2, 3, 4}
    pair = wordpiece("The NAIVE word", "the naïve word")
    half = len(pair.input_ids) // 2
    assert pair.input_ids[0] == 2
    assert pair.input_ids[1:half] == pair.input_ids[half + 1 : -1]
    assert pair.token_type_ids == [0] * (half + 1) + [1] * half
    assert 1 in wordpiece("中").input_ids
    assert "##" in "".join(wordpiece.tokenize("transformers"))


def test_training_again_in_a_fresh_process_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    """As does loading by transformers alone, which is what a user of the saved network does."""
    here = {kind: find_tokenizer(kind, TEXTS, SIZE, folder) for kind in ("bpe", "wordpiece")}
    places = {kind: next(folder.glob(f"{kind}-*/")) for kind in here}
    code = f"""if True:
        import json
        from pathlib import Path
        from transformers import AutoTokenizer
        from test_data_tokenizer import TEXTS, WORDS, SIZE, find_tokenizer
        for kind, place in {[(kind, str(place)) for kind, place in places.items()]}:
            print(json.dumps(AutoTokenizer.from_pretrained(place)(WORDS).input_ids))
            find_tokenizer(kind, TEXTS, SIZE, Path({str(tmp_path)!r}))"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         env={"PYTHONPATH": str(Path(__file__).parent), "HOME": str(tmp_path)}).stdout  # fmt: skip
    assert [json.loads(line) for line in out.splitlines()] == [one(WORDS).input_ids for one in here.values()]
    for place in places.values():
        assert (tmp_path / place.name / "tokenizer.json").read_bytes() == (place / "tokenizer.json").read_bytes()


def test_a_trained_tokenizer_is_used_again(folder: Path) -> None:
    def gone(start: int) -> Iterator[tuple[Split, str]]:
        raise AssertionError("read again")

    first = find_tokenizer("bpe", TEXTS, SIZE, folder)
    assert find_tokenizer("bpe", replace(TEXTS, documents=gone), SIZE, folder).get_vocab() == first.get_vocab()
    for texts, size in ((replace(TEXTS, documents=gone, key="other"), SIZE), (replace(TEXTS, documents=gone), 300)):
        with pytest.raises(AssertionError, match="read again"):
            find_tokenizer("bpe", texts, size, folder)
    assert not list(folder.glob("tmp*"))


def test_only_training_documents_are_learnt_from() -> None:
    assert sample(TEXTS) == [text for split, text in documents(0) if split == "train"]
    with pytest.raises(ValueError, match=r"^here: no training documents"):
        sample(Texts(lambda start: iter([("val", "a")]), "here", ""))


@pytest.mark.parametrize(
    ("kind", "text"), [("bpe", "a<|endoftext|>b"), ("wordpiece", "a [SEP] b [CLS][MASK] [PAD] [UNK]")]
)
def test_special_tokens_spelt_out_are_text(kind: str, text: str, folder: Path) -> None:
    tokenizer = find_tokenizer(kind, TEXTS, SIZE, folder)
    special = set(tokenizer.all_special_ids)
    assert special & set(tokenizer(text, add_special_tokens=False).input_ids)  # what would happen
    ids = encoder(tokenizer).encode(text, add_special_tokens=False).ids
    assert not special & set(ids)
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "").lower()
    assert special & set(tokenizer(text, add_special_tokens=False).input_ids)  # the user's own is not changed


def test_rust_threads_are_off_for_what_is_forked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with rust_threads():
        assert os.environ["TOKENIZERS_PARALLELISM"] == ASKED_THREADS
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_an_encoder_neither_truncates_nor_pads(folder: Path) -> None:
    bpe = find_tokenizer("bpe", TEXTS, SIZE, folder)
    bpe(["a", WORDS], truncation=True, max_length=4, padding="max_length")
    assert len(encoder(bpe).encode(WORDS).ids) > 4
    assert len(encoder(bpe).encode("a").ids) == 1


def test_a_folder_is_loaded_and_must_fit_the_model(folder: Path) -> None:
    find_tokenizer("bpe", TEXTS, SIZE, folder)
    (place,) = folder.glob("bpe-*/")
    assert len(find_tokenizer(str(place), TEXTS, 1000, folder)) == SIZE
    with pytest.raises(
        ValueError, match=rf"has {SIZE} entries and the model 100: set model\.config\.vocab_size={SIZE}$"
    ):
        find_tokenizer(str(place), TEXTS, 100, folder)
    with pytest.raises(ValueError, match=r"'bpe' has 257 entries and the model 100: set .*=257$"):
        find_tokenizer("bpe", TEXTS, 100, folder)


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^transformers cannot load the tokenizer '[^\n]*\): set model\.tok.*$"):
        find_tokenizer(str(tmp_path), TEXTS, SIZE, tmp_path)


def test_a_missing_special_token_is_named(folder: Path) -> None:
    bpe, wordpiece = (find_tokenizer(kind, TEXTS, SIZE, folder) for kind in ("bpe", "wordpiece"))
    assert special_id(wordpiece, "mask_token") == 4
    with pytest.raises(ValueError, match="has no mask_token, which the objective needs"):
        special_id(bpe, "mask_token")
    with pytest.raises(ValueError, match="has no eos_token"):
        special_id(wordpiece, "eos_token")

"""A tokenizer: one of the Hugging Face hub, one in a folder, or one trained here on the training documents."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from tokenizers import Tokenizer, pre_tokenizers, trainers

from mlframe.data.text_sources import Texts
from mlframe.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("mlframe.data")

TRAINING_CHARACTERS = 30_000_000  # of the first training documents; more changes little and takes longer
_LONG = re.compile(r"(\S{1000})")  # words longer than this take hours to learn from, and are none
ALPHABET = 1000  # letters of a WordPiece vocabulary, as BERT's
END_OF_TEXT = "<|endoftext|>"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FORMAT = 1  # of what is trained: raise it when the training changes
THREADS = "TOKENIZERS_PARALLELISM"
ASKED_THREADS = os.environ.get(THREADS, "true")


def find_tokenizer(kind: str, texts: Texts, vocab_size: int, folder: Path) -> PreTrainedTokenizerBase:
    """A Hugging Face tokenizer of at most `vocab_size` entries.

    Args:
        kind: "bpe", GPT-2's byte-level one, or "wordpiece", BERT's in lower case: trained on the training documents of
            `texts` to `vocab_size` entries and kept in `folder`. Anything else is a name on the hub, or a folder;
            no code of it is run.

    Raises:
        ValueError: when it cannot be loaded, has no fast form, or has too many entries.
    """
    from transformers import AutoTokenizer  # 5 s

    place = _trained(kind, texts, vocab_size, folder) if kind in TRAINING else kind
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "it needs code of its own, which is not run"
        raise ConfigError(f"transformers cannot load the tokenizer {str(place)!r} ({reason}): set model.tokenizer to "
                          "bpe or wordpiece, to a name on the hub, or to a folder") from error  # fmt: skip
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer {kind!r} has no fast form (tokenizer.json): set model.tokenizer to another")
    if (size := entries(tokenizer)) > vocab_size:
        raise ConfigError(f"the tokenizer {kind!r} has {size} entries and the model {vocab_size}: set "
                          f"model.config.vocab_size={size}")  # fmt: skip
    return tokenizer


def entries(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id."""
    return max(tokenizer.get_vocab().values()) + 1


def check_tokenizer(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """The embeddings of a checkpoint belong to the tokens of the tokenizer beside it, if there is one.

    Raises:
        ConfigError: when that has other tokens than `tokenizer`.
    """
    from transformers import AutoTokenizer

    folder = Path(source).expanduser()
    if folder.is_dir() and not any(list(folder.glob(name)) for name in ("tokenizer*", "vocab*", "*.model")):
        return  # transformers would make an empty one
    try:
        theirs = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError):
        return
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"init_from={source} was trained with another tokenizer: set model.tokenizer={source}")


def special_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """The id of a special token by its name in transformers, as "eos_token".

    Raises:
        ConfigError: when the tokenizer has none.
    """
    if getattr(tokenizer, name) is None:
        raise ConfigError(f"the tokenizer has no {name}, which the objective needs: set model.tokenizer to bpe for "
                          "causal and to wordpiece for masked, or to another that has it")  # fmt: skip
    return getattr(tokenizer, f"{name}_id")


def encoder(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The Rust part of a tokenizer, for plain text: neither truncates nor pads, and reads "[SEP]" in it as text."""
    rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    rust.no_truncation()
    rust.no_padding()
    rust.encode_special_tokens = True
    return rust


@contextmanager
def rust_threads() -> Iterator[None]:
    """Lets tokenizers use all cores inside, unless the environment says otherwise.

    Off afterwards: a process forked later, such as a loader's worker, lacks the threads and would wait for them for
    ever; older tokenizers warn of that at every fork.
    """
    os.environ[THREADS] = ASKED_THREADS
    try:
        yield
    finally:
        os.environ[THREADS] = "false"


def _trained(kind: str, texts: Texts, vocab_size: int, folder: Path) -> Path:
    """The folder of the trained tokenizer; trains it when there is none yet."""
    name = hashlib.sha256(f"{FORMAT} {kind} {vocab_size} {texts.key}".encode()).hexdigest()[:16]
    place = folder / f"{kind}-{name}"
    if place.is_dir():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{kind}-{name}.lock"):
        if not place.is_dir():
            log.info("training a %s tokenizer of %s entries on %s", kind, f"{vocab_size:,}", texts.where)
            with tempfile.TemporaryDirectory(dir=folder) as beside, rust_threads():
                tokenizer = TRAINING[kind](sample(texts), vocab_size)
                tokenizer.save_pretrained(Path(beside) / kind)
                os.replace(Path(beside) / kind, place)
            log.info("the tokenizer, of %s entries, is in %s", f"{entries(tokenizer):,}", place)
    return place


def sample(texts: Texts) -> list[str]:
    """The first training documents; the sources mix theirs, so that these are a fair sample."""
    chosen, left = [], TRAINING_CHARACTERS
    for split, text in texts.documents(0):
        if split == "train":
            chosen.append(_LONG.sub(r"\1 ", text[:left]))
            left -= len(chosen[-1])
        if left <= 0:
            break
    if not chosen:
        raise ConfigError(f"{texts.where}: no training documents to train a tokenizer on")
    return chosen


def train_bpe(documents: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """GPT-2's tokenizer (Radford et al. 2019): byte pairs; `<|endoftext|>` is 0 and every special token."""
    from transformers import GPT2Tokenizer

    rust = GPT2Tokenizer().backend_tokenizer
    rust.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))  # fmt: skip
    model = _model(rust)
    merges: Any = [tuple(pair) for pair in model["merges"]]  # declared as strings, which would not do
    return GPT2Tokenizer(vocab=model["vocab"], merges=merges, pad_token=END_OF_TEXT)


def train_wordpiece(documents: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """BERT's tokenizer (Devlin et al. 2019), in lower case; [PAD] is 0, [UNK] 1, [CLS] 2, [SEP] 3 and [MASK] 4."""
    from transformers import BertTokenizer

    rust = BertTokenizer().backend_tokenizer
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(rust.normalizer.normalize_str(document))
    ranked = sorted((letter for letter in counts if not letter.isspace()), key=lambda letter: (-counts[letter], letter))
    letters = sorted(ranked[: min(ALPHABET, vocab_size // 4)])
    # The trainer numbers letters inside a word ("##a") in the order of a hash map, which differs from run to run, and
    # breaks ties by these numbers. What is given as special comes first and in order; the final tokenizer keeps BERT's.
    first = [*BERT_TOKENS, *letters, *(f"##{letter}" for letter in letters)]
    rust.train_from_iterator(documents, trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=first, initial_alphabet=letters, limit_alphabet=len(letters),
        show_progress=False))  # fmt: skip
    return BertTokenizer(vocab=_model(rust)["vocab"], do_lower_case=True)


def _model(rust: Tokenizer) -> dict[str, Any]:
    return json.loads(rust.to_str())["model"]


TRAINING: dict[str, Callable[[list[str], int], PreTrainedTokenizerBase]] = {
    "bpe": train_bpe,
    "wordpiece": train_wordpiece,
}

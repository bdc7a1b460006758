"""What a 3-gram reaches on the tokens of a causal experiment: the loss that a network has to beat.

python benchmarks/ngram.py [EXPERIMENT] [OVERRIDE ...]        (default: gpt_docs; a minute)

An interpolated Kneser-Ney 3-gram with one discount (Chen and Goodman, 1998), measured on the test split: trained on as
many rows, at random, as the experiment's steps take (a V-cycle sees each token once), and on the whole training split.
"""

from __future__ import annotations

import sys

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from mlframe.train import CONF

DISCOUNT = 0.75


class Counts:
    """Of one order: how often each (context, token) occurs, how often each context, and after how many tokens."""

    def __init__(self, keys: np.ndarray, vocab: int, weights: np.ndarray | None = None) -> None:
        self.vocab = vocab
        self.keys, inverse = np.unique(keys, return_inverse=True)
        self.counts = np.bincount(inverse, weights)
        self.contexts, inverse = np.unique(self.keys // vocab, return_inverse=True)
        self.totals, self.kinds = np.bincount(inverse, self.counts), np.bincount(inverse)

    def probability(self, keys: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Discounted counts, and the mass that this frees goes to the lower order."""
        count = _looked_up(self.keys, self.counts, keys)
        total = _looked_up(self.contexts, self.totals, keys // self.vocab)
        kinds = _looked_up(self.contexts, self.kinds, keys // self.vocab)
        seen = np.maximum(total, 1)
        return np.where(total > 0, (np.maximum(count - DISCOUNT, 0) + DISCOUNT * kinds * lower) / seen, lower)


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def loss(train: np.ndarray, test: np.ndarray, vocab: int) -> float:
    """Mean nats a token of `test` [n], both token streams of int64."""
    three = Counts((train[:-2] * vocab + train[1:-1]) * vocab + train[2:], vocab)
    # The lower orders count in how many contexts, not how often, as Kneser and Ney have it.
    two = Counts(three.keys % vocab**2, vocab)
    one = np.bincount(two.keys % vocab, minlength=vocab)
    unigram = (np.maximum(one - DISCOUNT, 0) + DISCOUNT * np.count_nonzero(one) / vocab) / one.sum()
    bigram = two.probability(test[1:-1] * vocab + test[2:], unigram[test[2:]])
    trigram = three.probability((test[:-2] * vocab + test[1:-1]) * vocab + test[2:], bigram)
    return float(-np.log(trigram).mean())


def main() -> None:
    experiment, *overrides = sys.argv[1:] or ["gpt_docs"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [f"experiment={experiment}", "run_dir=runs", *overrides])
    data = instantiate(config.data)
    data.setup()
    rows = {"train": data.train_dataloader().dataset.rows, "test": data.test_dataloader().dataset.rows}
    order, test = np.random.default_rng(0).permutation(len(rows["train"])), rows["test"][:, :-1].ravel()
    for count in (min(len(order), config.steps * config.data.batch_size), len(order)):
        train = rows["train"][order[:count], :-1].ravel()
        nats = loss(train, test, config.model.config.vocab_size)
        print(f"3-gram of {experiment}: {nats:.3f} nats a token of the test split, from {len(train):,} tokens")


if __name__ == "__main__":
    main()

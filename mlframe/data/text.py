"""TextData: the LightningDataModule that gives batches of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mlframe.data.loader import Key, ResumableLoader, ResumableSampler, evaluation_batches
from mlframe.data.masking import EVALUATION, Masking
from mlframe.data.text_sources import Split, Texts
from mlframe.data.tokenizer import encoder, entries, find_tokenizer, special_id
from mlframe.data.tokens import Packing, Rows, causal, masked, token_rows
from mlframe.errors import ConfigError, check_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextData(pl.LightningDataModule):
    """Batches of rows of tokens. The documents that `source` finds are tokenised once, then read from mapped files.

    * `objective="causal"`: `(ids, targets)`, both int64 [B, T]; the targets are the next tokens.
    * `objective="masked"`: `(ids, positions, targets)`, int64 [B, T], [B, P], [B, P]; see `mlframe.data.masking`.

    Training batches come in an order that (seed, epoch) decides, from a loader that resumes inside an epoch, and the
    masks are a function of (seed, epoch, index). Use with `Trainer(use_distributed_sampler=False)`: training and
    evaluation are already split over the ranks, every evaluation row exactly once.

    Args:
        source: returns the `Texts`; see `mlframe.data.text_sources` and `mlframe.data.docs`.
        tokenizer: see `mlframe.data.tokenizer.find_tokenizer`.
        vocab_size: what the model takes; a trained tokenizer gets as many entries, a loaded one may have fewer.
        sequence_length: tokens per row, T.
        batch_size, eval_batch_size: rows per process.
        folder: for the tokens and the trained tokenizer.
        val_samples: rows of the validation split that are used, spread evenly over it; None: all. Tests use all.
        workers: loading processes; 0 loads in the training process.
        mask: the part of a row's tokens that is to be predicted; P = max(1, round(mask * T)).
    """

    def __init__(
        self,
        source: Callable[[], Texts],
        tokenizer: str,
        vocab_size: int,
        objective: str,
        sequence_length: int,
        batch_size: int,
        eval_batch_size: int,
        folder: str | Path,
        val_samples: int | None = None,
        workers: int = 0,
        seed: int = 0,
        mask: float = 0.15,
    ):
        super().__init__()
        if objective not in ("causal", "masked"):
            raise ConfigError(f"data.objective={objective}: use causal or masked")
        shortest = 1 if objective == "causal" else 3
        if type(sequence_length) is not int or sequence_length < shortest:
            raise ConfigError(
                f"data.sequence_length={sequence_length}: a whole number of tokens, {shortest} or more ({objective})"
            )
        if not isinstance(mask, int | float) or not 0 < mask <= 1:
            raise ConfigError(f"data.mask={mask}: the part of the tokens to predict is above 0 and at most 1")
        if val_samples is not None:
            check_whole("data.val_samples", val_samples, 1)
        check_whole("data.workers", workers, 0)
        self.source, self.tokenizer, self.vocab_size, self.objective = source, tokenizer, vocab_size, objective
        self.sequence_length, self.batch_size, self.eval_batch_size = sequence_length, batch_size, eval_batch_size
        self.folder, self.val_samples, self.workers, self.seed, self.mask = folder, val_samples, workers, seed, mask
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._rows: dict[Split, Rows] = {}
        self._masking: Masking | None = None

    @property
    def sample(self) -> dict[str, int]:
        """What one row is to the model: `tokens` read and `predictions` asked for."""
        length = self.sequence_length
        return {"tokens": length, "predictions": length if self.objective == "causal" else self._masked()}

    def _masked(self) -> int:
        return max(1, round(self.mask * self.sequence_length))

    def about(self) -> dict[str, Any]:
        """What is saved beside a network: the transformers `tokenizer`."""
        self.setup()
        return {"tokenizer": self._tokenizer}

    def prepare_data(self) -> None:
        """Downloads, trains the tokenizer and tokenises on one process per machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Finds the tokens, or makes them; the second time does nothing. Processes that come together wait for one.

        Raises:
            ValueError: when the source, the tokenizer or the model do not fit each other, or a split is too small.
        """
        if self._rows:
            return
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data.folder={self.folder} cannot be made ({error.strerror}): set data_dir to a folder "
                              "that can be written") from error  # fmt: skip
        texts = self.source()
        tokenizer = find_tokenizer(self.tokenizer, texts, self.vocab_size, Path(self.folder))
        packing = self._packing(tokenizer)
        rows = token_rows(texts, encoder(tokenizer), packing, Path(self.folder))
        if self.objective == "masked":
            self._masking = Masking(self._masked(), special_id(tokenizer, "mask_token"), tokenizer.all_special_ids,
                                    entries(tokenizer), self.seed)  # fmt: skip
        self._tokenizer, self._rows = tokenizer, rows

    def _packing(self, tokenizer: PreTrainedTokenizerBase) -> Packing:
        if self.objective == "causal":
            return causal(self.sequence_length, special_id(tokenizer, "eos_token"))
        first, last = (special_id(tokenizer, name) for name in ("cls_token", "sep_token"))
        return masked(self.sequence_length, first, last)

    def train_dataloader(self) -> ResumableLoader:
        self.setup()
        batches = Batches(self._rows["train"], self._masking)
        rank, world = self._rank_and_world()
        accumulate = self.trainer.accumulate_grad_batches if self.trainer else 1
        sampler = ResumableSampler(len(batches), self.batch_size, self.seed, rank, world, accumulate=accumulate)
        return ResumableLoader(batches, sampler, **self._loading())

    def val_dataloader(self) -> DataLoader:
        return self._eval_loader("val", self.val_samples)

    def test_dataloader(self) -> DataLoader:
        return self._eval_loader("test", None)

    def _eval_loader(self, split: Split, samples: int | None) -> DataLoader:
        self.setup()
        rows = self._rows[split]
        count = min(samples or len(rows), len(rows))
        chosen = np.arange(count) * len(rows) // count
        batches = [[(int(chosen[i]), EVALUATION) for i in batch]
                   for batch in evaluation_batches(count, self.eval_batch_size, *self._rank_and_world())]  # fmt: skip
        # An own generator: a plain loader draws from the global one every time, which would shift dropout.
        return DataLoader(Batches(rows, self._masking), batch_sampler=batches, generator=torch.Generator(),
                          **self._loading())  # fmt: skip

    def _loading(self) -> dict[str, Any]:
        return {"num_workers": self.workers, "persistent_workers": self.workers > 0, "collate_fn": as_it_is,
                "pin_memory": torch.cuda.is_available()}  # fmt: skip

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)


class Batches(Dataset):
    """Whole batches for lists of keys `(index, draw)`: causal ones, or masked ones where there is a `masking`."""

    def __init__(self, rows: Rows, masking: Masking | None):
        self.rows, self.masking = rows, masking

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, ...]:
        """What DataLoader calls."""
        indices, draws = np.array(keys).T
        rows = self.rows[indices]
        parts = (rows[:, :-1], rows[:, 1:]) if self.masking is None else self.masking(rows, indices, draws)
        return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in parts)


def as_it_is(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The collation of what is a batch already."""
    return batch

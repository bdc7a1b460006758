"""ImageData: the LightningDataModule that gives image batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from mlframe.data.augment import EvaluationImages, TrainImages, as_pil, evaluation_transform, train_transform
from mlframe.data.loader import ResumableLoader, ResumableSampler, evaluation_batches
from mlframe.data.sources import Images, Splits
from mlframe.errors import check_whole

CACHE_BYTES = 256 * 2**20  # an evaluation set up to this size is transformed once and kept


class ImageData(pl.LightningDataModule):
    """Batches `(float32 [B, C, H, W] normalised, int64 [B])` of the images that `source` finds.

    Training batches come in an order that (seed, epoch) decides, from a loader that resumes inside an epoch, and their
    augmentation is a function of (seed, epoch, index). Use with `Trainer(use_distributed_sampler=False)`: training and
    evaluation are already split over the ranks, every evaluation image exactly once.

    Args:
        source: returns the `Splits`; see `mlframe.data.sources`.
        image_size, channels, classes: what the model takes; images are made grey (1) or RGB (3).
        mean, std: per channel, or one number for all, of values in [0, 1].
        batch_size, eval_batch_size: images per process.
        workers: loading processes; 0 loads in the training process.
        holdout: images held out of `train` for validation when the source has no such split; in the proportions of
            the classes, chosen by `seed`.
        repeats: repeated augmentation, see `ResumableSampler`.
        augment: keywords of `timm.data.create_transform` for training; `{no_aug: true}` for none.
        crop_pct: the part of a resized image's side that evaluation keeps.
        interpolation: for resizing, in evaluation, and in training unless `augment` says otherwise.
    """

    sample: Mapping[str, int] = {}  # nothing: an image's size is the network's

    def __init__(
        self,
        source: Callable[[], Splits],
        image_size: int,
        channels: int,
        classes: int,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        batch_size: int,
        eval_batch_size: int,
        workers: int = 0,
        holdout: int = 0,
        seed: int = 0,
        repeats: int = 1,
        augment: Mapping[str, Any] | None = None,
        crop_pct: float = 1.0,
        interpolation: str = "bicubic",
    ):
        super().__init__()
        if channels not in (1, 3):
            raise ValueError(f"data.channels={channels}: images are made grey (1) or RGB (3)")
        check_whole("data.image_size", image_size, 1)
        check_whole("data.workers", workers, 0)
        mean, std = _per_channel("mean", mean, channels), _per_channel("std", std, channels)
        self.source, self.image_size, self.channels, self.classes = source, image_size, channels, classes
        self.batch_size, self.eval_batch_size, self.workers = batch_size, eval_batch_size, workers
        self.holdout, self.seed, self.repeats = holdout, seed, repeats
        self.transform = train_transform(image_size, mean, std, {"interpolation": interpolation, **(augment or {})})
        self.eval_transform = evaluation_transform(image_size, mean, std, crop_pct, interpolation)
        self.preprocessing = {"mean": mean, "std": std, "crop_pct": crop_pct, "interpolation": interpolation}
        self._splits: Splits | None = None
        self._cache: dict[str, TensorDataset] = {}

    def prepare_data(self) -> None:
        """Downloads on one process per machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Finds the images and checks them; the second time does nothing.

        Raises:
            ValueError: when a split is empty, labels or classes do not fit the model, or an image does not decode.
        """
        if self._splits is not None:
            return
        splits = self.source()
        if len(splits.classes) != self.classes:
            raise ValueError(f"{splits.where} has {len(splits.classes)} classes and the model {self.classes}: set "
                             f"model.config.num_classes={len(splits.classes)}")  # fmt: skip
        if splits.val is None:
            kept, held = hold_out(np.asarray(splits.train.targets), self.holdout, self.seed)
            splits = replace(splits, train=Chosen(splits.train, kept), val=Chosen(splits.train, held))
        for part in ("train", "val", "test"):
            self._check(part, getattr(splits, part), splits.where)
        self._splits = splits

    def _check(self, part: str, images: Images, where: str) -> None:
        labels = np.asarray(images.targets)
        if not len(images) or len(labels) != len(images):
            raise ValueError(f"{where}: the {part} split has {len(images)} images and {len(labels)} labels")
        if labels.dtype.kind not in "iu":
            raise ValueError(f"{where}: the {part} split has labels of type {labels.dtype}, make them whole numbers")
        if labels.min() < 0 or labels.max() >= self.classes:
            raise ValueError(f"{where}: the {part} split has labels {labels.min()} to {labels.max()}, expected 0 to "
                             f"{self.classes - 1}: mend them or take another split")  # fmt: skip
        wanted = (self.channels, self.image_size, self.image_size)
        shape = tuple(self.eval_transform(as_pil(images[0][0], self.channels)).shape)
        if shape != wanted:
            raise ValueError(f"{where}: the first {part} image becomes {shape}, the model takes {wanted}")

    @property
    def splits(self) -> Splits:
        """What is trained and evaluated on: the source's splits after the hold-out."""
        self.setup()
        assert self._splits is not None
        return self._splits

    @property
    def train_images(self) -> int:
        """How many images there are to train on."""
        return len(self.splits.train)

    def about(self) -> dict[str, Any]:
        """What a saved network's config says of its data: class names, and timm's `data_config`."""
        return {
            "label_names": list(self.splits.classes),
            "data_config": {"input_size": (self.channels, self.image_size, self.image_size), **self.preprocessing},
        }

    def train_dataloader(self) -> ResumableLoader:
        images = self.splits.train
        rank, world = self._rank_and_world()
        accumulate = self.trainer.accumulate_grad_batches if self.trainer else 1
        sampler = ResumableSampler(len(images), self.batch_size, self.seed, rank, world, self.repeats, accumulate)
        augmented = TrainImages(images, self.transform, self.channels, self.seed)
        return ResumableLoader(augmented, sampler, **self._loading())

    def val_dataloader(self) -> DataLoader:
        assert self.splits.val is not None  # held out by setup where the source has none
        return self._eval_loader("val", self.splits.val)

    def test_dataloader(self) -> DataLoader:
        return self._eval_loader("test", self.splits.test)

    def _eval_loader(self, part: str, split: Images) -> DataLoader:
        images = EvaluationImages(split, self.eval_transform, self.channels)
        batches = evaluation_batches(len(split), self.eval_batch_size, *self._rank_and_world())
        # An own generator: a plain loader draws from the global one every time, which would shift dropout.
        if len(split) * self.channels * self.image_size**2 * 4 > CACHE_BYTES:
            return DataLoader(images, batch_sampler=batches, generator=torch.Generator(), **self._loading())
        if part not in self._cache:
            tensors, labels = zip(*(images[index] for index in range(len(split))), strict=True)
            self._cache[part] = TensorDataset(torch.stack(tensors), torch.tensor(labels))
        # With batch_size=None the dataset is indexed with what the sampler gives: a whole batch at once.
        return DataLoader(self._cache[part], batch_size=None, sampler=batches, generator=torch.Generator())

    def _loading(self) -> dict[str, Any]:
        return {"num_workers": self.workers, "persistent_workers": self.workers > 0,
                "pin_memory": torch.cuda.is_available()}  # fmt: skip

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)


class Chosen:
    """Some of the images of a dataset, by their indices; torch's Subset with `targets`."""

    def __init__(self, images: Images, indices: np.ndarray):
        self.images, self.indices = images, indices
        self.targets = np.asarray(images.targets)[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[int(self.indices[index])]


def hold_out(labels: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits the indices of `labels` [N] at random into [N - count] and [count], with the classes in proportion.

    Raises:
        ValueError: when `count` is not in 1 to N - 1.
    """
    if not 0 < count < len(labels):
        raise ValueError(f"data.holdout={count}: there is no validation split, and {len(labels)} training images to "
                         f"hold some out of; set it to 1 or more and below {len(labels)}")  # fmt: skip
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    held = np.zeros(len(labels), dtype=bool)
    held[by_class[np.arange(count) * len(labels) // count]] = True  # every k-th, hence each class in its proportion
    return np.flatnonzero(~held), np.flatnonzero(held)


def _per_channel(name: str, value: float | Sequence[float], channels: int) -> tuple[float, ...]:
    values = (value,) if isinstance(value, int | float | str) else tuple(value)
    if not all(isinstance(v, int | float) and math.isfinite(v) and (v > 0 or name == "mean") for v in values):
        raise ValueError(f"data.{name}={value}: of values in [0, 1], so a number{' above 0' * (name == 'std')}, such "
                         "as 0.5, or a list with one for each channel")  # fmt: skip
    if len(values) not in (1, channels):
        raise ValueError(f"data.{name} has {len(values)} numbers for {channels} channel(s): set "
                         f"model.config.in_chans={len(values)}, or give one number for all")  # fmt: skip
    return values * (channels // len(values))

"""Images to tensors: timm's transforms, made a function of (seed, index, draw) for training."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp
from timm.data.transforms import MaybeToTensor
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import Compose, Normalize

from mlframe.data.loader import Key
from mlframe.data.sources import Images

Transform = Callable[[Image.Image], Tensor]  # PIL image -> float32 [C, H, W], normalised

# Set from the other arguments of ImageData, or they would change the shape of what comes out.
RESERVED = ("input_size", "is_training", "mean", "std", "normalize", "use_prefetcher", "separate", "tf_preprocessing",
            "crop_pct", "crop_mode", "crop_border_pixels", "naflex", "patch_size", "max_seq_len", "patchify",
            "patchify_channels_last", "patchify_flatten")  # fmt: skip


def train_transform(size: int, mean: Sequence[float], std: Sequence[float], augment: Mapping[str, Any]) -> Transform:
    """`timm.data.create_transform` for training with the keywords `augment`; `{"no_aug": True}` only resizes.

    Raises:
        ValueError: when timm has no such keyword, or refuses a value.
    """
    known = [key for key in inspect.signature(create_transform).parameters if key not in RESERVED]
    if unknown := [key for key in augment if key not in known]:
        raise ValueError(f"data.augment has {unknown}, which timm.data.create_transform does not take: use {known}")
    try:
        transform = create_transform(size, is_training=True, mean=tuple(mean), std=tuple(std), **augment)
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(f"timm.data.create_transform refuses data.augment={dict(augment)}: {error!r}") from error
    for step in transform.transforms:
        groups = getattr(step, "policy", [getattr(step, "ops", [])])  # AutoAugment's, else RandAugment's or AugMix's
        for op in (op for group in groups for op in group if isinstance(op, AugmentOp)):
            if op.name.startswith("Posterize"):
                op.aug_fn = posterize
    return _with_pixels(transform, mean, std)


def evaluation_transform(
    size: int, mean: Sequence[float], std: Sequence[float], crop_pct: float, interpolation: str
) -> Transform:
    """`timm.data.create_transform` for evaluation: resize to `size / crop_pct`, then cut out the centre."""
    transform = create_transform(size, mean=tuple(mean), std=tuple(std), crop_pct=crop_pct, interpolation=interpolation)
    return _with_pixels(transform, mean, std)


class Pixels:
    """A PIL image to a normalised float32 [C, H, W]: torchvision's ToTensor and Normalize in a third of their time.

    On small images these two are more than a third of all the work.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        self.shift = torch.tensor(mean).view(-1, 1, 1) * 255
        self.scale = 1 / (torch.tensor(std).view(-1, 1, 1) * 255)

    def __call__(self, image: Image.Image) -> Tensor:
        values = torch.from_numpy(np.array(image))
        values = values[None] if values.ndim == 2 else values.permute(2, 0, 1).contiguous()
        return values.float().sub_(self.shift).mul_(self.scale)


def _with_pixels(transform: Compose, mean: Sequence[float], std: Sequence[float]) -> Compose:
    steps = [step for step in transform.transforms if not isinstance(step, Normalize)]
    return Compose([Pixels(mean, std) if isinstance(step, MaybeToTensor) else step for step in steps])


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """As timm's, which at its strongest (rand-m9-mstd0.5-inc1 draws that) asks for 0 bits: Pillow 13 refuses these.

    Up to Pillow 12 they gave a black image; one bit is the nearest that all accept.
    """
    return image if bits >= 8 else ImageOps.posterize(image, max(1, bits))


def as_pil(image: Image.Image | np.ndarray, channels: int) -> Image.Image:
    """A grey (`channels` 1) or RGB (3) image from a PIL image or a uint8 array [H, W] or [H, W, 3].

    Raises:
        ValueError: for images of more than 8 bits, which PIL would clip to white without a word.
    """
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    mode = "L" if channels == 1 else "RGB"
    if image.mode == mode:
        return image
    if image.mode[0] in "IF":
        raise ValueError(f"an image has more than 8 bits a value (PIL mode {image.mode}): convert it to 8 bits first")
    return image.convert(mode)


class TrainImages(Dataset):
    """Gives `(float32 [C, H, W], label)` for a key `(index, draw)`: equal keys give equal tensors, in any worker."""

    def __init__(self, images: Images, transform: Transform, channels: int, seed: int):
        self.images, self.transform, self.channels, self.seed = images, transform, channels, seed

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Key]) -> list[tuple[Tensor, int]]:
        """What DataLoader calls: a batch at once, since keeping the global streams costs more than seeding them."""
        with kept_random_state():
            return [self._augmented(index, draw) for index, draw in keys]

    def _augmented(self, index: int, draw: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        seed_all(mixed(self.seed, index, draw))
        return self.transform(as_pil(image, self.channels)), int(label)


class EvaluationImages(Dataset):
    """Gives `(float32 [C, H, W], label)` for an index."""

    def __init__(self, images: Images, transform: Transform, channels: int):
        self.images, self.transform, self.channels = images, transform, channels

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        return self.transform(as_pil(image, self.channels)), int(label)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Gives the global streams of random, numpy and torch (CPU) back as they were: dropout draws from them."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def seed_all(seed: int) -> None:
    """Seeds the three streams from which timm and torchvision draw, in about 8 us."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed walks all devices: hundreds of us


def mixed(*numbers: int) -> int:
    """64 well-mixed bits of a sequence of integers (the finaliser of splitmix64 after each), the same everywhere."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state

"""ImageData: batches, augmentation by key, hold-out, checks; on images made here."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image
from timm.data import create_transform

from mlframe.data import image as image_module
from mlframe.data.augment import as_pil, evaluation_transform, mixed, seed_all, train_transform
from mlframe.data.image import ImageData, hold_out
from mlframe.data.sources import ArrayImages, Splits

CONF = Path(__file__).parents[1] / "conf" / "data"
BLACK = np.zeros((3, 12, 12), dtype=np.uint8)
STRONG = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.5, "re_mode": "pixel", "color_jitter": 0.3}


def splits(val: int = 0, train: int = 40, **changed: Any) -> Splits:
    pixels = np.random.default_rng(0)

    def some(count: int) -> ArrayImages:
        return ArrayImages(pixels.integers(0, 256, (count, 12, 12), dtype=np.uint8), np.arange(count) % 4)

    parts = {"train": some(train), "val": some(val) if val else None, "test": some(10), **changed}
    return Splits(**{"classes": ("a", "b", "c", "d"), "where": "made here", **parts})


def data(source: Splits | None = None, **changed: Any) -> ImageData:
    found = source or splits()
    settings: dict[str, Any] = {
        "image_size": 12, "channels": 1, "classes": 4, "mean": 0.5, "std": 0.25, "batch_size": 6, "eval_batch_size": 4,
        "holdout": 8, "seed": 1, "augment": STRONG, **changed,
    }  # fmt: skip
    return ImageData(lambda: found, **settings)


def epoch_of(data: ImageData, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


def equal(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(a, b) for left, right in zip(first, second, strict=True)
               for a, b in zip(left, right, strict=True))  # fmt: skip


# batches


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [12, 20])
def test_batches_have_the_promised_shapes_and_types(channels: int, size: int) -> None:
    module = data(channels=channels, image_size=size)
    assert module.train_images == 32
    loaders = module.train_dataloader(), module.val_dataloader(), module.test_dataloader()
    for loader, count in zip(loaders, (30, 8, 10), strict=True):
        batches = list(loader)
        assert sum(len(labels) for _, labels in batches) == count
        for images, labels in batches:
            assert images.shape == (len(labels), channels, size, size)
            assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("limit", [0, 2**20])
def test_evaluation_gives_every_image_once_in_order_and_normalised(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(image_module, "CACHE_BYTES", limit)
    source = splits(val=9)
    batches = list(data(source).val_dataloader())
    assert isinstance(source.val, ArrayImages)
    images, labels = (torch.cat(list(parts)) for parts in zip(*batches, strict=True))
    assert labels.tolist() == source.val.targets.tolist()
    expected = (torch.from_numpy(source.val.images)[:, None] / 255 - 0.5) / 0.25
    torch.testing.assert_close(images, expected)
    assert len(batches) == 3


def test_the_source_is_asked_once() -> None:
    calls: list[int] = []
    found = splits()
    module = data()

    def source() -> Splits:
        calls.append(1)
        return found

    module.source = source
    module.prepare_data()
    module.setup("fit")
    module.setup("test")
    module.val_dataloader()
    assert calls == [1]


def test_ranks_come_from_the_trainer() -> None:
    whole = [labels for _, labels in epoch_of(data(), 0)]
    parts, evaluated = [], 0
    for rank in (0, 1):
        module = data(batch_size=3)
        module.trainer = SimpleNamespace(global_rank=rank, world_size=2, accumulate_grad_batches=1)
        parts.append([labels for _, labels in epoch_of(module, 0)])
        evaluated += sum(len(labels) for _, labels in module.test_dataloader())
    assert evaluated == 10
    for labels, first, second in zip(whole, *parts, strict=True):
        assert sorted(labels.tolist()) == sorted([*first.tolist(), *second.tolist()])


# augmentation


def test_augmentation_is_a_function_of_seed_epoch_and_index_in_any_worker() -> None:
    alone = epoch_of(data(), 1)
    random.seed(99)
    torch.manual_seed(99)
    assert equal(alone, epoch_of(data(), 1))
    assert equal(alone, epoch_of(data(workers=2), 1))
    assert not equal(alone, epoch_of(data(seed=2), 1))


def test_draws_of_one_image_differ() -> None:
    images = data().train_dataloader().dataset
    tensors = [images[(5, draw)][0] for draw in range(8)]
    assert len({tensor.numpy().tobytes() for tensor in tensors}) == 8
    assert torch.equal(images[(5, 3)][0], tensors[3])


def test_a_resume_gives_the_rest_of_the_epoch_bit_for_bit() -> None:
    whole = epoch_of(data(), 1)
    stopped = data().train_dataloader()
    stopped.batch_sampler.set_epoch(1)
    iterator = iter(stopped)
    for _ in range(2):
        next(iterator)
    resumed = data().train_dataloader()
    resumed.load_state_dict(stopped.state_dict())
    resumed.batch_sampler.set_epoch(1)
    assert equal(list(resumed), whole[2:])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_streams_are_left_alone(workers: int) -> None:
    def states() -> list[bytes]:
        return [repr(random.getstate()).encode(), repr(np.random.get_state(legacy=False)["state"]).encode(),
                torch.get_rng_state().numpy().tobytes()]  # fmt: skip

    module = data(workers=workers)
    before = states()
    list(module.train_dataloader())
    list(module.val_dataloader())
    assert states() == before


def test_the_global_streams_come_back_after_an_error() -> None:
    module = data()
    module.transform = lambda _: torch.rand(3).reshape(7)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="invalid for input"):
        epoch_of(module, 0)
    assert torch.equal(torch.get_rng_state(), before)


@given(st.tuples(*[st.integers(0, 2**40)] * 3), st.tuples(*[st.integers(0, 2**40)] * 3))
def test_mixed_tells_keys_apart(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert (mixed(*first) == mixed(*second)) is (first == second)
    assert 0 <= mixed(*first) < 2**64


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("augment", [{}, {"no_aug": True}, {"train_crop_mode": "rkrr"}, STRONG])
def test_pixels_are_timms_own(mode: str, augment: dict[str, Any]) -> None:
    channels = len(mode)
    noise = np.random.default_rng(1).integers(0, 256, (30, 26, 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert(mode)
    mean, std = (0.4, 0.5, 0.6)[:channels], (0.2, 0.3, 0.4)[:channels]
    ours = train_transform(16, mean, std, augment)
    timms = create_transform(16, is_training=True, mean=mean, std=std, **augment)
    for seed in range(20):
        seed_all(seed)
        tensor = ours(image)
        seed_all(seed)
        torch.testing.assert_close(tensor, timms(image), atol=1e-5, rtol=1e-5)
    evaluate = create_transform(16, mean=mean, std=std, crop_pct=0.875, interpolation="bicubic")
    torch.testing.assert_close(evaluation_transform(16, mean, std, 0.875, "bicubic")(image), evaluate(image))


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("policy", ["rand-m10-n15-p1-inc1", "rand-m0-n15-p1", "original", "v0", "3a", "augmix-m5-w4"])
def test_every_policy_of_timm_runs_at_its_strongest(mode: str, policy: str) -> None:
    # Posterize to 0 bits, which Pillow 13 refuses, is one of them.
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (16, 16, 3), dtype=np.uint8)).convert(mode)
    transform = train_transform(16, (0.5,) * len(mode), (0.5,) * len(mode), {"auto_augment": policy})
    for seed in range(40):
        seed_all(seed)
        assert torch.isfinite(transform(image)).all()


def test_unknown_or_wrong_augmentation_is_named() -> None:
    with pytest.raises(ValueError, match=r"data.augment has \['hflipp'\].*'hflip'"):
        data(augment={"hflipp": 0.5})
    with pytest.raises(ValueError, match=r"data.augment has \['separate'\]"):
        data(augment={"separate": True})
    with pytest.raises(ValueError, match=r"refuses data.augment=.*'train_crop_mode': 'all'"):
        data(augment={"train_crop_mode": "all"})


def test_images_of_more_than_8_bits_are_refused_and_others_converted() -> None:
    with pytest.raises(ValueError, match="mode I;16"):
        as_pil(np.zeros((4, 4), dtype=np.uint16), 1)
    assert as_pil(Image.new("RGBA", (4, 4)), 3).mode == "RGB"
    assert as_pil(np.zeros((4, 4, 3), dtype=np.uint8), 1).mode == "L"


# hold-out


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_hold_out_is_disjoint_complete_and_in_proportion(sizes: list[int], share: float, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    count = min(max(1, int(share * len(labels))), len(labels) - 1)
    if count == 0:
        return
    kept, held = hold_out(labels, count, seed)
    assert len(held) == count
    assert sorted([*kept, *held]) == list(range(len(labels)))
    for label, size in enumerate(sizes):
        assert abs((labels[held] == label).sum() - size * count / len(labels)) <= 1


def test_hold_out_is_exactly_balanced_on_balanced_classes_and_decided_by_the_seed() -> None:
    labels = np.arange(600) % 10
    _, held = hold_out(labels, 50, seed=0)
    assert np.bincount(labels[held]).tolist() == [5] * 10
    assert np.array_equal(held, hold_out(labels, 50, seed=0)[1])
    assert not np.array_equal(held, hold_out(labels, 50, seed=1)[1])


def test_held_out_images_are_not_trained_on() -> None:
    source = splits()
    module = data(source)
    seen = [image.tobytes() for image, _ in (module.splits.train[index] for index in range(32))]
    assert module.splits.val is not None
    assert isinstance(source.train, ArrayImages)
    held = [module.splits.val[index][0].tobytes() for index in range(8)]
    assert sorted(seen + held) == sorted(image.tobytes() for image in source.train.images)
    assert not set(seen) & set(held)


def test_a_split_of_the_source_goes_before_the_hold_out() -> None:
    assert data(splits(val=9)).train_images == 40


# errors


@pytest.mark.parametrize(
    ("source", "changed", "message"),
    [
        ({}, {"classes": 1000}, "has 4 classes and the model 1000: set model.config.num_classes=4"),
        ({}, {"holdout": 0}, "data.holdout=0"),
        ({}, {"holdout": 40}, "data.holdout=40.* 40 training images"),
        ({"test": ArrayImages(BLACK, np.array([0, 1, 4]))}, {}, "test split has labels 0 to 4"),
        ({"test": ArrayImages(BLACK, np.array([0, 1, -1]))}, {}, "test split has labels -1"),
        ({"test": ArrayImages(BLACK[:0], np.zeros(0))}, {}, "test split has 0 images"),
        ({"test": ArrayImages(BLACK, np.zeros(2))}, {}, "3 images and 2 labels"),
    ],
)
def test_setup_names_what_does_not_fit(source: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data(splits(**source), **changed).setup()


def test_labels_that_are_not_whole_numbers_are_refused() -> None:
    source = splits(val=4)
    source.train.targets = np.linspace(0, 1, 40)
    with pytest.raises(ValueError, match="labels of type float64"):
        data(source).setup()


def test_channels_and_their_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match=r"data\.channels=2"):
        data(channels=2)
    with pytest.raises(ValueError, match=r"data.mean has 3 numbers for 1 channel"):
        data(mean=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="32 items, fewer than the 64 of one step"):
        data(batch_size=64).train_dataloader()


# with Lightning, and from conf/


class Recorder(pl.LightningModule):
    """Keeps a fingerprint of each training batch."""

    def __init__(self, save_at: dict[int, Path]) -> None:
        super().__init__()
        self.save_at = save_at  # in mid-epoch: after fit, Lightning counts the epoch as finished
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, float(batch[0].double().sum())))
        return self.weight.sum()

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step in self.save_at:
            self.trainer.save_checkpoint(self.save_at[self.global_step])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        assert batch[0].shape[1:] == (1, 12, 12)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, save_at: dict[int, Path], resume: Path | None, workers: int) -> list[tuple[int, float]]:
    trainer = pl.Trainer(
        max_steps=13, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=folder,
    )  # fmt: skip
    module = Recorder(save_at)
    trainer.fit(module, datamodule=data(workers=workers), ckpt_path=resume)
    return module.seen


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_the_stream_and_each_epoch_differs(tmp_path: Path) -> None:
    checkpoints = {step: tmp_path / f"{step}.ckpt" for step in (3, 7)}
    whole = fit(tmp_path, checkpoints, None, 0)
    assert [epoch for epoch, _ in whole] == [0] * 5 + [1] * 5 + [2] * 3
    assert len({total for _, total in whole}) == 13
    for (step, checkpoint), workers in zip(checkpoints.items(), (0, 1), strict=True):
        assert fit(tmp_path, {}, checkpoint, workers) == whole[step:]


IMAGE_CONFIGS = [path for path in sorted(CONF.glob("*.yaml")) if "ImageData" in path.read_text()]


@pytest.mark.parametrize("path", IMAGE_CONFIGS, ids=lambda path: path.stem)
def test_every_config_makes_image_data(path: Path) -> None:
    config = OmegaConf.create({
        "data_dir": "data", "seed": 7, "model": {"config": {"img_size": 32, "in_chans": 3, "num_classes": 10}},
        "data": OmegaConf.load(path),
    })  # fmt: skip
    if path.stem == "hf_images":
        config.data.source.path = "some/where"
    module = instantiate(config.data)
    assert isinstance(module, ImageData)
    assert callable(module.source)
    assert (module.image_size, module.channels, module.classes, module.seed) == (32, 3, 10, 7)
    module.source = splits
    module.classes, module.holdout, module.batch_size, module.workers = 4, 8, 8, 0
    images, _ = next(iter(module.train_dataloader()))
    assert images.shape == (8, 3, 32, 32)
    assert 5 <= len(path.read_text().splitlines()) <= 40


def test_an_epoch_holds_whole_steps_of_the_trainers_accumulation() -> None:
    module = data(batch_size=3)
    module.trainer = SimpleNamespace(global_rank=0, world_size=1, accumulate_grad_batches=4)
    assert len(module.train_dataloader()) == 32 // 12 * 4

"""Small networks with random weights, and small sets of images, for all tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

torch.set_num_threads(1)  # on networks of this size threads only wait for each other

TINY = {
    "model_name": "deit_tiny_patch16_224", "img_size": 16, "patch_size": 8, "in_chans": 1, "num_classes": 5,
    "embed_dim": 32, "depth": 4, "num_heads": 4,
}  # fmt: skip

VITS: dict[str, dict[str, Any]] = {
    "deit": TINY,
    "distilled deit": {**TINY, "model_name": "deit_tiny_distilled_patch16_224"},
    "vit with LayerScale": {**TINY, "model_name": "vit_tiny_patch16_224", "init_values": 0.1},
    "vit, mean pool": {
        **TINY, "model_name": "vit_tiny_patch16_224", "global_pool": "avg", "class_token": False, "reg_tokens": 2,
        "qk_norm": True, "pre_norm": True, "qkv_bias": False, "mlp_ratio": 3.0,
    },
}  # fmt: skip


def randomised(network: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter N(0, 0.2), in float64 and eval mode: a default init of ones and zeros hides errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network.double().eval()


def images_for(config: Mapping[str, Any], count: int = 3) -> torch.Tensor:
    size, generator = config["img_size"], torch.Generator().manual_seed(1)
    return torch.randn(count, config["in_chans"], size, size, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="session")
def image_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 grey images of 28 x 28 in 10 classes, as an ImageFolder; a class is a bright row at its own height."""
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, each in (("train", 12), ("val", 4), ("test", 4)):
        for label in range(10):
            (folder / part / f"class_{label}").mkdir(parents=True)
            for i in range(each):
                pixels = draw.integers(0, 120, (28, 28), dtype=np.uint8)
                pixels[2 * label + 3] = 255
                Image.fromarray(pixels).save(folder / part / f"class_{label}" / f"{i}.png")
    return folder

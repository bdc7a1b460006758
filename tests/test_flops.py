"""FLOPs: closed forms equal torch's count on the meta device, to the last FLOP (case A1 for DeiT)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TINY, VITS

from mlframe.architectures import VIT
from mlframe.errors import ConfigError
from mlframe.flops import count
from mlframe.levels import make_levels

CASE = {
    "model_name": "deit_tiny_patch16_224", "img_size": 32, "patch_size": 8, "in_chans": 3, "num_classes": 10,
    "embed_dim": 48, "depth": 4, "num_heads": 4,
}  # fmt: skip


def counted(config: dict[str, Any], batch: int) -> int:
    with torch.device("meta"):
        network = VIT.build(config)
        images = torch.zeros(batch, config.get("in_chans", 3), *[config.get("img_size", 224)] * 2)
    return count(network, lambda net: net(images).sum())


def test_one_step_by_hand() -> None:
    """17 tokens, width 48: per layer and image 8 T d^2 + 4 T^2 d + 16 T d^2; patches 16 x 192 x 48; head 48 x 10."""
    t, d = 17, 48
    layer = 2 * t * d * d * 4 + 4 * t * t * d + 2 * t * d * 4 * d * 2
    by_hand = 3 * (4 * layer + 2 * d * 10) + 2 * (2 * 16 * 192 * d)
    assert by_hand == 12_538_944
    assert make_levels(VIT, CASE)[0].flops == by_hand


@pytest.mark.parametrize("config", [*VITS.values(), CASE], ids=[*VITS, "case A1"])
def test_every_level_equals_the_count(config: dict[str, Any]) -> None:
    for level in make_levels(VIT, config, count=3):
        for batch in (1, 3):
            assert counted(dict(level.config), batch) == batch * level.flops


@pytest.mark.parametrize("name", ["deit_small_patch16_224", "deit_base_patch16_224", "deit_base_distilled_patch16_224"])
def test_published_sizes_equal_the_count(name: str) -> None:
    for level in make_levels(VIT, {"model_name": name}):
        assert counted(dict(level.config), 1) == level.flops


@pytest.mark.parametrize(
    "name", ["deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_gap_224"]
)
def test_other_vits_of_timm_equal_the_count(name: str) -> None:
    for level in make_levels(VIT, {"model_name": name, "img_size": 224}):
        assert counted({**level.config}, 1) == level.flops


@pytest.mark.parametrize("key", ["patch_drop_rate", "dynamic_img_size", "dynamic_img_pad"])
def test_what_would_make_the_count_vary_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=0.5: the number of tokens would vary"):
        make_levels(VIT, {**CASE, key: 0.5})


def test_eager_attention_on_the_cpu_counts_the_same() -> None:
    network = VIT.build(CASE)
    for block in network.blocks:  # type: ignore[union-attr]
        block.attn.fused_attn = False  # type: ignore[union-attr]
    assert count(network, lambda net: net(torch.zeros(2, 3, 32, 32)).sum()) == 2 * make_levels(VIT, CASE)[0].flops


def test_attention_is_quadratic_in_the_tokens_and_the_rest_linear() -> None:
    one, four = make_levels(VIT, TINY)[0].sizes, make_levels(VIT, {**TINY, "img_size": 32})[0].sizes
    assert (one["tokens"], four["tokens"]) == (5, 17)
    attention = {
        sizes["tokens"]: 3 * sizes["layers"] * 4 * sizes["tokens"] ** 2 * sizes["embed"] for sizes in (one, four)
    }
    rest = {n: VIT.flops(s) - attention[n] - 3 * 2 * s["embed"] * s["classes"] - 4 * s["patches"] * 64 * s["embed"]
            for n, s in ((5, one), (17, four))}  # fmt: skip
    assert rest[5] * 17 == rest[17] * 5

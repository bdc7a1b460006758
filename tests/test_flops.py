"""FLOPs: closed forms equal torch's count on the meta device, to the last FLOP (case A1 for each family)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import LANGUAGE, TINY, VITS, Family, batch_for, language_module

from mlframe.architectures import BERT, GPT2, LLAMA, VIT
from mlframe.axes import Architecture
from mlframe.errors import ConfigError
from mlframe.flops import count, six_nd
from mlframe.language import LanguageModeling
from mlframe.levels import make_levels
from mlframe.plan import scratch

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


# language


def counted_text(architecture: Architecture, config: dict[str, Any], batch: int, tokens: int) -> int:
    """transformers' own forward, which predicts at every token."""
    with torch.device("meta"):
        network = architecture.build(config)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return count(network, lambda net: net(input_ids=ids).logits.sum())


@pytest.mark.parametrize("family", LANGUAGE.values(), ids=LANGUAGE)
def test_every_level_of_a_language_model_equals_the_count(family: Family) -> None:
    levels = make_levels(family.architecture, family.config, count=3, sample={"tokens": 12, "predictions": 12})
    for level, batch, attention in ((0, 3, "sdpa"), (1, 1, "eager"), (2, 1, "sdpa")):
        config = {**levels[level].config, "attn_implementation": attention}
        assert counted_text(family.architecture, config, batch, 12) == batch * levels[level].flops


@pytest.mark.parametrize("family", LANGUAGE.values(), ids=LANGUAGE)
def test_a_training_step_of_the_task_equals_the_count(family: Family) -> None:
    """As it is trained: BERT's head on the masked tokens alone, and the loss that makes its gradients by chunks.

    On the CPU torch counts eager attention only, and on the meta device transformers' mask cannot be made.
    """
    eager = replace(family, config={**family.config, "attn_implementation": "eager"})
    levels = make_levels(eager.architecture, eager.config, count=2, sample=family.sample)
    for level, rows in zip(levels, (3, 1), strict=True):
        module = language_module(eager, scratch(levels, 1, level.index))
        step = partial(LanguageModeling.training_step, batch=batch_for(eager, rows), batch_idx=0)
        assert count(module, step) == rows * level.flops


def test_fewer_predictions_save_their_part_of_berts_head_only() -> None:
    few, all_ = ({"tokens": 12, "predictions": n} for n in (4, 12))
    config = LANGUAGE["bert"].config
    costs = [make_levels(BERT, config, sample=sample)[0].flops for sample in (few, all_)]
    assert costs[1] - costs[0] == 3 * 2 * 8 * 32 * (32 + 128)


CASE_GPT2: dict[str, Any] = {
    "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [True, False])
def test_case_a1_of_gpt2(attention: str, tied: bool) -> None:
    """2 rows of 64 tokens: 24 T d^2 + 4 T^2 d a layer and 2 T d V in the head, forward; three times that in all."""
    config = {**CASE_GPT2, "attn_implementation": attention, "tie_word_embeddings": tied}
    long, short = (
        2 * make_levels(GPT2, config, layers=1, sample={"tokens": t, "predictions": t})[0].flops for t in (64, 32)
    )
    assert long == counted_text(GPT2, config, 2, 64) == 94_371_840
    assert long != 81_788_928, "attention's two matmuls count too"
    attention_part = 3 * 2 * 2 * (4 * 64**2 * 64)  # three times, 2 rows, 2 layers
    assert short == counted_text(GPT2, config, 2, 32) == attention_part // 4 + (long - attention_part) // 2


PUBLISHED: dict[str, tuple[Architecture, dict[str, Any], int]] = {
    "bert-base": (BERT, {}, 109_514_298),
    "bert-large": (
        BERT,
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        335_174_458,
    ),
    "gpt2": (GPT2, {}, 124_439_808),
    "llama 3 8B": (
        LLAMA,
        {"vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 8192},
        8_030_261_248,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("architecture", "config", "parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_language_models(architecture: Architecture, config: dict[str, Any], parameters: int) -> None:
    level = make_levels(architecture, config, count=1, sample={"tokens": 128, "predictions": 128})[0]
    assert level.parameters == parameters
    if level.sizes["layers"] == 12:  # of more layers the count takes seconds
        assert counted_text(architecture, config, 1, 128) == level.flops


def test_six_nd_is_near_the_count_where_the_embedding_is_small() -> None:
    """A model of the size of GPT-2 whose tied head is its embedding: only attention and norms are left out."""
    level = make_levels(GPT2, {}, sample={"tokens": 128, "predictions": 128})[0]
    assert six_nd(level.parameters, 128) == 6 * 124_439_808 * 128
    assert six_nd(level.parameters, 128) == pytest.approx(level.flops, rel=0.03)

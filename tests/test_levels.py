"""Levels: sizes, schemes, and what does not divide."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import LANGUAGE, TINY, TINY_GPT2, TINY_LLAMA, TOKENS, Family

from mlframe.architectures import GPT2, LLAMA, VIT
from mlframe.axes import query_heads
from mlframe.errors import ConfigError
from mlframe.levels import Level, make_levels
from mlframe.operators import coalesce, decoalesce


def test_each_level_halves_heads_width_mlp_and_layers() -> None:
    levels = make_levels(VIT, TINY, count=3)
    shapes = [[level.sizes[axis] for axis in ("layers", "heads", "head_dim", "embed", "mlp")] for level in levels]
    assert shapes == [[4, 4, 8, 32, 128], [2, 2, 8, 16, 64], [1, 1, 8, 8, 32]]
    for level in levels:
        network = level.build()
        assert sum(p.numel() for p in network.parameters()) == level.parameters
        assert VIT.sizes(network) == level.sizes
    assert levels[1].scheme["layers"] == ((0, 1), (2, 3))
    assert levels[1].scheme["embed"] == tuple((2 * i, 2 * i + 1) for i in range(16))
    assert levels[0].scheme == {}


def test_width_only_and_depth_only() -> None:
    width = make_levels(VIT, TINY, layers=1)[1]
    assert set(width.scheme) == {"heads", "embed", "mlp"}
    assert width.sizes["layers"] == 4
    depth = make_levels(VIT, TINY, heads=1, mlp=1)[1]
    assert set(depth.scheme) == {"layers"}
    assert depth.sizes["embed"] == 32


def test_the_mlp_ratio_is_free() -> None:
    level = make_levels(VIT, {**TINY, "mlp_ratio": 3.0}, heads=2, mlp=3)[1]
    assert (level.sizes["embed"], level.sizes["mlp"]) == (16, 32)
    kept = make_levels(VIT, TINY, heads=1, mlp=4, layers=1)[1]
    assert (kept.sizes["embed"], kept.sizes["mlp"]) == (32, 32)
    odd = make_levels(VIT, {**TINY, "embed_dim": 176, "num_heads": 4, "mlp_ratio": 436 / 176 + 1e-3}, layers=1)[1]
    assert (odd.sizes["embed"], odd.sizes["mlp"]) == (88, 218), "int(88 * (218 / 88)) is 217"


def test_stacked_pairs_and_explicit_groups_of_any_size() -> None:
    assert make_levels(VIT, TINY, layers="stacked")[1].scheme["layers"] == ((0, 2), (1, 3))
    groups = make_levels(VIT, TINY, heads=[[0, 1, 2], [3]], layers=[[0], [1, 2, 3]])[1]
    assert groups.scheme["heads"] == ((0, 1, 2), (3,))
    assert groups.scheme["layers"] == ((0,), (1, 2, 3))
    assert groups.sizes["layers"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, r"levels\.heads=3: the 4 heads of level 0 do not divide by 3"),
        ({"count": 4}, r"levels\.heads=2: the 1 heads of level 2 do not divide by 2"),
        ({"layers": 3}, r"levels\.layers=3: the 4 layers of level 0 do not divide by 3"),
        ({"mlp": 5}, r"levels\.mlp=5: the 128 mlp"),
        ({"heads": 0}, r"levels\.heads=0"),
        ({"layers": "pairs"}, r"levels\.layers=pairs: a whole number, 'stacked' or a list of groups"),
        ({"heads": [[0, 1], [1, 2], [3]]}, r"levels\.heads: the groups .* each of 0 to 3 exactly once"),
        ({"heads": [[0, 1], [2], [3]]}, r"levels\.heads: 4 heads to 3 leaves no whole number of equal groups"),
        ({"heads": [[0, 1], [2, 3]], "count": 3}, r"levels\.heads: groups are those of level 0"),
        ({"heads": 1, "mlp": 1, "layers": 1}, r"level 1 would be as large as level 0"),
    ],
)
def test_what_cannot_be_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_levels(VIT, TINY, **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_name": "no_such_model"}, "no_such_model"),
        ({"embed_dims": 64}, "embed_dims"),
        ({"num_heads": 5}, "num_heads=5 does not divide the width"),
        ({"model_name": "resnet18", "img_size": None, "patch_size": None}, "model.config does not build at level 0"),
    ],
)
def test_a_model_that_does_not_build_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_levels(VIT, {**TINY, **change})


# language

SAMPLE = {"tokens": TOKENS, "predictions": TOKENS}


def attentions(network: Any) -> list[Any]:
    """The attention module of each layer, in the order of the layers."""
    if hasattr(network, "bert"):
        return [block.attention.self for block in network.bert.encoder.layer]
    if hasattr(network, "transformer"):
        return [block.attn for block in network.transformer.h]
    return [block.self_attn for block in network.model.layers]


def agrees(network: Any, level: Level) -> None:
    """The level's sizes, the network's config, its attention modules and its weights say the same."""
    sizes, config = level.sizes, network.config
    heads, head_dim = query_heads(sizes), sizes["head_dim"]
    assert (config.num_hidden_layers, config.num_attention_heads) == (sizes["layers"], heads)
    assert (config.hidden_size, config.vocab_size) == (sizes["embed"], 128)
    assert getattr(config, "intermediate_size", getattr(config, "n_inner", None)) in (sizes["mlp"], None)
    modules = attentions(network)
    assert [module.layer_idx for module in modules] == list(range(sizes["layers"]))
    for module in modules:
        assert (module.attention_head_size if hasattr(network, "bert") else module.head_dim) == head_dim
        if "kv_heads" in sizes:
            assert (config.head_dim, config.num_key_value_heads) == (head_dim, sizes["kv_heads"])
            assert module.num_key_value_groups == sizes["group"]
            assert module.k_proj.weight.shape == (sizes["kv_heads"] * head_dim, sizes["embed"])
        else:
            assert (module.num_attention_heads if hasattr(network, "bert") else module.num_heads) == heads
    assert network.get_input_embeddings().weight.shape == (128, sizes["embed"])
    tied = network.get_output_embeddings().weight is network.get_input_embeddings().weight
    assert tied == config.tie_word_embeddings
    assert sum(p.numel() for p in network.parameters()) == level.parameters


@pytest.mark.parametrize("family", LANGUAGE.values(), ids=LANGUAGE)
def test_config_modules_and_weights_of_every_level_agree_also_after_operators(family: Family) -> None:
    levels = make_levels(family.architecture, family.config, count=3, sample=family.sample)
    assert [level.sizes["embed"] for level in levels] == [32, 16, 8]
    assert [query_heads(level.sizes) * 2**i for i, level in enumerate(levels)] == [query_heads(levels[0].sizes)] * 3
    assert len({level.sizes["head_dim"] for level in levels}) == 1
    networks = [level.build() for level in levels]
    states = [networks[0].state_dict()]
    for above, level in pairwise(levels):
        states.append(coalesce(states[-1], family.architecture, above.sizes, level.scheme))
    grown = [decoalesce(states[i + 1], family.architecture, levels[i + 1].sizes, levels[i + 1].scheme) for i in (0, 1)]
    for level, network, state in zip([*levels, *levels[:2]], [*networks, *networks[:2]], states + grown, strict=True):
        fresh = level.build()
        network.load_state_dict(state, strict=True)
        agrees(network, level)
        # What is not in the weights (positions, rotary angles) is a matter of the config alone.
        buffers = dict(network.named_buffers())
        assert buffers.keys() == dict(fresh.named_buffers()).keys()
        assert not buffers.keys() & state.keys()
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in fresh.named_buffers())


def test_key_and_value_heads_merge_each_with_its_queries_and_one_alone_merges_its_queries() -> None:
    grouped = make_levels(LLAMA, TINY_LLAMA, count=3, sample=SAMPLE)
    assert [(level.sizes["kv_heads"], level.sizes["group"]) for level in grouped] == [(4, 2), (2, 2), (1, 2)]
    assert grouped[1].scheme["kv_heads"] == ((0, 1), (2, 3))
    single = make_levels(LLAMA, {**TINY_LLAMA, "num_key_value_heads": 1}, count=3, sample=SAMPLE)
    assert [(level.sizes["kv_heads"], level.sizes["group"]) for level in single] == [(1, 8), (1, 4), (1, 2)]
    assert single[1].scheme["group"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    both = make_levels(LLAMA, {**TINY_LLAMA, "num_key_value_heads": 2}, count=3, sample=SAMPLE)
    assert [(level.sizes["kv_heads"], level.sizes["group"]) for level in both] == [(2, 4), (1, 4), (1, 2)]


def test_groups_of_key_and_value_heads_as_lists_and_stacked() -> None:
    listed = make_levels(LLAMA, TINY_LLAMA, heads=[[0, 3], [1, 2]], sample=SAMPLE)[1]
    assert listed.scheme["kv_heads"] == ((0, 3), (1, 2))
    stacked = make_levels(LLAMA, {**TINY_LLAMA, "num_key_value_heads": 1}, heads="stacked", sample=SAMPLE)[1]
    assert stacked.scheme["group"] == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (TINY_LLAMA, {"heads": 3}, r"levels\.\w*heads=3: the 4 kv_heads of level 0 do not divide by 3"),
        (TINY_LLAMA, {"heads": [[0, 1], [2, 4]]}, r"levels\.heads \(kv_heads\): the groups .* each of 0 to 3"),
        (TINY_LLAMA, {"count": 4, "mlp": 1, "layers": 1, "heads": 4}, "of level 1 do not divide by 4"),
        (TINY_LLAMA, {"sample": {}}, r"llama: how many (tokens|predictions) has a sample"),
        (TINY_LLAMA, {"sample": {"tokens": 12}}, "llama: how many predictions has a sample"),
        (TINY_LLAMA, {"sample": {"predictions": 12}}, "llama: how many tokens has a sample"),
        (TINY_LLAMA, {"sample": {"tokens": 17, "predictions": 17}}, "=17: the network has 16 positions"),
        ({**TINY_LLAMA, "num_key_value_heads": 3}, {}, "=8 is not a multiple of num_key_value_heads=3"),
        ({**TINY_LLAMA, "hidden_sizes": 3}, {}, r"LlamaConfig has no \['hidden_sizes'\]; it has \['attention_bias'"),
    ],
)  # fmt: skip
def test_what_cannot_be_of_a_language_model_is_named(
    config: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_levels(LLAMA, config, **{"sample": SAMPLE, **settings})


@pytest.mark.parametrize(
    ("key", "value"), [("add_cross_attention", True), ("scale_attn_by_inverse_layer_idx", True), ("n_heads", 4)]
)
def test_what_gpt2_cannot_be_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{key}"):
        make_levels(GPT2, {**TINY_GPT2, key: value}, sample=SAMPLE)


def test_the_longest_text_fits() -> None:
    whole = {"tokens": 16, "predictions": 16}
    assert make_levels(GPT2, TINY_GPT2, sample=whole)[1].sizes["tokens"] == 16

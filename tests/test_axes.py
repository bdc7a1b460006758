"""Axis strings, matching of names, and tables checked against networks on the meta device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conftest import FAMILIES, LANGUAGE, TINY, VITS, Family

from mlframe.architectures import BERT, BERT_PAPER, GPT2, GPT2_PAPER, LLAMA, VIT
from mlframe.axes import Architecture, check, expand, parse, query_heads


def names(text: str) -> list[list[tuple[str, bool]]]:
    return [[(axis.name, axis.reads) for axis in dim] for dim in parse(text).dims]


def test_linear_and_conv1d_have_the_same_roles_in_their_stored_order() -> None:
    assert names("mlp <- embed") == [[("mlp", False)], [("embed", True)]]
    assert names("embed -> mlp") == [[("embed", True)], [("mlp", False)]]


def test_vectors_fused_dimensions_and_anonymous_ones() -> None:
    assert names("embed") == [[("embed", False)]]
    assert names("<- embed") == [[("embed", True)]]
    fused = names("(3 heads head_dim) <- embed")
    assert fused == [[("3", False), ("heads", False), ("head_dim", False)], [("embed", True)]]
    assert names("embed <- _ _ _") == [[("embed", False)], *[[("_", True)]] * 3]
    assert parse("+ embed <- mlp").residual
    assert not parse("embed <- mlp").residual
    assert names("embed <- embed") == [[("embed", False)], [("embed", True)]], "a name may stand on both sides"


@pytest.mark.parametrize("text", ["", "a <- b <- c", "a <- b -> c", "a a", "a <- b b", "a ! b", "(a b"])
def test_what_is_not_an_axis_string_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="axis string"):
        parse(text)


def test_braces() -> None:
    assert expand("norm{1,2}.{weight,bias}") == ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"]
    assert expand("blocks.{layers}.x") == ["blocks.{layers}.x"]


def test_every_name_matches_exactly_one_pattern() -> None:
    match = VIT.match(["blocks.11.attn.qkv.weight", "cls_token"])
    assert match["blocks.11.attn.qkv.weight"].layer == 11
    assert match["cls_token"].layer is None
    with pytest.raises(ValueError, match=r"no axis string for blocks\.0\.new\.weight"):
        VIT.match(["cls_token", "blocks.0.new.weight"])
    doubled = dataclasses.replace(VIT, tensors={**VIT.tensors, "{norm,other}.weight": "embed"})
    with pytest.raises(ValueError, match=r"'norm\.weight' matches"):
        doubled.match(["norm.weight"])


def meta_state(
    config: dict[str, Any], architecture: Architecture = VIT
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    with torch.device("meta"):
        network = architecture.build(config)
    return network.state_dict(), architecture.sizes(network)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_table_fits_the_network(family: Family) -> None:
    state, sizes = meta_state(family.config, family.architecture)
    check(state, family.architecture, sizes)


@pytest.mark.parametrize("config", VITS.values(), ids=VITS)
@pytest.mark.parametrize(
    ("change", "axes"),
    [
        ({"embed_dim": 48, "num_heads": 6, "mlp_ratio": 128 / 48}, {"embed", "heads"}),
        ({"mlp_ratio": 5.0}, {"mlp"}),
        ({"num_classes": 7}, {"classes"}),
        ({"img_size": 24}, {"pos"}),
    ],
    ids=lambda x: "+".join(sorted(x)) if isinstance(x, set) else "",
)
def test_growing_a_field_moves_exactly_the_axes_that_the_table_names(
    config: dict[str, Any], change: dict[str, Any], axes: set[str]
) -> None:
    """The delta trick: a wrong name in the table is caught also where two axes happen to have one size."""
    config = {**config, "mlp_ratio": 4.0}
    before, _ = meta_state(config)
    after, _ = meta_state({**config, **change})
    assert before.keys() == after.keys()
    for name, match in VIT.match(before).items():
        moved = [a != b for a, b in zip(before[name].shape, after[name].shape, strict=True)]
        declared = [any(axis.name in axes for axis in dim) for dim in match.axes.dims]
        assert moved == declared, f"{name}: {match.axes.text}"


BERT_CHANGES: list[tuple[dict[str, Any], set[str]]] = [
    ({"hidden_size": 48, "num_attention_heads": 6}, {"embed", "heads"}),
    ({"num_attention_heads": 8}, set()),
    ({"intermediate_size": 96}, {"mlp"}),
    ({"vocab_size": 160}, {"vocab"}),
    ({"max_position_embeddings": 24}, {"pos"}),
    ({"type_vocab_size": 3}, {"_"}),
]
GPT2_CHANGES: list[tuple[dict[str, Any], set[str]]] = [
    ({"n_embd": 48, "n_head": 6, "n_inner": 128}, {"embed", "heads"}),
    ({"n_inner": 96}, {"mlp"}),
    ({"vocab_size": 160}, {"vocab"}),
    ({"n_positions": 24}, {"pos"}),
]
LLAMA_CHANGES: list[tuple[dict[str, Any], set[str]]] = [
    ({"hidden_size": 64, "head_dim": 4}, {"embed"}),
    ({"num_key_value_heads": 8, "num_attention_heads": 16, "head_dim": 4}, {"kv_heads"}),
    ({"num_attention_heads": 16, "head_dim": 4}, {"group"}),
    ({"head_dim": 8}, {"head_dim"}),
    ({"intermediate_size": 96}, {"mlp"}),
    ({"vocab_size": 160}, {"vocab"}),
    ({"max_position_embeddings": 24}, set()),
]
CHANGES = [
    (BERT, BERT_CHANGES), (BERT_PAPER, BERT_CHANGES), (GPT2, GPT2_CHANGES), (GPT2_PAPER, GPT2_CHANGES),
    (LLAMA, LLAMA_CHANGES),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "changes"), CHANGES, ids=lambda x: getattr(x, "name", ""))
def test_growing_a_field_of_a_language_model_moves_exactly_the_axes_that_the_table_names(
    architecture: Architecture, changes: list[tuple[dict[str, Any], set[str]]]
) -> None:
    for family in LANGUAGE.values():
        if family.architecture.build is not architecture.build or "head_dim" in family.config:
            continue
        config = {**family.config, "num_key_value_heads": 4} if architecture is LLAMA else family.config
        config = {**config, "n_inner": 128} if architecture.build is GPT2.build else config
        before, _ = meta_state(config, architecture)
        for change, axes in changes:
            after, _ = meta_state({**config, **change}, architecture)
            assert before.keys() == after.keys()
            for name, match in architecture.match(before).items():
                moved = [a != b for a, b in zip(before[name].shape, after[name].shape, strict=True)]
                declared = [any(axis.name in axes for axis in dim) for dim in match.axes.dims]
                assert moved == declared, f"{name}: {match.axes.text} by {change}"


@pytest.mark.parametrize("family", LANGUAGE.values(), ids=LANGUAGE)
def test_heads_are_counted_with_all_that_share_keys_and_values(family: Family) -> None:
    sizes = meta_state(family.config, family.architecture)[1]
    heads = family.config.get("num_attention_heads", family.config.get("n_head"))
    assert query_heads(sizes) == heads
    assert sizes["head_dim"] == family.config.get("head_dim", 32 // heads)


def test_depth_adds_whole_layers_and_nothing_else() -> None:
    before, _ = meta_state(TINY)
    after, _ = meta_state({**TINY, "depth": 5})
    match = VIT.match(after)
    assert {match[name].layer for name in after.keys() - before.keys()} == {4}


def test_a_wrong_table_or_network_is_named() -> None:
    state, sizes = meta_state(TINY)
    wrong = dataclasses.replace(VIT, tensors={**VIT.tensors, "blocks.{layers}.mlp.fc1.weight": "embed <- mlp"})
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.fc1\.weight: shape \(128, 32\), but .* gives \(32, 128\)"):
        check(state, wrong, sizes)
    with pytest.raises(ValueError, match="2 dimensions"):
        check({**state, "norm.weight": torch.zeros(2, 2, device="meta")}, VIT, sizes)
    missing = {name: x for name, x in state.items() if not name.startswith("blocks.2.")}
    with pytest.raises(ValueError, match=r"layers \[0, 1, 3\] instead of 0 to 3"):
        check(missing, VIT, sizes)

"""Identities of coalesce, decoalesce and interpolate, with all parameters random, for every family (case A4)."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from conftest import FAMILIES, TINY, TINY_BERT, TINY_GPT2, Family, error, inputs_for, outputs, randomised
from torch import Tensor, nn

from mlframe.architectures import BERT, BERT_PAPER, GPT2_PAPER, VIT
from mlframe.axes import Sizes
from mlframe.levels import make_levels
from mlframe.maps import Groups, Scheme, adjacent, stacked
from mlframe.operators import coalesce, decoalesce, interpolate, merging, resize, resized, splitting

families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def halves(sizes: Sizes, axes: tuple[str, ...]) -> Scheme:
    """The scheme under which a network of `sizes` is the small one: twice the entries on each of `axes`."""
    return {axis: (stacked if axis == "layers" else adjacent)(2 * sizes[axis], sizes[axis]) for axis in axes}


def larger(sizes: Sizes, scheme: Scheme) -> dict[str, int]:
    return {**sizes, **{axis: sum(map(len, groups)) for axis, groups in scheme.items()}}


def grown_by(family: Family, scheme: Scheme, new_layers: Any = "copy", noise: float = 0.0) -> nn.Module:
    """The family's small network, de-coalesced."""
    small, sizes = small_of(family)
    state = decoalesce(small.state_dict(), family.architecture, sizes, scheme, new_layers, noise)
    network = family.network(larger(sizes, scheme))
    network.load_state_dict(state, strict=True)
    return network


@cache
def small_of(family: Family) -> tuple[nn.Module, dict[str, int]]:
    network = family.network()
    return network, family.architecture.sizes(network)


def change(family: Family, grown: nn.Module) -> float:
    """How far the function of the grown network is from the small one's, relative to the largest logit."""
    x = inputs_for(family.architecture, family.config)
    return error(outputs(grown, x), outputs(small_of(family)[0], x))


@families
@pytest.mark.parametrize(("part", "noise"), [("width", 0.5), ("depth", 0.0), ("both", 0.0)])
def test_coalesce_inverts_decoalesce_for_every_tensor(family: Family, part: str, noise: float) -> None:
    architecture, (small, sizes) = family.architecture, small_of(family)
    scheme = halves(sizes, {"width": family.width, "depth": ("layers",), "both": (*family.width, "layers")}[part])
    with torch.device("meta"):
        built = architecture.build({**family.config, **architecture.resized(larger(sizes, scheme))}).state_dict()
    for new_layers in ("copy", "halve", "identity") if part == "depth" else ("copy",):
        grown = decoalesce(small.state_dict(), architecture, sizes, scheme, new_layers, noise)  # type: ignore[arg-type]
        assert {name: x.shape for name, x in grown.items()} == {name: x.shape for name, x in built.items()}
        back = coalesce(grown, architecture, larger(sizes, scheme), scheme, new_layers)  # type: ignore[arg-type]
        assert back.keys() == small.state_dict().keys()
        for name, x in small.state_dict().items():
            torch.testing.assert_close(back[name], x, rtol=0, atol=1e-12, msg=name)


@families
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_width_decoalescing_keeps_the_function(family: Family, noise: float) -> None:
    assert change(family, grown_by(family, halves(small_of(family)[1], family.width), noise=noise)) < family.exact


@families
def test_layers_started_as_the_identity_keep_the_function_and_copies_do_not(family: Family) -> None:
    """Stacked identity layers stand between others but add nothing, so the order does not matter.

    In BERT a norm stands after each sum, and a layer that adds nothing still has it: no layer of it is the identity.
    """
    n = small_of(family)[1]["layers"]
    for order, new_layers in ((stacked, "identity"), (adjacent, "identity"), (stacked, "copy"), (adjacent, "halve")):
        difference = change(family, grown_by(family, {"layers": order(2 * n, n)}, new_layers))
        keeps = new_layers == "identity" and family.architecture is not BERT
        assert difference < family.exact if keeps else difference > family.seen


OUTPUTS = {
    "vit": {"attn.proj", "mlp.fc2"},
    "bert": {"attention.output.dense", "output.dense"},
    "gpt2": {"attn.c_proj", "mlp.c_proj"},
    "llama": {"self_attn.o_proj", "mlp.down_proj"},
}


@families
def test_of_a_layer_started_as_the_identity_exactly_the_outputs_are_zero(family: Family) -> None:
    """Also in BERT, where the function does not tell."""
    state = grown_by(family, {"layers": stacked(8, 4)}, "identity").state_dict()
    part = {name: re.split(r"\.\d+\.", name) for name in state}
    added = {name for name, match in family.architecture.match(state).items() if (match.layer or 0) >= 4}
    outputs = {name for name in added if part[name][-1].rpartition(".")[0] in OUTPUTS[family.architecture.name]}
    assert len(outputs) >= 4 * 2
    assert {name for name, x in state.items() if x.is_floating_point() and not x.any()} == outputs


@families
@pytest.mark.parametrize("size", [3, 4])
def test_groups_of_three_and_more_in_width_keep_the_function(family: Family, size: int) -> None:
    sizes = small_of(family)[1]
    scheme = {axis: adjacent(size * sizes[axis], sizes[axis]) for axis in family.width}
    assert change(family, grown_by(family, scheme, noise=0.2)) < family.exact


@families
def test_uneven_groups_of_heads_and_neurons_keep_the_function(family: Family) -> None:
    """Heads (0,1,2),(3),(4,5),(6,7): what is shared sums up, whatever the group's size. The stream's are even."""
    sizes = small_of(family)[1]
    n = sizes["mlp"]
    neurons: Groups = (*((i,) for i in range(n - 1)), tuple(range(n - 1, 2 * n + 40)))
    scheme: dict[str, Groups] = {**halves(sizes, family.width), "mlp": neurons}
    scheme[family.heads] = ((0, 1, 2), (3,), *scheme[family.heads][2:])
    assert change(family, grown_by(family, scheme)) < family.exact


def test_control_uneven_groups_of_the_stream_change_the_function() -> None:
    family = FAMILIES["gpt2"]
    sizes = small_of(family)[1]
    uneven: Groups = ((0, 1, 2), (3,), *adjacent(64, 32)[2:])
    assert change(family, grown_by(family, {**halves(sizes, family.width), "embed": uneven})) > 1e-3


@families
def test_control_two_heads_swapped_in_one_step_only_is_seen(family: Family) -> None:
    small, sizes = small_of(family)
    scheme = halves(sizes, family.width)
    swapped = ((0, 2), (1, 3), *scheme[family.heads][2:])
    grown = decoalesce(small.state_dict(), family.architecture, sizes, scheme)
    back = coalesce(grown, family.architecture, larger(sizes, scheme), {**scheme, family.heads: swapped})
    worst = max(float((back[name] - x).abs().max()) for name, x in small.state_dict().items())
    assert worst > 1e-2


@families
@torch.no_grad()
def test_control_every_tensor_mapped_in_the_other_role_changes_the_function(family: Family) -> None:
    """Of groups of two, a reader that is copied is twice what it should be, and a writer that is shared one half."""
    grown = grown_by(family, halves(small_of(family)[1], family.width))
    names = dict(grown.named_parameters())
    seen = 0
    for name, match in family.architecture.match(names).items():
        reads = {axis.reads for axis in match.axes.factors if axis.name in family.width}
        # A key's bias adds the same to all scores of a query: softmax takes it out again, whatever it is.
        if match.layer not in (None, 0) or name.endswith("key.bias"):
            continue
        for wrong in (2.0 if read else 0.5 for read in reads):
            names[name].mul_(wrong)
            assert change(family, grown) > family.seen, f"{name} times {wrong}"
            names[name].div_(wrong)
            seen += 1
    assert seen > 10
    assert change(family, grown) < family.exact


def test_the_papers_table_of_bert_keeps_the_function_where_all_shares_are_even() -> None:
    """All embeddings are halved, and the LayerNorm after them takes that out again. Uneven shares it cannot."""
    family = Family(BERT_PAPER, TINY_BERT, norms=1.0)
    scheme = halves(small_of(family)[1], family.width)
    assert change(family, grown_by(family, scheme)) < 1e-5
    assert change(family, grown_by(family, scheme, noise=0.2)) > 1e-2


def test_the_papers_table_of_gpt2_changes_the_function_by_a_known_amount() -> None:
    """No norm follows the embeddings: the stream starts at half its scale."""
    family = Family(GPT2_PAPER, TINY_GPT2)
    assert 0.1 < change(family, grown_by(family, halves(small_of(family)[1], family.width))) < 0.5


@pytest.mark.parametrize(("table", "config"), [(BERT_PAPER, TINY_BERT), (GPT2_PAPER, TINY_GPT2)], ids=["bert", "gpt2"])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_coalesce_inverts_decoalesce_with_the_papers_tables(table: Any, config: dict[str, Any], noise: float) -> None:
    family = Family(table, config)
    small, sizes = small_of(family)
    scheme = halves(sizes, (*family.width, "layers"))
    back = coalesce(
        decoalesce(small.state_dict(), table, sizes, scheme, split_noise=noise), table, larger(sizes, scheme), scheme
    )
    for name, x in small.state_dict().items():
        torch.testing.assert_close(back[name], x, rtol=0, atol=1e-12, msg=name)


def test_coalesce_by_hand() -> None:
    """fc1 (mlp x embed) of two neurons and two features each: writers averaged, readers summed, layers averaged."""
    large = randomised(VIT.build(TINY))
    sizes, state = VIT.sizes(large), large.state_dict()
    scheme = {"heads": adjacent(4, 2), "embed": adjacent(32, 16), "mlp": adjacent(128, 64), "layers": adjacent(4, 2)}
    small = coalesce(state, VIT, sizes, scheme)
    fc1 = (state["blocks.2.mlp.fc1.weight"] + state["blocks.3.mlp.fc1.weight"]) / 2
    by_hand = (fc1[6, 10] + fc1[6, 11] + fc1[7, 10] + fc1[7, 11]) / 2
    torch.testing.assert_close(small["blocks.1.mlp.fc1.weight"][3, 5], by_hand)
    # The patch convolution writes embed and reads pixels, which keep their size.
    patch = state["patch_embed.proj.weight"]
    torch.testing.assert_close(small["patch_embed.proj.weight"][5], (patch[10] + patch[11]) / 2)
    # qkv: head 1 of the small is heads 2 and 3 of the large, each entry of it, for q, k and v alike.
    qkv = state["blocks.0.attn.qkv.bias"].view(3, 4, 8) + state["blocks.1.attn.qkv.bias"].view(3, 4, 8)
    torch.testing.assert_close(small["blocks.0.attn.qkv.bias"].view(3, 2, 8)[:, 1], (qkv[:, 2] + qkv[:, 3]) / 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_is_in_float32_and_the_dtype_stays(dtype: torch.dtype) -> None:
    large = VIT.build(TINY)
    sizes = VIT.sizes(large)
    scheme = {"heads": adjacent(4, 2), "embed": adjacent(32, 16), "mlp": adjacent(128, 64), "layers": adjacent(4, 2)}
    state = {name: x.to(dtype) for name, x in randomised(large).state_dict().items()}
    small = coalesce(state, VIT, sizes, scheme)
    exact = coalesce({name: x.double() for name, x in state.items()}, VIT, sizes, scheme)
    for name, x in small.items():
        assert x.dtype == dtype
        torch.testing.assert_close(x, exact[name].to(dtype), rtol=2e-7, atol=1e-7, msg=name)
    mixed = interpolate(state, {name: x.flip(0) for name, x in state.items()}, 0.25)
    for name, x in state.items():
        exact_mix = (0.75 * x.double() + 0.25 * x.flip(0).double()).to(dtype)
        torch.testing.assert_close(mixed[name], exact_mix, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-7)


def test_buffers_that_are_not_floating_point_are_kept() -> None:
    counted = dataclasses.replace(
        VIT, tensors={**VIT.tensors, "steps": "_", "blocks.{layers}.calls": "_", "mask": "embed"}
    )
    network = randomised(VIT.build(TINY))
    sizes = VIT.sizes(network)
    calls = {f"blocks.{i}.calls": torch.tensor([i + 2**40]) for i in range(4)}
    state = {**network.state_dict(), "steps": torch.tensor([2**53 + 1]), **calls}
    small = coalesce(state, counted, sizes, {"heads": adjacent(4, 2), "layers": adjacent(4, 2)})
    assert small["steps"].tolist() == [2**53 + 1]
    assert small["steps"].dtype == torch.int64
    assert small["blocks.1.calls"].tolist() == [2 + 2**40]


def test_results_share_no_memory_with_what_they_came_from_or_each_other() -> None:
    small = randomised(VIT.build(TINY))
    sizes, before = VIT.sizes(small), {k: v.clone() for k, v in small.state_dict().items()}
    for new_layers in ("copy", "identity"):
        grown = decoalesce(small.state_dict(), VIT, sizes, halves(sizes, ("layers",)), new_layers)  # type: ignore[arg-type]
        assert len({x.data_ptr() for x in grown.values()}) == len(grown)
        for x in grown.values():
            x.add_(1)
    mixed = interpolate(before, before, 0.0)
    for x in mixed.values():
        x.add_(1)
    assert all(torch.equal(x, before[name]) for name, x in small.state_dict().items())


def test_interpolation_ends_are_exact_and_the_middle_is_the_mix() -> None:
    a = {"w": torch.randn(3, 4), "n": torch.tensor(3)}
    b = {"w": torch.randn(3, 4), "n": torch.tensor(7)}
    assert torch.equal(interpolate(a, b, 0)["w"], a["w"])
    assert torch.equal(interpolate(a, b, 1)["w"], b["w"])
    torch.testing.assert_close(interpolate(a, b, 0.25)["w"], 0.75 * a["w"] + 0.25 * b["w"])
    assert all(interpolate(a, b, alpha)["n"] == 3 for alpha in (0, 0.25, 1))


def test_what_does_not_fit_is_named() -> None:
    network = VIT.build(TINY)
    sizes, state = VIT.sizes(network), network.state_dict()
    with pytest.raises(ValueError, match=r"missing \['b'\], extra \['c'\], shapes \['w \(2,\) and \(3,\)'\]"):
        interpolate({"w": torch.zeros(2), "b": torch.zeros(1)}, {"w": torch.zeros(3), "c": torch.zeros(1)}, 0.5)
    with pytest.raises(ValueError, match=r"no axis string for extra"):
        resize({**state, "extra": torch.zeros(1)}, VIT, sizes, {})
    part = {name: x for name, x in state.items() if not name.startswith("blocks.2.")}
    with pytest.raises(ValueError, match=r"blocks\.\{layers\}\.norm1\.weight: layers \[0, 1, 3\] instead of 0 to 3"):
        coalesce(part, VIT, sizes, {"layers": adjacent(4, 2)})
    with pytest.raises(ValueError, match=r"no tensor has an axis \['hedas'\]"):
        coalesce(state, VIT, sizes, {"hedas": adjacent(4, 2)})
    with pytest.raises(ValueError, match="each of 0 to 3 exactly once"):
        coalesce(state, VIT, sizes, {"heads": ((0, 1), (2, 2))})
    with pytest.raises(ValueError, match=r"alpha=3"):
        interpolate(state, state, 3)
    with pytest.raises(ValueError, match=r"cls_token \(_ _ embed\): the map resizes 64 entries"):
        coalesce(state, VIT, sizes, {"embed": adjacent(64, 32)})


def test_tensors_are_read_one_at_a_time() -> None:
    """So that of a sharded network no process holds more than what one tensor is made of: at most a pair of layers."""
    family = FAMILIES["gpt2"]
    above, below = make_levels(family.architecture, family.config, sample=family.sample)

    class Counted(Mapping[str, Tensor]):
        def __init__(self, state: Mapping[str, Tensor]) -> None:
            self.state, self.read, self.most = state, list[weakref.ref[Tensor]](), 0

        def __getitem__(self, name: str) -> Tensor:
            x = self.state[name].clone()
            self.read.append(weakref.ref(x))
            self.most = max(self.most, sum(ref() is not None for ref in self.read))
            return x

        def __iter__(self) -> Iterator[str]:
            return iter(self.state)

        def __len__(self) -> int:
            return len(self.state)

    large = Counted(above.build().state_dict())
    small = Counted(below.build().state_dict())
    for _ in resized(large, family.architecture, above.sizes, merging(below.scheme), {}):
        pass
    for _ in resized(small, family.architecture, below.sizes, splitting(below.scheme), {}):
        pass
    for state in (large, small):
        assert 2 <= state.most <= 4, "the tensors of a pair, and those of the pair before while they are replaced"
        assert len(state) > 20

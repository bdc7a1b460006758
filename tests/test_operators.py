"""Identities of coalesce, decoalesce and interpolate, with all parameters random (case A4 for DeiT and ViT)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from conftest import TINY, VITS, images_for, randomised
from torch import nn

from mlframe.architectures import VIT
from mlframe.axes import Sizes
from mlframe.maps import Scheme, adjacent, stacked
from mlframe.operators import coalesce, decoalesce, interpolate, resize

WIDTH = ("heads", "embed", "mlp")
AXES = {"width": WIDTH, "depth": ("layers",), "both": (*WIDTH, "layers")}


def halves(sizes: Sizes, axes: tuple[str, ...]) -> Scheme:
    """The scheme under which a network of `sizes` is the small one: twice the entries on each of `axes`."""
    return {axis: (stacked if axis == "layers" else adjacent)(2 * sizes[axis], sizes[axis]) for axis in axes}


def network_of(config: dict[str, Any], sizes: Sizes, state: dict[str, torch.Tensor]) -> nn.Module:
    network = VIT.build({**config, **VIT.resized(sizes)}).double().eval()
    network.load_state_dict(state, strict=True)
    return network


def larger(sizes: Sizes, scheme: Scheme) -> dict[str, int]:
    return {**sizes, **{axis: sum(map(len, groups)) for axis, groups in scheme.items()}}


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).abs().max() / b.abs().max()).detach())


@pytest.mark.parametrize("config", VITS.values(), ids=VITS)
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("new_layers", ["copy", "halve", "identity"])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_coalesce_inverts_decoalesce_for_every_tensor(
    config: dict[str, Any], axes: tuple[str, ...], new_layers: Any, noise: float
) -> None:
    small = randomised(VIT.build(config))
    sizes = VIT.sizes(small)
    scheme = halves(sizes, axes)
    grown = decoalesce(small.state_dict(), VIT, sizes, scheme, new_layers, noise)
    network_of(config, larger(sizes, scheme), grown)
    back = coalesce(grown, VIT, larger(sizes, scheme), scheme, new_layers)
    assert back.keys() == small.state_dict().keys()
    for name, x in small.state_dict().items():
        torch.testing.assert_close(back[name], x, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("config", VITS.values(), ids=VITS)
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_width_decoalescing_keeps_the_function(config: dict[str, Any], noise: float) -> None:
    small = randomised(VIT.build(config))
    sizes = VIT.sizes(small)
    scheme = halves(sizes, WIDTH)
    grown = decoalesce(small.state_dict(), VIT, sizes, scheme, split_noise=noise)
    x = images_for(config)
    assert error(network_of(config, larger(sizes, scheme), grown)(x), small(x)) < 1e-10


@pytest.mark.parametrize("config", VITS.values(), ids=VITS)
def test_layers_started_as_the_identity_keep_the_function_and_copies_do_not(config: dict[str, Any]) -> None:
    small, x = randomised(VIT.build(config)), images_for(config)
    sizes = VIT.sizes(small)
    for order, new_layers in itertools.product((adjacent, stacked), ("identity", "copy", "halve")):
        scheme = {**halves(sizes, WIDTH), "layers": order(2 * sizes["layers"], sizes["layers"])}
        grown = decoalesce(small.state_dict(), VIT, sizes, scheme, new_layers)  # type: ignore[arg-type]
        difference = error(network_of(config, larger(sizes, scheme), grown)(x), small(x))
        # Stacked identity layers stand between others but add nothing, so the order does not matter.
        assert difference < 1e-10 if new_layers == "identity" else difference > 1e-2


@pytest.mark.parametrize("size", [3, 4])
def test_groups_of_three_and_more_in_width_keep_the_function(size: int) -> None:
    small, x = randomised(VIT.build(TINY)), images_for(TINY)
    sizes = VIT.sizes(small)
    scheme = {axis: adjacent(size * sizes[axis], sizes[axis]) for axis in WIDTH}
    grown = decoalesce(small.state_dict(), VIT, sizes, scheme, split_noise=0.2)
    assert error(network_of(TINY, larger(sizes, scheme), grown)(x), small(x)) < 1e-10


def test_uneven_groups_of_heads_and_neurons_keep_the_function() -> None:
    """Heads (0,1,2),(3),(4,5),(6,7): what is shared sums up, whatever the group's size. The stream's are even."""
    small, x = randomised(VIT.build(TINY)), images_for(TINY)
    sizes = VIT.sizes(small)
    scheme = {
        "heads": ((0, 1, 2), (3,), (4, 5), (6, 7)),
        "embed": adjacent(64, 32),
        "mlp": (*((i,) for i in range(127)), tuple(range(127, 300))),
    }
    grown = decoalesce(small.state_dict(), VIT, sizes, scheme)
    assert error(network_of(TINY, larger(sizes, scheme), grown)(x), small(x)) < 1e-10


def test_control_two_heads_swapped_in_one_step_only_is_seen() -> None:
    small = randomised(VIT.build(TINY))
    sizes = VIT.sizes(small)
    scheme = halves(sizes, WIDTH)
    swapped = {**scheme, "heads": ((0, 2), (1, 3), (4, 5), (6, 7))}
    grown = decoalesce(small.state_dict(), VIT, sizes, scheme)
    back = coalesce(grown, VIT, larger(sizes, scheme), swapped)
    worst = max(float((back[name] - x).abs().max()) for name, x in small.state_dict().items())
    assert worst > 1e-2


def test_control_a_reader_mapped_as_a_writer_changes_the_function() -> None:
    small, x = randomised(VIT.build(TINY)), images_for(TINY)
    sizes = VIT.sizes(small)
    scheme = halves(sizes, WIDTH)
    grown = decoalesce(small.state_dict(), VIT, sizes, scheme)
    grown["blocks.0.mlp.fc2.weight"] *= 2  # a reader of mlp that was copied, not shared
    assert error(network_of(TINY, larger(sizes, scheme), grown)(x), small(x)) > 1e-2


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

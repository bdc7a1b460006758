"""Levels: sizes, schemes, and what does not divide."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import TINY

from mlframe.architectures import VIT
from mlframe.errors import ConfigError
from mlframe.levels import make_levels


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
        ({"layers": "pairs"}, r"levels\.layers=pairs: a number, 'stacked' or a list of groups"),
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
        ({"num_heads": 5}, r"level 0"),
        ({"model_name": "resnet18", "img_size": None, "patch_size": None}, "model.config does not build at level 0"),
    ],
)
def test_a_model_that_does_not_build_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_levels(VIT, {**TINY, **change})

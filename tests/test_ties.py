"""Ties: a head that is the embedding stays one tensor, in operators, in the optimizer, parked and on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LANGUAGE, TIED, Family, batch_for, language_module
from torch import Tensor

from mlframe.axes import State
from mlframe.levels import make_levels
from mlframe.operators import coalesce, decoalesce, interpolate, resize, ties
from mlframe.plan import Phase, Plan
from mlframe.transition import next_weights, weights_of

tied_families = pytest.mark.parametrize("family", TIED.values(), ids=TIED)
PAIRS = {
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "llama": {"lm_head.weight": "model.embed_tokens.weight"},
}


def pairs(state: State) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in ties(state).items()}


@tied_families
def test_results_of_operators_share_one_storage_where_their_source_does(family: Family) -> None:
    architecture = family.architecture
    large, small = make_levels(architecture, family.config, sample=family.sample)
    state = family.network().state_dict()
    expected = {frozenset(pair) for pair in PAIRS[architecture.name].items()}
    assert pairs(state) == expected
    down = coalesce(state, architecture, large.sizes, small.scheme)
    up = decoalesce(down, architecture, small.sizes, small.scheme, split_noise=0.3)
    results = [down, up, resize(state, architecture, large.sizes, {})]
    results += [interpolate(state, up, alpha) for alpha in (0, 0.25, 1)]
    for result in results:
        assert pairs(result) == expected
        taken = {x.data_ptr() for x in state.values()}
        assert not taken & {x.data_ptr() for x in result.values()}, "nor is it the source's"


@tied_families
def test_a_copy_that_only_looks_alike_is_no_tie(family: Family) -> None:
    """Control: ties are found by storage, not by value or name."""
    copies = {name: x.clone() for name, x in family.network().state_dict().items()}
    assert ties(copies) == {}
    sizes = family.architecture.sizes(family.network())
    assert ties(resize(copies, family.architecture, sizes, {})) == {}


def test_views_of_one_storage_that_are_not_the_same_are_no_tie() -> None:
    whole = torch.randn(4, 4)
    assert ties({"a": whole, "b": whole[:2], "c": whole.T, "d": whole[2:]}) == {}
    assert ties({"a": whole, "b": torch.zeros(0), "c": torch.zeros(0), "d": whole}) == {"d": "a"}
    assert ties({"a": whole.to("meta"), "b": whole.to("meta")}) == {}


@tied_families
def test_tied_names_of_two_axis_strings_are_refused(family: Family) -> None:
    state = family.network().state_dict()
    head = next(iter(PAIRS[family.architecture.name]))
    table = dataclasses.replace(family.architecture, tensors={**family.architecture.tensors, head: "vocab <- embed"})
    with pytest.raises(ValueError, match=r"\(vocab <- embed\) and .* \(vocab embed\) are one tensor"):
        resize(state, table, table.sizes(family.network()), {})


@tied_families
def test_the_optimizer_has_the_tied_tensor_once_and_decays_no_bias_or_norm(family: Family) -> None:
    module: Any = language_module(family)
    optimizer = module.configure_optimizers()["optimizer"]
    decay = [(id(p), group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert len(decay) == len({i for i, _ in decay}) == len(list(module.network.parameters()))
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == module.level.parameters
    by_id = dict(decay)
    embedding, head = module.network.get_input_embeddings(), module.network.get_output_embeddings()
    assert head.weight is embedding.weight
    assert by_id[id(embedding.weight)] == 0.1
    for name, parameter in module.network.named_parameters():
        plain = name.endswith("bias") or "norm" in name.lower() or ".ln_" in name
        assert by_id[id(parameter)] == (0.0 if plain else 0.1), name


@tied_families
def test_one_step_of_the_optimizer_moves_both_names_alike(family: Family) -> None:
    module: Any = language_module(family)
    optimizer = module.configure_optimizers()["optimizer"]
    before = module.network.get_output_embeddings().weight.detach().clone()
    module.training_step(batch_for(family), 0).backward()
    optimizer.step()
    after = module.network.state_dict()
    for name, other in PAIRS[family.architecture.name].items():
        assert torch.equal(after[name], after[other])
    assert not torch.equal(module.network.get_output_embeddings().weight, before)


def parked(family: Family) -> tuple[Any, dict[str, Tensor]]:
    """A module of which the first phase of a V-cycle is over, and what it then has parked."""
    levels = make_levels(family.architecture, family.config, sample=family.sample)
    plan = Plan(levels, (Phase("a", 0, 1), Phase("b", 1, 1), Phase("c", 0, 1, 0.25)))
    module: Any = language_module(family, plan)
    weights = weights_of(module)
    module.phase_index, module.network = 1, None
    small = next_weights(module, 0, weights)
    assert len(ties(small)) == len(ties(weights))
    module.configure_model()
    module.network.double().load_state_dict(small, strict=True)
    return module, module.parked["0"]


@tied_families
def test_parked_weights_keep_ties_through_a_checkpoint_and_the_way_up(family: Family, tmp_path: Path) -> None:
    module, weights = parked(family)
    expected = {frozenset(pair) for pair in PAIRS[family.architecture.name].items()}
    assert pairs(weights) == expected
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "tied.ckpt")
    loaded = torch.load(tmp_path / "tied.ckpt", weights_only=True)["vcycle"]["parked"]["0"]
    assert pairs(loaded) == expected
    assert all(torch.equal(x, loaded[name]) for name, x in weights.items())

    torch.save({name: x.clone() for name, x in weights.items()}, tmp_path / "copies.pt")
    torch.save(weights, tmp_path / "parked.pt")
    saved = (tmp_path / "copies.pt").stat().st_size - (tmp_path / "parked.pt").stat().st_size
    assert saved >= sum(weights[name].nbytes for name in PAIRS[family.architecture.name])

    down = weights_of(module)
    assert len(pairs(down)) == len(expected)
    module.parked = {"0": loaded}
    module.phase_index = 2
    assert pairs(next_weights(module, 1, down)) == expected


def test_what_is_not_tied_stays_two() -> None:
    family = LANGUAGE["gpt2 untied"]
    module, weights = parked(family)
    assert ties(weights) == {}
    assert not torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    assert module.network.lm_head.weight is not module.network.transformer.wte.weight

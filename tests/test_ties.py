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
from mlframe.transition import load, next_weights, weights_of

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


def moved(module: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` of the phase before, taken to the module's next phase as a transition takes them."""
    old = module.level.index
    module.phase_index, module.network = module.phase_index + 1, None
    kept = module.parked.pop(str(module.level.index), None)
    if module.level.index > old:
        module.parked[str(old)] = weights
    module.configure_model()
    module.network.double()
    load(module.network, next_weights(module, old, weights, torch.device("cpu")), kept, module.phase.alpha)
    return module.network.state_dict()


def at_the_start(family: Family) -> Any:
    levels = make_levels(family.architecture, family.config, sample=family.sample)
    return language_module(family, Plan(levels, (Phase("a", 0, 1), Phase("b", 1, 1), Phase("c", 0, 1, 0.25))))


@tied_families
def test_parked_weights_hold_a_tied_tensor_once_and_ties_return_on_the_way_up(family: Family, tmp_path: Path) -> None:
    module = at_the_start(family)
    expected = {frozenset(pair) for pair in PAIRS[family.architecture.name].items()}
    assert pairs(moved(module, weights_of(module))) == expected, "the small network"
    names = {name for pair in PAIRS[family.architecture.name].items() for name in pair}
    assert len(names & module.parked["0"].keys()) == len(names) - len(expected)

    torch.save(module.parked, tmp_path / "parked.pt")
    module.parked = torch.load(tmp_path / "parked.pt", weights_only=True)
    assert pairs(moved(module, weights_of(module))) == expected, "the large network"
    assert module.parked == {}


def test_what_is_not_tied_stays_two() -> None:
    family = LANGUAGE["gpt2 untied"]
    module = at_the_start(family)
    weights = weights_of(module)
    moved(module, weights)
    moved(module, weights_of(module))
    assert ties(weights) == ties(module.network.state_dict()) == {}
    assert not torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    assert module.network.lm_head.weight is not module.network.transformer.wte.weight

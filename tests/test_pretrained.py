"""Saving and loading in the forms of the families' own libraries, and starting from what was saved."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LANGUAGE, TIED, TINY, VOCAB, Family, language_module, outputs, randomised, tokens_for
from safetensors.torch import load_file, save_file
from test_language import fit, plan_of
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import BertForPreTraining, PreTrainedTokenizerFast

from mlframe.architectures import BERT, GPT2, LLAMA, VIT
from mlframe.levels import make_levels
from mlframe.maps import stacked
from mlframe.operators import decoalesce
from mlframe.plan import scratch

KINDS = {name: LANGUAGE[name] for name in ("bert", "gpt2", "llama")}
kinds = pytest.mark.parametrize("family", KINDS.values(), ids=KINDS)
LAYERS = {"bert": "num_hidden_layers", "gpt2": "n_layer", "llama": "num_hidden_layers"}


def tokenizer() -> PreTrainedTokenizerFast:
    special = {name: f"[{name}]" for name in ("pad_token", "unk_token", "mask_token", "bos_token", "eos_token")}
    words = [*special.values(), *(f"w{i}" for i in range(5, VOCAB))]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[unk_token]"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def doubled_in_depth(family: Family) -> nn.Module:
    """Case A3: of two layers, four: copies of the whole stacked."""
    architecture = family.architecture
    small = randomised(architecture.build({**family.config, LAYERS[architecture.name]: 2}))
    state = decoalesce(small.state_dict(), architecture, architecture.sizes(small), {"layers": stacked(4, 2)})
    large = architecture.build(family.config)
    large.load_state_dict(state, strict=True)
    return large.float().eval()


SCRIPT = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

seen = {}
for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
    kind = AutoModelForMaskedLM if "bert" in folder.name else AutoModelForCausalLM
    network, info = kind.from_pretrained(folder, output_loading_info=True)
    network.eval()
    ids = torch.load(folder / "ids.pt")
    told = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    one = {"wrong": told, "logits": network(input_ids=ids).logits.detach(), "layers": network.config.num_hidden_layers,
           "words": AutoTokenizer.from_pretrained(folder)("w5 w127 nothing")["input_ids"]}
    if kind is AutoModelForCausalLM:
        one["uncached"] = network(input_ids=ids, use_cache=False).logits.detach()
        first = network(input_ids=ids[:, :5], use_cache=True)
        then = network(input_ids=ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
        one["cached"] = torch.cat([first.logits, then.logits], 1).detach()
        one["text"] = [network.generate(ids[:1, :4], do_sample=False, min_new_tokens=8, max_new_tokens=8, use_cache=how)
                       for how in (True, False)]
    seen[folder.name] = one
torch.save(seen, sys.argv[2])
"""


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, nn.Module], dict[str, Any], Path]:
    """Networks as they were saved, and what one fresh process, without mlframe, sees of them in transformers."""
    folder = tmp_path_factory.mktemp("saved")
    networks = {name: family.network().float() for name, family in LANGUAGE.items()}
    networks |= {f"{name} grown": doubled_in_depth(family) for name, family in KINDS.items()}
    for name, network in networks.items():
        family = LANGUAGE[name.removesuffix(" grown")]
        family.architecture.save(network, family.config, folder / "saved" / name, {"tokenizer": tokenizer()})
        torch.save(tokens_for((3, 12)), folder / "saved" / name / "ids.pt")
    (folder / "script.py").write_text(SCRIPT)
    command: list[Any] = [sys.executable, folder / "script.py", folder / "saved", folder / "seen.pt"]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return networks, torch.load(folder / "seen.pt"), folder / "saved"


@pytest.mark.parametrize("name", [*LANGUAGE, *(f"{name} grown" for name in KINDS)])
def test_what_is_saved_loads_with_transformers_in_a_fresh_process(reloaded: Any, name: str) -> None:
    networks, seen, folder = reloaded
    assert seen[name]["wrong"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    torch.testing.assert_close(seen[name]["logits"], outputs(networks[name], tokens_for((3, 12))), rtol=1e-6, atol=1e-6)
    assert seen[name]["layers"] == 4
    assert [i for i in seen[name]["words"] if i != 1] == [5, 127]
    config = json.loads((folder / name / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, 4)


@pytest.mark.parametrize("name", [*(name for name in LANGUAGE if "bert" not in name), "gpt2 grown", "llama grown"])
def test_generation_with_the_cache_is_generation_without(reloaded: Any, name: str) -> None:
    """The cache is kept by the number of a layer, which must be right in what grew too."""
    seen = reloaded[1][name]
    torch.testing.assert_close(seen["cached"], seen["uncached"], rtol=1e-5, atol=1e-5)
    with_cache, without = seen["text"]
    assert with_cache.shape == (1, 12)
    assert torch.equal(with_cache, without)


@kinds
def test_stacked_copies_have_the_size_of_a_fresh_network_and_a_life_of_their_own(family: Family) -> None:
    grown, fresh = doubled_in_depth(family), family.architecture.build(family.config)
    count = [sum(p.numel() for p in network.parameters()) for network in (grown, fresh)]
    assert count[0] == count[1]
    assert family.architecture.sizes(grown)["layers"] == 4
    state = grown.state_dict()
    match = family.architecture.match(state)
    first, third = ([name for name, m in match.items() if m.layer == layer] for layer in (0, 2))
    assert all(torch.equal(state[a], state[b]) for a, b in zip(first, third, strict=True))
    before = [state[name].clone() for name in third]
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            if name in first:
                parameter.add_(1)
    assert all(torch.equal(state[name], x) for name, x in zip(third, before, strict=True))
    assert not torch.equal(state[first[0]], state[third[0]])


# loading


def saved(family: Family, folder: Path) -> tuple[nn.Module, str]:
    network = family.network().float()
    family.architecture.save(network, family.config, folder, {})
    return network, str(folder)


@kinds
def test_loaded_weights_have_the_logits_of_what_was_saved(family: Family, tmp_path: Path) -> None:
    network, source = saved(family, tmp_path)
    fresh = family.architecture.build(family.config).eval()
    x, state = tokens_for((3, 12)), torch.get_rng_state()
    assert not torch.allclose(outputs(fresh, x), outputs(network, x))
    family.architecture.load(fresh, source)
    assert torch.equal(outputs(fresh, x), outputs(network, x))
    assert torch.equal(torch.get_rng_state(), state), "loading does not move the global stream"
    tie = [n.get_output_embeddings().weight is n.get_input_embeddings().weight for n in (fresh, network)]  # type: ignore[operator]
    assert tie[0] == tie[1]
    wide = family.architecture.build(family.config).double()
    family.architecture.load(wide, source)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}


def others(family: Family) -> dict[str, dict[str, Any]]:
    """Configurations of which each one differs from the family's in one thing that changes the function."""
    width, heads, act = "hidden_size", {"num_attention_heads": 2}, "hidden_act"
    if family.architecture is GPT2:
        width, heads, act = "n_embd", {"n_head": 2}, "activation_function"
    if family.architecture is LLAMA:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    tied = family.architecture is not LLAMA
    return {
        "another size": {width: 64}, "more layers": {LAYERS[family.architecture.name]: 6},
        "other heads of the same width": heads, "another activation": {act: "relu"},
        "tied or not": {"tie_word_embeddings": not tied}, "more words": {"vocab_size": 130},
    }  # fmt: skip


def one_line(error: BaseException, source: str) -> str:
    assert source in str(error)
    assert "\n" not in str(error).strip()
    return str(error)


@kinds
def test_another_configuration_is_refused_and_named(family: Family, tmp_path: Path) -> None:
    """Other heads of the same width have the same shapes, another activation too: only the configuration tells."""
    source = saved(family, tmp_path)[1]
    for change in others(family).values():
        network = family.architecture.build({**family.config, **change})
        with pytest.raises(ValueError, match=r"model\.config") as caught:
            family.architecture.load(network, source)
        message = one_line(caught.value, source)
        assert any(key in message for key in change), message


def test_dropout_and_special_tokens_may_differ(tmp_path: Path) -> None:
    family = LANGUAGE["gpt2"]
    _, source = saved(family, tmp_path)
    network = family.architecture.build({**family.config, "resid_pdrop": 0.0, "eos_token_id": 3, "use_cache": False})
    family.architecture.load(network, source)


def rewrite(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = dict(load_file(folder / "model.safetensors"))
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return damage


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class Evil:
    """Unpickled by a careless loader, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def poison(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**state, "evil": Evil(folder / "ran")}, folder / "pytorch_model.bin")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing key": (rewrite(lambda state: state.pop(sorted(state)[0])), "missing "),
    "unexpected key": (rewrite(lambda state: state.update({"more.weight": torch.zeros(2)})), "unexpected more"),
    "another shape": (rewrite(lambda state: state.update({sorted(state)[0]: torch.zeros(3, 3)})), "mismatched"),
    "not there": (shutil.rmtree, "is not there"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
    "cut off": (cut, "cannot be loaded"),
    "a pickle that runs code": (poison, "cannot be loaded"),
}


@kinds
@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_refused_in_one_line(
    family: Family, damage: Callable[[Path], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = saved(family, tmp_path / "saved")[1]
    damage(tmp_path / "saved")
    network = family.architecture.build(family.config)
    before = {name: x.clone() for name, x in network.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        family.architecture.load(network, source)
    one_line(caught.value, source)
    assert not (tmp_path / "saved" / "ran").exists()
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items()), "the network is as it was"


def test_control_the_poison_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_the_published_form_of_bert_has_more_heads_which_are_left(tmp_path: Path) -> None:
    """bert-base-uncased on the hub is a BertForPreTraining: a pooler, and a head for next sentences."""
    network = BertForPreTraining(BERT.build(LANGUAGE["bert"].config).config)  # type: ignore[arg-type]
    network.save_pretrained(tmp_path)
    assert any("pooler" in name for name in load_file(tmp_path / "model.safetensors"))
    assert any("seq_relationship" in name for name in load_file(tmp_path / "model.safetensors"))
    fresh = BERT.build(LANGUAGE["bert"].config).eval()
    BERT.load(fresh, str(tmp_path))
    x = tokens_for((3, 12))
    torch.testing.assert_close(outputs(fresh, x), network.eval()(input_ids=x).prediction_logits.detach())


# images


ABOUT = {
    "label_names": list("abcde"),
    "data_config": {"input_size": (1, 16, 16), "mean": (0.3,), "std": (0.4,), "crop_pct": 1.0,
                    "interpolation": "bicubic"},
}  # fmt: skip


@pytest.mark.parametrize("form", ["folder", "safetensors", "pth"])
def test_timms_networks_load_from_a_folder_or_a_file(form: str, tmp_path: Path) -> None:
    network, fresh = randomised(VIT.build(TINY)).float(), VIT.build(TINY)
    VIT.save(network, TINY, tmp_path / "final", ABOUT)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    source = {
        "folder": tmp_path / "final", "safetensors": tmp_path / "final" / "model.safetensors",
        "pth": tmp_path / "weights.pth",
    }[form]  # fmt: skip
    VIT.load(fresh, str(source))
    assert all(torch.equal(x, network.state_dict()[name]) for name, x in fresh.state_dict().items())


def test_timms_networks_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    VIT.save(VIT.build(TINY), TINY, tmp_path / "final", ABOUT)
    source = str(tmp_path / "final")
    for change, message in (
        ({"num_classes": 7}, r"mismatched head\.bias \(5,\) for \(7,\), head\.weight \(5, 32\) for \(7, 32\)"),
        ({"depth": 6}, r"missing blocks\.4\."),
        ({"depth": 2}, r"unexpected blocks\.2\."),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            VIT.load(VIT.build({**TINY, **change}), source)
        one_line(caught.value, source)
    for missing in ("nothing", "final/nothing.safetensors"):
        with pytest.raises(ValueError, match="is not there: give a file, a folder") as caught:
            VIT.load(VIT.build(TINY), str(tmp_path / missing))
        one_line(caught.value, missing)


def test_timms_files_that_are_cut_off_or_run_code_are_refused_in_one_line(tmp_path: Path) -> None:
    VIT.save(VIT.build(TINY), TINY, tmp_path, ABOUT)
    cut(tmp_path)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as caught:
        VIT.load(VIT.build(TINY), str(tmp_path))
    one_line(caught.value, str(tmp_path))
    torch.save({**VIT.build(TINY).state_dict(), "evil": Evil(tmp_path / "ran")}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"weights\.pth") as caught:
        VIT.load(VIT.build(TINY), str(tmp_path / "weights.pth"))
    one_line(caught.value, "weights.pth")
    assert not (tmp_path / "ran").exists()


# training from it


@kinds
def test_only_the_first_phase_starts_from_what_is_named(family: Family, tmp_path: Path) -> None:
    network, source = saved(family, tmp_path)
    plan = plan_of(family, 3, 1, 1, 0.0)
    module: Any = language_module(family, plan, init_from=source)
    first = module.network.state_dict()
    assert all(torch.equal(x, first[name]) for name, x in network.state_dict().items())
    plain = family.architecture.build(family.config).state_dict()
    assert not all(torch.equal(x, first[name]) for name, x in plain.items()), "control"
    module.phase_index, module.network = 1, None
    module.configure_model()
    assert module.network.config.num_hidden_layers == 2
    module.phase_index, module.network = 2, None
    module.configure_model()
    assert not any(torch.equal(x, first[name]) for name, x in module.network.state_dict().items() if x.std() > 0)


def test_a_level_alone_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    family = TIED["gpt2"]
    source = saved(family, tmp_path)[1]
    levels = make_levels(family.architecture, family.config, sample=family.sample)
    with pytest.raises(ValueError, match=r"n_embd is 32, not 16"):
        language_module(family, scratch(levels, 1, level=1), init_from=source)


@kinds
def test_a_cycle_trains_from_it(family: Family, tmp_path: Path) -> None:
    """alpha 0: the last phase, of no steps, has the parked network, which is the loaded one after one step."""
    network, source = saved(family, tmp_path)
    trained, _ = fit(family, plan_of(family, 2, 1, 1, 0.0), init_from=source, limit_val_batches=0)
    moved = {name: (x - network.state_dict()[name]).abs().max() for name, x in trained.network.state_dict().items()}
    assert 1e-3 < max(map(float, moved.values())) < 0.05, "one step of AdamW at a rate of 1e-2 or less"

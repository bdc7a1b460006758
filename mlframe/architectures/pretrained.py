"""What all networks of Hugging Face transformers share: building from a config, saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from mlframe.axes import check_nan

_SPARE = ("bert.pooler.", "cls.seq_relationship.")  # of published checkpoints, for next-sentence prediction
_OPTIONS = ("attn_implementation",)  # how, not what, is computed: "sdpa" (the default) or "eager"


def build(network: type[PreTrainedModel], config: Mapping[str, Any]) -> PreTrainedModel:
    """The network of a config, freshly initialised. Raises ValueError for keys that its config class does not have.

    transformers itself keeps an unknown key without a word. Its second names for some keys (`attribute_map`) and most
    of what all its configs share (`return_dict`, ...) are refused too: a level could have both, the task needs its own.
    """
    config_class = network.config_class
    assert config_class is not None
    known = {*_own(config_class()), *_OPTIONS} - config_class.attribute_map.keys()
    if unknown := sorted(config.keys() - known):
        raise ValueError(f"{config_class.__name__} has no {unknown}; it has {sorted(known)}")
    made = config_class(**config)
    if made.num_hidden_layers < 1:
        raise ValueError(f"{made.num_hidden_layers} layers: a network has 1 or more")
    return network(made)


def _own(config: PreTrainedConfig) -> list[str]:
    """The keys of a config that not all configs of transformers have, and the tie, which a few of them share."""
    shared = PreTrainedConfig().to_dict()
    return [*(key for key in config.to_dict() if key not in shared), "tie_word_embeddings"]


def save(network: nn.Module, config: Mapping[str, Any], folder: Path, about: Mapping[str, Any]) -> None:
    """save_pretrained: config.json, model.safetensors and, from `about["tokenizer"]`, the tokenizer.

    Loads with AutoModelForMaskedLM or AutoModelForCausalLM and AutoTokenizer .from_pretrained(folder).
    """
    assert isinstance(network, PreTrainedModel)
    if (tokenizer := about.get("tokenizer")) is not None:
        # Or generation would stop at the id that ends a text of the published model's own tokenizer.
        for key in ("bos_token_id", "eos_token_id"):
            for settings in (network.config, getattr(network, "generation_config", None)):  # BERT has none
                if settings is not None:
                    setattr(settings, key, getattr(tokenizer, key))
        tokenizer.save_pretrained(folder)
    transformers.logging.disable_progress_bar()  # it would draw over the bar of training
    network.save_pretrained(folder)


def load(network: nn.Module, source: str) -> None:
    """The weights of `source`, a name on the hub or a folder of save_pretrained, into `network`.

    Parts that the network does not have by its kind (BERT's pooler, its next-sentence head) may be left over; every
    other difference in names, shapes or configuration raises ValueError.
    """
    assert isinstance(network, PreTrainedModel)
    loaded, info = _read(network, _place(source))
    wrong = {how: sorted(map(str, info[f"{how}_keys"])) for how in ("missing", "unexpected", "mismatched")}
    spare = (*(getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ()), *_SPARE)
    wrong["unexpected"] = [key for key in wrong["unexpected"] if not any(part in key for part in spare)]
    if any(wrong.values()):
        found = "; ".join(f"{how} {_some(keys)}" for how, keys in wrong.items() if keys)
        raise ValueError(f"{source} does not fit {type(network).__name__} of model.config: {found}")
    check_nan(source, loaded.state_dict())
    network.load_state_dict(loaded.state_dict(), strict=True)


def _place(source: str) -> str:
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path)
    if source.startswith((".", "/", "~")) or source.count("/") > 1:  # a name on the hub is NAME or ORG/NAME
        raise ValueError(f"{source} is not there: give a folder such as a run's final/, or a name on the hub")
    return source


def _read(network: PreTrainedModel, source: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """from_pretrained, without its tables and bars, and with one line where it cannot."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind: Any = type(network)
    config = copy.deepcopy(network.config)  # it takes notes in it
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": network.dtype}
    try:
        theirs = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if theirs.model_type != config.model_type:
            raise ValueError(f"it is a {theirs.model_type} and the model a {config.model_type}")
        if differing := _differing(theirs, config):
            raise ValueError(f"another configuration than model.config, which has to follow: {'; '.join(differing)}")
        return kind.from_pretrained(source, config=config, **options)
    except Exception as error:  # of transformers, safetensors, torch or the hub, some of many lines
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own, which is not run: name a model that transformers has"
        raise ValueError(f"{source} cannot be loaded: {type(error).__name__}: {reason}") from error
    finally:
        transformers.logging.set_verbosity(before)


def _differing(theirs: PreTrainedConfig, ours: PreTrainedConfig) -> list[str]:
    """What differs between two configurations and changes the function: not dropout, special tokens or init."""
    free = ("drop", "token_id", "initializer_range", "use_cache", "n_inner")  # n_inner null is 4 n_embd: shapes show it
    old, new = theirs.to_dict(), ours.to_dict()
    keys = [key for key in _own(ours) if not any(part in key for part in free)]
    return [f"{key} is {old.get(key)}, not {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def _some(keys: list[str], most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")

"""Small networks of all families with random weights, and small sets of images, for all tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_images import write_images
from torch import Tensor, nn

from mlframe.architectures import BERT, GPT2, LLAMA, VIT
from mlframe.axes import Architecture, Sizes
from mlframe.language import CausalLM, LanguageModeling, MaskedLM
from mlframe.levels import make_levels
from mlframe.plan import scratch
from mlframe.schedule import Schedule

SLOWEST = ["test_sweep.py", "test_cli.py", "test_processes.py", "test_pretrained.py", "test_kills.py"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, as each is one worker's: the others fill what time is left."""
    items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))


torch.set_num_threads(1)  # on networks of this size threads only wait for each other

TINY = {
    "model_name": "deit_tiny_patch16_224", "img_size": 16, "patch_size": 8, "in_chans": 1, "num_classes": 5,
    "embed_dim": 32, "depth": 4, "num_heads": 4,
}  # fmt: skip

VITS: dict[str, dict[str, Any]] = {
    "deit": TINY,
    "distilled deit": {**TINY, "model_name": "deit_tiny_distilled_patch16_224"},
    "vit with LayerScale": {**TINY, "model_name": "vit_tiny_patch16_224", "init_values": 0.1},
    "vit, mean pool": {
        **TINY, "model_name": "vit_tiny_patch16_224", "global_pool": "avg", "class_token": False, "reg_tokens": 2,
        "qk_norm": True, "pre_norm": True, "qkv_bias": False, "mlp_ratio": 3.0,
    },
}  # fmt: skip

VOCAB, TOKENS, MASKED = 128, 12, 4

TINY_BERT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 16,
}  # fmt: skip
TINY_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
TINY_LLAMA: dict[str, Any] = {**TINY_BERT, "num_attention_heads": 8, "num_key_value_heads": 4}


@dataclass(frozen=True, eq=False)
class Family:
    """One kind of network. `heads`: the axis by which its heads become more; `exact`: more than the rounding of its
    function; `seen`: less than what a wrong map changes of it; `norms`: the mean weight of its LayerNorms."""

    architecture: Architecture
    config: dict[str, Any]
    heads: str = "heads"
    exact: float = 1e-10
    seen: float = 1e-3
    norms: float = 0.0

    def network(self, sizes: Sizes | None = None) -> nn.Module:
        change = {} if sizes is None else self.architecture.resized(sizes)
        return self.randomised(self.architecture.build({**self.config, **change}))

    def randomised(self, network: nn.Module) -> nn.Module:
        for module in randomised(network).modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.data += self.norms
        return network

    @property
    def width(self) -> tuple[str, ...]:
        return self.heads, "embed", "mlp"

    @property
    def sample(self) -> dict[str, int]:
        return {"tokens": TOKENS, "predictions": MASKED if self.architecture is BERT else TOKENS}


def _llama(heads: str = "kv_heads", **change: Any) -> Family:
    # transformers computes Llama's norms and rotary angles in float32, whatever the weights are.
    return Family(LLAMA, {**TINY_LLAMA, **change}, heads, exact=1e-5)


LANGUAGE = {
    # BERT's norms stand on the stream: with weights of 0.2 each layer damps what comes before it, errors too.
    "bert": Family(BERT, TINY_BERT, seen=1e-6),
    "bert, norms around 1": Family(BERT, TINY_BERT, norms=1.0),
    "bert untied": Family(BERT, {**TINY_BERT, "tie_word_embeddings": False}, norms=1.0),
    "gpt2": Family(GPT2, TINY_GPT2),
    "gpt2 untied": Family(GPT2, {**TINY_GPT2, "tie_word_embeddings": False}),
    "gpt2, an mlp of 3x": Family(GPT2, {**TINY_GPT2, "n_inner": 96}),
    "llama": _llama(),
    "llama tied": _llama(tie_word_embeddings=True),
    "llama, one kv head": _llama("group", num_key_value_heads=1),
    "llama, as many kv heads": _llama(num_key_value_heads=8),
    "llama, biases": _llama(attention_bias=True, mlp_bias=True),
    "llama, wide heads": _llama(num_attention_heads=4, num_key_value_heads=2, head_dim=16),
}
TIED = {name: LANGUAGE[name] for name in ("bert", "gpt2", "llama tied")}
FAMILIES = {**{name: Family(VIT, config) for name, config in VITS.items()}, **LANGUAGE}


def randomised(network: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter N(0, 0.2), in float64 and eval mode: a default init of ones and zeros hides errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network.double().eval()


def images_for(config: Mapping[str, Any], count: int = 3) -> Tensor:
    size, generator = config["img_size"], torch.Generator().manual_seed(1)
    return torch.randn(count, config["in_chans"], size, size, generator=generator, dtype=torch.float64)


def tokens_for(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def inputs_for(architecture: Architecture, config: Mapping[str, Any]) -> Tensor:
    """Three images, or three rows of tokens."""
    return images_for(config) if architecture is VIT else tokens_for((3, TOKENS))


@torch.no_grad()
def outputs(network: nn.Module, x: Tensor) -> Tensor:
    """The logits."""
    out = network(x)
    return out if isinstance(out, Tensor) else out.logits


def error(a: Tensor, b: Tensor) -> float:
    return float(((a - b).abs().max() / b.abs().max()).detach())


def language_module(family: Family, plan: Any = None, **settings: Any) -> LanguageModeling:
    """The family's task around its network (randomised, float64, eval), outside of a trainer."""
    plan = plan or scratch(make_levels(family.architecture, family.config, sample=family.sample), 10)
    task = MaskedLM if family.architecture is BERT else CausalLM
    module = task(plan, partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1), Schedule(), **settings)
    module.log = lambda *a, **k: None
    module.log_rate = lambda: None  # type: ignore[method-assign]
    module.configure_model()
    if "init_from" not in settings:
        family.randomised(module.network)  # type: ignore[arg-type]
    return module


def batch_for(family: Family, rows: int = 3, seed: int = 1) -> tuple[Tensor, ...]:
    """As the text data gives them: the inputs, of masked tokens where they are, and what is to be predicted."""
    text = tokens_for((rows, TOKENS + 1), seed)
    if family.architecture is not BERT:
        return text[:, :-1], text[:, 1:]
    order = torch.rand(rows, TOKENS, generator=torch.Generator().manual_seed(seed)).argsort(1)
    positions = order[:, :MASKED].sort(1).values
    return text[:, :-1].scatter(1, positions, 3), positions, text.gather(1, positions)


@pytest.fixture(scope="session")
def image_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))

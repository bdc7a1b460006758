"""GPT-2 (Radford et al., 2019): transformers' GPT2LMHeadModel, whose Conv1D stores (in, out)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import GPT2LMHeadModel

from mlframe import flops
from mlframe.architectures import pretrained
from mlframe.axes import Architecture, Sizes


def _build(config: Mapping[str, Any]) -> nn.Module:
    if config.get("add_cross_attention"):
        raise ValueError("add_cross_attention=true: GPT-2 is trained as a decoder alone; leave it out")
    if config.get("scale_attn_by_inverse_layer_idx"):
        raise ValueError("scale_attn_by_inverse_layer_idx=true: a layer's function would change with its number")
    return pretrained.build(GPT2LMHeadModel, config)


def _sizes(network: nn.Module) -> dict[str, int]:
    assert isinstance(network, GPT2LMHeadModel)
    config, layers = network.config, network.transformer.h
    block: Any = layers[0]
    return {
        "layers": len(layers),
        "heads": block.attn.num_heads,
        "head_dim": block.attn.head_dim,
        "embed": config.n_embd,
        "mlp": block.mlp.c_fc.nf,
        "vocab": config.vocab_size,
        "pos": config.n_positions,
    }


def _resized(sizes: Sizes) -> dict[str, Any]:
    return {
        "n_layer": sizes["layers"],
        "n_head": sizes["heads"],
        "n_embd": sizes["embed"],
        "n_inner": sizes["mlp"],
    }


GPT2 = Architecture(
    "gpt2",
    tensors={
        "transformer.wte.weight": "vocab embed",
        "transformer.wpe.weight": "pos embed",
        "transformer.h.{layers}.ln_{1,2}.{weight,bias}": "embed",
        "transformer.h.{layers}.attn.c_attn.weight": "embed -> (3 heads head_dim)",
        "transformer.h.{layers}.attn.c_attn.bias": "(3 heads head_dim)",
        "transformer.h.{layers}.attn.c_proj.weight": "+ (heads head_dim) -> embed",
        "transformer.h.{layers}.attn.c_proj.bias": "+ embed",
        "transformer.h.{layers}.mlp.c_fc.weight": "embed -> mlp",
        "transformer.h.{layers}.mlp.c_fc.bias": "mlp",
        "transformer.h.{layers}.mlp.c_proj.weight": "+ mlp -> embed",
        "transformer.h.{layers}.mlp.c_proj.bias": "+ embed",
        "transformer.ln_f.{weight,bias}": "<- embed",
        "lm_head.weight": "vocab embed",
    },
    build=_build,
    sizes=_sizes,
    resized=_resized,
    flops=flops.causal,
    save=pretrained.save,
    load=pretrained.load,
)
"""The embedding writes the stream and, tied, is the head too: so the final norm is what reads. Untied likewise."""

GPT2_PAPER = replace(
    GPT2,
    name="gpt2 (paper)",
    tensors={
        **GPT2.tensors,
        "transformer.wte.weight": "vocab <- embed",
        "transformer.wpe.weight": "pos <- embed",
        "transformer.ln_f.{weight,bias}": "embed",
        "lm_head.weight": "vocab <- embed",
    },
)
"""As in the paper's code, the embeddings are mapped as the head, a reader. No norm follows them here, so the stream
starts at half its scale and widening changes the function; docs/design.md states the error."""

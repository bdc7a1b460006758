"""Llama (Touvron et al., 2023), grouped queries, RMSNorm, SwiGLU, rotary angles: transformers' LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers import LlamaForCausalLM

from mlframe import flops
from mlframe.architectures import pretrained
from mlframe.axes import Architecture, Sizes, query_heads


def _build(config: Mapping[str, Any]) -> nn.Module:
    network = pretrained.build(LlamaForCausalLM, config)
    heads, kv_heads = network.config.num_attention_heads, network.config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    return network


def _sizes(network: nn.Module) -> dict[str, int]:
    assert isinstance(network, LlamaForCausalLM)
    config, layers = network.config, network.model.layers
    attention: Any = layers[0].self_attn
    return {
        "layers": len(layers),
        "kv_heads": config.num_key_value_heads,
        "group": attention.num_key_value_groups,
        "head_dim": attention.head_dim,
        "embed": config.hidden_size,
        "mlp": config.intermediate_size,
        "vocab": config.vocab_size,
        "pos": config.max_position_embeddings,
    }


def _resized(sizes: Sizes) -> dict[str, Any]:
    return {
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": query_heads(sizes),
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "hidden_size": sizes["embed"],
        "intermediate_size": sizes["mlp"],
    }


LLAMA = Architecture(
    "llama",
    tensors={
        "model.embed_tokens.weight": "vocab embed",
        "model.layers.{layers}.{input_layernorm,post_attention_layernorm}.weight": "embed",
        "model.layers.{layers}.self_attn.q_proj.weight": "(kv_heads group head_dim) <- embed",
        "model.layers.{layers}.self_attn.q_proj.bias": "(kv_heads group head_dim)",
        "model.layers.{layers}.self_attn.{k,v}_proj.weight": "(kv_heads head_dim) <- embed",
        "model.layers.{layers}.self_attn.{k,v}_proj.bias": "(kv_heads head_dim)",
        "model.layers.{layers}.self_attn.o_proj.weight": "+ embed <- (kv_heads group head_dim)",
        "model.layers.{layers}.self_attn.o_proj.bias": "+ embed",
        "model.layers.{layers}.mlp.{gate,up}_proj.weight": "mlp <- embed",
        "model.layers.{layers}.mlp.{gate,up}_proj.bias": "mlp",
        "model.layers.{layers}.mlp.down_proj.weight": "+ embed <- mlp",
        "model.layers.{layers}.mlp.down_proj.bias": "+ embed",
        "model.norm.weight": "<- embed",
        "lm_head.weight": "vocab embed",
    },
    build=_build,
    sizes=_sizes,
    resized=_resized,
    flops=partial(flops.causal, mlp_matrices=3),  # a gated MLP
    save=pretrained.save,
    load=pretrained.load,
)
"""Tied or untied alike, the final norm reads the stream and the head is mapped as the embedding is."""

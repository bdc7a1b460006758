"""BERT with its masked-language-model head (Devlin et al., 2019): transformers' BertForMaskedLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import BertForMaskedLM

from mlframe import flops
from mlframe.architectures import pretrained
from mlframe.axes import Architecture, Sizes


def _build(config: Mapping[str, Any]) -> nn.Module:
    for key in ("is_decoder", "add_cross_attention"):
        if config.get(key):
            raise ValueError(f"{key}=true: BERT is trained as an encoder; leave it out")
    return pretrained.build(BertForMaskedLM, config)


def _sizes(network: nn.Module) -> dict[str, int]:
    assert isinstance(network, BertForMaskedLM)
    config, layers = network.config, network.bert.encoder.layer
    block: Any = layers[0]
    return {
        "layers": len(layers),
        "heads": block.attention.self.num_attention_heads,
        "head_dim": block.attention.self.attention_head_size,
        "embed": config.hidden_size,
        "mlp": config.intermediate_size,
        "vocab": config.vocab_size,
        "pos": config.max_position_embeddings,
    }


def _resized(sizes: Sizes) -> dict[str, Any]:
    return {
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "hidden_size": sizes["embed"],
        "intermediate_size": sizes["mlp"],
    }


BERT = Architecture(
    "bert",
    tensors={
        "bert.embeddings.word_embeddings.weight": "vocab embed",
        "bert.embeddings.position_embeddings.weight": "pos embed",
        "bert.embeddings.token_type_embeddings.weight": "_ embed",
        "bert.embeddings.LayerNorm.{weight,bias}": "embed",
        "bert.encoder.layer.{layers}.attention.self.{query,key,value}.weight": "(heads head_dim) <- embed",
        "bert.encoder.layer.{layers}.attention.self.{query,key,value}.bias": "(heads head_dim)",
        "bert.encoder.layer.{layers}.attention.output.dense.weight": "+ embed <- (heads head_dim)",
        "bert.encoder.layer.{layers}.attention.output.dense.bias": "+ embed",
        "bert.encoder.layer.{layers}.{attention.output,output}.LayerNorm.{weight,bias}": "embed",
        "bert.encoder.layer.{layers}.intermediate.dense.weight": "mlp <- embed",
        "bert.encoder.layer.{layers}.intermediate.dense.bias": "mlp",
        "bert.encoder.layer.{layers}.output.dense.weight": "+ embed <- mlp",
        "bert.encoder.layer.{layers}.output.dense.bias": "+ embed",
        "cls.predictions.transform.dense.weight": "embed <- embed",
        "cls.predictions.transform.dense.bias": "embed",
        "cls.predictions.transform.LayerNorm.{weight,bias}": "<- embed",
        "cls.predictions.decoder.weight": "vocab embed",
        "cls.predictions.{decoder.bias,bias}": "vocab",
    },
    build=_build,
    sizes=_sizes,
    resized=_resized,
    flops=flops.bert,
    save=pretrained.save,
    load=pretrained.load,
)
"""The embedding writes the stream and, tied, is the decoder too: so the LayerNorm before the decoder is what reads."""

BERT_PAPER = replace(
    BERT,
    name="bert (paper)",
    tensors={
        **BERT.tensors,
        "bert.embeddings.word_embeddings.weight": "vocab <- embed",
        "bert.embeddings.position_embeddings.weight": "pos <- embed",
        "bert.embeddings.token_type_embeddings.weight": "_ <- embed",
        "cls.predictions.transform.LayerNorm.{weight,bias}": "embed",
        "cls.predictions.decoder.weight": "vocab <- embed",
    },
)
"""As in the paper's code, all embeddings are mapped as the decoder, a reader. The LayerNorm that follows the embeddings
takes their scale out again, so this is lossless too, to the norm's epsilon, where all groups have one size."""

"""The families that mlframe trains: one axis table each, and how their library builds, describes, saves and loads them.

A table is checked, not trusted: `levels` compares every tensor of every level with it (axes.check). Names load on first
use, as timm and transformers are slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"VIT": "vit", "BERT": "bert", "BERT_PAPER": "bert", "GPT2": "gpt2", "GPT2_PAPER": "gpt2", "LLAMA": "llama"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"mlframe.architectures.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'mlframe.architectures' has no attribute {name!r}; it has {', '.join(__all__)}")

"""mlframe: train transformers in a V-cycle over model sizes.

The public API. Names load on first use, so that the operators need torch and nothing above it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "axes": ["Architecture", "check"],
    "architectures": ["BERT", "BERT_PAPER", "GPT2", "GPT2_PAPER", "LLAMA", "VIT"],
    "operators": ["coalesce", "decoalesce", "interpolate", "resize"],
    "maps": ["AxisMap", "adjacent", "stacked"],
    "levels": ["Level", "make_levels"],
    "plan": ["Phase", "Plan", "control", "describe", "scratch", "vcycle"],
    "schedule": ["Schedule"],
    "module": ["ImageClassification", "LevelModule"],
    "language": ["CausalLM", "MaskedLM"],
    "loop": ["VCycleLoop"],
    "sharding": ["FSDP2"],
    "ledger": ["Ledger"],
    "errors": ["ConfigError"],
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"mlframe.{module}"), name)
    raise AttributeError(f"module 'mlframe' has no attribute {name!r}; it has {', '.join(__all__)}")

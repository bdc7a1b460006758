"""One colour a method, in all figures: pairs for light and dark ground that colour-blind readers tell apart."""

from __future__ import annotations

PAIRS = (
    ("#0b6bb8", "#5db3f0"), ("#d1540a", "#f58f4e"), ("#0e8a68", "#46c9a0"), ("#a8488f", "#e08cc8"),
    ("#8a6d00", "#e0bc45"), ("#4f5bd5", "#98a2ff"), ("#b3263e", "#f27c8f"), ("#5b6470", "#a9b2be"),
)  # fmt: skip
SYMBOLS = (("circle", "o"), ("square", "s"), ("diamond", "D"), ("triangle-up", "^"))
"""Plotly's and matplotlib's; of the methods after the eighth, so that a colour that comes again is told apart."""


def pair(method: int) -> tuple[str, str]:
    return PAIRS[method % len(PAIRS)]


def symbol(method: int) -> tuple[str, str]:
    return SYMBOLS[method // len(PAIRS) % len(SYMBOLS)]

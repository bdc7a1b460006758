"""Random lines of words that follow one another by rules, so that there is something to learn."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = [
    f"{start}{end}" for start in ("ba", "do", "ke", "li", "mu", "ra", "so", "ti") for end in ("n", "m", "rt", "sk")
]


def write_text(folder: Path, lines: int = 2000, seed: int = 0) -> Path:
    """`folder`/lines.jsonl: documents of 8 to 24 words; a word is mostly followed by one of three others."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for _ in range(lines):
        word, line = draw.randrange(len(WORDS)), []
        for _ in range(draw.randint(8, 24)):
            line.append(WORDS[word])
            word = (3 * word + draw.randrange(3)) % len(WORDS) if draw.random() < 0.9 else draw.randrange(len(WORDS))
        texts.append(f'{{"text": "{" ".join(line)}."}}\n')
    path = folder / "lines.jsonl"
    path.write_text("".join(texts))
    return path

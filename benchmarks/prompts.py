"""Prompts for timing: pieces of a real text where the answer matters, made-up token ids where it does not."""

from __future__ import annotations

from pathlib import Path

from runtime.torch_tp.tokenizer import load_tokenizer

TEXT = Path(__file__).resolve().parents[1] / "docs" / "simulator.md"


class TextPieces:
    """Pieces of a real text, no two alike, so that no prefix is found in a cache."""

    def __init__(self, folder: Path) -> None:
        self._ids = load_tokenizer(folder).encode(TEXT.read_text(encoding="utf-8"))
        self._place = 0

    def take(self, count: int, length: int) -> list[list[int]]:
        taken = []
        for _ in range(count):
            place = self._place % (len(self._ids) - length)
            taken.append(self._ids[place : place + length])
            self._place += 61 + length // 3
        return taken


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Made-up prompts: alike in every run, no two with the same beginning."""
    return [[(7 + 31 * number + 17 * place * (number + 3)) % vocabulary for place in range(length)] for number in range(count)]

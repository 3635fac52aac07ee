"""One step laid out for the model: rows sorted by plan, their rotary rows, and which of them want logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from runtime.torch_tp.kv_store import Span
from runtime.torch_tp.rope import RopeTable


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a step: new `tokens` at positions start, start + 1, … of `slot`, under its plan's head ranges."""

    slot: int
    plan_version: int
    tokens: Tensor | Sequence[int]
    start: int
    wants_logits: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a step that run under one plan; `spans` count rows from the part's first."""

    version: int
    rows: slice
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """tokens: int64 (rows,). cos, sin: float32 (rows, head_dim). logit_rows: in the order of the slices that want logits."""

    tokens: Tensor
    parts: tuple[Part, ...]
    cos: Tensor
    sin: Tensor
    logit_rows: list[int]

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]


def lay_out(slices: Sequence[Slice], versions: Iterable[int], rope: RopeTable, vocabulary: int, all_logits: bool) -> StepLayout:
    """Raises ValueError for no slices, a slice without tokens, with a token id beyond `vocabulary`, or under a plan not in `versions`."""
    if not slices:
        raise ValueError("forward got no slices; give at least one")
    tokens: list[int] = []
    tables: list[tuple[Tensor, Tensor]] = []
    parts: list[Part] = []
    wanted: dict[int, list[int]] = {}
    for version in versions:
        first, spans = len(tokens), []
        for index, piece in enumerate(slices):
            if piece.plan_version != version:
                continue
            ids = piece.tokens.tolist() if isinstance(piece.tokens, Tensor) else list(piece.tokens)
            if not ids:
                raise ValueError(f"slot {piece.slot}: a slice without tokens; give at least one")
            end = len(tokens) + len(ids)
            spans.append(Span(piece.slot, len(tokens) - first, len(ids), piece.start))
            tables.append(rope.rows(piece.start, piece.start + len(ids)))
            if piece.wants_logits:
                wanted[index] = list(range(len(tokens), end)) if all_logits else [end - 1]
            tokens += ids
        if spans:
            parts.append(Part(version, slice(first, len(tokens)), tuple(spans)))
    if sum(len(part.spans) for part in parts) != len(slices):
        raise ValueError(f"plan versions {sorted({s.plan_version for s in slices} - set(versions))} are not live; live: {list(versions)}")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"token id {token} is outside the model's vocabulary of {vocabulary}")
    cos, sin = (torch.cat(column) if len(tables) > 1 else column[0] for column in zip(*tables, strict=True))
    return StepLayout(torch.tensor(tokens), tuple(parts), cos, sin, [row for index in sorted(wanted) for row in wanted[index]])


def halves(slices: Sequence[Slice]) -> tuple[Sequence[Slice], Sequence[Slice]]:
    """At least two slices cut in two runs of nearly equal tokens; alike on every rank, since it looks at token counts only."""
    ends = list(accumulate(len(piece.tokens) for piece in slices))
    cut = 1 + min(range(len(slices) - 1), key=lambda index: abs(2 * ends[index] - ends[-1]))
    return slices[:cut], slices[cut:]

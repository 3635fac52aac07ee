"""What the model and the re-split ask of a KV store; slots on CPUs (`kv_slots`) and pages on GPUs (`kv_pages`) answer alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.torch_tp.shares import Interval


class KvFull(RuntimeError):
    """No room for the tokens asked for; release or preempt a slot, then ask again."""


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one slot in a step: rows [row, row + tokens) of the part's tensors, at positions [start, start + tokens)."""

    slot: int
    row: int
    tokens: int
    start: int


class KvStore(Protocol):
    """Keys and values per slot, for the KV heads this rank holds under the slot's plan. Tokens count from 0."""

    def add_plan(self, version: int, kv: Sequence[Interval]) -> None:
        """Make slots of this plan possible; `kv` are this rank's KV heads per layer."""

    def drop_plan(self, version: int) -> None:
        """Forget a plan. Raises ValueError while a slot uses it."""

    def allocate(self, slot: int, plan_version: int, tokens_max: int) -> None:
        """Reserve room. Raises KvFull when there is none, ValueError for a slot in use or an unknown plan."""

    def grow(self, slot: int, tokens_max: int) -> None:
        """Make room for `tokens_max` tokens in all; what the slot holds stays. Raises KvFull when there is none. Never shrinks."""

    def release(self, slot: int) -> None:
        """Free a slot at once; a free slot stays free."""

    def length(self, slot: int) -> int:
        """Tokens whose KV is held."""

    def truncate(self, slot: int, tokens: int) -> None:
        """Forget all but the first `tokens`."""

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Make the first `tokens` of `target` those of `source`, for the heads both hold; earlier content of `target` is lost."""

    def move(self, source: int, target: int) -> None:
        """Rename `source` to `target` (released first): the last act of a re-split that built the new KV beside the old."""

    def export(self, slot: int, layer: int, heads: Interval, start: int, end: int) -> Tensor:
        """A copy of keys and values, shape (2, heads, tokens, head_dim), of heads (in the model's numbering) and tokens [start, end)."""

    def import_(self, slot: int, layer: int, heads: Interval, start: int, values: Tensor) -> None:
        """Store what `export` gave, from token `start` on; the length grows to its end. Import every layer before the next step."""

    def begin(self, spans: Sequence[Span]) -> None:
        """Check and note the spans of a step, once for all layers. Raises ValueError for a gap or more tokens than reserved."""

    def attend(self, layer: int, spans: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Store the new keys and values and attend causally.

        query, out: (tokens, kv heads, group, head_dim), the queries of one KV head side by side; key, value:
        (tokens, kv heads, head_dim).
        """

    def commit(self, spans: Sequence[Span]) -> None:
        """The step is through: lengths grow."""

"""What the model and the re-split ask of a KV store; slots on CPUs (`kv_slots`) and pages on GPUs (`kv_pages`) answer alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from runtime.torch_tp.shares import Interval

Storage = TypeVar("Storage")


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

    def heads(self, slot: int) -> tuple[Interval, ...]:
        """KV heads per layer that are held of it."""

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


@dataclass(slots=True)
class SlotEntry(Generic[Storage]):
    """What is known of a slot: `heads` are this rank's KV heads per layer under the slot's plan."""

    plan_version: int
    heads: tuple[Interval, ...]
    tokens_max: int
    storage: Storage
    length: int = 0

    def own(self, slot: int, layer: int, heads: Interval) -> Interval:
        """`heads` counted from this rank's first. Raises ValueError for heads that it does not hold."""
        held = self.heads[layer]
        if not held.covers(heads):
            raise ValueError(
                f"slot {slot}, layer {layer}: holds KV heads [{held.start}, {held.end}), asked for [{heads.start}, {heads.end})"
            )
        return Interval(heads.start - held.start, heads.end - held.start) if heads.width else Interval(0, 0)


class SlotBook(Generic[Storage]):
    """The part of a KV store that does not depend on how keys lie in memory: plans, slots, lengths, and the refusals.

    Room is counted in tokens, whatever heads a slot holds, so that every rank admits and refuses alike.
    """

    def __init__(self, tokens_max: int, slots_max: int) -> None:
        self._tokens_max, self._slots_max = tokens_max, slots_max
        self._plans: dict[int, tuple[Interval, ...]] = {}
        self._slots: dict[int, SlotEntry[Storage]] = {}

    @property
    def tokens_free(self) -> int:
        """Tokens that can still be reserved."""
        return self._tokens_max - sum(entry.tokens_max for entry in self._slots.values())

    def add_plan(self, version: int, kv: Sequence[Interval]) -> None:
        self._plans[version] = tuple(kv)

    def drop_plan(self, version: int) -> None:
        users = [number for number, entry in self._slots.items() if entry.plan_version == version]
        if users:
            raise ValueError(f"plan version {version} is used by slots {users}; release or move them first")
        self._plans.pop(version, None)

    def length(self, slot: int) -> int:
        return self._entry(slot).length

    def heads(self, slot: int) -> tuple[Interval, ...]:
        return self._entry(slot).heads

    def plan_version(self, slot: int) -> int:
        return self._entry(slot).plan_version

    def truncate(self, slot: int, tokens: int) -> None:
        entry = self._entry(slot)
        if not 0 <= tokens <= entry.length:
            raise ValueError(f"slot {slot} holds {entry.length} tokens, cannot be truncated to {tokens}")
        entry.length = tokens

    def begin(self, spans: Sequence[Span]) -> None:
        for span in spans:
            entry, end = self._entry(span.slot), span.start + span.tokens
            if span.start > entry.length or end > entry.tokens_max:
                raise ValueError(f"slot {span.slot} holds {entry.length} tokens of at most {entry.tokens_max}; got [{span.start}, {end})")

    def commit(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._slots[span.slot].length = span.start + span.tokens

    def _check_free(self, slot: int, plan_version: int, tokens_max: int) -> tuple[Interval, ...]:
        """KV heads per layer for a new slot. Raises as `KvStore.allocate` says."""
        if slot in self._slots:
            raise ValueError(f"slot {slot} is in use; release it first")
        if plan_version not in self._plans:
            raise ValueError(f"plan version {plan_version} is not live; live: {sorted(self._plans)}")
        if tokens_max < 1:
            raise ValueError(f"slot {slot}: tokens_max={tokens_max} must be at least 1")
        if len(self._slots) >= self._slots_max:
            raise KvFull(f"no room for slot {slot}: all {self._slots_max} slots are in use")
        self._check_tokens(slot, tokens_max)
        return self._plans[plan_version]

    def _check_tokens(self, slot: int, more: int) -> None:
        if more > self.tokens_free:
            raise KvFull(f"no room for {more} tokens (more) of slot {slot}: {self.tokens_free} are free")

    def _entry(self, slot: int) -> SlotEntry[Storage]:
        entry = self._slots.get(slot)
        if entry is None:
            raise ValueError(f"slot {slot} is not allocated; allocated: {sorted(self._slots)}")
        return entry

    def _prefix_pair(self, source: int, target: int, tokens: int) -> tuple[SlotEntry[Storage], SlotEntry[Storage]]:
        old, new = self._entry(source), self._entry(target)
        if not 0 <= tokens <= min(old.length, new.tokens_max):
            raise ValueError(f"cannot copy {tokens} tokens: slot {source} holds {old.length}, slot {target} has room for {new.tokens_max}")
        return old, new

    def _check_held(self, slot: int, start: int, end: int) -> SlotEntry[Storage]:
        entry = self._entry(slot)
        if not 0 <= start <= end <= entry.length:
            raise ValueError(f"slot {slot} holds {entry.length} tokens, asked for [{start}, {end})")
        return entry

    def _check_room(self, slot: int, start: int, end: int) -> SlotEntry[Storage]:
        entry = self._entry(slot)
        if not 0 <= start <= end <= entry.tokens_max:
            raise ValueError(f"slot {slot} has room for {entry.tokens_max} tokens, got [{start}, {end})")
        return entry

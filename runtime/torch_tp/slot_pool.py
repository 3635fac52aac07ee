"""The ranks' KV slots as they will be once the next command is carried out, and what that command must order to make them so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from runtime.torch_tp.kv_ledger import KvLedger
from runtime.torch_tp.prefix_index import PrefixIndex
from runtime.torch_tp.requests import SamplingSettings
from runtime.torch_tp.steps import NewSlot, PrefixCopy, SlotGrowth


@dataclass(frozen=True, slots=True)
class Taken:
    """A slot for a request. held: of its ids, whose KV it starts with; keeps: so many of these are in the slot itself, not copied."""

    slot: int
    held: int = 0
    keeps: int = 0


class SlotOrders(TypedDict):
    """Fields of StepCommand."""

    new_slots: tuple[NewSlot, ...]
    releases: tuple[int, ...]
    growths: tuple[SlotGrowth, ...]
    prefix_copies: tuple[PrefixCopy, ...]


class SlotPool:
    """Slots are running or retained: KV of a finished request, which another one that begins alike may use until the room is needed.

    ledger: for views of the account; all changes go through here.
    """

    def __init__(self, slots_max: int, kv_tokens_max: int, block_tokens: int) -> None:
        self.ledger = KvLedger(slots_max, kv_tokens_max)
        self._index = PrefixIndex(block_tokens)
        self._versions: dict[int, int] = {}  # plan version of every slot in use
        self._expecting: set[int] = set()  # retained slots whose KV is still on its way
        self._clear_orders()

    # --- orders of the next command -----------------------------------------------------------------------------------------

    def _clear_orders(self) -> None:
        self._releases: list[int] = []
        self._new_slots: dict[int, NewSlot] = {}
        self._growths: dict[int, int] = {}
        self._copies: list[PrefixCopy] = []

    @property
    def has_orders(self) -> bool:
        return bool(self._releases or self._new_slots)

    @property
    def pinned(self) -> frozenset[int]:
        """Slots that must live: the next command copies from them, or something is on its way there."""
        return frozenset(copy.source for copy in self._copies) | self._expecting

    def take_orders(self) -> SlotOrders:
        """They are part of a command now."""
        orders = SlotOrders(
            new_slots=tuple(self._new_slots.values()),
            releases=tuple(self._releases),
            growths=tuple(SlotGrowth(slot, tokens) for slot, tokens in self._growths.items()),
            prefix_copies=tuple(self._copies),
        )
        self._clear_orders()
        return orders

    # --- room ---------------------------------------------------------------------------------------------------------------

    def could_fit(self, tokens: int) -> bool:
        """Whether there would be room for so many tokens more once nothing were retained."""
        return self.ledger.could_fit(tokens, needs_slot=False, pinned=self.pinned)

    def _make_room(self, tokens: int, *, needs_slot: bool, kept: int | None = None) -> bool:
        """Evict retained slots but `kept`, least recently used first, until it fits; nothing is evicted where that would not be enough."""
        pinned = self.pinned if kept is None else self.pinned | {kept}
        if not self.ledger.could_fit(tokens, needs_slot, pinned):
            return False
        while not self.ledger.fits(tokens, needs_slot):
            self.evict(next(slot for slot in self.ledger.retained if slot not in pinned))
        return True

    # --- slots come and go --------------------------------------------------------------------------------------------------

    def take(self, ids: Sequence[int], version: int, tokens: int) -> Taken | None:
        """A slot with room for `tokens` under a plan, with as much KV of `ids` as some slot holds; None where there is no room.

        A retained slot that offers little beyond what is common is taken over, any other copied, if there is room beside it.
        """
        hit = self._index.longest(ids, version)
        taken = None if hit is None else self._take_beside(*hit, tokens)
        if taken is None and self._make_room(tokens, needs_slot=True):
            return Taken(self.ledger.take(tokens))
        return taken

    def _take_beside(self, source: int, held: int, tokens: int) -> Taken | None:
        is_retained = not self.ledger.is_running(source)
        offers_more = not is_retained or self._index.computed(source) > held * 4 // 3
        if offers_more and self._make_room(tokens, needs_slot=True, kept=source):
            self.ledger.touch(source)
            slot = self.ledger.take(tokens)
            self._copies.append(PrefixCopy(source, slot, held))
            return Taken(slot, held)
        more = max(0, tokens - self.ledger.reserved(source))
        if is_retained and source not in self.pinned and self._make_room(more, needs_slot=False, kept=source):
            self.ledger.take_over(source, tokens)
            self._index.drop(source)
            return Taken(source, held, keeps=held)
        return None

    def fill(self, new: NewSlot) -> None:
        """A slot that was taken gets its request."""
        self._versions[new.slot] = new.plan_version
        self._new_slots[new.slot] = new

    def grow(self, slot: int, tokens: int) -> bool:
        """Room for `tokens` in all in a running slot; False where retained slots do not give it."""
        if not self._make_room(tokens - self.ledger.reserved(slot), needs_slot=False, kept=slot):
            return False
        self.ledger.grow(slot, tokens)
        self._growths[slot] = self.ledger.reserved(slot)
        return True

    def holds(self, slot: int, ids: Sequence[int], computed: int) -> None:
        """The slot has the KV of the first `computed` of `ids`, a live list."""
        self._index.put(slot, self._versions[slot], ids, computed)

    def retain(self, slot: int, ids: Sequence[int], computed: int) -> None:
        """Its request is finished; the KV stays until the room is needed."""
        self.holds(slot, ids, computed)
        self.ledger.retain(slot)

    # --- KV from elsewhere --------------------------------------------------------------------------------------------------

    def expect(self, ids: Sequence[int], version: int, tokens: int) -> int | None:
        """A retained slot, with room for `tokens` under a plan, that KV which is not computed here goes to: a new one, or the one that
        has all of `ids` from there already. None where there is no such slot or no room. It stays until `arrived` or `lost`."""
        if not ids:
            if not self._make_room(tokens, needs_slot=True):
                return None
            slot = self.ledger.take(tokens)
            self.ledger.retain(slot)
            self.fill(NewSlot(slot, "", version, tokens, 0, SamplingSettings()))
        else:
            found = self._index.whole(ids, version)
            if found is None or found in self.pinned or self.ledger.is_running(found) or self.ledger.reserved(found) < tokens:
                return None
            slot = found
            self._index.drop(slot)
        self._expecting.add(slot)
        return slot

    def is_expected(self, slot: int) -> bool:
        return slot in self._expecting

    def is_ordered(self, slot: int) -> bool:
        """Whether the ranks have not been told of it yet."""
        return slot in self._new_slots

    def arrived(self, slot: int, ids: Sequence[int]) -> bool:
        """An expected slot has the KV of `ids`; no ids: nothing came, it is freed. False where it is expected no more."""
        if slot not in self._expecting:
            return False
        self._expecting.discard(slot)
        if ids:
            self.holds(slot, ids, len(ids))
            self.ledger.touch(slot)
        else:
            self.evict(slot)
        return True

    def evict(self, slot: int) -> None:
        """Free a slot here and, with the next command, at the ranks."""
        self._free(slot)
        new = self._new_slots.pop(slot, None)
        self._growths.pop(slot, None)
        self._copies = [copy for copy in self._copies if copy.target != slot]
        if new is None or new.keeps_tokens:  # the ranks have it
            self._releases.append(slot)

    def drop_retained(self) -> None:
        """Evict all that is kept for reuse."""
        for slot in self.ledger.retained:
            self.evict(slot)

    def lost(self, slots: Iterable[int] | None) -> list[int]:
        """The ranks do not hold these slots any more (None: any, nor know of any order); returns those that were in use, ascending."""
        gone = set(self._versions) if slots is None else set(slots)
        if slots is None:
            self._clear_orders()
        self._releases = [slot for slot in self._releases if slot not in gone]
        lost = sorted(gone & set(self._versions))
        for slot in lost:
            self._free(slot)
            self._new_slots.pop(slot, None)
        return lost

    def _free(self, slot: int) -> None:
        self._index.drop(slot)
        self.ledger.release(slot)
        del self._versions[slot]
        self._expecting.discard(slot)

    # --- plans --------------------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> set[int]:
        """Plan versions that slots lie by."""
        return set(self._versions.values())

    def version_of(self, slot: int) -> int:
        return self._versions[slot]

    def of_plan(self, version: int) -> tuple[int, ...]:
        """Slots that lie by this plan, ascending."""
        return tuple(sorted(slot for slot, held in self._versions.items() if held == version))

    def moved(self, slots: Iterable[int], version: int) -> list[int]:
        """The KV of these slots lies by another plan from now on; returns those still in use."""
        moved = [slot for slot in slots if slot in self._versions]
        for slot in moved:
            self._versions[slot] = version
            self._index.rebind(slot, version)
        return moved

    def check(self, running: Mapping[int, object]) -> None:
        """Raise AssertionError unless slots and tokens are conserved; running: slots of running requests."""
        self.ledger.check()
        assert self.ledger.running == set(running), "running slots and running requests differ"
        assert set(self._versions) == set(running) | set(self.ledger.retained), "a slot without a plan version"

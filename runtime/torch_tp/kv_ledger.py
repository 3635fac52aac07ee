"""The controller's account of KV: which slots are taken, how many tokens each has room for, which finished ones are kept for reuse."""

from __future__ import annotations


class KvLedger:
    """Slots 0 to slots_max - 1 over a pool of tokens_max. A slot is free, running or retained (KV of a finished request, evictable).

    The ranks hold what this account says once they have carried out the next StepCommand.
    """

    def __init__(self, slots_max: int, tokens_max: int) -> None:
        if slots_max < 1 or tokens_max < 0:
            raise ValueError(f"KvLedger: slots_max={slots_max} must be at least 1 and tokens_max={tokens_max} at least 0")
        self.slots_max = slots_max
        self.tokens_max = tokens_max
        self._free = list(range(slots_max - 1, -1, -1))
        self._running: dict[int, int] = {}  # slot -> tokens reserved
        self._retained: dict[int, int] = {}  # the same, least recently used first
        self.tokens_free = tokens_max

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._running)

    def is_running(self, slot: int) -> bool:
        return slot in self._running

    @property
    def retained(self) -> tuple[int, ...]:
        """Least recently used first."""
        return tuple(self._retained)

    @property
    def tokens_running(self) -> int:
        return sum(self._running.values())

    @property
    def tokens_retained(self) -> int:
        return sum(self._retained.values())

    def reserved(self, slot: int) -> int:
        """Tokens that `slot` has room for; 0 where it is free."""
        return self._running.get(slot, self._retained.get(slot, 0))

    def could_fit(self, tokens: int, needs_slot: bool, pinned: frozenset[int] = frozenset()) -> bool:
        """Whether there would be room once every retained slot outside `pinned` were evicted."""
        evictable = [reserved for slot, reserved in self._retained.items() if slot not in pinned]
        return self.tokens_free + sum(evictable) >= tokens and (not needs_slot or bool(self._free or evictable))

    def fits(self, tokens: int, needs_slot: bool) -> bool:
        return self.tokens_free >= tokens and (not needs_slot or bool(self._free))

    def take(self, tokens: int) -> int:
        """A free slot with room for `tokens`; the caller has seen that it fits."""
        slot = self._free.pop()
        self._running[slot] = tokens
        self.tokens_free -= tokens
        return slot

    def grow(self, slot: int, tokens: int) -> None:
        """Room for `tokens` in all in a running slot; never less than before."""
        more = max(0, tokens - self._running[slot])
        self._running[slot] += more
        self.tokens_free -= more

    def retain(self, slot: int) -> None:
        """A running slot is finished with, its KV stays until the room is needed."""
        self._retained[slot] = self._running.pop(slot)

    def touch(self, slot: int) -> None:
        """A retained slot was of use again."""
        if slot in self._retained:
            self._retained[slot] = self._retained.pop(slot)

    def take_over(self, slot: int, tokens: int) -> None:
        """A retained slot runs again, with room for at least `tokens`; the caller has seen that the difference fits."""
        self._running[slot] = self._retained.pop(slot)
        self.grow(slot, tokens)

    def release(self, slot: int) -> None:
        """The slot is free again, whether it was running or retained."""
        held = self._running if slot in self._running else self._retained
        self.tokens_free += held.pop(slot)
        self._free.append(slot)

    def check(self) -> None:
        """Raise AssertionError unless slots and tokens are conserved."""
        slots = [*self._free, *self._running, *self._retained]
        assert sorted(slots) == list(range(self.slots_max)), f"slots lost or doubled: {sorted(slots)}"
        used = sum(self._running.values()) + sum(self._retained.values())
        assert self.tokens_free + used == self.tokens_max, f"{self.tokens_free} free + {used} used KV tokens are not {self.tokens_max}"

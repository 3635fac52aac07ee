"""Which slots hold the KV of which token prefixes. Knows ids and slots; leaves memory and eviction to the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Held:
    """ids: live list of the slot's tokens; computed: how many of them its KV covers; keys: of its full blocks, first to last."""

    plan_version: int
    ids: Sequence[int]
    computed: int = 0
    keys: list[int] = field(default_factory=list)


class PrefixIndex:
    """Token prefixes in blocks, each block's key made of the key before it and its own ids.

    Finding costs one pass over the prompt. Keys are hashes: what is found is compared id by id before it is believed, and then
    followed beyond the last full block. Only slots of one plan version can give their KV to each other: their head ranges agree.
    """

    def __init__(self, block_tokens: int = 16) -> None:
        if block_tokens < 1:
            raise ValueError(f"PrefixIndex: block_tokens={block_tokens} must be at least 1")
        self._block_tokens = block_tokens
        self._slots_of: dict[int, dict[int, None]] = {}  # key -> slots in order of insertion
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, slot: int, plan_version: int, ids: Sequence[int], computed: int) -> None:
        """`slot` holds the KV of the first `computed` of `ids`. Called again as it grows; `ids` may only be extended meanwhile."""
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = _Held(plan_version, ids)
        held.computed = computed
        while (len(held.keys) + 1) * self._block_tokens <= computed:
            key = self._next_key(held.keys[-1] if held.keys else plan_version, ids, len(held.keys))
            held.keys.append(key)
            self._slots_of.setdefault(key, {})[slot] = None

    def drop(self, slot: int) -> None:
        """The slot's KV is gone or no longer to be relied on; no-op where nothing was put."""
        held = self._held.pop(slot, None)
        for key in held.keys if held else ():
            slots = self._slots_of[key]
            slots.pop(slot, None)
            if not slots:
                del self._slots_of[key]

    def rebind(self, slot: int, plan_version: int) -> None:
        """The slot's KV now lies by another plan."""
        held = self._held.get(slot)
        if held is not None:
            self.drop(slot)
            self.put(slot, plan_version, held.ids, held.computed)

    def computed(self, slot: int) -> int:
        """Tokens whose KV `slot` holds; 0 where nothing was put."""
        held = self._held.get(slot)
        return held.computed if held else 0

    def whole(self, ids: Sequence[int], plan_version: int) -> int | None:
        """A slot that holds the KV of exactly `ids`; None where none does."""
        for slot, held in self._held.items():
            if held.computed == len(ids) and held.plan_version == plan_version and list(held.ids[: len(ids)]) == list(ids):
                return slot
        return None

    def longest(self, ids: Sequence[int], plan_version: int) -> tuple[int, int] | None:
        """(slot, tokens) of the longest prefix of `ids` held, at least one block, at most all but the last token; else None."""
        key, found = plan_version, None
        for block in range((len(ids) - 1) // self._block_tokens):
            key = self._next_key(key, ids, block)
            slots = self._slots_of.get(key)
            if not slots:
                break
            found = next(reversed(slots))
        if found is None:
            return None
        held = self._held[found]
        limit = min(held.computed, len(ids) - 1)
        same = 0
        while same < limit and held.ids[same] == ids[same]:
            same += 1
        return (found, same) if same >= self._block_tokens and held.plan_version == plan_version else None

    def _next_key(self, before: int, ids: Sequence[int], block: int) -> int:
        return hash((before, *ids[block * self._block_tokens : (block + 1) * self._block_tokens]))

"""Which prompts' beginnings each group has computed lately: what its prefix cache is thought to hold, from what we sent there ourselves.

An estimate: the group may have given the room to others meanwhile. Bounded by the group's KV pool, oldest use first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from envs.domain.snapshot import BoolArray, IntArray

BLOCK_TOKENS = 64
BLOCKS_MAX = 256  # of one prompt: what lies beyond costs more to look at than it tells


def block_keys(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """A key per full leading block; equal keys mean equal beginnings (but for collisions of 64-bit hashes)."""
    keys, chain = [], 0
    for begin in range(0, min(len(prompt_ids) // BLOCK_TOKENS, BLOCKS_MAX) * BLOCK_TOKENS, BLOCK_TOKENS):
        chain = hash((chain, tuple(prompt_ids[begin : begin + BLOCK_TOKENS])))
        keys.append(chain)
    return tuple(keys)


class PrefixMemory:
    """keeps (groups,): which groups keep prefixes at all; the others never hit."""

    def __init__(self, keeps: BoolArray) -> None:
        self._seen: list[OrderedDict[int, None] | None] = [OrderedDict() if kept else None for kept in keeps]

    def hits(self, keys: Sequence[int]) -> IntArray:
        """Prompt tokens that each group is thought to hold, shape (groups,)."""
        found = np.zeros(len(self._seen), np.int64)
        if not keys:
            return found
        for g, seen in enumerate(self._seen):
            if seen:
                count = 0
                while count < len(keys) and keys[count] in seen:
                    count += 1
                found[g] = count * BLOCK_TOKENS
        return found

    def remember(self, g: int, keys: Sequence[int], kv_tokens: int) -> None:
        """Group `g` has computed these blocks; its pool holds `kv_tokens`."""
        seen = self._seen[g]
        if seen is None:
            return
        for key in reversed(keys):  # the beginning is the last to be forgotten
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > kv_tokens // BLOCK_TOKENS:
            seen.popitem(last=False)

    def forget(self, g: int) -> None:
        """Another process stands behind group `g`."""
        seen = self._seen[g]
        if seen is not None:
            seen.clear()

"""Prefix cache of one group: which blocks are present, who refers to them, and the least recently used idle one.

Idle blocks (no reference) form a ring through a sentinel row, oldest first, so that every operation is O(1).
A block that is absent has -1 references; one that is in use is in no ring.
"""

from __future__ import annotations

from envs.group_kernel.layout import GI_BLOCK_TOKENS, GI_CACHE_BLOCK_TOKENS, GI_CACHE_BLOCKS, GI_CACHE_IDLE
from envs.perf_model.compiled import inner_kernel, kernel

_PREVIOUS, _NEXT, _REFERENCES = 0, 1, 2


@inner_kernel
def matched_blocks(state, g, request):
    """Leading full prefix blocks of `request` that group `g` holds."""
    count = 0
    for i in range(state.prefix_offset[request], state.prefix_offset[request + 1]):
        if state.cache_links[g, state.prefix_ids[i], _REFERENCES] < 0:
            break
        count += 1
    return count


@inner_kernel
def blocks_per_entry(state, g):
    """KV blocks that one cached prefix block occupies."""
    return -(-state.group_int[g, GI_CACHE_BLOCK_TOKENS] // state.group_int[g, GI_BLOCK_TOKENS])


@inner_kernel
def _unlink(links, block):
    before = links[block, _PREVIOUS]
    after = links[block, _NEXT]
    links[before, _NEXT] = after
    links[after, _PREVIOUS] = before


@inner_kernel
def take_reference(state, g, block):
    """Refer to a present block; an idle one leaves the ring."""
    links = state.cache_links[g]
    if links[block, _REFERENCES] == 0:
        _unlink(links, block)
        state.group_int[g, GI_CACHE_IDLE] -= 1
    links[block, _REFERENCES] += 1


@inner_kernel
def drop_reference(state, g, block):
    """Stop referring; the last one makes the block idle, as the most recently used."""
    links = state.cache_links[g]
    links[block, _REFERENCES] -= 1
    if links[block, _REFERENCES] == 0:
        sentinel = links.shape[0] - 1
        last = links[sentinel, _PREVIOUS]
        links[last, _NEXT] = block
        links[block, _PREVIOUS] = last
        links[block, _NEXT] = sentinel
        links[sentinel, _PREVIOUS] = block
        state.group_int[g, GI_CACHE_IDLE] += 1


@inner_kernel
def evict_oldest(state, g):
    """Forget the least recently used idle block; the caller has checked that there is one."""
    links = state.cache_links[g]
    block = links[links.shape[0] - 1, _NEXT]
    _unlink(links, block)
    links[block, _REFERENCES] = -1
    state.group_int[g, GI_CACHE_IDLE] -= 1
    state.group_int[g, GI_CACHE_BLOCKS] -= 1


@kernel
def flush_idle(state, g):
    """Forget every idle block (a re-split moved the heads they belong to)."""
    while state.group_int[g, GI_CACHE_IDLE] > 0:
        evict_oldest(state, g)

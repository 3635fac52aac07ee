"""KV blocks that decoding sequences will want: how many for how many steps, and for how many steps there are enough."""

from __future__ import annotations

from envs.group_kernel import kv_pool
from envs.group_kernel import layout as L
from envs.perf_model.compiled import ONE, ZERO, inner_kernel


@inner_kernel
def blocks_wanted(row, tokens, block_tokens, entry_blocks):
    """Private blocks that a slot needs for `tokens` tokens, beyond those it shares with the cache and has."""
    return -(-tokens // block_tokens) - row[L.SI_CACHE_REFS] * entry_blocks - row[L.SI_BLOCKS]


@inner_kernel
def blocks_to_grow(state, g, steps):
    """Blocks that decoding `steps` more steps would take, by plan slot."""
    grow0 = grow1 = 0
    ints = state.group_int[g]
    block_tokens = ints[L.GI_BLOCK_TOKENS]
    entry_blocks = -(-ints[L.GI_CACHE_BLOCK_TOKENS] // block_tokens)
    running = state.running[g]
    slots = state.slot_int[g]
    for place in range(ints[L.GI_RUNNING]):
        row = slots[running[place]]
        if row[L.SI_PHASE] == L.PHASE_DECODE:
            wanted = blocks_wanted(row, row[L.SI_DONE] + steps, block_tokens, entry_blocks)
            if wanted > 0:
                if row[L.SI_PLAN] == 0:
                    grow0 += wanted
                else:
                    grow1 += wanted
    return grow0, grow1


@inner_kernel
def evict_for_growth(state, g, steps):
    """Make room for `steps` more steps by evicting idle cache blocks."""
    grow0, grow1 = blocks_to_grow(state, g, steps)
    if grow0 > 0:
        kv_pool.room_for(state, g, ZERO, grow0 + grow1)
    if grow1 > 0:
        kv_pool.room_for(state, g, ONE, grow0 + grow1)


@inner_kernel
def kv_allows(state, g, steps):
    """Can every decoding sequence take `steps` more steps? Growth of both plans is charged at the tighter plan's free blocks."""
    grow0, grow1 = blocks_to_grow(state, g, steps)
    if grow0 > 0 and grow0 + grow1 > kv_pool.reachable_blocks(state, g, ZERO):
        return False
    return not (grow1 > 0 and grow0 + grow1 > kv_pool.reachable_blocks(state, g, ONE))


@inner_kernel
def steps_within_kv(state, g, steps):
    """Largest number of decode steps, at most `steps`, for which KV suffices (0 when not even one fits)."""
    # at most one block more per sequence and block length: most jumps need no exact count
    rough = state.group_int[g, L.GI_RUNNING] * (steps // state.group_int[g, L.GI_BLOCK_TOKENS] + 1)
    plan = state.group_int[g, L.GI_PLAN]
    other_used = state.group_int[g, L.GI_USED_BLOCKS0 + 1 - plan]
    if (other_used == 0 and rough <= kv_pool.free_blocks(state, g, plan)) or kv_allows(state, g, steps):
        return steps
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        if kv_allows(state, g, middle):
            low = middle
        else:
            high = middle
    return low

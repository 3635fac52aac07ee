"""KV accounting of one group: per-rank bytes, blocks by plan slot, and room made by evicting idle cache blocks."""

from __future__ import annotations

from envs.group_kernel import prefix_cache
from envs.group_kernel.layout import GI_BLOCK_TOKENS, GI_CACHE_BLOCKS, GI_CACHE_IDLE, GI_PLAN, GI_USED_BLOCKS0
from envs.perf_model.compiled import inner_kernel, kernel

UNBOUNDED_BLOCKS = 1 << 40


@inner_kernel
def blocks_for(state, g, tokens):
    """KV blocks that hold `tokens` tokens."""
    return -(-tokens // state.group_int[g, GI_BLOCK_TOKENS])


@inner_kernel
def free_blocks(state, g, plan):
    """Blocks still free under plan slot `plan`: the tightest rank decides; never negative."""
    used0 = state.group_int[g, GI_USED_BLOCKS0]
    used1 = state.group_int[g, GI_USED_BLOCKS0 + 1]
    cached = state.group_int[g, GI_CACHE_BLOCKS] * prefix_cache.blocks_per_entry(state, g)
    current = state.group_int[g, GI_PLAN]
    free = UNBOUNDED_BLOCKS
    for r in range(state.kv_bytes.shape[1]):
        size = state.kv_block_bytes[g, plan, r]
        if size > 0.0:
            used = used0 * state.kv_block_bytes[g, 0, r] + used1 * state.kv_block_bytes[g, 1, r]
            used += cached * state.kv_block_bytes[g, current, r]
            free = min(free, int((state.kv_bytes[g, r] - used + 1e-6 * size) / size))
    return max(0, free)


@kernel
def total_blocks(state, g, plan):
    """Blocks of an empty pool under plan slot `plan`."""
    total = UNBOUNDED_BLOCKS
    for r in range(state.kv_bytes.shape[1]):
        size = state.kv_block_bytes[g, plan, r]
        if size > 0.0:
            total = min(total, int((state.kv_bytes[g, r] + 1e-6 * size) / size))
    return max(0, total)


@inner_kernel
def room_for(state, g, plan, blocks):
    """Evict idle cache blocks until `blocks` are free; False when that is not enough."""
    free = free_blocks(state, g, plan)
    while free < blocks and state.group_int[g, GI_CACHE_IDLE] > 0:
        prefix_cache.evict_oldest(state, g)
        free = free_blocks(state, g, plan)
    return free >= blocks


@inner_kernel
def reachable_blocks(state, g, plan):
    """Blocks free now plus those that evicting the idle cache would free."""
    idle = state.group_int[g, GI_CACHE_IDLE] * prefix_cache.blocks_per_entry(state, g)
    return free_blocks(state, g, plan) + idle

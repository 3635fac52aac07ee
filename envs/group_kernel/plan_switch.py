"""What a change of plan does to a group's state: the pause, and residents of the plan before that must move. Rare, so not compiled."""

from __future__ import annotations

from envs.group_kernel import layout as L
from envs.group_kernel.jump import cut_jump


def pause_group(state: L.KernelState, g: int, now_s: float, seconds: float) -> None:
    """Stop group `g` for `seconds` from its next step boundary."""
    cut_jump(state, g, now_s)
    start_s = max(now_s, state.group_float[g, L.GF_CLOCK_S])
    if state.group_int[g, L.GI_JUMP_ACTIVE]:
        start_s = state.group_float[g, L.GF_JUMP_END_S]
    floats = state.group_float[g]
    floats[L.GF_PAUSED_UNTIL_S] = max(floats[L.GF_PAUSED_UNTIL_S], start_s) + seconds


def older_blocks(state: L.KernelState, g: int) -> int:
    """KV blocks of residents that still lie by the plan before the present one."""
    return int(state.group_int[g, L.GI_USED_BLOCKS0 + 1 - int(state.group_int[g, L.GI_PLAN])])


def move_older_residents(state: L.KernelState, g: int) -> None:
    """Let residents of the plan before the present one lie by the present one, so that its slot is free for a third plan."""
    current = int(state.group_int[g, L.GI_PLAN])
    other = 1 - current
    if state.group_int[g, L.GI_USED_BLOCKS0 + other] > 0:
        for slot in state.running[g, : state.group_int[g, L.GI_RUNNING]]:
            state.slot_int[g, slot, L.SI_PLAN] = current
        state.group_int[g, L.GI_USED_BLOCKS0 + current] += state.group_int[g, L.GI_USED_BLOCKS0 + other]
        state.group_int[g, L.GI_USED_BLOCKS0 + other] = 0

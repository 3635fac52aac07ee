"""How an engine batches, and the limits it keeps: what a kernel state is told once, the same for simulated and for emulated groups."""

from __future__ import annotations

from dataclasses import dataclass

from envs.group_kernel import layout as L


@dataclass(frozen=True, slots=True)
class EngineHabits:
    """Times in s, sizes in tokens. memory_fraction: share of each device's memory that may be used."""

    chunk_tokens_max: int = 2048
    chunk_tokens_min: int = 256
    batch_min: int = 8
    tpot_margin: float = 0.9
    preemption_limit: int = 32
    queue_timeout_s: float = 120.0
    memory_fraction: float = 0.9


def write_habits(state: L.KernelState, habits: EngineHabits, running_max: int, block_tokens: int) -> None:
    """Put them into every group of `state`. running_max: sequences of a batch; block_tokens: of one KV block."""
    ints, floats = state.group_int, state.group_float
    ints[:, L.GI_RUNNING_LIMIT] = running_max
    ints[:, L.GI_CHUNK_MAX] = habits.chunk_tokens_max
    ints[:, L.GI_CHUNK_MIN] = habits.chunk_tokens_min
    ints[:, L.GI_BATCH_MIN] = habits.batch_min
    ints[:, L.GI_BLOCK_TOKENS] = ints[:, L.GI_CACHE_BLOCK_TOKENS] = block_tokens
    ints[:, L.GI_PREEMPTION_LIMIT] = habits.preemption_limit
    floats[:, L.GF_QUEUE_TIMEOUT_S] = habits.queue_timeout_s
    floats[:, L.GF_TPOT_MARGIN] = habits.tpot_margin

"""Compiling the kernels once, in the process that starts the others: these then read them from disk in under a second.

Compiled code is kept in `__pycache__` beside the sources (or in $NUMBA_CACHE_DIR), so that only the first run after a change of
the code pays (`envs.perf_model.kernel_cache`). `python -m envs.cluster.warm_up` does it ahead of time.
"""

from __future__ import annotations

import time

import numpy as np

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.world import WorldOptions, WorldSpec
from envs.decision import observation
from envs.decision import predictor as P
from envs.decision.actions import Decision, DecisionPoint
from envs.group_kernel import advance, jump, prefix_cache, queue
from envs.group_kernel import layout as L
from envs.group_kernel.play_forward import scratch_group, what_if_gain
from envs.scenario.cluster_file import load_cluster
from envs.traces.trace_table import TraceTable

REQUESTS = 12
PREFIX_BLOCKS = 4
DECISIONS: tuple[Decision, ...] = ("route", "split", "rebalance")


class _Everything:
    """Asks for all that a scheduler may compute, and takes the first allowed candidate."""

    def choose(self, point: DecisionPoint) -> int:
        observation.encode(point, len(point.commands))
        if point.request is not None and not point.view.residents.ints.size:
            _play(point)
        return int(np.flatnonzero(point.mask)[0])


def compile_kernels() -> float:
    """Compile, or read from disk, every kernel that worlds, schedulers and environments use; returns the CPU seconds it took.

    A tiny world is played, since the types of its arrays are those of every other one.
    """
    begin = time.process_time()
    options = WorldOptions(control_tick_s=0.5, drain_s=20.0, report_delay_s=0.05)
    # several groups: a column of one row passes for contiguous, which is another type
    world = WorldSpec(load_cluster("mixed-8"), _trace(), seed=0, options=options, name="warm-up")
    cluster = ClusterProcess(world, DECISIONS)
    cluster.run(dict.fromkeys(DECISIONS, _Everything()))
    _move_around(cluster.state)
    return time.process_time() - begin


def _trace() -> TraceTable:
    """A dozen requests that share a prefix."""
    n = REQUESTS
    return TraceTable(
        arrival_s=np.arange(n) * 0.1, prompt_tokens=np.full(n, 200, np.int32), output_tokens=np.full(n, 20, np.int32),
        class_index=(np.arange(n) % 3).astype(np.int8), session=np.full(n, -1, np.int32), session_names=(),
        priority=np.full(n, -1, np.int16), output_limit_tokens=np.zeros(n, np.int32),
        prefix_offsets=np.arange(n + 1) * PREFIX_BLOCKS, prefix_ids=np.tile(np.arange(PREFIX_BLOCKS), n), block_tokens=16,
        source="warm-up", synthetic=True,
    )  # fmt: skip


def _move_around(state: L.KernelState) -> None:
    """What only faults, moves and held requests call."""
    now_s = float(state.group_float[:, L.GF_CLOCK_S].max())
    int_row, float_row = np.empty(L.SLOT_INTS, np.int64), np.empty(L.SLOT_FLOATS)
    slot = advance.join(state, 0, now_s, 0, 0, 100, 10, now_s, now_s, 1.0)
    queue.take_out(state, 0, slot, now_s, int_row, float_row)
    queue.enqueue_row(state, 0, now_s, int_row, float_row, 0)
    advance.advance_group(state, 0, now_s + 1e-6)
    advance.next_event_s(state)
    jump.cut_jump(state, 0, now_s)
    advance.stop_group(state, 0, now_s)
    queue.preempt(state, 0, int(state.running[0, 0]), now_s)
    prefix_cache.flush_idle(state, 0)


def _play(point: DecisionPoint) -> None:
    """One play-forward, as the what-if router makes it."""
    view, tables, request = point.view, point.tables, point.request
    assert request is not None
    ints, floats = point.packed
    asked = np.array([request.arrival_s, request.prompt_tokens, request.class_index], np.float64)
    what_if_gain(
        scratch_group(tables.rank_cost.shape[2], 8), view.now_s, 0, ints, floats, view.residents.offset, view.residents.ints,
        view.residents.floats, view.kv_block_tokens, asked, 0.0, int(point.hits[0]), P.class_limits(tables.limit_multiplier),
        tables.rank_cost, tables.group_cost, tables.plan, tables.remaining_quantiles, tables.chunk_tokens, np.full((1, 2), 0.5), 10.0,
    )  # fmt: skip


if __name__ == "__main__":
    print(f"kernels ready after {compile_kernels():.1f} CPU s")

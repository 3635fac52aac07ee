"""A `GroupReport` read from a kernel state: what an emulated group says of itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from envs.group_kernel import layout as L
from envs.group_kernel import reading as R
from envs.group_kernel.jump import steps_done_by
from runtime.backends.emulated_kernel import measured_times
from runtime.backends.interface import CallProgress, GroupReport, RankTimes, WorkReport
from runtime.request_notes import AnswerTimes


class KernelReader:
    """Buffers to read one state of any number of groups into, and the reports made of them."""

    def __init__(self, state: L.KernelState) -> None:
        self._state = state
        groups, slots = state.slot_int.shape[:2]
        self._ints, self._floats = np.zeros((R.READ_INTS, groups), np.int64), np.zeros((R.READ_FLOATS, groups))
        self._offset = np.zeros(groups + 1, np.int64)
        self._rows = np.zeros((groups * slots, R.RESIDENT_INTS), np.int64)
        self._row_floats = np.zeros((groups * slots, R.RESIDENT_FLOATS))
        self._work_s = np.zeros((groups, 2, state.slow.shape[1]))  # computing and waiting for memory, per rank, since the start
        self._told_s = np.zeros((groups, 2))

    def advance(self, now_s: float) -> None:
        """Bring the groups to `now_s` and read them."""
        R.advance_and_read(self._state, now_s, self._ints, self._floats, self._offset, self._rows, self._row_floats)

    def residents(self, g: int) -> np.ndarray:
        """Rows of group g's residents, admitted ones first, columns `R.V_*`; valid until the next `advance`."""
        return self._rows[self._offset[g] : self._offset[g + 1]]

    def report(self, g: int, now_s: float, names: Mapping[int, str]) -> GroupReport:
        """Of group g as last read. names: kernel request id -> call id."""
        ints, floats, state = self._ints[:, g], self._floats[:, g], self._state
        progress = tuple(
            CallProgress(names[row[R.V_REQUEST]], row[R.V_GENERATED], row[R.V_PREFILL_LEFT], bool(row[R.V_ADMITTED]))
            for row in self.residents(g).tolist()
        )
        times = None
        if state.group_int[g, L.GI_UP] and state.group_int[g, L.GI_JUMP_ACTIVE]:
            tokens, pairs, kv = R.step_under_way(state, g)
            measured = measured_times(state, g, tokens, pairs, kv)
            times = RankTimes(int(tokens), float(pairs), int(kv), tuple(measured[:, 0].tolist()), tuple(measured[:, 1].tolist()))
        return GroupReport(
            at_s=now_s,
            running=int(ints[R.R_RUNNING]),
            waiting=int(ints[R.R_WAITING]),
            kv_blocks_free=int(ints[R.R_BLOCKS_FREE]),
            kv_blocks_total=int(ints[R.R_BLOCKS_TOTAL]),
            step_s=float(floats[R.R_STEP_NOW_S]),
            step_left_s=float(floats[R.R_STEP_LEFT_S]),
            correction=float(floats[R.R_CORRECTION]),
            pause_left_s=float(floats[R.R_PAUSE_LEFT_S]),
            rank_times=times,
            progress=progress,
            work=self._work(g, now_s, None if times is None else measured.sum(axis=1)),
        )

    def _work(self, g: int, now_s: float, rank_s: np.ndarray | None) -> WorkReport:
        """The kernel counts the slowest rank's times; the others' are in the proportion of the step under way, rank_s (ranks,)."""
        ints, group = self._state.group_int[g], self._state.group_float[g]
        done = steps_done_by(group, now_s, ints[L.GI_JUMP_STEPS]) if ints[L.GI_JUMP_ACTIVE] else 0  # of a jump, booked at its end
        memory_s = done * group[L.GF_J_MEMORY_S] + 0.5 * done * max(0, done - 1) * group[L.GF_J_MEMORY_SLOPE]
        told_s = np.array([group[L.GF_CUM_COMPUTE_S] + done * group[L.GF_J_COMPUTE_S], group[L.GF_CUM_MEMORY_S] + memory_s])
        share = np.ones(self._work_s.shape[2]) if rank_s is None or rank_s.max() <= 0 else rank_s / rank_s.max()
        self._work_s[g] += (told_s - self._told_s[g])[:, None] * share
        self._told_s[g] = told_s
        compute, stall = self._work_s[g].tolist()
        return WorkReport(int(ints[L.GI_STEPS]) + int(done), tuple(compute), tuple(stall))


def times_of_record(ints: np.ndarray, floats: np.ndarray) -> AnswerTimes:
    """Where the time of a completed request went: one row each of the kernel's `record_int` and `record_float`."""
    queue_s, prefill_s, decode_s = np.diff(floats[[L.RF_ARRIVAL_S, L.RF_ADMITTED_S, L.RF_FIRST_S, L.RF_FINISH_S]]).tolist()
    return AnswerTimes(queue_s, prefill_s, decode_s, tuple(floats[L.RF_PARTS :].tolist()), int(ints[L.RI_PREEMPTIONS]), int(ints[L.RI_HIT]))

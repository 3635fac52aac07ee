"""Reports that arrive late: a snapshot shows groups as they were some time ago, but our own requests as we know them.

What is inside a group is known at once, since we sent it and see its answers end. How far each request is, the memory in
use and the step under way are known as of the report.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from envs.domain.snapshot import FloatArray, IntArray
from envs.group_kernel import reading as R
from envs.perf_model.compiled import kernel


@kernel
def _merge(offset, ints, floats, old_offset, old_ints, old_floats, place, group_ints, old_group_ints):
    """Rewrite the present's residents and counts, in place, to what is known with an old report.

    place (requests,): scratch of -1, left as it was. A resident that the report does not have in its group was sent since:
    it waits, with all of its prompt to compute.
    """
    for g in range(group_ints.shape[1]):
        for i in range(old_offset[g], old_offset[g + 1]):
            place[old_ints[i, R.V_REQUEST]] = i
        running = waiting = backlog = decoding = decode_kv = 0
        for i in range(offset[g], offset[g + 1]):
            old = place[ints[i, R.V_REQUEST]]
            if old >= 0:
                for k in range(ints.shape[1]):
                    ints[i, k] = old_ints[old, k]
                for k in range(floats.shape[1]):
                    floats[i, k] = old_floats[old, k]
            elif ints[i, R.V_ADMITTED] == 1 or ints[i, R.V_GENERATED] > 0:
                ints[i, R.V_ADMITTED] = 0
                ints[i, R.V_GENERATED] = 0
                ints[i, R.V_PREFILL_LEFT] = ints[i, R.V_PROMPT]
                floats[i, R.V_FIRST_S] = np.nan
            if ints[i, R.V_ADMITTED] == 1:
                running += 1
                if ints[i, R.V_PREFILL_LEFT] == 0:
                    decoding += 1
                    decode_kv += ints[i, R.V_PROMPT] + ints[i, R.V_GENERATED] - 1
            else:
                waiting += 1
            backlog += ints[i, R.V_PREFILL_LEFT]
        for i in range(old_offset[g], old_offset[g + 1]):
            place[old_ints[i, R.V_REQUEST]] = -1
        for k in range(group_ints.shape[0]):
            group_ints[k, g] = old_group_ints[k, g]
        group_ints[R.R_RUNNING, g] = running
        group_ints[R.R_WAITING, g] = waiting
        group_ints[R.R_BACKLOG_TOKENS, g] = backlog
        group_ints[R.R_DECODING, g] = decoding
        group_ints[R.R_DECODE_KV, g] = decode_kv


class DelayedReports:
    """Keeps what groups reported, and makes of the present what is known with reports `delay_s` old.

    requests: how many the world has (ids from 0). Memory is bounded by `kept_max` reports: should more come within the delay,
    every other one is dropped, so that ages grow rather than memory.
    """

    def __init__(self, delay_s: float, requests: int, kept_max: int = 512) -> None:
        self.delay_s = delay_s
        self._kept_max = kept_max
        self._kept: deque[tuple[float, IntArray, FloatArray, IntArray, IntArray, FloatArray]] = deque()
        self._place = np.full(max(1, requests), -1, np.int64)

    def keep(self, now_s: float, ints: IntArray, floats: FloatArray, offset: IntArray, r_ints: IntArray, r_floats: FloatArray) -> None:
        """Store the report of `now_s`; copies are the caller's to make. Reports that no later view can ask for are dropped."""
        self._kept.append((now_s, ints, floats, offset, r_ints, r_floats))
        while len(self._kept) > 1 and self._kept[1][0] <= now_s - self.delay_s:
            self._kept.popleft()
        if len(self._kept) > self._kept_max:
            self._kept = deque(list(self._kept)[::2])

    @property
    def last_s(self) -> float:
        """Time of the newest report; 0 before the first."""
        return self._kept[-1][0] if self._kept else 0.0

    def apply(self, now_s: float, ints: IntArray, floats: FloatArray, offset: IntArray, r_ints: IntArray, r_floats: FloatArray) -> float:
        """Rewrite the present's arrays, in place, to what is known at `now_s`; returns the age of the report used, in s.

        Before any report is old enough the first one is used (a scheduler that has just come up asks everybody once).
        """
        report = self._kept[0]
        for candidate in self._kept:
            if candidate[0] > now_s - self.delay_s:
                break
            report = candidate
        reported_s, old_ints, old_floats, old_offset, old_r_ints, old_r_floats = report
        _merge(offset, r_ints, r_floats, old_offset, old_r_ints, old_r_floats, self._place, ints, old_ints)
        floats[:] = old_floats
        age_s = now_s - reported_s
        floats[R.R_STEP_LEFT_S] = np.maximum(0.0, floats[R.R_STEP_LEFT_S] - age_s)
        floats[R.R_PAUSE_LEFT_S] = np.maximum(0.0, floats[R.R_PAUSE_LEFT_S] - age_s)
        return age_s

"""When a lost rank is started again: soon, and ever later where it does not stay."""

from __future__ import annotations

import math
from collections.abc import Iterable

FIRST_WAIT_S = 0.5
WAIT_MAX_S = 60.0
STAYED_S = 5.0
"""A rank that was there for so long after its last start is started again without a wait."""


class Revivals:
    """One that dies while it loads is told by nobody's step, so what counts is who is absent, not what was heard of losses."""

    def __init__(self, pause_s: float = 0.0) -> None:
        """pause_s: from a loss to the start after it, for those left: what they do next needs the cores that a start would take."""
        self._pause_s = pause_s
        self._started: dict[int, tuple[float, float]] = {}  # by worker: when it was last started, how long the start after that waits
        self._absent: dict[int, float] = {}  # by worker: when it may be started again

    def due(self, absent: Iterable[int], now_s: float) -> list[int]:
        """Those of `absent` to start now; they count as started."""
        found = []
        for worker in absent:
            if worker not in self._absent:  # it has just gone
                started_s, wait_s = self._started.get(worker, (-math.inf, 0.0))
                if now_s - started_s >= STAYED_S:
                    wait_s = 0.0
                self._absent[worker] = max(started_s + wait_s, now_s + self._pause_s)
                self._started[worker] = started_s, wait_s
            if now_s >= self._absent[worker]:
                found.append(worker)
                del self._absent[worker]
                self._started[worker] = now_s, min(max(FIRST_WAIT_S, 2.0 * self._started[worker][1]), WAIT_MAX_S)
        return found

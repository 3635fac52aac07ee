"""Whose fault it is when a collective fails: known at once where a rank died, guessed a moment later where none did."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.torch_tp.liveness import Phase, Reading, laggards

BLAME_AFTER_S = 0.1
"""A rank that died shows by its socket within ms; if nobody did, a failed collective is nobody's death and the group is rebuilt whole."""
REBUILDS_IN_A_ROW_MAX = 3


class Blame:
    """What ranks said of the group that stands. detail: a failure that was some rank's own, "" where all blame their peers."""

    def __init__(self) -> None:
        self.detail = ""
        self.rebuilds_in_a_row = 0
        self._due_s = float("inf")

    @property
    def is_pending(self) -> bool:
        """Whether a failure waits for its explanation; until then no round is complete."""
        return self._due_s < float("inf")

    def hear(self, now_s: float) -> None:
        """Somebody could not finish: if another rank died, that shows before long."""
        self._due_s = min(self._due_s, now_s + BLAME_AFTER_S)

    def forget(self) -> None:
        """It is explained, or of a group that is gone: it says nothing of the next one."""
        self._due_s = float("inf")

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to judge; from then on it is no longer pending."""
        if now_s <= self._due_s:
            return False
        self.forget()
        self.rebuilds_in_a_row += 1
        return True

    @property
    def is_hopeless(self) -> bool:
        return self.rebuilds_in_a_row > REBUILDS_IN_A_ROW_MAX

    def culprit(self, readings: Mapping[int, Reading]) -> int | None:
        """The one rank that is behind the others; None where there is none, or where a rank told of a failure of its own."""
        behind = laggards({worker: reading for worker, reading in readings.items() if reading.phase is not Phase.IDLE})
        return behind[0] if len(behind) == 1 and not self.detail else None

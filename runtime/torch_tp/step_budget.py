"""How much one step may compute, so that those who decode keep their pace and prompts come in time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from envs.domain.requests import SERVICE_CLASSES
from runtime.torch_tp.batcher_settings import BatcherSettings
from runtime.torch_tp.resident import Resident
from runtime.torch_tp.step_pace import StepPace


class StepBudget:
    """Asks the pace how long steps take, and the service classes how long they may."""

    def __init__(self, settings: BatcherSettings, pace: StepPace) -> None:
        self._settings, self._pace = settings, pace

    def passes(self, decoding: Sequence[Resident], calm_steps: int) -> int:
        """Passes without asking: 1 after any change, then twice as many each time, within burst_s and the nearest token limit.

        Requests may be waiting: they have just been tried, and room only comes with an end. Ranks break off at a stop id by
        themselves, token limits are known here, and what else may happen (an arrival, a cancellation) waits burst_s at most.
        """
        if not decoding:
            return 1
        affordable = int(self._settings.burst_s / self._pace.step_s(len(decoding)))
        near = min(resident.tokens_left for resident in decoding)
        growing = 1 << min(calm_steps, 16)
        return max(1, min(self._settings.decode_steps_max, growing, affordable, near))

    def rows(self, residents: Iterable[Resident]) -> float:
        """Decoding rows that a step of these may have."""
        return self._pace.rows_within(self._tpot_limit_s(residents))

    def _tpot_limit_s(self, residents: Iterable[Resident]) -> float:
        """Longest step that the strictest of these classes allows. Where one row alone takes longer than that, the limit is
        multiplied by the smallest whole number that makes it possible, as DESIGN section 8 does for whole worlds."""
        limit_s = min(SERVICE_CLASSES[s.request.class_index].tpot_limit_s for s in residents) * self._settings.limit_headroom
        return limit_s * math.ceil(self._pace.step_s(1) / limit_s)

    def chunk_tokens(self, running: Sequence[Resident], waiting: Sequence[Resident], now_s: float) -> int:
        """Prompt tokens of the next step. Nobody decodes: as many as fit step_s_max. Otherwise the more, the more pressing the
        prompts are, from half a decode step's worth up to the TPOT limit of those running."""
        settings = self._settings
        prompts = [resident for resident in running if resident.pending > 1]
        rows = len(running) - len(prompts)
        step_s = self._pace.step_s(rows)
        target_s = settings.step_s_max
        if rows:
            spare_s = self._tpot_limit_s(running) - step_s
            target_s = max(1.5 * step_s, step_s + self._pressure([*prompts, *waiting], now_s) * spare_s)
        return min(settings.chunk_tokens_max, max(settings.chunk_tokens_min, self._pace.tokens_within(rows, target_s)))

    def _pressure(self, prompts: Iterable[Resident], now_s: float) -> float:
        """0 to 1: share of the time left to the TTFT limits that the prompts still to be computed need at full speed."""
        ahead_s, pressure = 0.0, 0.0
        for resident in prompts:
            ahead_s += resident.pending * self._pace.token_s
            limit_s = SERVICE_CLASSES[resident.request.class_index].ttft_limit_s(len(resident.request.prompt))
            left_s = resident.arrival_s + limit_s - now_s
            pressure = max(pressure, ahead_s / left_s if left_s > ahead_s else 1.0)
        return pressure

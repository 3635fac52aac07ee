"""Who is turned away while not all can be served in time: lowest priority first, before queues grow. One rule, service and simulator.

Pressure of a request in a group: what the group is predicted to make of it, over its limits (the worse of TTFT and TPOT; 1 is just in
time). Where even the empty group needs more than half of a limit, twice that need stands for the limit: an idle cluster sheds nobody,
however slow it is or is taken for. Leaves to others which of the groups that have time serves, and what a full queue means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from envs.decision import predictor as P
from envs.decision.actions import DecisionPoint
from envs.domain.requests import SERVICE_CLASSES
from envs.domain.snapshot import BoolArray, FloatArray
from envs.perf_model.compiled import kernel

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1.0, 30.0
PRIORITY_SPAN = 8  # priorities further from 0 count as this far, which bounds the levels
HARM_MIN = 0.25
FRESH_S = 1.0  # a pressure so old says nothing of the present


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """shed_above: own pressure beyond which a group takes a request no more. tight_above, tight_below: pressure of a level (in its best
    group) at which all lower ones begin and cease to be turned away; closed_s: so long they are after each request of it that was turned
    away. active_s: a level that nobody asked at for so long protects nobody."""

    shed_above: float = 0.9
    tight_above: float = 0.7
    tight_below: float = 0.5
    closed_s: float = 1.0
    active_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0.0 < self.tight_below <= self.tight_above <= self.shed_above or not (self.active_s > 0.0 and self.closed_s >= 0.0):
            raise ValueError(f"{self}: need 0 < tight_below <= tight_above <= shed_above, active_s above 0 and closed_s at least 0")


@kernel
def _pressures(
    now_s, arrival_s, prompt, class_index, key, allowed, ints, floats, offset, resident_ints, resident_floats, block_tokens, estimates,
    limits, baseline, remaining, head_start_s, class_ratio, out,
):  # fmt: skip
    """Pressure of a typical request of each class that came now, and of the one that asks (the last row), in each group; inf where it may
    not be sent.

    As in the predictor, but only those ahead in the queue count: a backlog of lower priority is no reason to turn higher ones away.
    """
    classes = limits.shape[0]
    for row in range(classes + 1):
        c = row if row < classes else class_index
        row_key = now_s - limits[c, 4] * head_start_s if row < classes else key
        expected = max(1.0, remaining[c, 0])
        for g in range(allowed.shape[0]):
            out[row, g] = np.inf
            if not allowed[g]:
                continue
            ahead = waiting = 0
            for i in range(offset[g], offset[g + 1]):
                if resident_ints[i, 5] == 1:
                    ahead += resident_ints[i, 4]
                elif resident_floats[i, 2] <= row_key:
                    ahead += resident_ints[i, 4]
                    waiting += 1
            typical = max(1.0, baseline[c, g, P.B_KV_TOKENS] - expected)
            tokens = typical if row < classes else prompt
            start_s = floats[g, 3] + floats[g, 0]
            everyone = ints[g, 0] + ints[g, 1]
            room_s = 0.0  # until a slot and KV are free
            if everyone > 0:
                leave_s = (estimates[g, P.E_WORK_LEFT_S] - estimates[g, P.E_BACKLOG_S]) / everyone
                need = tokens + 0.5 * expected + (ahead if waiting > 0 else 0)
                missing = ints[g, 0] + waiting + 1 - ints[g, 8]
                room_s = P.room_wait_s(need, ints[g, 2] * block_tokens, missing, everyone, ints[g, 5] + ints[g, 4], leave_s)
            ahead_s = ahead / estimates[g, P.E_PREFILL_RATE]
            ttft_limit_s = limits[c, 0] + limits[c, 1] * tokens
            if row < classes:
                own_s = baseline[c, g, P.B_TTFT_RATIO] * floats[g, 2] * ttft_limit_s
                ttft_s = start_s + max(ahead_s, room_s) + own_s
            else:
                start_s += now_s - arrival_s
                own_s = estimates[g, P.E_TTFT_S] - start_s - max(estimates[g, P.E_BACKLOG_S], estimates[g, P.E_KV_WAIT_S])
                ttft_s = start_s + max(ahead_s, room_s) + own_s
            # steps with others' prefills in them are longer than the next one: what was seen of the class tells by how much
            seen = max(1.0, class_ratio[g, c, 1])
            tpot_s = (estimates[g, P.E_STEP_AFTER_S] + 0.5 * ahead_s / expected) * seen
            alone = baseline[c, g, P.B_TPOT_RATIO] * floats[g, 2] * seen
            out[row, g] = max(ttft_s / max(ttft_limit_s, 2.0 * own_s), tpot_s / (limits[c, 2] * max(1.0, 2.0 * alone)))


def _is_worth_it(point: DecisionPoint) -> BoolArray:
    """Groups, shape (groups,), where the request is not predicted to cost those inside more than it is worth itself. A harm of less than
    HARM_MIN of its weight keeps nobody out: where all are late anyway, utilities are next to nothing."""
    assert point.request is not None
    harm = -point.estimates[:, P.E_HARM]
    worth = np.maximum(point.estimates[:, P.E_OWN], HARM_MIN * point.request.service.weight)
    return np.asarray(harm < worth)


@dataclass(slots=True)
class _Level:
    asked_s: float
    refused_s: float = -math.inf
    is_tight: bool = False


class OverloadControl:
    """Judges requests as they come. Work per request: one compiled pass over groups and residents, and the levels that are in use.

    pressure (classes,): of a typical request of each class in its best group, as of `at_s`. shed (classes,): requests
    turned away. sheds: False only looks.
    """

    def __init__(self, settings: OverloadSettings | None = None) -> None:
        self.settings = settings or OverloadSettings()
        self.pressure: FloatArray = np.zeros(len(SERVICE_CLASSES))
        self.at_s = -math.inf
        self.shed = [0] * len(SERVICE_CLASSES)
        self.sheds = True
        self._levels: dict[tuple[int, int], _Level] = {}

    def judge(self, point: DecisionPoint, priority: int) -> float | None:
        """None: go on; groups that have no time for the request of the route decision `point` are taken out of its mask. Otherwise it is
        turned away, and may ask again after so many seconds.

        No request is let in for `closed_s` after one of higher priority was turned away, nor while the pressure of a higher level is high.
        """
        request, settings = point.request, self.settings
        assert request is not None, "only route decisions have a request to judge"
        allowed, now_s = point.allowed_groups, point.view.now_s
        if not allowed.any():
            return None
        priority = max(-PRIORITY_SPAN, min(PRIORITY_SPAN, priority))
        own = self._observe(point)
        level = self._levels.setdefault((priority, request.class_index), _Level(now_s))
        level.asked_s = now_s
        self._follow(now_s)
        if not self.sheds:
            return None
        is_closed = any(
            other.is_tight or now_s - other.refused_s < settings.closed_s for (above, _), other in self._levels.items() if above > priority
        )
        has_time = (own <= settings.shed_above) & _is_worth_it(point)
        if has_time.any() and not is_closed:
            point.mask[: point.view.groups] = has_time
            return None
        level.refused_s = now_s
        self.shed[request.class_index] += 1
        backlog_s = float(point.estimates[allowed, P.E_WORK_LEFT_S].min())  # until the first group would be empty
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, backlog_s))

    def strain(self, priority: int, now_s: float) -> float:
        """Highest pressure of the levels in use at `priority` and above; 0 where it is not fresh."""
        if now_s - self.at_s > FRESH_S:
            return 0.0
        return max((float(self.pressure[c]) for (level, c) in self._levels if level >= priority), default=0.0)

    def levels(self) -> list[tuple[int, int, bool]]:
        """Those in use, highest first: priority, class, whether lower ones are turned away on its account."""
        return [(*key, self._levels[key].is_tight) for key in sorted(self._levels, reverse=True)]

    def _observe(self, point: DecisionPoint) -> FloatArray:
        """Take the pressures of the present; returns that of the request that asks, in each group."""
        view, request, tables = point.view, point.request, point.tables
        assert request is not None
        found = np.empty((len(SERVICE_CLASSES) + 1, view.groups))
        ints, floats = point.packed
        residents = view.residents
        key = P.queue_key(request.arrival_s, request.class_index, tables.head_start_s)
        _pressures(
            view.now_s, request.arrival_s, float(request.prompt_tokens), request.class_index, key, point.allowed_groups, ints, floats,
            residents.offset, residents.ints, residents.floats, view.kv_block_tokens, point.estimates,
            P.class_limits(tables.limit_multiplier), tables.baseline, tables.remaining_tokens, tables.head_start_s,
            view.class_ratio, found,
        )  # fmt: skip
        self.pressure, self.at_s = found[:-1].min(axis=1), view.now_s
        return np.asarray(found[-1])

    def _follow(self, now_s: float) -> None:
        settings = self.settings
        for key in [key for key, level in self._levels.items() if now_s - level.asked_s > settings.active_s]:
            del self._levels[key]
        for (_, c), level in self._levels.items():
            level.is_tight = bool(self.pressure[c] >= (settings.tight_below if level.is_tight else settings.tight_above))

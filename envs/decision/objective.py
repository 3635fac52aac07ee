"""What evaluation and reward share: limits, goodput, the lateness charge, and the summary of a run.

Leaves to others: how outcomes come about, when a reward is paid and how it is discounted. One request is worth

    weight x (met - price x late_s / ttft_limit_s)        (DESIGN sections 3 and 8)

late_s counts the seconds by which the first token passed its limit plus those by which the further tokens fell behind
their limit. It grows linearly to the horizon and is neither capped below it nor concave, so that giving up a hopeless
request never pays. A request that was not completed (refused, lost, held, never finished) is charged as unserved to
the horizon: no less than any completion of it. Both phases are divided by the same limit, so that a second of waiting
costs one class the same whatever the length of the answer, and starving long answers earns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.domain.requests import LATENCY_PARTS, SERVICE_CLASSES, Ended, OutcomeKind, RequestOutcome
from envs.domain.snapshot import BoolArray, FloatArray, IntArray

LATENESS_PRICE = 1.0
"""Weighted goodput lost per limit of lateness."""

PERCENTILES: tuple[int, ...] = (50, 95, 99)

_TTFT_BASE_S = np.array([service.ttft_base_s for service in SERVICE_CLASSES])
_TTFT_PER_TOKEN_S = np.array([service.ttft_per_prompt_token_s for service in SERVICE_CLASSES])
_TPOT_LIMIT_S = np.array([service.tpot_limit_s for service in SERVICE_CLASSES])
_WEIGHT = np.array([service.weight for service in SERVICE_CLASSES])
_LIMIT_SLACK = 1e-9  # relative: a request that hits its limit exactly has met it, whatever the rounding of clock differences


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeColumns:
    """Outcomes as arrays of shape (requests,); times in absolute s, NaN where the event never came."""

    class_index: IntArray
    kind: IntArray
    arrival_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray

    @property
    def is_completed(self) -> BoolArray:
        return np.asarray(self.kind == int(OutcomeKind.COMPLETED), dtype=np.bool_)

    @property
    def ttft_s(self) -> FloatArray:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> FloatArray:
        """Mean seconds per token after the first; 0 for a single token."""
        further = np.maximum(self.output_tokens - 1, 1)
        return np.where(self.output_tokens > 1, (self.finish_s - self.first_token_s) / further, 0.0)

    @property
    def e2e_s(self) -> FloatArray:
        return self.finish_s - self.arrival_s


def columns(outcomes: Sequence[RequestOutcome]) -> OutcomeColumns:
    """Arrays of `outcomes`, in their order. Raises ValueError where a completed one lacks a time."""
    table = OutcomeColumns(
        class_index=np.array([o.class_index for o in outcomes], dtype=np.int64),
        kind=np.array([int(o.kind) for o in outcomes], dtype=np.int64),
        arrival_s=np.array([o.arrival_s for o in outcomes], dtype=np.float64),
        first_token_s=np.array([o.first_token_s for o in outcomes], dtype=np.float64),
        finish_s=np.array([o.finish_s for o in outcomes], dtype=np.float64),
        prompt_tokens=np.array([o.prompt_tokens for o in outcomes], dtype=np.int64),
        output_tokens=np.array([o.output_tokens for o in outcomes], dtype=np.int64),
    )
    in_order = (table.arrival_s <= table.first_token_s) & (table.first_token_s <= table.finish_s)
    broken = np.flatnonzero(table.is_completed & ~in_order)
    if broken.size:
        worst = outcomes[int(broken[0])]
        raise ValueError(
            f"outcome of request {worst.request_id}: completed, but arrival_s={worst.arrival_s}, first_token_s="
            f"{worst.first_token_s}, finish_s={worst.finish_s} are not in order; give finite, ordered times or another kind"
        )
    return table


def limits(class_index: npt.ArrayLike, prompt_tokens: npt.ArrayLike, multiplier: float = 1.0) -> tuple[FloatArray, FloatArray, FloatArray]:
    """TTFT limit (s), TPOT limit (s) and weight of each request; shapes as the inputs broadcast. Source: DESIGN section 8."""
    index = np.asarray(class_index, dtype=np.int64)
    prompt = np.asarray(prompt_tokens, dtype=np.float64)
    ttft_limit_s = (_TTFT_BASE_S[index] + _TTFT_PER_TOKEN_S[index] * prompt) * multiplier
    shape = ttft_limit_s.shape
    return ttft_limit_s, np.broadcast_to(_TPOT_LIMIT_S[index] * multiplier, shape), np.broadcast_to(_WEIGHT[index], shape)


def met(
    class_index: npt.ArrayLike,
    prompt_tokens: npt.ArrayLike,
    is_completed: npt.ArrayLike,
    ttft_s: npt.ArrayLike,
    tpot_s: npt.ArrayLike,
    multiplier: float = 1.0,
) -> BoolArray:
    """Whether each request was completed within every limit of its class; equal to a limit is within. NaN is not met."""
    ttft_limit_s, tpot_limit_s, _ = limits(class_index, prompt_tokens, multiplier)
    within_ttft = np.asarray(ttft_s) <= ttft_limit_s * (1.0 + _LIMIT_SLACK)
    within_tpot = np.asarray(tpot_s) <= tpot_limit_s * (1.0 + _LIMIT_SLACK)
    return np.asarray(np.asarray(is_completed, dtype=np.bool_) & within_ttft & within_tpot, dtype=np.bool_)


def goodput(weight: npt.ArrayLike, is_met: npt.ArrayLike) -> float | None:
    """Weighted share of all arrived requests that met their limits; None when none arrived."""
    weights = np.asarray(weight, dtype=np.float64)
    total = float(weights.sum())
    if total <= 0.0:
        return None
    return float(weights[np.asarray(is_met, dtype=np.bool_)].sum()) / total


def unserved_charge(ttft_limit_s: npt.ArrayLike, horizon_s: float) -> FloatArray:
    """Limits of lateness of a request that is never served: from its limit to `horizon_s` after its arrival.

    A horizon short of twice the limit is taken as twice the limit: refusal costs at least one limit and is never free.
    """
    limit_s = np.asarray(ttft_limit_s, dtype=np.float64)
    return np.maximum(horizon_s, 2.0 * limit_s) / limit_s - 1.0


def lateness_charge(
    ttft_limit_s: npt.ArrayLike,
    tpot_limit_s: npt.ArrayLike,
    arrival_s: npt.ArrayLike,
    first_token_s: npt.ArrayLike,
    until_s: npt.ArrayLike,
    tokens: npt.ArrayLike,
    horizon_s: float,
) -> FloatArray:
    """Limits of lateness that served or waiting requests have run up by `until_s`; all inputs broadcast.

    until_s: absolute s, the finish or, for one still in the system, now. first_token_s: absolute s, NaN or later than
    `until_s` while none was seen. tokens: tokens delivered by `until_s`. The difference of two calls is the charge of the
    time between them, so a reward paid in pieces adds up to the charge at the finish.
    """
    limit_s = np.asarray(ttft_limit_s, dtype=np.float64)
    arrival = np.asarray(arrival_s, dtype=np.float64)
    until = np.asarray(until_s, dtype=np.float64)
    first = np.asarray(first_token_s, dtype=np.float64)
    has_first = first <= until  # False for NaN
    first = np.where(has_first, first, until)
    wait_late_s = np.maximum(first - arrival - limit_s, 0.0)
    further = np.maximum(np.asarray(tokens, dtype=np.float64) - 1.0, 0.0)
    decode_late_s = np.maximum(until - first - np.asarray(tpot_limit_s, dtype=np.float64) * further, 0.0)
    # 0 x NaN cannot occur: `first` is finite from here on.
    late = (wait_late_s + decode_late_s) / limit_s
    return np.minimum(late, unserved_charge(limit_s, horizon_s))


def values(table: OutcomeColumns, horizon_s: float, multiplier: float = 1.0, price: float = LATENESS_PRICE) -> FloatArray:
    """What each request was worth, shape (requests,): weight x (met - price x charge)."""
    ttft_limit_s, tpot_limit_s, weight = limits(table.class_index, table.prompt_tokens, multiplier)
    completed = table.is_completed
    is_met = met(table.class_index, table.prompt_tokens, completed, table.ttft_s, table.tpot_s, multiplier)
    served = lateness_charge(
        ttft_limit_s,
        tpot_limit_s,
        table.arrival_s,
        table.first_token_s,
        np.where(completed, table.finish_s, table.arrival_s),
        table.output_tokens,
        horizon_s,
    )
    charge = np.where(completed, served, unserved_charge(ttft_limit_s, horizon_s))
    return weight * (is_met - price * np.where(is_met, 0.0, charge))


def value_of(outcome: RequestOutcome | Ended, horizon_s: float, multiplier: float = 1.0, price: float = LATENESS_PRICE) -> float:
    """What one request was worth: the scalar twin of `values`, for the moment it leaves the system."""
    service = SERVICE_CLASSES[outcome.class_index]
    ttft_limit_s = service.ttft_limit_s(outcome.prompt_tokens) * multiplier
    tpot_limit_s = service.tpot_limit_s * multiplier
    unserved = max(horizon_s, 2.0 * ttft_limit_s) / ttft_limit_s - 1.0
    if outcome.kind != OutcomeKind.COMPLETED:
        return -service.weight * price * unserved
    slack = 1.0 + _LIMIT_SLACK
    ttft_s, decode_s = outcome.first_token_s - outcome.arrival_s, outcome.finish_s - outcome.first_token_s
    further = outcome.output_tokens - 1
    if ttft_s <= ttft_limit_s * slack and (further < 1 or decode_s / further <= tpot_limit_s * slack):
        return service.weight
    wait_late_s = max(0.0, ttft_s - ttft_limit_s)
    decode_late_s = max(0.0, decode_s - tpot_limit_s * max(0, further))
    return -service.weight * price * min(unserved, (wait_late_s + decode_late_s) / ttft_limit_s)


def gpu_charge(gpu_s: float, price_per_gpu_s: float) -> float:
    """Weighted goodput charged for `gpu_s` GPU-seconds held, where scaling is allowed; price in goodput per GPU-second."""
    if gpu_s < 0.0 or price_per_gpu_s < 0.0:
        raise ValueError(f"gpu_charge: gpu_s={gpu_s} and price_per_gpu_s={price_per_gpu_s} must both be >= 0")
    return gpu_s * price_per_gpu_s


def smallest_limit_multiplier(
    unloaded_ttft_s: npt.ArrayLike, unloaded_tpot_s: npt.ArrayLike, class_index: npt.ArrayLike, prompt_tokens: npt.ArrayLike
) -> int:
    """Smallest integer by which all limits must be multiplied so that the median group meets them unloaded (DESIGN section 8).

    Args: unloaded times in s, shape (groups, cases); class_index and prompt_tokens, shape (cases,): the probe requests.
    With an even number of groups the faster of the two middle ones counts: half of the groups then meet the limits.
    Raises: ValueError when there is no group or no case, or a time is not finite and positive.
    """
    ttft_s = np.atleast_2d(np.asarray(unloaded_ttft_s, dtype=np.float64))
    tpot_s = np.atleast_2d(np.asarray(unloaded_tpot_s, dtype=np.float64))
    if ttft_s.size == 0 or ttft_s.shape != tpot_s.shape:
        raise ValueError(f"smallest_limit_multiplier: shapes {ttft_s.shape} and {tpot_s.shape}; give (groups, cases) in both")
    if not (np.isfinite(ttft_s).all() and np.isfinite(tpot_s).all() and (ttft_s >= 0).all() and (tpot_s >= 0).all()):
        raise ValueError("smallest_limit_multiplier: a time is negative or not finite; leave out what a group cannot serve")
    ttft_limit_s, tpot_limit_s, _ = limits(class_index, prompt_tokens)
    needed = np.maximum(ttft_s / ttft_limit_s, tpot_s / tpot_limit_s).max(axis=1)
    median = float(np.sort(needed)[(needed.size - 1) // 2])
    return max(1, math.ceil(median * (1.0 - _LIMIT_SLACK)))


def percentiles(measured_s: FloatArray, failures: int, worst_s: float) -> dict[str, float | None]:
    """p50, p95, p99 with `failures` further values at `worst_s` (or the worst measured, if worse); None when empty (K13)."""
    if measured_s.size + failures == 0:
        return {f"p{q}": None for q in PERCENTILES}
    worst = max(worst_s, float(measured_s.max(initial=0.0)))
    everything = np.concatenate([measured_s, np.full(failures, worst)])
    return {f"p{q}": float(value) for q, value in zip(PERCENTILES, np.percentile(everything, PERCENTILES), strict=True)}


def _latency(table: OutcomeColumns, chosen: BoolArray, horizon_s: float) -> dict[str, dict[str, float | int | None]]:
    """Percentiles of TTFT, TPOT and E2E beside how many were measured and how many stand at the worst value (K12)."""
    served = chosen & table.is_completed
    failures = int(chosen.sum() - served.sum())
    several = served & (table.output_tokens > 1)  # a single token has no time per further token
    result: dict[str, dict[str, float | int | None]] = {}
    for name, measured in (("ttft_s", table.ttft_s[served]), ("tpot_s", table.tpot_s[several]), ("e2e_s", table.e2e_s[served])):
        result[name] = {**percentiles(measured, failures, horizon_s), "measured": int(measured.size), "at_worst": failures}
    return result


def _share(
    table: OutcomeColumns, chosen: BoolArray, is_met: BoolArray, value: FloatArray, span_s: float, horizon_s: float
) -> dict[str, object]:
    """Goodput, counts and latency of the chosen requests."""
    weight = _WEIGHT[table.class_index[chosen]]
    met_weight = float(weight[is_met[chosen]].sum())
    kinds = table.kind[chosen]
    return {
        "arrived": int(chosen.sum()),
        "met": int(is_met[chosen].sum()),
        "goodput_share": goodput(weight, is_met[chosen]),
        "goodput_per_s": float(is_met[chosen].sum()) / span_s if span_s > 0 else None,
        "weighted_goodput_per_s": met_weight / span_s if span_s > 0 else None,
        "value_total": float(value[chosen].sum()),
        "value_mean": float(value[chosen].mean()) if chosen.any() else None,
        "outcomes": {kind.name.lower(): int((kinds == int(kind)).sum()) for kind in OutcomeKind},
        "refusals": int((kinds == int(OutcomeKind.REFUSED)).sum()),
        "output_tokens": int(table.output_tokens[chosen & table.is_completed].sum()),
        "latency": _latency(table, chosen, horizon_s),
    }


def latency_parts_mean(outcomes: Sequence[RequestOutcome]) -> dict[str, float | None]:
    """Mean seconds of each latency part over the outcomes that carry parts; None where none does."""
    rows = [outcome.parts for outcome in outcomes if outcome.parts]
    if not rows:
        return dict.fromkeys(LATENCY_PARTS)
    wrong = {len(row) for row in rows} - {len(LATENCY_PARTS)}
    if wrong:
        raise ValueError(f"outcome parts have {sorted(wrong)} entries; give {len(LATENCY_PARTS)}: {', '.join(LATENCY_PARTS)}")
    means = np.array(rows, dtype=np.float64).mean(axis=0)
    return {name: float(mean) for name, mean in zip(LATENCY_PARTS, means, strict=True)}


def summary(outcomes: Sequence[RequestOutcome], span_s: float, horizon_s: float, multiplier: float = 1.0) -> dict[str, object]:
    """Report of one run, ready for strict JSON (no NaN, no infinity; None where nothing was measured).

    Args: every request that arrived, in any order; span_s, seconds over which they arrived, the base of the rates;
    horizon_s, seconds after its arrival at which a failure is placed; multiplier, of all limits (DESIGN section 8).
    Keys of each share: arrived, met, goodput_share (weighted, of all arrived), goodput_per_s, weighted_goodput_per_s,
    value_total, value_mean, outcomes (count per kind), refusals, output_tokens, latency. `classes` holds one share per class.
    Raises: ValueError for times that are out of order, or a negative or non-finite span or horizon.
    """
    if not (math.isfinite(span_s) and span_s >= 0 and math.isfinite(horizon_s) and horizon_s > 0):
        raise ValueError(f"summary: span_s={span_s} must be finite and >= 0, horizon_s={horizon_s} finite and > 0")
    table = columns(outcomes)
    is_met = met(table.class_index, table.prompt_tokens, table.is_completed, table.ttft_s, table.tpot_s, multiplier)
    value = values(table, horizon_s, multiplier)
    everyone = np.ones(len(outcomes), dtype=np.bool_)
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.kind is not OutcomeKind.COMPLETED:
            reasons[outcome.reason] = reasons.get(outcome.reason, 0) + 1
    report: dict[str, object] = {"span_s": span_s, "horizon_s": horizon_s, "limit_multiplier": multiplier}
    report.update(_share(table, everyone, is_met, value, span_s, horizon_s))
    report["failure_reasons"] = dict(sorted(reasons.items()))
    report["latency_parts_mean_s"] = latency_parts_mean(outcomes)
    report["preemptions"] = sum(outcome.preemptions for outcome in outcomes)
    report["classes"] = {
        service.name: _share(table, everyone & (table.class_index == index), is_met, value, span_s, horizon_s)
        for index, service in enumerate(SERVICE_CLASSES)
    }
    return report

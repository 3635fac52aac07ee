"""From a decision point to numbers: one feature row per candidate and one context row, the same in simulation and service.

Every feature is finite and lies in [-BOUND, BOUND]: logarithms and ratios, clipped. A change here raises
OBSERVATION_VERSION, because a policy trained on other numbers must refuse to load.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from envs.decision import predictor as P
from envs.decision.actions import CORNER_COUNT, DecisionPoint
from envs.domain.commands import CommandKind
from envs.domain.requests import SERVICE_CLASSES
from envs.perf_model.compiled import kernel

OBSERVATION_VERSION = 1
BOUND = 10.0

GROUP_FEATURES = (
    "running_fraction",
    "log_waiting",
    "kv_free_fraction",
    "log_backlog_s",
    "log_step_over_tightest_limit",
    "log_correction",
    "log_capability",
    "breaker_half_open",
    "report_age_s",
    "log_pause_left_s",
    "rank_deviation",
    "is_up",
    "is_draining",
    "log_work_left_s",
    "utility_per_resident",
)
ROUTE_FEATURES = (
    "log_ttft_over_limit",
    "log_tpot_over_limit",
    "log_completion_s",
    "own_utility",
    "resident_harm",
    "net_utility",
    "prefix_hit_fraction",
    "log_kv_wait_s",
    "log_ttft_over_best",
    "log_completion_over_best",
    "net_utility_below_best",
    "is_best_completion",
)
MOVE_FEATURES = ("log_speedup", "log_price_s", "affected_log", "target_log_backlog_s", "utility_delta")
FEATURES: tuple[str, ...] = (
    tuple(f"kind_{kind.name.lower()}" for kind in CommandKind)
    + tuple(f"corner_{i}" for i in range(CORNER_COUNT))
    + GROUP_FEATURES
    + ROUTE_FEATURES
    + MOVE_FEATURES
)
CONTEXT: tuple[str, ...] = (
    "is_route",
    "is_split",
    "is_rebalance",
    *(f"class_{service.name}" for service in SERVICE_CLASSES),
    "log_prompt_tokens",
    "log_expected_output_tokens",
    "log_waited_s",
    "attempts",
    "log_rate_5s",
    "log_rate_60s",
    "hold_fraction",
    "log_groups",
    "mean_running_fraction",
    "mean_kv_free_fraction",
    "best_net_utility",
    "up_fraction",
)
_GROUP_AT = len(CommandKind) + CORNER_COUNT
_ROUTE_AT = _GROUP_AT + len(GROUP_FEATURES)
_MOVE_AT = _ROUTE_AT + len(ROUTE_FEATURES)

Float32Array = npt.NDArray[np.float32]


def schema_hash() -> str:
    """Digest of feature names, order and version: what a bundle must agree with."""
    text = f"{OBSERVATION_VERSION}|{BOUND}|{','.join(FEATURES)}|{','.join(CONTEXT)}"
    return hashlib.sha256(text.encode()).hexdigest()


@kernel
def _log(value, floor):
    return math.log(max(value, floor))


@kernel
def _group_rows(ints, floats, flags, estimates, tightest_s, out):
    """Group features of every group; `flags` (G, 6): capability, breaker half open, report age, deviation, up, draining."""
    for g in range(ints.shape[0]):
        row = out[g]
        everyone = ints[g, 0] + ints[g, 1]
        row[0] = ints[g, 0] / max(1, ints[g, 8])
        row[1] = math.log1p(ints[g, 1])
        row[2] = ints[g, 2] / max(1, ints[g, 3])
        row[3] = math.log1p(estimates[g, P.E_BACKLOG_S])
        row[4] = _log(estimates[g, P.E_STEP_AFTER_S] / tightest_s, 1e-4)
        row[5] = _log(floats[g, 2], 1e-3)
        row[6] = _log(flags[g, 0], 1e-3)
        row[7] = flags[g, 1]
        row[8] = flags[g, 2]
        row[9] = math.log1p(floats[g, 3])
        row[10] = flags[g, 3]
        row[11] = flags[g, 4]
        row[12] = flags[g, 5]
        row[13] = math.log1p(estimates[g, P.E_WORK_LEFT_S])
        row[14] = estimates[g, P.E_UTILITY] / max(1, everyone)


@kernel
def _route_rows(estimates, hits, prompt, allowed, out):
    """Route features of every group; comparisons are with the best allowed group. Returns the best net utility."""
    best_ttft = best_completion = math.inf
    best_net = -math.inf
    best_index = -1
    for g in range(estimates.shape[0]):
        if allowed[g]:
            best_ttft = min(best_ttft, estimates[g, P.E_TTFT_S])
            if estimates[g, P.E_COMPLETION_S] < best_completion:
                best_completion = estimates[g, P.E_COMPLETION_S]
                best_index = g
            best_net = max(best_net, estimates[g, P.E_OWN] + estimates[g, P.E_HARM])
    for g in range(estimates.shape[0]):
        row = out[g]
        net = estimates[g, P.E_OWN] + estimates[g, P.E_HARM]
        row[0] = _log(estimates[g, P.E_TTFT_RATIO], 1e-4)
        row[1] = _log(estimates[g, P.E_TPOT_RATIO], 1e-4)
        row[2] = _log(estimates[g, P.E_COMPLETION_S], 1e-3)
        row[3] = estimates[g, P.E_OWN]
        row[4] = estimates[g, P.E_HARM]
        row[5] = net
        row[6] = hits[g] / max(1, prompt)
        row[7] = math.log1p(estimates[g, P.E_KV_WAIT_S])
        if best_index >= 0:
            row[8] = _log(estimates[g, P.E_TTFT_S] / max(best_ttft, 1e-6), 1e-4)
            row[9] = _log(estimates[g, P.E_COMPLETION_S] / max(best_completion, 1e-6), 1e-4)
            row[10] = net - best_net
            row[11] = 1.0 if g == best_index else 0.0
    return best_net if best_index >= 0 else 0.0


def _group_flags(point: DecisionPoint) -> npt.NDArray[np.float64]:
    view = point.view
    flags = np.empty((view.groups, 6))
    flags[:, 0] = view.capability
    flags[:, 1] = view.breaker_state == 1
    flags[:, 2] = view.report_age_s
    busiest = view.rank_busy_fraction.max(axis=1)
    ranks = np.maximum(1, (view.rank_busy_fraction > 0).sum(axis=1))
    flags[:, 3] = 1.0 - view.rank_busy_fraction.sum(axis=1) / ranks / np.maximum(busiest, 1e-9)
    flags[:, 4] = view.is_up
    flags[:, 5] = view.is_draining
    return flags


def _feature_rows(point: DecisionPoint) -> tuple[npt.NDArray[np.float64], float]:
    """Group features followed by route features (zero without a request) of every group, and the best net utility."""
    view = point.view
    ints, floats = point.packed
    both = np.zeros((view.groups, len(GROUP_FEATURES) + len(ROUTE_FEATURES)))
    _group_rows(ints, floats, _group_flags(point), point.estimates, point.tightest_tpot_s, both[:, : len(GROUP_FEATURES)])
    best_net = 0.0
    if point.request is not None:
        allowed = point.mask[: view.groups]
        prompt = point.request.prompt_tokens
        best_net = _route_rows(point.estimates, point.hits, prompt, allowed, both[:, len(GROUP_FEATURES) :])
    return both, best_net


def route_and_group_rows(point: DecisionPoint) -> npt.NDArray[np.float64]:
    """The part of the observation that a per-group score may look at, shape (groups, GROUP_FEATURES + ROUTE_FEATURES)."""
    return _feature_rows(point)[0]


def encode(point: DecisionPoint, rows: int) -> tuple[Float32Array, Float32Array]:
    """Observation of one decision point.

    Args: rows: number of candidate rows to return; rows beyond the point's candidates are zero.
    Returns: candidates (rows, len(FEATURES)) and context (len(CONTEXT),), float32 within [-BOUND, BOUND].
    Raises: ValueError when the point has more candidates than `rows` (a cluster beyond the policy's maximum is refused).
    """
    count = len(point.commands)
    if count > rows:
        raise ValueError(f"{count} candidates, but the policy takes at most {rows}; raise max_candidates and train again")
    view = point.view
    out = np.zeros((rows, len(FEATURES)))
    out[:count, : len(CommandKind)] = point.kind_rows
    both, best_net = _feature_rows(point)
    group_rows = both[:, : len(GROUP_FEATURES)]
    if point.request is not None:
        out[: view.groups, _GROUP_AT:_MOVE_AT] = both
    else:
        source = point.source_groups
        has_group = source >= 0
        out[:count][has_group, _GROUP_AT:_ROUTE_AT] = group_rows[source[has_group]]
        corners = point.corners
        is_split = corners >= 0
        out[np.flatnonzero(is_split), len(CommandKind) + corners[is_split]] = 1.0
        out[:count, _MOVE_AT:] = point.moves
    context = np.empty(len(CONTEXT))
    context[:3] = [point.decision == "route", point.decision == "split", point.decision == "rebalance"]
    context[3 : 3 + len(SERVICE_CLASSES)] = 0.0
    tail = 3 + len(SERVICE_CLASSES)
    if point.request is not None:
        context[3 + point.request.class_index] = 1.0
        context[tail] = math.log1p(point.request.prompt_tokens)
        context[tail + 1] = math.log1p(point.tables.remaining_tokens[point.request.class_index, 0])
        context[tail + 2] = math.log1p(max(0.0, view.now_s - point.request.arrival_s))
        context[tail + 3] = point.request.attempts
    else:
        context[tail : tail + 4] = 0.0
    up = max(1, int(view.is_up.sum()))
    context[tail + 4] = math.log1p(view.arrival_rate_5s)
    context[tail + 5] = math.log1p(view.arrival_rate_60s)
    context[tail + 6] = view.hold_queue / max(1, view.hold_queue_limit)
    context[tail + 7] = math.log(max(1, view.groups))
    context[tail + 8] = float(group_rows[:, 0] @ view.is_up) / up
    context[tail + 9] = float(group_rows[:, 2] @ view.is_up) / up
    context[tail + 10] = best_net
    context[tail + 11] = up / max(1, view.groups)
    np.clip(out, -BOUND, BOUND, out=out)
    np.clip(context, -BOUND, BOUND, out=context)
    return out.astype(np.float32), context.astype(np.float32)

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
from envs.decision.capability import FEATURES as PROFILE
from envs.decision.capability import profiles_and_cosines
from envs.decision.circuit_breaker import State
from envs.domain.commands import CommandKind
from envs.domain.requests import SERVICE_CLASSES
from envs.perf_model.compiled import inner_kernel, kernel

OBSERVATION_VERSION = 3
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
    "log_slowest_rank",
    "log_rank_spread",
    "correction_std",
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
    "log_baseline_ttft_over_limit",
    "log_baseline_time_over_best",
    "log_baseline_kv_over_free",
    "profile_affinity",
    "log_class_ttft_ratio",
    "log_class_tpot_ratio",
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
_BREAKER_HALF_OPEN = int(State.HALF_OPEN)
_DECISIONS = ("route", "split", "rebalance")
_CLASS_AT = len(_DECISIONS)
_REQUEST_AT = _CLASS_AT + len(SERVICE_CLASSES)
_CORNER_AT = len(CommandKind)
_GROUP_AT = _CORNER_AT + CORNER_COUNT
_ROUTE_AT = _GROUP_AT + len(GROUP_FEATURES)
_MOVE_AT = _ROUTE_AT + len(ROUTE_FEATURES)
_NO_MOVES = np.zeros((0, len(MOVE_FEATURES)))
_NO_HITS = np.zeros(0, np.int64)

Float32Array = npt.NDArray[np.float32]


def schema_hash() -> str:
    """Digest of feature names, order and version: what a bundle must agree with."""
    text = f"{OBSERVATION_VERSION}|{BOUND}|{','.join(FEATURES)}|{','.join(CONTEXT)}"
    return hashlib.sha256(text.encode()).hexdigest()


@inner_kernel
def _log(value, floor):
    return math.log(max(value, floor))


@inner_kernel
def _deviation(busy):
    """1 - mean / max of the ranks' busy shares, over the ranks that have any."""
    total = busiest = 0.0
    ranks = 0
    for share in busy:
        total += share
        busiest = max(busiest, share)
        if share > 0:
            ranks += 1
    return 1.0 - total / max(1, ranks) / max(busiest, 1e-9)


@inner_kernel
def _rank_extremes(ratio):
    """Largest and smallest measured / declared time over the ranks there are (absent ones are 0); 1 and 1 for none."""
    slowest = 0.0
    fastest = math.inf
    for value in ratio:
        if value > 0.0:
            slowest = max(slowest, value)
            fastest = min(fastest, value)
    if slowest == 0.0:
        return 1.0, 1.0
    return slowest, fastest


@kernel
def _group_rows(
    ints, floats, capability, breaker_state, report_age_s, rank_busy, rank_ratio, correction_std, is_up, is_draining, estimates,
    tightest_s, out,
):  # fmt: skip
    """Group features of every group into `out` (G, GROUP_FEATURES)."""
    for g in range(ints.shape[0]):
        row = out[g]
        everyone = ints[g, 0] + ints[g, 1]
        row[0] = ints[g, 0] / max(1, ints[g, 8])
        row[1] = math.log1p(ints[g, 1])
        row[2] = ints[g, 2] / max(1, ints[g, 3])
        row[3] = math.log1p(estimates[g, P.E_BACKLOG_S])
        row[4] = _log(estimates[g, P.E_STEP_AFTER_S] / tightest_s, 1e-4)
        row[5] = _log(floats[g, 2], 1e-3)
        row[6] = _log(capability[g], 1e-3)
        row[7] = 1.0 if breaker_state[g] == _BREAKER_HALF_OPEN else 0.0
        row[8] = report_age_s[g]
        row[9] = math.log1p(floats[g, 3])
        row[10] = _deviation(rank_busy[g])
        row[11] = is_up[g]
        row[12] = is_draining[g]
        row[13] = math.log1p(estimates[g, P.E_WORK_LEFT_S])
        row[14] = estimates[g, P.E_UTILITY] / max(1, everyone)
        slowest, fastest = _rank_extremes(rank_ratio[g])
        row[15] = math.log(slowest)
        row[16] = math.log(slowest / fastest)
        row[17] = correction_std[g]


@kernel
def _route_rows(estimates, hits, prompt, allowed, ints, floats, baseline, block_tokens, affinity, ratio, class_index, out):
    """Route features of every group, after its group features in `out`; comparisons are with the best allowed group.

    baseline (groups, BASELINES): what a typical request of the class costs each group; affinity (groups,); ratio (groups,
    classes, 2): observed / predicted. Returns the best net utility.
    """
    best_ttft = best_completion = best_base = math.inf
    best_net = -math.inf
    best_index = -1
    for g in range(estimates.shape[0]):
        if allowed[g]:
            best_ttft = min(best_ttft, estimates[g, P.E_TTFT_S])
            if estimates[g, P.E_COMPLETION_S] < best_completion:
                best_completion = estimates[g, P.E_COMPLETION_S]
                best_index = g
            best_net = max(best_net, estimates[g, P.E_OWN] + estimates[g, P.E_HARM])
            best_base = min(best_base, baseline[g, P.B_TIME_S] * floats[g, 2])
    for g in range(estimates.shape[0]):
        row = out[g, len(GROUP_FEATURES) :]
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
            row[13] = _log(baseline[g, P.B_TIME_S] * floats[g, 2] / max(best_base, 1e-6), 1e-4)
        row[12] = _log(baseline[g, P.B_TTFT_RATIO] * floats[g, 2], 1e-4)
        row[14] = _log(baseline[g, P.B_KV_TOKENS] / max(1, ints[g, 2] * block_tokens), 1e-4)
        row[15] = affinity[g]
        row[16] = math.log(ratio[g, class_index, 0])
        row[17] = math.log(ratio[g, class_index, 1])
    return best_net if best_index >= 0 else 0.0


@inner_kernel
def _clipped(value):
    return min(BOUND, max(-BOUND, value))


@kernel
def _fill_candidates(both, kind, group, corner, moves, is_route, out):
    """One row per candidate into `out` (candidates or more, FEATURES), zero so far. `both`: feature rows by group."""
    for i in range(kind.shape[0]):
        row = out[i]
        row[kind[i]] = 1.0
        if is_route:
            if i < both.shape[0]:  # hold and refuse concern no group
                for k in range(both.shape[1]):
                    row[_GROUP_AT + k] = _clipped(both[i, k])
            continue
        if group[i] >= 0:
            for k in range(_ROUTE_AT - _GROUP_AT):
                row[_GROUP_AT + k] = _clipped(both[group[i], k])
        if corner[i] >= 0:
            row[_CORNER_AT + corner[i]] = 1.0
        for k in range(moves.shape[1]):
            row[_MOVE_AT + k] = _clipped(moves[i, k])


@kernel
def _fill_context(values, both, is_up, hold_fraction, best_net, out):
    """The context row. values: the entries from `log_prompt_tokens` to `log_rate_60s`; the one-hot entries before them are
    the caller's."""
    groups = both.shape[0]
    up = 0
    running = free = 0.0
    for g in range(groups):
        if is_up[g]:
            up += 1
            running += both[g, 0]
            free += both[g, 2]
    for k in range(len(values)):
        out[_REQUEST_AT + k] = _clipped(values[k])
    at = _REQUEST_AT + len(values)
    out[at] = _clipped(hold_fraction)
    out[at + 1] = _clipped(math.log(max(1, groups)))
    out[at + 2] = _clipped(running / max(1, up))
    out[at + 3] = _clipped(free / max(1, up))
    out[at + 4] = _clipped(best_net)
    out[at + 5] = _clipped(max(1, up) / max(1, groups))


@kernel
def _all_rows(
    ints, floats, capability, breaker_state, report_age_s, rank_busy, rank_ratio, correction_std, is_up, is_draining, estimates,
    tightest_s, hits, prompt, allowed, baseline, block_tokens, static, needs, profile, square, affinity, ratio, class_index, out,
):  # fmt: skip
    """Group rows and, where class_index >= 0, route rows; profile, square and affinity are scratch (zeros). Best net utility."""
    _group_rows(
        ints, floats, capability, breaker_state, report_age_s, rank_busy, rank_ratio, correction_std, is_up, is_draining, estimates,
        tightest_s, out,
    )  # fmt: skip
    if class_index < 0:
        return 0.0
    profiles_and_cosines(static, ints[:, 1], ints[:, 2], ints[:, 3], rank_ratio, needs[class_index], profile, square, affinity)
    return _route_rows(
        estimates, hits, prompt, allowed, ints, floats, baseline[class_index], block_tokens, affinity, ratio, class_index, out
    )


def _feature_rows(point: DecisionPoint) -> tuple[npt.NDArray[np.float64], float]:
    """Group features followed by route features (zero without a request) of every group, and the best net utility."""
    view, tables, request = point.view, point.tables, point.request
    ints, floats = point.packed
    groups = view.groups
    both = np.zeros((groups, len(GROUP_FEATURES) + len(ROUTE_FEATURES)))
    profile, work = np.empty((groups, len(PROFILE))), np.zeros((2, groups))
    prompt, class_index, hits = (0, -1, _NO_HITS) if request is None else (request.prompt_tokens, request.class_index, point.hits)
    best_net = _all_rows(
        ints, floats, view.capability, view.breaker_state, view.report_age_s, view.rank_busy_fraction, view.rank_ratio,
        view.correction_std, view.is_up, view.is_draining, point.estimates, point.tightest_tpot_s, hits, prompt,
        point.allowed_groups, tables.baseline, view.kv_block_tokens, view.static_profile, tables.needs, profile, work[0], work[1],
        view.class_ratio, class_index, both,
    )  # fmt: skip
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
    view, request = point.view, point.request
    both, best_net = _feature_rows(point)
    candidates = np.zeros((rows, len(FEATURES)), np.float32)
    moves = _NO_MOVES if request is not None else point.moves
    _fill_candidates(both, *point.columns, moves, request is not None, candidates)
    context = np.zeros(len(CONTEXT), np.float32)
    context[_DECISIONS.index(point.decision)] = 1.0
    of_request = (0.0, 0.0, 0.0, 0.0)
    if request is not None:
        context[_CLASS_AT + request.class_index] = 1.0
        expected = point.tables.remaining_tokens[request.class_index, 0]
        waited_s = max(0.0, view.now_s - request.arrival_s)
        of_request = (math.log1p(request.prompt_tokens), math.log1p(expected), math.log1p(waited_s), float(request.attempts))
    values = (*of_request, math.log1p(view.arrival_rate_5s), math.log1p(view.arrival_rate_60s))
    _fill_context(values, both, view.is_up, view.hold_queue / max(1, view.hold_queue_limit), best_net, context)
    return candidates, context

"""Hand-made decision points for the heuristics' tests: small clusters whose numbers a reader can follow.

The toy model of a group: a decode step takes 10 ms / speed whatever its batch, prefill 0.1 ms / speed per token, and every
answer has 100 tokens. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envs.decision import predictor as P
from envs.decision.actions import DecisionPoint, route_commands, route_mask
from envs.decision.capability import FEATURES, STATIC_FEATURES
from envs.domain.commands import Command, CommandKind
from envs.domain.requests import SERVICE_CLASSES, Request
from envs.domain.snapshot import ClusterSnapshot, Residents
from envs.perf_model import step_time as ST

ANSWER_TOKENS = 100
KV_BLOCKS = 1000
BLOCK_TOKENS = 16


def view_of(groups: int, residents: Mapping[int, Sequence[tuple[int, int]]] | None = None, **columns: object) -> ClusterSnapshot:
    """Snapshot at 10 s of idle, equal groups; `columns` replace arrays or scalars.

    residents: group -> (prompt tokens, tokens generated) of running requests; running, decoding, KV follow from it.
    """
    inside = residents or {}
    counts = np.array([len(inside.get(g, ())) for g in range(groups)], np.int64)
    kv_tokens = np.array([sum(prompt + made for prompt, made in inside.get(g, ())) for g in range(groups)], np.int64)
    rows = [(g, prompt, made) for g in range(groups) for prompt, made in inside.get(g, ())]
    ints = np.array([(i, 0, prompt, made, 0, 1) for i, (_, prompt, made) in enumerate(rows)], np.int64).reshape(-1, 6)
    floats = np.array([(9.0, 9.5, 7.0) for _ in rows], np.float64).reshape(-1, 3)
    values: dict[str, object] = {
        "now_s": 10.0,
        "is_up": np.ones(groups, np.bool_),
        "accepts": np.ones(groups, np.bool_),
        "is_draining": np.zeros(groups, np.bool_),
        "running": counts,
        "waiting": np.zeros(groups, np.int64),
        "running_limit": np.full(groups, 64),
        "queue_limit": np.full(groups, 256),
        "kv_blocks_free": KV_BLOCKS - -(-kv_tokens // BLOCK_TOKENS),
        "kv_blocks_total": np.full(groups, KV_BLOCKS),
        "kv_block_tokens": BLOCK_TOKENS,
        "prefill_backlog_tokens": np.zeros(groups, np.int64),
        "decode_kv_tokens": kv_tokens,
        "decoding": counts,
        "step_s": np.zeros(groups),
        "step_left_s": np.zeros(groups),
        "correction": np.ones(groups),
        "oldest_wait_s": np.zeros(groups),
        "breaker_state": np.zeros(groups, np.int64),
        "report_age_s": np.zeros(groups),
        "pause_left_s": np.zeros(groups),
        "plan_corner": np.zeros(groups, np.int64),
        "rank_busy_fraction": np.ones((groups, 1)),
        "capability": np.ones(groups),
        "usd_per_hour": np.ones(groups),
        "residents": Residents(np.concatenate([[0], np.cumsum(counts)]), ints, floats),
        "hold_queue": 0,
        "hold_queue_limit": 8,
        "arrival_rate_5s": 1.0,
        "arrival_rate_60s": 1.0,
        "static_profile": np.zeros((groups, len(STATIC_FEATURES))),
        "rank_ratio": np.ones((groups, 1)),
        "correction_std": np.zeros(groups),
        "class_ratio": np.ones((groups, len(SERVICE_CLASSES), 2)),
    }
    wrong = set(columns) - set(values)
    assert not wrong, f"no such column: {wrong}"
    arrays = {name: np.asarray(value) if isinstance(value, (list, tuple)) else value for name, value in columns.items()}
    return ClusterSnapshot(**(values | arrays))


def tables_of(speeds: Sequence[float], answer_tokens: int = ANSWER_TOKENS) -> P.PredictorTables:
    """Predictor tables of one-rank groups with these relative speeds."""
    groups, speed = len(speeds), np.asarray(speeds, np.float64)
    rank_cost = np.zeros((groups, 2, 1, ST.RANK_COLUMNS))
    rank_cost[:, :, 0, ST.RC_MLP_WEIGHT_S] = (0.010 / speed)[:, None]
    rank_cost[:, :, 0, ST.RC_MLP_TOKEN_S] = (1e-4 / speed)[:, None]
    group_cost = np.zeros((groups, ST.GROUP_COLUMNS))
    group_cost[:, [ST.GC_HOST_SLOW, ST.GC_LINK_SLOW, ST.GC_INTERFERENCE]] = 1.0
    classes = len(SERVICE_CLASSES)
    plan, chunk = np.zeros(groups, np.int64), np.full(groups, 2048, np.int64)
    residual, slow = np.ones((groups, 1, ST.RESIDUAL_BINS)), np.ones((groups, 1, 2))
    prompts, answers = np.full(classes, 400.0), np.full(classes, float(answer_tokens))
    return P.PredictorTables(
        rank_cost=rank_cost,
        group_cost=group_cost,
        plan=plan,
        baseline=P.baseline_table(P.baselines(prompts, answers, rank_cost, group_cost, residual, slow, plan, chunk, 1e5)),
        needs=np.zeros((classes, len(FEATURES))),
        remaining_tokens=np.full((classes, P.REMAINING_BINS), float(answer_tokens)),
        remaining_quantiles=np.full((classes, P.REMAINING_BINS, P.QUANTILES), float(answer_tokens)),
        chunk_tokens=chunk,
        residual=residual,
        slow=slow,
    )


def route_point(
    view: ClusterSnapshot,
    allowed: Sequence[bool] | None = None,
    speeds: Sequence[float] | None = None,
    hits: Sequence[int] | None = None,
    estimates: Mapping[int, Sequence[float]] | None = None,
    may_hold: bool = True,
    prompt_tokens: int = 400,
    class_index: int = 0,
) -> DecisionPoint:
    """Route decision for a request that arrives now; `estimates`: predictor column -> values by group, in place of the predictor's."""
    groups = view.groups
    accepts = np.ones(groups, np.bool_) if allowed is None else np.array(allowed, np.bool_)
    point = DecisionPoint(
        "route",
        view,
        route_commands(groups),
        route_mask(accepts, view.hold_queue, view.hold_queue_limit, may_hold),
        tables_of([1.0] * groups if speeds is None else speeds),
        Request(7, view.now_s, prompt_tokens, class_index),
        np.zeros(groups, np.int64) if hits is None else np.array(hits, np.int64),
    )
    if estimates is not None:
        table = np.ones((groups, P.ESTIMATES))
        for column, values in estimates.items():
            table[:, column] = values
        point.estimates = table  # a cached property: a value set beforehand is the one that counts
    return point


def control_point(
    decision: str,
    view: ClusterSnapshot,
    moves: Sequence[tuple[Command, Sequence[float]]],
    mask: Sequence[bool] | None = None,
    estimates: Mapping[int, Sequence[float]] | None = None,
) -> DecisionPoint:
    """Split or rebalance decision: keep, then `moves` as (command, its row of MOVE_FEATURES)."""
    commands = (Command(CommandKind.KEEP), *(command for command, _ in moves))
    rows = np.array([[0.0] * 5, *(list(row) for _, row in moves)], np.float64)
    allowed = np.ones(len(commands), np.bool_) if mask is None else np.array(mask, np.bool_)
    point = DecisionPoint(decision, view, commands, allowed, tables_of([1.0] * view.groups), moves=rows)  # type: ignore[arg-type]
    if estimates is not None:
        table = np.zeros((view.groups, P.ESTIMATES))
        for column, values in estimates.items():
            table[:, column] = values
        point.estimates = table
    return point


def hold_index(point: DecisionPoint) -> int:
    return point.view.groups


def refuse_index(point: DecisionPoint) -> int:
    return point.view.groups + 1

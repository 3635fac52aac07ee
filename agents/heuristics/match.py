"""The matching-score router: fit of request and group by named sub-scores (`envs.decision.matching_score`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.heuristics.counting import pick_lowest
from envs.decision import matching_score
from envs.decision import predictor as P
from envs.decision.actions import DecisionPoint
from envs.decision.class_experience import TPOT, TTFT
from envs.domain.snapshot import FloatArray
from envs.perf_model.step_time import GC_COMM_ALPHA_S, GC_COMM_TOKEN_S


@dataclass(frozen=True, slots=True)
class MatchingScore:
    """Highest total matching score among the allowed groups."""

    def choose(self, point: DecisionPoint) -> int:
        return pick_lowest(point, -matching_score.total(sub_scores(point)))


def sub_scores(point: DecisionPoint) -> FloatArray:
    """Sub-scores (groups, 5) of the point's request in every group, in the order of `matching_score.SUB_SCORES`.

    The estimates carry the groups' observed / predicted step times already; what answers of this class have met beyond that
    in each group corrects them here. The class's baseline, which no idle group beats, bounds the latency expectation from
    below: a prediction for a lucky request is no expectation of its kind.
    """
    view, tables, request, estimates = point.view, point.tables, point.request, point.estimates
    assert request is not None
    limits = P.class_limits(tables.limit_multiplier)[request.class_index]
    ttft_limit_s = limits[0] + limits[1] * request.prompt_tokens
    baseline = tables.baseline[request.class_index] * view.correction[:, None]
    seen = view.class_ratio[:, request.class_index]
    everyone = view.running + view.waiting + 1
    comm_s = tables.group_cost[:, GC_COMM_ALPHA_S] + tables.group_cost[:, GC_COMM_TOKEN_S] * everyone
    wanted_rate = (view.prefill_backlog_tokens + request.prompt_tokens) / ttft_limit_s
    return matching_score.matching_scores(
        ttft_s=estimates[:, P.E_TTFT_S] * seen[:, TTFT],
        tpot_s=estimates[:, P.E_TPOT_S] * seen[:, TPOT],
        ttft_limit_s=ttft_limit_s,
        tpot_limit_s=limits[2],
        kv_tokens_needed=request.prompt_tokens + tables.remaining_tokens[request.class_index, 0],
        kv_tokens_free=view.kv_blocks_free * view.kv_block_tokens,
        comm_fraction=np.clip(comm_s / estimates[:, P.E_STEP_AFTER_S], 0.0, 1.0),
        rank_busy_fraction=view.rank_busy_fraction,
        compute_ratio=estimates[:, P.E_PREFILL_RATE] / wanted_rate,
        rank_is_present=tables.rank_cost[:, 0].any(axis=2),
        baseline_ttft_ratio=baseline[:, P.B_TTFT_RATIO],
        baseline_tpot_ratio=baseline[:, P.B_TPOT_RATIO],
        profile_affinity=point.affinity,
    )

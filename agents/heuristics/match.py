"""The matching-score router: fit of request and group by named sub-scores (`envs.decision.matching_score`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.heuristics.counting import pick_lowest
from envs.decision import matching_score, predictor
from envs.decision.actions import DecisionPoint
from envs.domain.snapshot import FloatArray


@dataclass(frozen=True, slots=True)
class MatchingScore:
    """Highest total matching score among the allowed groups."""

    def choose(self, point: DecisionPoint) -> int:
        return pick_lowest(point, -matching_score.total(sub_scores(point)))


def sub_scores(point: DecisionPoint) -> FloatArray:
    """Sub-scores (groups, 5) of the point's request in every group, in the order of `matching_score.SUB_SCORES`."""
    return matching_score.scores_of_point(point.view, point.request, point.estimates, point.tables)


_ = (np, predictor)

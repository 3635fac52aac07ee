"""Decision points: what may be chosen now, as a list of candidate commands with a mask that is never all false."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, Protocol

import numpy as np

from envs.decision import predictor as P
from envs.decision.capability import profile_and_affinity
from envs.domain.commands import Command, CommandKind
from envs.domain.requests import SERVICE_CLASSES, Request
from envs.domain.snapshot import BoolArray, ClusterSnapshot, FloatArray, IntArray
from envs.perf_model.compiled import kernel

Decision = Literal["route", "split", "rebalance"]
CORNER_COUNT = 5  # len(envs.decision.split_planner.CORNERS); a test holds the two together
_WEIGHTS = np.array([service.weight for service in SERVICE_CLASSES])
MOVE_COLUMNS = 5  # len(envs.decision.observation.MOVE_FEATURES)


@lru_cache(maxsize=64)
def route_commands(groups: int) -> tuple[Command, ...]:
    """Candidates of a route decision: every group in order, then hold, then refuse."""
    routes = tuple(Command(CommandKind.ROUTE, group_index) for group_index in range(groups))
    return (*routes, Command(CommandKind.HOLD), Command(CommandKind.REFUSE, reason="scheduler"))


class CandidateColumns(NamedTuple):
    """Candidates as the observation shows them, each of shape (candidates,): kind, group it concerns (-1: none), corner of
    the split it would set (-1: none)."""

    kind: IntArray
    group: IntArray
    corner: IntArray


def candidate_columns(commands: Sequence[Command]) -> CandidateColumns:
    """Columns of `commands`, in their order."""
    return CandidateColumns(
        np.array([int(command.kind) for command in commands], np.int64),
        np.array([command.group_index for command in commands], np.int64),
        np.array([command.argument if command.kind is CommandKind.SET_SPLIT else -1 for command in commands], np.int64),
    )


@lru_cache(maxsize=64)
def _route_columns(groups: int) -> CandidateColumns:
    return candidate_columns(route_commands(groups))


def route_mask(accepts: BoolArray, hold_queue: int, hold_limit: int, may_hold: bool) -> BoolArray:
    """Allowed candidates of a route decision; refusing is always legal, so the mask is never empty (K02)."""
    mask = np.empty(accepts.shape[0] + 2, np.bool_)
    mask[:-2] = accepts
    mask[-2] = may_hold and hold_queue < hold_limit
    mask[-1] = True
    return mask


@kernel
def _expected_loss(estimates, resident_ints, weights):
    """Summed soft utility of all groups less the residents' full weights."""
    total = 0.0
    for g in range(estimates.shape[0]):
        total += estimates[g, P.E_UTILITY]
    for i in range(resident_ints.shape[0]):
        total -= weights[resident_ints[i, 1]]
    return total


@dataclass(eq=False)
class DecisionPoint:
    """One question to the scheduler: the view, the candidates, the mask. Derived numbers are computed when first asked for.

    request and hits belong to route decisions (hits (groups,): prompt tokens in each prefix cache); moves
    (candidates, MOVE_COLUMNS) to split and rebalance decisions: log speed-up, log1p price in s, log1p affected
    requests, log1p target backlog in s, utility delta.
    """

    decision: Decision
    view: ClusterSnapshot
    commands: tuple[Command, ...]
    mask: BoolArray
    tables: P.PredictorTables
    request: Request | None = None
    hits: IntArray = None  # type: ignore[assignment]
    moves: FloatArray = None  # type: ignore[assignment]

    @cached_property
    def estimates(self) -> FloatArray:
        """Predictor's table (groups, ESTIMATES); for decisions without a request, of a short chat request."""
        request = self.request or Request(-1, self.view.now_s, 128, 0)
        hits = self.hits if self.hits is not None else np.zeros(self.view.groups, np.int64)
        return P.estimate_routes(self.view, request, hits, self.tables, self.packed)

    def expected_s(self, group_index: int) -> tuple[float, float] | None:
        """Predicted TTFT and TPOT in a group, s, if anybody has asked for estimates; None otherwise."""
        estimates = self.__dict__.get("estimates")
        if estimates is None:
            return None
        return float(estimates[group_index, P.E_TTFT_S]), float(estimates[group_index, P.E_TPOT_S])

    @cached_property
    def packed(self) -> tuple[IntArray, FloatArray]:
        return P.pack_groups(self.view)

    @cached_property
    def affinity(self) -> FloatArray:
        """Cosine of every group's capability profile with what the request's class needs, shape (groups,)."""
        return self._profile_and_affinity[1]

    @cached_property
    def profile(self) -> FloatArray:
        """Capability profile of every group, static and dynamic, shape (groups, len(capability.FEATURES))."""
        return self._profile_and_affinity[0]

    @cached_property
    def _profile_and_affinity(self) -> tuple[FloatArray, FloatArray]:
        class_index = self.request.class_index if self.request is not None else 0
        return profile_and_affinity(self.view, self.tables.needs[class_index])

    @cached_property
    def potential(self) -> float:
        """Phi of reward shaping: what everybody inside is expected to lose, soft utility less full weight; at most 0.

        Counted from full weight so that it stays near 0 while all goes well: a large Phi times a random discount^dt would
        bury the effect of the one decision in noise.
        """
        return float(_expected_loss(self.estimates, self.view.residents.ints, _WEIGHTS))

    @property
    def allowed_groups(self) -> BoolArray:
        """Route decisions: which groups may take the request, shape (groups,)."""
        return self.mask[: self.view.groups]

    @property
    def columns(self) -> CandidateColumns:
        """The candidates as arrays; those of a route decision depend on the number of groups alone."""
        return _route_columns(self.view.groups) if self.decision == "route" else candidate_columns(self.commands)

    @property
    def tightest_tpot_s(self) -> float:
        return min(service.tpot_limit_s for service in SERVICE_CLASSES) * self.tables.limit_multiplier


def route_point(
    view: ClusterSnapshot, tables: P.PredictorTables, request: Request, fits: BoolArray, hits: IntArray, may_hold: bool
) -> DecisionPoint:
    """Where `request` shall go. fits (groups,): which groups could hold it; hits (groups,): prompt tokens in each one's prefix cache."""
    mask = route_mask(view.accepts & fits, view.hold_queue, view.hold_queue_limit, may_hold)
    return DecisionPoint("route", view, route_commands(view.groups), mask, tables, request, hits)


class Scheduler(Protocol):
    """Whoever answers decision points: a heuristic, a policy, or the runtime's retreat through both."""

    def choose(self, point: DecisionPoint) -> int:
        """Index of an allowed candidate; an index the mask forbids is the scheduler's fault and is counted."""
        ...

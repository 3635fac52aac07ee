"""What holds for every heuristic by name: it chooses what the mask allows, holds and then refuses without a group, sees groups
as a set where it should, and is the same when made twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decision_points import control_point, hold_index, refuse_index, route_point, tables_of, view_of

from agents import heuristics
from agents.heuristics.predicting import LinearScore
from envs.decision.actions import DecisionPoint, Scheduler, route_mask
from envs.domain.commands import Command, CommandKind
from envs.domain.snapshot import ClusterSnapshot, Residents

GROUPS = 5
ORDER_MATTERS = {"random", "round_robin", "weighted_round_robin", "power_of_two"}
"""These take turns or draw: another order of groups is another choice, by design."""
ROUTERS = sorted(heuristics.ROUTERS)
CONTROLLERS = [("split", name) for name in sorted(heuristics.SPLITTERS)] + [("rebalance", name) for name in sorted(heuristics.REBALANCERS)]


def make(name: str, decision: str = "route", seed: int = 0) -> Scheduler:
    return heuristics.make(decision, name, np.random.default_rng(seed))


def random_view(rng: np.random.Generator) -> ClusterSnapshot:
    counts = 2 * rng.permutation(GROUPS)  # with at most one waiting request each, no two groups are equally full
    residents = {g: [(int(rng.integers(50, 900)), int(rng.integers(1, 90))) for _ in range(int(count))] for g, count in enumerate(counts)}
    view = view_of(
        GROUPS,
        residents,
        correction=rng.uniform(0.8, 1.5, GROUPS),
        capability=rng.uniform(0.3, 2.0, GROUPS),
        step_left_s=rng.uniform(0.0, 0.02, GROUPS),
        prefill_backlog_tokens=rng.integers(0, 4000, GROUPS),
    )
    return view._replace(waiting=(view.prefill_backlog_tokens > 2000).astype(np.int64))


def random_point(rng: np.random.Generator, allowed: list[bool] | None = None) -> DecisionPoint:
    mask = list(rng.random(GROUPS) < 0.6) if allowed is None else allowed
    speeds = list(rng.uniform(0.3, 3.0, GROUPS))
    hits = list(rng.permutation([0, 0, 96, 160, 320]))
    return route_point(random_view(rng), mask, speeds, hits, prompt_tokens=int(rng.integers(330, 2000)), class_index=int(rng.integers(3)))


def permuted(point: DecisionPoint, order: np.ndarray) -> DecisionPoint:
    """The same decision with group order[i] in place i."""
    view = point.view
    columns = {}
    for name in ClusterSnapshot._fields:
        value = getattr(view, name)
        if isinstance(value, np.ndarray):
            columns[name] = value[order]
    old = view.residents
    rows = np.concatenate([np.arange(old.offset[g], old.offset[g + 1]) for g in order]).astype(np.int64)
    offset = np.concatenate([[0], np.cumsum(np.diff(old.offset)[order])])
    columns["residents"] = Residents(offset, old.ints[rows], old.floats[rows])
    tables = point.tables
    per_group = ("rank_cost", "group_cost", "plan", "chunk_tokens", "residual", "slow")
    moved = replace(tables, baseline=tables.baseline[:, order], **{name: getattr(tables, name)[order] for name in per_group})
    mask = route_mask(point.allowed_groups[order], view.hold_queue, view.hold_queue_limit, True)
    return DecisionPoint("route", view._replace(**columns), point.commands, mask, moved, point.request, point.hits[order])


@pytest.mark.fault("K02")
@pytest.mark.parametrize("name", ROUTERS)
def test_router_chooses_only_what_the_mask_allows(name):
    rng = np.random.default_rng(1)
    router = make(name)
    for _ in range(20 if name == "what_if" else 200):
        point = random_point(rng)
        assert point.mask[router.choose(point)]


@pytest.mark.parametrize("name", ROUTERS)
def test_router_takes_the_only_allowed_group(name):
    rng = np.random.default_rng(2)
    router = make(name)
    for group in range(GROUPS):
        point = random_point(rng, [g == group for g in range(GROUPS)])
        assert router.choose(point) == group


@pytest.mark.fault("K02")
@pytest.mark.parametrize("name", ROUTERS)
def test_router_holds_then_refuses_without_a_group(name):
    """No group may take it: hold while holding is legal; with the hold queue full or the time to hold over, refuse."""
    router = make(name)
    nobody = [False] * 3
    holdable = route_point(view_of(3), nobody)
    assert router.choose(holdable) == hold_index(holdable)
    full = route_point(view_of(3, hold_queue=8), nobody)
    assert router.choose(full) == refuse_index(full)
    overdue = route_point(view_of(3), nobody, may_hold=False)
    assert router.choose(overdue) == refuse_index(overdue)


@pytest.mark.parametrize("name", [name for name in ROUTERS if name not in ORDER_MATTERS])
def test_router_sees_groups_as_a_set(name):
    """In another order the same group is chosen (random numbers leave no ties)."""
    rng = np.random.default_rng(3)
    for _ in range(4 if name == "what_if" else 30):
        point = random_point(rng)
        order = rng.permutation(GROUPS)
        before, after = make(name).choose(point), make(name).choose(permuted(point, order))
        assert after == before if before >= GROUPS else order[after] == before


@pytest.mark.parametrize("name", ROUTERS)
def test_same_seed_same_choices(name):
    def choices() -> list[int]:
        rng, router = np.random.default_rng(4), make(name, seed=5)
        return [router.choose(random_point(rng)) for _ in range(10)]

    assert choices() == choices()


@pytest.mark.parametrize("name", ROUTERS)
def test_router_leaves_the_question_as_it_was(name):
    """A heuristic that writes into the snapshot would corrupt the next one's view of the same instant."""
    point = random_point(np.random.default_rng(6), [True] * GROUPS)
    before = {name: np.array(getattr(point.view, name)) for name in ClusterSnapshot._fields if name != "residents"}
    mask = point.mask.copy()
    make(name).choose(point)
    assert all(np.array_equal(before[column], getattr(point.view, column)) for column in before)
    assert np.array_equal(point.mask, mask)


@pytest.mark.parametrize(("decision", "name"), CONTROLLERS)
def test_controller_keeps_when_nothing_else_is_allowed(decision, name):
    """Attractive moves that the mask forbids are not made."""
    moves = [
        (Command(CommandKind.SET_SPLIT, 0, argument=corner), (2.0, 0.0, 0.0, 0.0, 0.0)) for corner in range(5)
    ] + [
        (Command(kind, 0, 1), (2.0, 0.0, 1.0, 5.0, 1.0))
        for kind in (CommandKind.REQUEUE, CommandKind.MIGRATE, CommandKind.FALL_BACK, CommandKind.SCALE_OUT)
    ]  # fmt: skip
    view = view_of(2, waiting=[9, 0], kv_blocks_free=[0, 1000], plan_corner=[-1, -1], prefill_backlog_tokens=[60_000, 0])
    point = control_point(decision, view, moves, [True] + [False] * len(moves))
    assert make(name, decision).choose(point) == 0


@pytest.mark.parametrize(("decision", "name"), CONTROLLERS)
def test_controller_keeps_when_there_is_only_keep(decision, name):
    assert make(name, decision).choose(control_point(decision, view_of(2), [])) == 0


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match='did you mean "least_completion"\\? known: least_completion, least_kv'):
        make("least_complet")
    with pytest.raises(ValueError, match='split heuristic "round_robin" unknown; known: bandwidth, compute'):
        make("round_robin", "split")


def test_linear_score_counts_features_and_takes_the_best():
    """With its whole weight on one feature it is that feature's argmax: the queue's length with a negative sign."""
    names = LinearScore.features()
    weights = np.zeros(len(names))
    weights[names.index("log_waiting")] = -1.0
    router = LinearScore(weights)
    assert router.choose(route_point(view_of(3, waiting=[4, 1, 2]))) == 1
    assert router.choose(route_point(view_of(3, waiting=[4, 1, 2]), [True, False, True])) == 2
    point = route_point(view_of(3), [False] * 3)
    assert router.choose(point) == hold_index(point)


def test_linear_score_is_equivariant():
    rng = np.random.default_rng(8)
    router = LinearScore(rng.normal(size=len(LinearScore.features())))
    for _ in range(20):
        point, order = random_point(rng, [True] * GROUPS), rng.permutation(GROUPS)
        assert order[router.choose(permuted(point, order))] == router.choose(point)


def test_toy_model_is_what_its_text_says():
    """10 ms a step, 0.1 ms a prompt token at speed 1; half of both at speed 2 (checked through the predictor)."""
    point = route_point(view_of(2), speeds=[1.0, 2.0], prompt_tokens=400)
    assert point.estimates[:, 0] == pytest.approx([0.0401, 0.02005], rel=0.01)  # TTFT: 400 prompt tokens, one decode row
    assert point.estimates[:, 1] == pytest.approx([0.010, 0.005])
    assert tables_of([1.0]).remaining_tokens[0, 0] == 100

"""Small worlds for tests: three unlike groups (a pair, a single card, a parked spare) and made-up traffic."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.faults import FaultEvent
from envs.cluster.world import WorldOptions, WorldSpec
from envs.decision.actions import Decision, DecisionPoint
from envs.domain.commands import CommandKind
from envs.group_kernel import layout as L
from envs.group_kernel import reading as R
from envs.scenario.cluster_file import load_cluster
from envs.scenario.cluster_spec import ClusterLimits, ClusterSpec
from envs.traces.trace_table import TraceTable

PAIR, SOLO, SPARE = 0, 1, 2
LIMITS = ClusterLimits(max_running=16, queue_limit=32, hold_limit=8, context_tokens=8192)
ALL: tuple[Decision, ...] = ("route", "split", "rebalance")


@lru_cache
def _unlike() -> ClusterSpec:
    return load_cluster("unlike-3")


def cluster(limits: ClusterLimits = LIMITS, copies: int = 1) -> ClusterSpec:
    """`copies` times the three groups; the spares are parked."""
    pair, solo = _unlike().groups
    groups = []
    for i in range(copies):
        groups += [replace(group, name=f"{group.name}-{i}") for group in (pair, solo, replace(solo, name="spare"))]
    return replace(_unlike(), groups=tuple(groups), parked=(False, False, True) * copies, limits=limits, faults=())


def trace(arrivals_s, prompts, outputs, classes=0, limits=0, prefixes: list[list[int]] | None = None, block_tokens: int = 0) -> TraceTable:
    """A trace of given columns; scalars are repeated."""
    n = len(arrivals_s)
    full = lambda values, dtype: np.broadcast_to(np.asarray(values), (n,)).astype(dtype)  # noqa: E731
    lengths = [len(ids) for ids in prefixes] if prefixes else [0] * n
    return TraceTable(
        arrival_s=np.asarray(arrivals_s, np.float64).copy(),
        prompt_tokens=full(prompts, np.int32),
        output_tokens=full(outputs, np.int32),
        class_index=full(classes, np.int8),
        session=np.full(n, -1, np.int32),
        session_names=(),
        priority=np.full(n, -1, np.int16),
        output_limit_tokens=full(limits, np.int32),
        prefix_offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        prefix_ids=np.array([block for ids in prefixes or [] for block in ids], np.int64),
        block_tokens=block_tokens,
        source="made up",
        synthetic=True,
    )


def traffic(count: int, rate_per_s: float, seed: int, prompt_mean: float = 400, output_mean: float = 60, shared: bool = True) -> TraceTable:
    """Poisson arrivals, log-normal lengths, all classes; half of the requests share prefixes of 64-token blocks."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    prompts = np.clip(rng.lognormal(np.log(prompt_mean), 0.8, count), 1, 4000).astype(int)
    outputs = np.clip(rng.lognormal(np.log(output_mean), 0.8, count), 1, 1500).astype(int)
    prefixes = []
    for i in range(count):
        family = int(rng.integers(4))
        own = 40 + i * 70
        full = prompts[i] // 64 if shared and rng.random() < 0.5 else 0
        prefixes.append([family * 10 + k if k < 8 else own + k for k in range(full)])
    ids = {block: index for index, block in enumerate(sorted({b for blocks in prefixes for b in blocks}))}
    prefixes = [[ids[block] for block in blocks] for blocks in prefixes]
    return trace(arrivals, prompts, outputs, rng.integers(0, 3, count), 0, prefixes, 64)


def world(table: TraceTable, spec: ClusterSpec | None = None, seed: int = 1, faults: tuple[FaultEvent, ...] = (), **options) -> WorldSpec:
    return WorldSpec(spec or cluster(), table, seed, WorldOptions(**options), faults)


class RandomLegal:
    """Any legal candidate, moves forced far more often than anybody would; keeps count of what it chose."""

    def __init__(self, seed: int, move_share: float = 0.8) -> None:
        self.rng = np.random.default_rng(seed)
        self.move_share = move_share
        self.chosen: dict[CommandKind, int] = {}

    def choose(self, point: DecisionPoint) -> int:
        legal = np.flatnonzero(point.mask)
        assert legal.size, "empty mask"
        weights = np.ones(len(legal))
        if point.decision == "route":
            weights[legal >= point.view.groups] = 0.1
        else:
            weights[0] = len(legal) * (1 - self.move_share)
        index = int(self.rng.choice(legal, p=weights / weights.sum()))
        kind = point.commands[index].kind
        self.chosen[kind] = self.chosen.get(kind, 0) + 1
        return index


class RouteTo:
    """Every request to one group; hold when it cannot go there, else refuse."""

    def __init__(self, group_index: int) -> None:
        self.group_index = group_index

    def choose(self, point: DecisionPoint) -> int:
        groups = point.view.groups
        for index in (self.group_index, groups):
            if point.mask[index]:
                return index
        return groups + 1


class Shortest:
    """The allowed group with the fewest requests."""

    def choose(self, point: DecisionPoint) -> int:
        view = point.view
        if point.allowed_groups.any():
            return int(np.where(point.allowed_groups, view.running + view.waiting, 1 << 30).argmin())
        return view.groups if point.mask[view.groups] else view.groups + 1


def inside(process: ClusterProcess) -> int:
    """Requests inside groups, held, about to be asked, or under way between groups."""
    return int(process.state.group_int[:, [L.GI_RUNNING, L.GI_WAITING]].sum()) + process.outside


def check_laws(process: ClusterProcess) -> None:
    """Requests and KV blocks are conserved, the cache's books are right, no rank holds more KV than it has."""
    assert R.kv_conserved(process.state) == -1
    arrived = process._next_arrival
    assert arrived == process.outcomes.ended + inside(process)
    state = process.state
    resident = []
    for g in range(state.group_int.shape[0]):
        references = np.zeros(state.cache_links.shape[1] - 1, np.int64)
        for slot in process.residents(g):
            row = state.slot_int[g, slot]
            resident.append(int(row[L.SI_REQUEST]))
            begin = state.prefix_offset[row[L.SI_REQUEST]]
            for block in state.prefix_ids[begin : begin + row[L.SI_CACHE_REFS]]:
                references[block] += 1
        present = state.cache_links[g, :-1, 2]
        assert (np.maximum(present, 0) == references).all(), f"group {g}: cache references"
        assert (present == 0).sum() == state.group_int[g, L.GI_CACHE_IDLE]
    assert len(set(resident)) == len(resident), "a request is in two places"
    ended = process.outcomes.kind[resident] != 4
    assert not ended.any(), "an ended request is still inside"


def check_outcomes(process: ClusterProcess) -> None:
    """Times of completed requests are in order and their parts are >= 0 and add up."""
    out, table = process.outcomes, process.trace
    done = out.kind == 0
    parts = out.parts[done]
    assert (parts >= 0).all(), f"negative part {parts.min()}"
    whole = out.finish_s[done] - table.arrival_s[done]
    gap = np.abs(parts.sum(axis=1) - whole)
    assert gap.max(initial=0.0) < 1e-9, f"parts miss {gap.max()} s of request {np.flatnonzero(done)[gap.argmax()]}"
    assert (table.arrival_s[done] <= out.admitted_s[done]).all()
    assert (out.admitted_s[done] <= out.first_token_s[done]).all()
    assert (out.first_token_s[done] <= out.finish_s[done]).all()
    assert (out.output_tokens[done] == table.output_tokens[done]).all()
    ended = out.kind != 4
    assert np.isfinite(out.finish_s[ended]).all()


def play(spec: WorldSpec, schedulers: dict, check_every: int = 0, keep_lines: bool = False, on_point=None) -> ClusterProcess:
    """Run a world to its end, checking the laws at every `check_every`-th decision."""
    process = ClusterProcess(spec, tuple(schedulers), keep_lines=keep_lines)
    count = 0
    while (point := process.next_decision()) is not None:
        if on_point is not None:
            on_point(process, point)
        process.apply(point, schedulers[point.decision].choose(point))
        count += 1
        if check_every and count % check_every == 0:
            check_laws(process)
    check_laws(process)
    check_outcomes(process)
    return process

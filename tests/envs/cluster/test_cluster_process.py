"""The simulated world as a whole: conservation, latency parts, determinism, degenerate worlds, unservable requests."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.faults import FaultEvent, FaultKind, FaultRates
from envs.domain.commands import CommandKind
from envs.domain.requests import OutcomeKind
from envs.scheduling_env import world_summary
from tests.envs import small_worlds as W
from tests.envs.small_worlds import ALL, LIMITS, RandomLegal, Shortest, check_laws, play, traffic, world

PROJECT = Path(__file__).resolve().parents[3]
MANY_FAULTS = FaultRates(60, 60, 60, 60, 60, 60, length_mean_s=5.0)
FAST = dict(control_tick_s=1.0, cold_start_s=4.0, rebuild_s=1.0, drain_s=60.0)


def chaos_world(seed: int, with_faults: bool = True, kv_blocks: int | None = None):
    spec = W.cluster(replace(LIMITS, kv_blocks=kv_blocks))
    made = world(traffic(110, 6.0, seed, output_mean=60), spec, seed=seed, **FAST)
    return replace(made, fault_rates=MANY_FAULTS if with_faults else None)


@pytest.mark.parametrize(
    "seed, with_faults, kv_blocks", [(0, False, None), (1, True, None), (2, True, 400), (3, True, 500), (5, True, 330)]
)
def test_everything_is_conserved_under_random_legal_moves(seed, with_faults, kv_blocks):
    """Random legal answers to all three kinds of decision, moves forced at four ticks of five, faults of every kind:
    requests in = ended + inside and KV is conserved at every third decision; parts of completed requests are >= 0 and
    add up to finish - arrival within 1e-9 (checked by `play`)."""
    anybody = RandomLegal(seed)
    process = play(chaos_world(seed, with_faults, kv_blocks), dict.fromkeys(ALL, anybody), check_every=3)
    assert process.illegal_actions == 0
    assert process.in_system == 0 or process.env.now >= process.horizon_s
    assert anybody.chosen[CommandKind.SET_SPLIT] > 0
    assert (process.outcomes.kind == OutcomeKind.COMPLETED).sum() > 10


def digest_of(seed: int) -> str:
    anybody = RandomLegal(seed)
    return play(chaos_world(seed), dict.fromkeys(ALL, anybody)).log.digest()


def test_same_seed_same_digest_in_this_process_and_in_others():
    """Two runs here, one forked, one spawned, two with other hash seeds: one digest; another seed: another digest."""
    ours = digest_of(4)
    assert digest_of(4) == ours
    assert digest_of(6) != ours
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(digest_of, (4,)) == ours, method
    code = "from tests.envs.cluster.test_cluster_process import digest_of; print(digest_of(4))"
    for hash_seed in ("1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(PROJECT)}
        out = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, env=environment, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == ours, f"hash seed {hash_seed}"


def test_a_fault_moves_no_arrival_and_no_interference():
    """With one more fault the same requests are asked about at the same times, and hidden slow-downs stay the same."""
    table = traffic(40, 5.0, 3)
    fault = FaultEvent(FaultKind.LOST_GROUP, 2.0, 3.0, W.SOLO)

    def trace_of(faults):
        asked, hidden = {}, []

        def see(process, point):
            asked.setdefault(point.request.request_id, (point.view.now_s, point.request))
            hidden.append((point.view.now_s, tuple(process.groups.interference)))

        play(world(table, faults=faults, interference_period_s=3.0), {"route": Shortest()}, on_point=see)
        return asked, dict(hidden)

    calm, hit = trace_of(()), trace_of((fault,))
    assert calm[0] == hit[0]
    assert all(calm[1][now] == hit[1][now] for now in calm[1].keys() & hit[1].keys())


@pytest.mark.fault("K09")
@pytest.mark.parametrize("blocks", [0, 1, 17, 33, 125, 500])
def test_tiny_cache_ends_with_a_verdict(blocks, shared):
    """kv_tiny.json: ends within 10 s, everybody accounted for, nobody preempted more often than the bound; with too few
    blocks for one request everybody is unservable, otherwise somebody completes."""
    stated = json.loads((shared / "cases/inputs/kv_tiny.json").read_text())
    load, worker = stated["load"], stated["workers"][0]
    arrivals = np.cumsum(np.random.default_rng(load["seed"]).exponential(1 / load["arrivals_per_s"], load["requests"]))
    table = W.trace(arrivals, load["prompt_tokens"], load["output_tokens"])
    limits = replace(LIMITS, max_running=worker["max_running"], queue_limit=256, kv_block_tokens=worker["block_tokens"], kv_blocks=blocks)
    began = time.perf_counter()
    process = play(world(table, W.cluster(limits, copies=2), preemption_limit=64), {"route": Shortest()}, check_every=50)
    assert time.perf_counter() - began < 10.0
    assert process.outcomes.ended == 200 or process.env.now >= process.horizon_s
    assert process.outcomes.preemptions.max() <= 65
    completed = (process.outcomes.kind == OutcomeKind.COMPLETED).sum()
    assert completed > 0 if blocks >= 33 else (process.outcomes.kind == OutcomeKind.UNSERVABLE).all()


@pytest.mark.fault("K10")
def test_requests_that_can_never_fit_block_nobody(shared):
    """trace_too_long.csv, context 8,192, pool 4,096 tokens: rows 2, 3 and 5 are unservable at once, the others complete."""
    with (shared / "cases/inputs/trace_too_long.csv").open() as lines:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(lines)]
    table = W.trace(np.arange(6) * 0.1, [row[0] for row in rows], [row[1] for row in rows])
    process = play(world(table, W.cluster(replace(LIMITS, kv_blocks=256))), {"route": Shortest()})
    assert [OutcomeKind(k).name for k in process.outcomes.kind] == [
        "COMPLETED", "UNSERVABLE", "UNSERVABLE", "COMPLETED", "UNSERVABLE", "COMPLETED",
    ]  # fmt: skip
    refused = process.outcomes.kind == OutcomeKind.UNSERVABLE
    assert (process.outcomes.finish_s - table.arrival_s)[refused].max() < 0.1


@pytest.mark.fault("K10")
def test_a_small_pool_is_masked_for_a_request_that_only_a_large_one_holds():
    """Limits are per worker kind: what fits the pair's pool and not the single card's may only go to the pair."""
    limits = replace(LIMITS, context_tokens=10**6)
    process = ClusterProcess(world(W.trace([0.0, 0.1], 100, 100), W.cluster(limits)))
    pools = process.groups.kv_tokens
    assert pools[W.PAIR] != pools[W.SOLO]
    large = int(np.argmax(pools[:2]))
    table = W.trace([0.0, 0.1], [int(pools[1 - large]), 100], 64)
    asked = {}
    process = play(
        world(table, W.cluster(limits)),
        {"route": Shortest()},
        on_point=lambda process, point: asked.setdefault(point.request.request_id, point.mask.copy()),
    )
    assert asked[0][large] and not asked[0][1 - large]
    assert asked[1][:2].all()
    assert (process.outcomes.kind == OutcomeKind.COMPLETED).all()


@pytest.mark.fault("K11")
def test_first_token_time_runs_from_arrival():
    """100 requests at once in one slot: times are in order for each, and the k-th waits for the k - 1 before it."""
    limits = replace(LIMITS, max_running=1, queue_limit=256)
    process = play(world(W.trace(np.zeros(100), 64, 2), W.cluster(limits), interference_sigma=0.0), {"route": W.RouteTo(W.SOLO)})
    out = process.outcomes
    assert (out.kind == OutcomeKind.COMPLETED).all()
    assert (np.diff(out.first_token_s) > 0).all()
    service_s = (out.first_token_s - out.admitted_s).min()
    assert (out.first_token_s >= service_s * np.arange(1, 101) - 1e-6).all()
    assert out.parts[:, 0] == pytest.approx(out.admitted_s, abs=1e-9)


@pytest.mark.fault("K17")
def test_ties_keep_file_order():
    """Eight requests in two instants are asked about in file order, each at its own arrival, and admitted in that order."""
    order = []
    play(
        world(W.trace([1.0] * 5 + [2.0] * 3, 64, 4)),
        {"route": W.RouteTo(W.PAIR)},
        on_point=lambda process, point: order.append((point.request.request_id, point.view.now_s)),
    )
    assert order == [(i, 1.0 if i < 5 else 2.0) for i in range(8)]


def test_no_decision_is_asked_before_its_request_arrives():
    """Arrivals at awkward fractions: the clock is never short of the arrival, so no queue time is negative by rounding."""
    arrivals = np.cumsum(np.random.default_rng(0).exponential(0.1, 400)) + 1234.567

    def see(process, point):
        assert point.view.now_s >= point.request.arrival_s
        assert point.view.now_s == pytest.approx(point.request.arrival_s, abs=1e-9)

    play(world(W.trace(arrivals, 32, 2), W.cluster(replace(LIMITS, queue_limit=500))), {"route": Shortest()}, on_point=see)


@pytest.mark.fault("K13")
def test_empty_world_and_world_without_workers_have_strict_json_summaries():
    """No requests at all; and every group down from the first second: finite views, null percentiles, strict JSON."""
    empty = ClusterProcess(world(W.trace([], 1, 1)), ALL)
    while (point := empty.next_decision()) is not None:
        empty.apply(point, 0)
    text = json.dumps(world_summary(empty), allow_nan=False)
    assert json.loads(text)["ttft_s"]["p50"] is None
    faults = tuple(FaultEvent(FaultKind.LOST_GROUP, 0.0, 500.0, g) for g in (W.PAIR, W.SOLO))

    def see(process, point):
        if point.request is not None and point.view.now_s > 3.0:
            assert not point.view.is_up.any() and not point.allowed_groups.any()
            assert np.isfinite(point.estimates).all()
            assert point.mask.any()

    down = play(world(traffic(30, 3.0, 1), faults=faults, drain_s=20.0), dict.fromkeys(ALL, RandomLegal(0, 0.0)), on_point=see)
    assert not (down.outcomes.kind == OutcomeKind.COMPLETED).any()
    json.dumps(world_summary(down), allow_nan=False)


def test_requests_wait_for_parked_workers_instead_of_being_called_unservable():
    """Both groups drained and parked: a request that fits them is held or refused, never "unservable"."""
    process = ClusterProcess(world(W.trace([5.0], 100, 10)))
    for g in (W.PAIR, W.SOLO):
        process.groups.health[g].is_parked = True
    point = process.next_decision()
    assert point is not None and not point.allowed_groups.any() and point.mask[-2] and point.mask[-1]


def test_an_early_end_leaves_the_rest_unfinished():
    process = ClusterProcess(world(traffic(60, 10.0, 2)))
    for _ in range(30):
        point = process.next_decision()
        process.apply(point, Shortest().choose(point))
    check_laws(process)
    process.finish_now()
    assert process.next_decision() is None
    assert (process.outcomes.kind == OutcomeKind.UNFINISHED).sum() == 60 - process.outcomes.ended


def test_failed_requests_keep_their_attempts_and_stamps():
    """Both groups are lost while requests run: who fails for good shows how often it was tried and when it began."""
    faults = tuple(FaultEvent(FaultKind.LOST_GROUP, at, 500.0, g) for g, at in ((W.PAIR, 2.0), (W.SOLO, 8.0)))
    out = play(
        world(W.trace(np.linspace(0, 1.5, 8), 200, 4000), W.cluster(replace(LIMITS, context_tokens=8192)), faults=faults),
        {"route": Shortest()},
    ).outcomes
    failed = out.kind == OutcomeKind.FAILED
    assert failed.any()
    assert out.attempts[failed].max() >= 2
    assert np.isfinite(out.first_token_s[failed]).any()

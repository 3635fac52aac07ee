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


@pytest.mark.parametrize("begin_s", [0.0, 7.25, 1e9])
def test_a_late_first_arrival_changes_nothing_but_the_clock(begin_s):
    """The same requests and random faults beginning at 0, a little later and after thirty years: the same fates and the same
    durations (to what a float holds there), and no event is spent on the empty time before."""
    table = traffic(40, 5.0, 3, shared=False)
    arrivals = table.arrival_s - table.arrival_s[0]
    # halves of a microsecond, which every one of the three clocks holds exactly
    arrivals = np.round(arrivals * 2**20) / 2**20

    def fates(at_s: float):
        made = world(replace(table, arrival_s=at_s + arrivals), seed=5, **FAST)
        process = ClusterProcess(replace(made, fault_rates=MANY_FAULTS), ALL)
        steps, before = 0, process.env.step

        def counted() -> None:
            nonlocal steps
            steps += 1
            before()

        process.env.step = counted
        process.run(dict.fromkeys(ALL, RandomLegal(1)))
        return process.outcomes.kind.copy(), process.outcomes.finish_s - at_s, steps

    kinds, finish_s, steps = fates(0.0)
    later_kinds, later_finish_s, later_steps = fates(begin_s)
    assert (kinds == OutcomeKind.COMPLETED).sum() > 10
    if begin_s < 1e6:
        assert (later_kinds == kinds).all()
        assert later_finish_s == pytest.approx(finish_s, abs=1e-6, nan_ok=True)
    assert later_steps < 3 * steps + 1000


def test_a_scripted_fault_is_on_the_traces_clock():
    """Requests arrive from 100 s on. A loss from 101 to 103 s strikes; one under way at 100 s lasts for its rest; one that was
    over at 100 s is noted and strikes nobody."""
    table = W.trace(100.0 + np.arange(60) * 0.1, 100, 10)
    faults = (
        FaultEvent(FaultKind.LOST_GROUP, 10.0, 80.0, W.PAIR),
        FaultEvent(FaultKind.SLOW_HOST, 90.0, 12.0, W.SOLO),
        FaultEvent(FaultKind.LOST_GROUP, 101.0, 2.0, W.PAIR),
    )
    seen = []

    def see(process, point):
        seen.append((process.env.now, process.groups.health[W.SOLO].host_slow, process.groups.health[W.PAIR].is_lost))

    process = play(world(table, faults=faults, **FAST), {"route": Shortest()}, keep_lines=True, on_point=see)
    noted = [line for line in process.log.lines if "fault" in line]
    assert [line.split()[1] for line in noted] == ["fault_over:LOST_GROUP", "fault:SLOW_HOST", "fault:LOST_GROUP"]
    assert {slow for now, slow, _ in seen if 100.0 < now < 101.9} == {2.0}
    assert {slow for now, slow, _ in seen if now > 102.1} == {1.0}
    assert not any(lost for now, _, lost in seen if now < 101.0) and any(lost for now, _, lost in seen if 101.2 < now < 102.9)


def test_a_request_carries_its_session_and_prefix():
    """What a scheduler may know at arrival: session name and prefix blocks, when it is first asked about and when it is put back."""
    table = W.trace([0.0, 0.1], [200, 100], 400, prefixes=[[0, 1, 2], []], block_tokens=64)
    table = replace(table, session=np.array([0, -1], np.int32), session_names=("anna",))
    asked: dict[int, list] = {}
    fault = FaultEvent(FaultKind.LOST_GROUP, 1.0, 5.0, W.SOLO)
    play(
        world(table, faults=(fault,), **FAST),
        {"route": W.RouteTo(W.SOLO)},
        on_point=lambda process, point: asked.setdefault(point.request.request_id, []).append(point.request),
    )
    for request in asked[0]:
        assert (request.session, request.prefix_blocks, request.prefix_block_tokens) == ("anna", (0, 1, 2), 64)
    for request in asked[1]:
        assert (request.session, request.prefix_blocks, request.prefix_block_tokens) == (None, (), 0)
    assert len(asked[0]) > 1 and asked[0][-1].attempts > 0


@pytest.mark.fault("K10")
def test_the_door_and_the_mask_know_nothing_of_the_answer():
    """Worlds that differ only in how long the answers turn out to be ask the same first questions with the same masks and refuse
    the same requests at the door. A declared limit is what counts where there is one, the class's default elsewhere."""
    limits = replace(LIMITS, context_tokens=4000, kv_blocks=150)  # 2,400 tokens
    prompts, declared, classes = [2000, 2000, 2200, 100, 3900, 100], [0, 500, 0, 2350, 0, 3950], [0, 0, 0, 1, 0, 0]

    def door(outputs):
        table = W.trace(np.arange(6) * 1e-3, prompts, outputs, classes, declared)
        masks = {}
        process = play(
            world(table, W.cluster(limits), default_output_tokens=(300, 300, 300)),
            {"route": Shortest()},
            on_point=lambda process, point: masks.setdefault(point.request.request_id, point.mask.tolist()),
        )
        early = process.outcomes.finish_s <= table.arrival_s
        return masks, early.tolist()

    short, long = door(1), door([600, 2000, 1, 5, 1, 1])
    assert short == long
    # 2,300 fits; 2,500 by declaration, 2,500 by default, 2,450 by declaration, 4,200 and 4,050 do not
    assert short[1] == [False, True, True, True, True, True]


def test_an_answer_ends_with_the_context():
    """1,000 tokens of context, 900 of prompt, a recorded answer of 400: it is cut after 100, as an engine would."""
    table = W.trace([0.0, 0.1], [900, 300], [400, 400], 0, [60, 0])
    process = ClusterProcess(world(table, W.cluster(replace(LIMITS, context_tokens=1000))))
    process.run({"route": Shortest()})
    assert process.outcomes.output_tokens.tolist() == [100, 400]
    assert (process.outcomes.kind == OutcomeKind.COMPLETED).all()

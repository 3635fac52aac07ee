"""Whatever the policy does, no request fails and none waits for it: faults of a live process, bundles that cannot be used, its return."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agents.policy_bundle import BundleContents, BundleSchema, NetworkShape, Scaling, load_bundle, write_bundle
from envs.decision.circuit_breaker import State
from envs.decision.observation import BOUND, CONTEXT, FEATURES, OBSERVATION_VERSION
from runtime.calls import Refusal
from runtime.scheduling import policy_guard
from runtime.scheduling.agreement import Agreement
from runtime.scheduling.policy_client import CALM_S, PolicyClient
from runtime.scheduling.policy_guard import PolicyGuard
from tests.conftest import GUARD_S
from tests.runtime.scheduling.service_parts import Scripted, call, check_whole, collect, dispatcher, until, with_service

GROUPS = 3
DEADLINE_S = 0.5  # a hundred times the service's own: tests share their cores
BAD = Path(__file__).with_name("bad_policy.py")


def contents(version: int = OBSERVATION_VERSION, features: tuple[str, ...] = FEATURES, most: int = 16) -> BundleContents:
    """A random policy whose training range is everything."""
    rng = np.random.default_rng(5)
    shape = NetworkShape(8, "tanh")
    wide = {"candidate": len(features), "context": len(CONTEXT)}
    fill = {"mean": 0.0, "scale": 1.0, "low": -BOUND, "high": BOUND}
    arrays = {f"{what}_{name}": np.full(wide[what], value, np.float32) for what in wide for name, value in fill.items()}
    weights = {name: rng.normal(0, 0.1, size).astype(np.float32) for name, size in shape.tensors(len(features), len(CONTEXT)).items()}
    if "kind_route" in features:  # it never refuses while a group takes the call
        weights["residual.weight"][0, features.index("kind_route")] = 9.0
    return BundleContents(BundleSchema("route", features, CONTEXT, version, most), shape, Scaling(**arrays, clip=10.0), weights)


def guard_of(bundle, command=None) -> PolicyGuard:
    return PolicyGuard(PolicyClient(str(bundle), GROUPS + 2, command), DEADLINE_S)


@pytest.fixture
def patient(monkeypatch) -> None:
    """A question is taken for unanswered only after as many deadlines as in the service, more or less."""
    monkeypatch.setattr(policy_guard, "SILENT_S", 2 * DEADLINE_S)


async def decides(service, more: int = 10) -> None:
    """Load until the policy has decided so many more: one that was late, on full cores, comes back through shadow decisions."""
    counts, end_s = service.scheduler.counts, time.monotonic() + GUARD_S
    wanted = counts["policy", ""] + more
    while counts["policy", ""] < wanted:
        assert time.monotonic() < end_s, (counts, service.scheduler.guard.breaker.reason, service.scheduler.guard.client.state)
        await served(service, 10, rate_per_s=100.0)


async def served(service, count: int, rate_per_s: float = 200.0) -> list[float]:
    """Seconds from asking to the first token, of so many calls that all come to their end."""

    async def one() -> float:
        asked, began_s, first_s = call(max_tokens=4), time.monotonic(), []
        pieces = []
        async for piece in service.run(asked):
            first_s.append(time.monotonic() - began_s)
            pieces.append(piece)
        check_whole(pieces, 4)
        return first_s[0]

    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(1.0 / rate_per_s)
    return await asyncio.gather(*tasks)


def run_with(guard: PolicyGuard, body) -> None:
    backends = [Scripted(f"g{i}", i, gap_s=0.0) for i in range(GROUPS)]
    asyncio.run(with_service(dispatcher(backends, guard=guard), body))


def test_a_good_bundle_decides(tmp_path, monkeypatch):
    """The policy's choices are followed, within its deadline, and are those that the bundle makes in this process."""

    async def body(service):
        guard = service.scheduler.guard
        await until(lambda: guard.client.state == "ready")
        await served(service, 5)
        service.scheduler.counts.clear()
        await served(service, 60, rate_per_s=100.0)
        assert set(service.scheduler.counts) == {("policy", "")} and service.scheduler.counts["policy", ""] == 60
        assert guard.breaker.state is State.CLOSED

    monkeypatch.setattr(policy_guard, "SILENT_S", GUARD_S)
    run_with(PolicyGuard(PolicyClient(str(write_bundle(tmp_path / "good", contents())), GROUPS + 2), 10.0), body)


def test_what_is_asked_for_nobody_disturbs_no_answer(tmp_path):
    """Announced where there is time for it, questions get the answers that the bundle gives in this process; nothing is left open."""
    bundle = write_bundle(tmp_path / "good", contents())
    rng, policy = np.random.default_rng(3), load_bundle(bundle)

    async def body() -> None:
        client = PolicyClient(str(bundle), GROUPS + 2)
        await client.start()
        sent, send = [], client._send
        client._send = lambda data: (sent.append(data), send(data))
        try:
            await until(lambda: client.state == "ready")
            client.expect()
            assert not sent  # there is no last question
            for _ in range(20):
                candidates = rng.uniform(-1.0, 1.0, (GROUPS + 2, len(FEATURES))).astype(np.float32)
                context, mask = rng.uniform(-1.0, 1.0, len(CONTEXT)).astype(np.float32), rng.random(GROUPS + 2) < 0.7
                mask[0] = True
                client.expect()
                future = client.ask(candidates, context, mask)
                client.expect()  # too late for this one, and too early for the next
                if not client.wait_briefly(future):
                    await asyncio.wait_for(future, GUARD_S)
                assert future.result().index == policy.choose(candidates, context, mask)
                await asyncio.sleep(2 * CALM_S)
            assert not client._asked
            assert len(sent) == (39 if len(os.sched_getaffinity(0)) > 1 else 20)  # all but the first were announced
        finally:
            await client.close()

    asyncio.run(body())


def _broken_bundles(folder: Path) -> dict[str, Path]:
    wrong_shape = write_bundle(folder / "shape", contents())
    description = json.loads((wrong_shape / "bundle.json").read_text())
    description["network"]["hidden"] = 16
    (wrong_shape / "bundle.json").write_text(json.dumps(description))
    nan = write_bundle(folder / "nan", contents())
    (nan / "policy.safetensors").write_bytes(b"\x00" * 64)
    return {
        "missing file": folder / "nowhere",
        "wrong shape": wrong_shape,
        "damaged weights": nan,
        "wrong version": write_bundle(folder / "version", contents(version=OBSERVATION_VERSION - 1)),
        "other features": write_bundle(folder / "features", contents(features=FEATURES[::-1])),
        "too small": write_bundle(folder / "small", contents(most=GROUPS)),
    }


@pytest.mark.fault("K08")
@pytest.mark.parametrize("kind", ["missing file", "wrong shape", "damaged weights", "wrong version", "other features", "too small"])
def test_a_bundle_that_cannot_be_used_is_refused_in_one_line(tmp_path, kind):
    guard = guard_of(_broken_bundles(tmp_path)[kind])

    async def body(service):
        await until(lambda: guard.client.state == "refused")
        assert guard.client.detail and "\n" not in guard.client.detail
        await served(service, 20)
        assert set(service.scheduler.counts) <= {("heuristic", "bundle_refused"), ("heuristic", "policy_starting")}
        assert guard.client.restarts == 0  # it would be refused again

    run_with(guard, body)


@pytest.mark.parametrize("kind", ["exception", "nan", "stall", "slow", "exit", "garbage", "illegal", "range", "shape"])
def test_a_policy_that_breaks_in_service(tmp_path, kind, patient):
    """During load the policy breaks: 0 failed requests, the heuristic answers, the breaker trips within 3 bad decisions or 250 ms. When
    the policy is well again it decides again, through shadow decisions."""
    said = tmp_path / "kind"
    said.write_text("good")
    guard = guard_of("unused", [sys.executable, str(BAD), str(said)])

    async def body(service):
        await until(lambda: guard.client.state == "ready")
        await decides(service)
        await until(lambda: guard.client.oldest_unanswered_s == 0.0)
        said.write_text(kind)
        service.scheduler.counts.clear()
        took_s: list[float] = []
        service.scheduler.listeners.append(lambda made: took_s.append(made.decided.took_s))
        await served(service, 60)
        end_s = time.monotonic() + GUARD_S
        while kind not in ("exit", "garbage") and guard.breaker.state is State.CLOSED:
            assert time.monotonic() < end_s, "it is asked on and on"
            await served(service, 10)
        assert service.scheduler.counts["policy", ""] == 0 or kind in ("illegal",)
        bad = sum(n for (_, cause), n in service.scheduler.counts.items() if cause in ("exception", "not_finite", "deadline", "illegal"))
        assert bad <= 3, service.scheduler.counts
        assert float(np.median(took_s)) < 0.05 + DEADLINE_S
        said.write_text("good")
        await decides(service)
        assert guard.shadow_decisions >= 20 or kind in ("exit", "garbage")

    run_with(guard, body)


def test_a_policy_that_never_agrees_with_the_heuristic_loses_its_say(tmp_path, monkeypatch):
    """It refuses all, legally and in time: after a window of comparisons its breaker opens, shadow keeps it shut while it goes on so, and
    when it chooses sensibly again it comes back."""
    said = tmp_path / "kind"
    said.write_text("good")
    guard = guard_of("unused", [sys.executable, str(BAD), str(said)])
    guard.agreement, guard.deadline_s = Agreement(0.02, 1.0, window=10), 10.0  # nothing but its choices opens the breaker
    monkeypatch.setattr(policy_guard, "SILENT_S", GUARD_S)

    async def body(service):
        await until(lambda: guard.client.state == "ready")
        await served(service, 20)
        said.write_text("refuse")
        end_s = time.monotonic() + GUARD_S
        while guard.breaker.state is State.CLOSED:
            assert time.monotonic() < end_s
            with contextlib.suppress(Refusal):  # until it is stopped, its word counts
                await collect(service, call(max_tokens=2))
        assert guard.breaker.reason.endswith("agreement") and guard.causes["agreement"] == 1
        openings = guard.breaker.openings
        while guard.breaker.openings < openings + 1:  # shadow does not let it back
            assert time.monotonic() < end_s
            await served(service, 5)
        assert guard.breaker.reason.endswith("agreement")
        said.write_text("good")
        await decides(service)

    run_with(guard, body)


def test_nobody_waits_for_a_stalled_policy(tmp_path):
    """30 calls at once while the policy takes 1.5 s for each, three quarters of a minute in all: none waits longer than its deadline, and
    all together not three times that, since the third bad decision opens the breaker."""
    said = tmp_path / "kind"
    said.write_text("good")
    guard = guard_of("unused", [sys.executable, str(BAD), str(said)])

    async def body(service):
        await until(lambda: guard.client.state == "ready")
        await served(service, 5)
        said.write_text("slow")
        took: list[float] = []
        service.scheduler.listeners.append(lambda made: took.append(made.decided.took_s))
        await asyncio.gather(*(collect(service, call(max_tokens=2)) for _ in range(30)))
        assert len(took) == 30 and max(took) < 3 * DEADLINE_S + 10.0  # the last: for full cores
        assert service.scheduler.counts["heuristic", "deadline"] <= 3

    run_with(guard, body)


async def _pairs(with_policy, without, count: int) -> np.ndarray:
    """Seconds to the first token of calls made two by two, at the same moment, one to each service: shape (count, 2)."""
    waits = np.zeros((count, 2))
    for number in range(count):
        order = ((0, with_policy), (1, without))
        took = await asyncio.gather(*(served(service, 1, rate_per_s=1000.0) for _, service in order[:: 1 - 2 * (number % 2)]))
        for (place, _), (wait_s,) in zip(order[:: 1 - 2 * (number % 2)], took, strict=True):
            waits[number, place] = wait_s
    return waits


@pytest.mark.parametrize(
    "kind", ["exception", "nan", "stall", "slow", "exit", "garbage", "illegal", "missing file", "wrong shape", "wrong version"]
)
def test_nobody_waits_ten_milliseconds_for_a_broken_policy(tmp_path, kind):
    """With the service's own deadline, beside a service without a policy: each call has a twin there at the same moment, so that what the
    machine makes them wait is the same for both. The three that may meet the deadline (5 ms) included, what is left is under 10 ms."""
    said = tmp_path / "kind"
    said.write_text("good")
    is_bundle = " " in kind
    client = (
        PolicyClient(str(_broken_bundles(tmp_path)[kind]), GROUPS + 2)
        if is_bundle
        else PolicyClient("unused", GROUPS + 2, [sys.executable, str(BAD), str(said)])
    )
    guard = PolicyGuard(client, 0.005)

    async def body(service):
        plain = dispatcher([Scripted(f"p{i}", i, gap_s=0.0) for i in range(GROUPS)])

        async def beside(without):
            await until(lambda: client.state in ("ready", "refused"))
            await _pairs(service, without, 5)
            said.write_text(kind)
            waits = await _pairs(service, without, 100)
            longer = waits[:, 0] - waits[:, 1]
            # noise makes either the later one as often, give or take its own spread; a wait for the policy makes only the first
            late, early = int((longer > 0.010).sum()), int((longer < -0.010).sum())
            assert float(np.median(longer)) < 0.002 and late <= 4 + early + 3 * early**0.5, (late, early, np.sort(longer)[-10:])

        await with_service(plain, beside)

    run_with(guard, body)

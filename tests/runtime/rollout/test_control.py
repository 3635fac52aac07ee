"""A rollout in a running dispatcher with real policy processes: stages by gates, faults in each of them, restarts. No request fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.policy_bundle import write_bundle
from envs.decision.observation import OBSERVATION_VERSION
from runtime.rollout import examiner
from runtime.rollout.control import RolloutControl
from runtime.rollout.settings import RolloutEntry
from runtime.rollout.stage_stats import CanaryStats
from runtime.rollout.state import RolloutError
from runtime.rollout.store import ARMS_FILE, AUDIT_FILE, RolloutStore, audit_faults
from runtime.rollout.switchback import CANDIDATE, INCUMBENT
from runtime.scheduling.policy_client import PolicyClient
from runtime.scheduling.policy_guard import PolicyGuard
from tests.runtime.rollout.rollout_parts import QUICK, bundle, evaluation
from tests.runtime.scheduling.service_parts import Scripted, call, check_whole, dispatcher, with_service
from tests.runtime.scheduling.test_policy_faults import BAD, DEADLINE_S, GROUPS, contents, served

PYTHON = sys.executable
HERE_S = 200.0  # a limit, not a wait: tests share their cores


class Rollout:
    """A dispatcher with scripted groups, its rollout, and a load of calls that must all come to their end."""

    def __init__(self, folder: Path, service, settings: RolloutEntry, make_guard: Callable[[str], PolicyGuard]) -> None:
        self.folder, self.service, self.settings, self.make_guard = folder, service, settings, make_guard
        self.used: list[PolicyGuard | None] = []
        self.calls = 0
        self.open()

    def open(self) -> None:
        self.control = RolloutControl(self.service, self.settings, RolloutStore(self.folder), self.make_guard, self._use)

    async def _use(self, guard: PolicyGuard | None) -> None:
        self.used.append(guard)
        before, self.service.scheduler.guard = self.service.scheduler.guard, guard
        if before is not None:
            await before.client.close()

    async def reopen(self) -> None:
        """As after a restart of the service: another object on the same folder."""
        await self.control.close()
        self.open()
        await self.control.start()

    async def load_until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + HERE_S
        while not condition():
            assert time.monotonic() < end_s, (self.control.state, await self.control.status())
            await served(self.service, 20)
            self.calls += 20

    def is_canary_at_work(self) -> bool:
        """In a canary whose counting has begun: a move counts once it is on the disk, a moment before its stage begins."""
        return self.control.state.stage == "canary" and isinstance(self.control.stats, CanaryStats)

    def events(self) -> list[tuple[str, str]]:
        lines = (self.folder / AUDIT_FILE).read_text().splitlines()
        return [(entry["event"], entry["stage"]) for entry in map(json.loads, lines)]


def real_guard(folder: str) -> PolicyGuard:
    return PolicyGuard(PolicyClient(folder, GROUPS + 2), 10 * DEADLINE_S)  # tests share their cores


def run_with(tmp_path: Path, body, settings: dict | None = None, make_guard: Callable[[str], PolicyGuard] = real_guard) -> None:
    backends = [Scripted(f"g{i}", i, gap_s=0.0) for i in range(GROUPS)]

    async def whole(service):
        rollout = Rollout(tmp_path / "rollout", service, RolloutEntry(**(QUICK | (settings or {}))), make_guard)
        await rollout.control.start()
        try:
            await body(rollout)
        finally:
            await rollout.control.close()
        started = sum(len(backend.started) for backend in backends)
        assert started == rollout.calls  # nothing was sent twice
        assert not service.scheduler.listeners and not service.ledger.listeners and service.scheduler.guard_of is None

    asyncio.run(with_service(dispatcher(backends), whole))


def prepared(tmp_path: Path) -> tuple[Path, Path]:
    made = bundle(tmp_path / "made")
    return made, evaluation(tmp_path / "evaluation.json", made)


def test_all_stages_by_their_gates(tmp_path):
    """Shadow, two canary stages, adopted: in shadow the heuristic decides everything; in the canaries either arm has its calls; when
    adopted the policy decides. The audit log has each move."""
    made, evidence = prepared(tmp_path)

    async def body(rollout: Rollout):
        control, counts, seen = rollout.control, rollout.service.scheduler.counts, set()
        rollout.service.scheduler.listeners.append(note := lambda made: seen.add((control.state.stage, made.decided.source)))
        await control.begin(made, evidence, None, "operator")
        await rollout.load_until(lambda: control.state.stage != "shadow")
        rollout.service.scheduler.listeners.remove(note)
        assert ("shadow", "heuristic") in seen and ("shadow", "policy") not in seen
        counts.clear()
        await rollout.load_until(lambda: control.state.title not in ("canary 1", "shadow"))
        assert counts["policy", ""] > 0 and counts["heuristic", "no_policy"] > 0
        if control.state.title == "canary 2":
            said = await control.status()
            assert said["share"] == 1.0 and set(said["arms"]) == {CANDIDATE, INCUMBENT}
            assert said["slice"]["arm"] in (CANDIDATE, INCUMBENT)
        await rollout.load_until(lambda: not control.state.is_active)
        assert control.state.stage == "adopted" and control.state.incumbent.digest == control.state.candidate.digest
        counts.clear()
        await rollout.load_until(lambda: counts["policy", ""] > 20)
        assert counts["heuristic", "no_policy"] == 0
        assert rollout.events() == [("start", "shadow"), ("promote", "canary 1"), ("promote", "canary 2"), ("promote", "adopted")]
        assert audit_faults(rollout.folder) == []
        await control.roll_back("operator", "a try")
        assert rollout.used[-1] is None and rollout.service.scheduler.guard is None

    run_with(tmp_path, body)


def test_users_and_sessions_keep_their_arm_over_a_restart(tmp_path):
    """Forced into the canary at once, in which slices of half a second alternate: the arms of 40 users and sessions, given over two
    seconds, are the same after the service started again, also from what a kill would have left, though by then fresh ones get others."""
    made, evidence = prepared(tmp_path)
    who = [{"user": f"u{i}"} for i in range(20)] + [{"session": f"s{i}"} for i in range(20)]

    def arms(control: RolloutControl) -> list[str]:
        return [control._switchback.arm_of(call(**name), time.monotonic()) for name in who]

    async def body(rollout: Rollout):
        await rollout.control.begin(made, evidence, None, "operator")
        await rollout.control.promote("operator", is_forced=True)
        first = []
        for name in who:
            first.append(rollout.control._switchback.arm_of(call(**name), time.monotonic()))
            await asyncio.sleep(0.05)
        assert set(first) == {CANDIDATE, INCUMBENT}
        await rollout.control._put_down()
        shutil.copytree(rollout.folder, tmp_path / "killed")
        await rollout.reopen()
        assert arms(rollout.control) == first
        killed = RolloutStore(tmp_path / "killed")
        assert len(killed.arms()) == len(who) and all(0.0 <= silent_s < 60.0 for _, _, silent_s in killed.arms())
        killed.close()
        await rollout.control.close()
        (rollout.folder / ARMS_FILE).write_bytes(b"[1, 2")
        rollout.open()
        await rollout.control.start()
        assert rollout.control.state.stage == "canary" and rollout.control._switchback.kept() == []

    run_with(tmp_path, body, {"slice_s": 0.5, "sticky_s": 600.0, "automatic": False, "canary": [{"share": 1.0}]})


def test_the_evaluation_is_read_in_another_process(tmp_path, monkeypatch):
    """A file of tens of MiB would hold the interpreter: here nobody parses it. What the other process refuses is refused in its words; one
    that dies, or takes too long, refuses too."""
    made, evidence = prepared(tmp_path)
    monkeypatch.setattr("runtime.rollout.evidence.read_evaluation_file", None)

    async def body(rollout: Rollout):
        with pytest.raises(RolloutError, match="nowhere"):
            await rollout.control.begin(made, tmp_path / "nowhere.json", None, "operator")
        for limit_s, said in ((0.0, "not examined within 0 s"), (60.0, "without a verdict")):
            monkeypatch.setattr(examiner, "EXAMINE_S", limit_s)
            monkeypatch.setattr(examiner.sys, "executable", "/bin/false" if limit_s else sys.executable)
            with pytest.raises(RolloutError, match=said):
                await rollout.control.begin(made, evidence, None, "operator")
            monkeypatch.setattr(examiner.sys, "executable", PYTHON)
        said = await rollout.control.begin(made, evidence, None, "operator")
        assert said["stage"] == "shadow" and said["evidence"]["worlds"] == 24

    run_with(tmp_path, body)


def test_gates_hold_until_they_are_passed_and_an_operator_may_force(tmp_path):
    made, evidence = prepared(tmp_path)
    slow = {"shadow": QUICK["shadow"] | {"decisions_min": 1_000_000}, "automatic": False}

    async def body(rollout: Rollout):
        control = rollout.control
        with pytest.raises(RolloutError, match="nothing to promote"):
            await control.promote("operator")
        await control.begin(made, evidence, None, "operator")
        with pytest.raises(RolloutError, match="under way"):
            await control.begin(made, evidence, None, "operator")
        await rollout.load_until(lambda: control._trial.stats.decisions >= 40)
        with pytest.raises(RolloutError, match=r"has not passed its gates: decisions: .* \(wanted >= 1e\+06\)"):
            await control.promote("operator")
        await control.promote("operator", "looked at by hand", is_forced=True)
        assert control.state.title == "canary 1"
        assert (await control.status())["audit"][0]["reason"] == "looked at by hand"
        await rollout.load_until(lambda: control._trial.verdict("").move == "promote")
        assert control.state.title == "canary 1"  # not automatic
        await control.promote("operator")
        assert control.state.title == "canary 2"
        await control.roll_back("operator")
        assert control.state.stage == "rolled_back" and control.state.incumbent is None

    run_with(tmp_path, body, slow)


def test_a_restart_goes_on_where_it_stood(tmp_path):
    """In shadow and in a canary: stage and counts are there, no pair of slices is used twice."""
    made, evidence = prepared(tmp_path)
    still = {"canary": [{"share": 1.0, "calls_min": 1_000_000}]}

    async def body(rollout: Rollout):
        await rollout.control.begin(made, evidence, None, "operator")
        await rollout.load_until(rollout.is_canary_at_work)
        await rollout.load_until(lambda: rollout.control._trial.stats.goodput.count >= 2)
        await rollout.control.close()
        kept = rollout.control.state
        rollout.open()
        await rollout.control.start()
        assert rollout.control.state.title == "canary 1" and kept.pairs_begun >= 2
        trial = rollout.control._trial
        assert trial.stats.goodput.count >= 2 and trial.switchback._first >= kept.pairs_begun
        before = trial.stats.candidate.calls
        await rollout.load_until(lambda: trial.stats.candidate.calls > before)

    run_with(tmp_path, body, still)


@pytest.mark.parametrize("kind", ["exception", "nan", "stall", "slow", "exit", "illegal"])
def test_a_candidate_that_breaks_in_its_canary(tmp_path, kind):
    """During load the candidate's policy breaks: no request fails, none waits longer than a few deadlines for it, and the rollout is rolled
    back by itself, with the reason in the audit log."""
    made, evidence = prepared(tmp_path)
    told = tmp_path / "kind"
    told.write_text("good")

    def make_guard(folder: str) -> PolicyGuard:
        return PolicyGuard(PolicyClient("unused", GROUPS + 2, [sys.executable, str(BAD), str(told)]), DEADLINE_S)

    async def body(rollout: Rollout):
        control, counts = rollout.control, rollout.service.scheduler.counts
        await control.begin(made, evidence, None, "operator")
        await rollout.load_until(lambda: control.state.stage == "canary")
        counts.clear()
        await rollout.load_until(lambda: counts["policy", ""] > 10)
        told.write_text(kind)
        waits: list[float] = []
        rollout.service.scheduler.listeners.append(note := lambda made: waits.append(made.decided.took_s))
        await rollout.load_until(lambda: not control.state.is_active)
        rollout.service.scheduler.listeners.remove(note)
        assert control.state.stage == "rolled_back", control.state
        assert not waits or max(waits) < 4 * DEADLINE_S + 10.0  # the last: for full cores
        assert rollout.events()[-1] == ("roll back", "rolled_back")
        assert "candidate's process and breaker" in control.state.reason or "fallback share" in control.state.reason
        counts.clear()
        await rollout.load_until(lambda: counts["heuristic", "no_policy"] > 20)
        assert set(counts) == {("heuristic", "no_policy")}

    still = [{"share": 1.0, "calls_min": 1_000_000}]
    run_with(tmp_path, body, {"canary": still, "faults_max": 1, "fallback_max": 0.3}, make_guard)


@pytest.mark.parametrize("kind", ["wrong version", "wrong shape"])
def test_a_bundle_that_cannot_be_used_never_decides(tmp_path, kind):
    made = tmp_path / "made"
    write_bundle(made, contents(version=OBSERVATION_VERSION - (kind == "wrong version")))
    if kind == "wrong shape":
        description = json.loads((made / "bundle.json").read_text())
        description["network"]["hidden"] = 16
        (made / "bundle.json").write_text(json.dumps(description))
    evidence = evaluation(tmp_path / "evaluation.json", made)

    async def body(rollout: Rollout):
        await rollout.control.begin(made, evidence, None, "operator")
        await rollout.load_until(lambda: not rollout.control.state.is_active)
        assert rollout.control.state.stage == "rolled_back" and "refused" in rollout.control.state.reason
        assert set(rollout.service.scheduler.counts) == {("heuristic", "no_policy")}

    run_with(tmp_path, body)


@pytest.mark.parametrize("who", ["service", "policy process"])
def test_a_bundle_whose_files_go_missing_is_rolled_back(tmp_path, who):
    """The author's directory may go: we have a copy. The copy gone too, and the service or the candidate's process started again: it is
    rolled back, and nothing failed."""
    made, evidence = prepared(tmp_path)

    async def body(rollout: Rollout):
        await rollout.control.begin(made, evidence, None, "operator")
        await rollout.load_until(lambda: rollout.control.state.stage == "canary")
        shutil.rmtree(made)
        await rollout.reopen()
        await rollout.load_until(lambda: rollout.service.scheduler.counts["policy", ""] > 10)
        shutil.rmtree(rollout.control.state.candidate.folder)
        if who == "service":
            await rollout.reopen()
        else:
            os.kill(rollout.control._candidate.guard.client.pid, signal.SIGKILL)
        await rollout.load_until(lambda: not rollout.control.state.is_active)
        assert rollout.control.state.stage == "rolled_back"
        assert ("is gone" if who == "service" else "refused") in rollout.control.state.reason

    run_with(tmp_path, body, {"canary": [{"share": 1.0, "calls_min": 1_000_000}], "fallback_max": 1.0})


def test_a_worse_candidate_is_found_by_the_test(tmp_path):
    """Group 0 takes 0.15 s a token, beyond the class's limit of 0.1 s; the candidate sends everything there, the heuristic learns not to.
    A difference in goodput of -1 is shown to be below 0 by 12 pairs of slices at the earliest ((log(2 / 0.025) + 0.2) / (0.75 x 12) is just
    above a half), and the rollout ends; no request failed."""
    made, evidence = prepared(tmp_path)
    (tmp_path / "kind").write_text("good")  # the first allowed group

    def make_guard(folder: str) -> PolicyGuard:
        return PolicyGuard(PolicyClient("unused", GROUPS + 2, [sys.executable, str(BAD), str(tmp_path / "kind")]), DEADLINE_S)

    async def body(rollout: Rollout):
        control = rollout.control
        rollout.service.backends[0].gap_s = 0.15
        await control.begin(made, evidence, None, "operator")
        await rollout.load_until(rollout.is_canary_at_work)
        trial = control._trial
        await rollout.load_until(lambda: not control.state.is_active)
        assert control.state.stage == "rolled_back" and control.state.reason.startswith("goodput: not shown to be worse: -")
        assert 12 <= trial.stats.goodput.count <= 200 and trial.stats.served.mean == 0.0
        assert trial.stats.candidate.goodput < 0.2 < 0.5 < trial.stats.incumbent.goodput  # full cores make calls late

    run_with(tmp_path, body, {"canary": [{"share": 1.0, "calls_min": 1_000_000}], "error_chance": 0.05}, make_guard)


def test_a_candidate_whose_calls_fail_is_rolled_back(tmp_path):
    """Calls of the candidate's arm are told to the rollout as lost: 20 of them running end it."""
    made, evidence = prepared(tmp_path)

    async def body(rollout: Rollout):
        control, service = rollout.control, rollout.service
        await control.begin(made, evidence, None, "operator")
        await rollout.load_until(rollout.is_canary_at_work)
        trial = control._trial

        def end_badly(account):
            if account.arm == CANDIDATE:
                account.end = "stream_lost"

        service.ledger.listeners.insert(0, end_badly)
        await rollout.load_until(lambda: not control.state.is_active)
        service.ledger.listeners.remove(end_badly)
        assert control.state.stage == "rolled_back"
        assert trial.stats.failures_running >= 20 and "failed calls running" in control.state.reason

    run_with(tmp_path, body, {"canary": [{"share": 1.0, "calls_min": 1_000_000}]})


def test_a_candidate_that_never_agrees_is_stopped_in_shadow(tmp_path):
    """The candidate would refuse everything, which the heuristic never does: outside the band, and the rollout ends before it decided
    anything."""
    made, evidence = prepared(tmp_path)
    (tmp_path / "kind").write_text("refuse")

    def make_guard(folder: str) -> PolicyGuard:
        return PolicyGuard(PolicyClient("unused", GROUPS + 2, [sys.executable, str(BAD), str(tmp_path / "kind")]), DEADLINE_S)

    async def body(rollout: Rollout):
        control = rollout.control
        await control.begin(made, evidence, None, "operator")
        await rollout.load_until(lambda: not control.state.is_active)
        assert control.state.reason == "agreement: 0 (wanted 0.02 to 1)"
        assert rollout.service.scheduler.counts["policy", ""] == 0

    run_with(tmp_path, body, {"shadow": QUICK["shadow"] | {"agreement_min": 0.02, "min_s": 1000.0}}, make_guard)


def test_a_full_disk_keeps_the_stage_but_not_the_candidate(tmp_path):
    """The state cannot be written: a promotion does not happen; a rollback does, and is written down when the disk takes it."""
    made, evidence = prepared(tmp_path)

    async def body(rollout: Rollout):
        control = rollout.control
        await control.begin(made, evidence, None, "operator")
        await rollout.load_until(lambda: control.state.stage == "canary")
        commit, control._store.commit = control._store.commit, _no_room
        with pytest.raises(RolloutError, match="No space left"):
            await control.promote("operator", is_forced=True)
        assert control.state.title == "canary 1" and control._trial is not None
        with contextlib.suppress(RolloutError):
            await control.roll_back("operator", "bad")
        assert control._trial is None and rollout.service.scheduler.guard_of is None
        control._store.commit = commit
        await rollout.load_until(lambda: control.state.stage == "rolled_back")

    run_with(tmp_path, body, {"canary": [{"share": 1.0, "calls_min": 1_000_000}]})


def _no_room(*arguments):
    raise OSError(28, "No space left on device")


def test_shadow_asks_nobody_twice(tmp_path):
    """60 calls in shadow: 60 attempts at the groups, 60 decisions counted, 60 calls in the ledger; the candidate's answers are extra."""
    made, evidence = prepared(tmp_path)

    async def body(rollout: Rollout):
        control, service, seen = rollout.control, rollout.service, []
        service.ledger.listeners.append(seen.append)
        await control.begin(made, evidence, None, "operator")
        await asyncio.gather(*(one(service) for _ in range(60)))
        rollout.calls += 60
        assert len(seen) == 60 and sum(service.scheduler.counts.values()) == 60
        await rollout.load_until(lambda: control._trial.stats.decisions > 20)
        service.ledger.listeners.remove(seen.append)

    async def one(service):
        check_whole([piece async for piece in service.run(call(max_tokens=4))], 4)

    run_with(tmp_path, body, {"shadow": QUICK["shadow"] | {"min_s": 1000.0}})

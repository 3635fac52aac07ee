"""A rollout of a served process from the command line: begun, killed, gone on with, promoted, rolled back; over emulated groups."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import yaml

from runtime.rollout.store import audit_faults, read_state
from tests.conftest import GUARD_S, PROJECT
from tests.runtime.rollout.rollout_parts import KEY, QUICK, bundle, evaluation
from tests.runtime.test_serve import Running

ASKED = {"model": "Mistral-7B", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path, kernels):
    (tmp_path / "key").write_bytes(KEY)
    stages = {
        "shadow": QUICK["shadow"] | {"fallback_max": 1.0},
        "canary": [{"share": 1.0, "calls_min": 5, "min_s": 0.5, "margin": 2.0}],
    }
    rollout = QUICK | stages | {"dir": "state", "evidence_key_file": "key", "automatic": False, "faults_max": 100, "fallback_max": 1.0}
    content = {"cluster": "unlike-3", "scheduler": {"deadline_ms": 500}, "rollout": rollout}
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(content))
    evaluation(tmp_path / "evaluation.json", bundle(tmp_path / "made"), key=KEY)
    return tmp_path


class Load:
    """Calls one after another in a thread; `failed` holds the answers that were not 200."""

    def __init__(self, running: Running) -> None:
        self.running, self.failed, self.done = running, [], 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            status, body, _ = self.running.post("/v1/completions", ASKED)
            self.done += 1
            if status != 200:
                self.failed.append(body)

    def end(self) -> None:
        self._ending.set()
        self._thread.join(GUARD_S)


def test_from_start_to_rollback(folder):
    """start without a service; the service finds it and decides in shadow; promote by command line once the gates are passed; killed with
    SIGKILL in the canary and started again, it goes on in the canary; adopted; started again, the bundle decides; rolled back."""

    def rollout(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "runtime", "rollout", *arguments, "--config", str(folder / "service.yaml")]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        assert code == 0 or done.stderr.count("\n") == 1
        return done.stdout + done.stderr

    def status(running: Running) -> dict:
        with urllib.request.urlopen(running.url + "/admin/rollout", timeout=60) as answer:
            return json.loads(answer.read())

    def until(running: Running, condition) -> None:
        end_s = time.monotonic() + GUARD_S
        while not condition(said := status(running)):
            assert time.monotonic() < end_s, said
            time.sleep(0.1)

    files = ("--bundle", str(folder / "made"), "--evaluation", str(folder / "evaluation.json"))
    assert "nothing to promote" in rollout("promote", "--force", code=1)
    (folder / "odd.json").write_text("{}")
    assert "odd.json: not an evaluation file (sha256 is missing)" in rollout(
        "start", *files[:2], "--evaluation", str(folder / "odd.json"), code=2
    )
    assert "stage      shadow" in rollout("start", *files)
    assert "under way" in rollout("start", *files, code=1)
    running = Running("--config", str(folder / "service.yaml"))
    assert "has not passed its gates" in rollout("promote", code=1)  # without any call
    load = Load(running)
    try:
        until(running, lambda said: said["next_move"] == "promote")
        assert "every gate passed: `rollout promote`" in rollout("status")
        assert "stage      canary 1, 100% of users" in rollout("promote")
        until(running, lambda said: said["is_running"] and said["arms"]["candidate"]["decisions"] > 5)
    finally:
        load.end()
        running.process.kill()
        running.process.wait(GUARD_S)
    assert not load.failed and load.done > 10
    assert read_state(folder / "state").title == "canary 1"
    running = Running("--config", str(folder / "service.yaml"))
    load = Load(running)
    try:
        assert status(running)["title"] == "canary 1"
        until(running, lambda said: said["next_move"] == "promote")
        body = json.dumps({}).encode()
        order = urllib.request.Request(running.url + "/admin/rollout/promote", body, {"content-type": "application/json"})
        with urllib.request.urlopen(order, timeout=60) as answer:
            assert json.loads(answer.read())["stage"] == "adopted"
    finally:
        load.end()
        assert running.stop() == 0
    assert not load.failed
    running = Running("--config", str(folder / "service.yaml"))
    try:
        end_s = time.monotonic() + GUARD_S
        while 'ballast_decisions_total{cause="",source="policy"}' not in running.get("/metrics")[1]:
            assert time.monotonic() < end_s
            assert running.post("/v1/completions", ASKED)[0] == 200
        assert "rolled_back" in rollout("rollback", "--reason", "enough of it")
        assert running.post("/v1/completions", ASKED)[0] == 200
    finally:
        running.stop()
    said = rollout("audit")
    assert "enough of it" in said and "canary 1 -> adopted" in said and said.count("\n") == 4
    assert audit_faults(folder / "state") == []

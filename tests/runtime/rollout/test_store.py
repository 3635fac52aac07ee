"""State and audit log outlive a kill at any moment; nobody else writes beside their owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.rollout.state import BundleName, InconsistentState, RolloutError, RolloutState, begun, promoted, rolled_back
from runtime.rollout.store import (
    ARMS_FILE,
    AUDIT_FILE,
    STATE_FILE,
    RolloutBusy,
    RolloutStore,
    audit_faults,
    audit_tail,
    check_bundle,
    read_state,
)
from tests.conftest import PROJECT
from tests.runtime.rollout.rollout_parts import bundle

CANDIDATE = BundleName("/folder", "/origin", "d" * 64)


def test_the_stages_in_order():
    """idle -> shadow -> four canary stages -> adopted; rolling back an adoption brings the incumbent before it back."""
    state = begun(RolloutState(), CANDIDATE, "configured", "salt", {}, 1.0)
    titles = [state.title]
    while state.is_active:
        state = promoted(state, 4, "", 2.0)
        titles.append(state.title)
    assert titles == ["shadow", "canary 1", "canary 2", "canary 3", "canary 4", "adopted"] and state.incumbent == CANDIDATE
    with pytest.raises(RolloutError, match="nothing to promote"):
        promoted(state, 4, "", 3.0)
    with pytest.raises(RolloutError, match="decides already"):
        begun(state, CANDIDATE, "", "", {}, 3.0)
    second = BundleName("/second", "/second", "e" * 64)
    state = begun(state, second, "configured", "salt", {}, 4.0)
    with pytest.raises(RolloutError, match="under way"):
        begun(state, second, "", "", {}, 4.0)
    back = rolled_back(state, "why", 5.0)
    assert back.stage == "rolled_back" and back.incumbent == CANDIDATE and back.reason == "why"
    with pytest.raises(RolloutError, match="nothing to roll back"):
        rolled_back(back, "", 6.0)
    while state.is_active:
        state = promoted(state, 4, "", 7.0)
    assert state.incumbent == second and rolled_back(state, "", 8.0).incumbent == CANDIDATE


def test_arms_are_those_of_this_rollout(tmp_path):
    """By the wall clock: silent for 5 s when put down, for 65 s a minute later. Another rollout, with another salt, finds none; what is no
    such file is said."""
    now_s = 1000.0
    store = RolloutStore(tmp_path, lambda: now_s)
    store.commit(begun(store.state, CANDIDATE, "", "salt", {}, 0.0), "start", "t")
    assert store.arms() == []
    store.put_down_arms([(2**64 - 1, "candidate", 5.0), (0, "incumbent", 0.0)])
    now_s += 60.0
    assert store.arms() == [(2**64 - 1, "candidate", 65.0), (0, "incumbent", 60.0)]
    store.put_down(rolled_back(store.state, "", 0.0))
    store.put_down(begun(store.state, CANDIDATE, "", "other", {}, 0.0))
    assert store.arms() == []
    for data in (b"", b"{}", b'{"salt":"other","arms":[["zz","candidate",1]]}', b"[" * 10**6):
        (tmp_path / ARMS_FILE).write_bytes(data)
        with pytest.raises(InconsistentState, match="not the arms"):
            store.arms()
    store.close()


def test_one_owner(tmp_path):
    store = RolloutStore(tmp_path)
    store.say_url("http://127.0.0.1:1")
    with pytest.raises(RolloutBusy) as busy:
        RolloutStore(tmp_path)
    assert busy.value.url == "http://127.0.0.1:1"
    store.close()
    RolloutStore(tmp_path).close()


def test_a_line_that_the_log_lacks_is_added(tmp_path):
    """A kill between state and log: the state carries the line. A kill within the log's line: what is there stays, the line follows
    whole."""
    store = RolloutStore(tmp_path)
    store.commit(begun(store.state, CANDIDATE, "", "s", {}, 1.0), "start", "operator")
    store.commit(promoted(store.state, 4, "", 2.0), "promote", "gates")
    store.close()
    whole, kept = (tmp_path / AUDIT_FILE).read_text(), (tmp_path / STATE_FILE).read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut, faults in ((len(last), 0), (5, 1), (1, 0)):
        (tmp_path / AUDIT_FILE).write_text(whole[:-cut])
        (tmp_path / STATE_FILE).write_bytes(kept)
        store = RolloutStore(tmp_path)
        assert store.state.title == "canary 1"
        assert audit_tail(tmp_path, 1) == [store.state.entry]
        found = audit_faults(tmp_path)
        assert len(found) == faults and all("unfinished" in fault for fault in found)
        store.commit(rolled_back(store.state, "", 3.0), "roll back", "operator")
        assert len(audit_faults(tmp_path)) == faults
        store.close()


def test_a_log_that_was_edited_is_found_out(tmp_path):
    store = RolloutStore(tmp_path)
    for _ in range(3):
        store.commit(begun(store.state, CANDIDATE, "", "s", {}, 1.0), "start", "operator")
        store.commit(rolled_back(store.state, "bad", 2.0), "roll back", "gates")
    store.close()
    path = tmp_path / AUDIT_FILE
    assert audit_faults(tmp_path) == []
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines).replace('"actor": "gates"', '"actor": "operator"', 1))
    assert any("does not follow" in fault for fault in audit_faults(tmp_path))
    path.write_text("".join(lines[:2] + lines[3:]))
    assert any("does not follow" in fault for fault in audit_faults(tmp_path))


def test_bundles_are_copied_and_checked(tmp_path):
    made = bundle(tmp_path / "made")
    store = RolloutStore(tmp_path / "rollout")
    name = store.adopt_bundle(made)
    assert store.adopt_bundle(made) == name and Path(name.folder) != made
    check_bundle(name)
    weights = Path(name.folder) / "policy.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RolloutError, match="was changed"):
        check_bundle(name)
    weights.unlink()
    with pytest.raises(RolloutError, match="is gone"):
        check_bundle(name)
    with pytest.raises(RolloutError, match="cannot be copied"):
        store.adopt_bundle(tmp_path / "nowhere")
    store.close()


@pytest.mark.parametrize(
    "damaged",
    [
        b"{", b"", b"\xff", b"[]", b'{"stage": "\xff"}', b'{"stage": "canary"}', b'{"stage": "adopted"}',
        b'{"stage": "bogus"}', b'{"step": -1}', b'{"sequence": -7}', b'{"sequence": "1"}', b'{"stats": ' + b"[" * 5000,
        b'{"stats": {"a":' * 3000, b" " * (5 << 20),
        b'{"candidate": {"folder": "/a"}}',
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_used_is_refused_in_one_line(tmp_path, damaged):
    """Damaged by hand or by a disk: never half believed."""
    (tmp_path / STATE_FILE).write_bytes(damaged)
    with pytest.raises(RolloutError, match="not a rollout's state") as error:
        RolloutStore(tmp_path)
    assert "\n" not in str(error.value)
    RolloutStore(tmp_path / "other").close()  # and its lock is free


@pytest.mark.parametrize("name", ["bundle.json", "policy.safetensors"])
@pytest.mark.parametrize("target", ["/dev/zero", "/proc/self/mem", "pipe"])
def test_a_bundle_of_devices_and_pipes_is_refused_at_once(tmp_path, name, target):
    origin = bundle(tmp_path / "origin")
    (origin / name).unlink()
    if target == "pipe":
        os.mkfifo(origin / name)
    else:
        (origin / name).symlink_to(target)
    store = RolloutStore(tmp_path / "store")
    with pytest.raises(RolloutError, match="cannot be copied"):
        store.adopt_bundle(origin)
    store.close()


MOVER = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
from pathlib import Path
from runtime.rollout.state import *
from runtime.rollout.store import RolloutStore
store = RolloutStore(Path(sys.argv[1]))
said = open(sys.argv[2], "a", buffering=1)
while True:
    state = store.state
    if state.is_active:
        moved, event = promoted(state, 4, "", 2.0), "promote"
    elif state.stage == "adopted":
        moved, event = rolled_back(state, "", 2.0), "roll back"
    else:
        moved, event = begun(state, BundleName("f", "o", str(state.sequence)), "", "s", {{}}, 1.0), "start"
    store.commit(moved, event, "test")
    said.write(f"{{store.state.sequence}} {{store.state.title}}\\n")
    store.put_down(store.state)
"""


def test_killed_at_random_moments_no_stage_is_lost(tmp_path):
    """A process that moves without pause is killed 30 times with SIGKILL, each time after a random few milliseconds: the state is always
    whole, never behind what the process had said was done and at most one move ahead; the audit log then holds every move, in order."""
    rng = np.random.default_rng(20261130)
    folder, said = tmp_path / "rollout", tmp_path / "said"
    said.touch()
    moves = 0
    for _ in range(30):
        process = subprocess.Popen([sys.executable, "-c", MOVER, str(folder), str(said)], env={**os.environ, "PYTHONPATH": str(PROJECT)})
        before, end_s = said.stat().st_size, time.monotonic() + 120.0
        while said.stat().st_size == before:  # it is at work
            assert process.poll() is None and time.monotonic() < end_s
            time.sleep(0.001)
        time.sleep(float(rng.uniform(0.0, 0.02)))
        process.send_signal(signal.SIGKILL)
        process.wait(120)
        state = read_state(folder)
        sequence, _, title = said.read_text().splitlines()[-1].partition(" ")
        assert state.sequence - int(sequence) in (0, 1)
        assert state.sequence != int(sequence) or state.title == title
        store = RolloutStore(folder)
        store.close()
        entries = []
        for line in (folder / AUDIT_FILE).read_text(errors="replace").splitlines():
            try:
                entries.append(json.loads(line)["sequence"])
            except ValueError:
                continue  # the torn line of a kill, closed off
        assert list(dict.fromkeys(entries)) == list(range(1, state.sequence + 1))
        assert all("unfinished" in fault for fault in audit_faults(folder))
        moves = state.sequence
    assert moves >= 30

"""Who counts as frozen, on a clock that the test moves; and the page that processes share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from runtime.torch_tp.liveness import REMOTE_SLACK_S, Phase, ProgressPage, Reading, Slot, Watch, is_suspect, laggards, process_state


def watch(beaten_s: float, progressed_s: float, phase: Phase = Phase.COMPUTING) -> Watch:
    return Watch(Reading(5, 5, phase), progressed_s, beaten_s)


@pytest.mark.parametrize(
    ("seen", "now_s", "step_s", "state", "expected"),
    [
        # stopped: 250 ms without a beat are enough, however long the step
        (watch(10.0, 10.0), 10.24, 0.01, "T", False),
        (watch(10.0, 10.0), 10.26, 0.01, "T", True),
        (watch(10.0, 10.0), 10.26, 2.00, "T", True),
        (watch(10.0, 10.0, Phase.STARTING), 10.26, 0.0, "T", True),
        # running or waiting for the disk: may be starved, gets the 3 s of the promise, or 5 steps if that is more
        (watch(10.0, 10.0), 12.70, 0.01, "R", False),
        (watch(10.0, 10.0), 12.76, 0.01, "D", True),
        (watch(10.0, 10.0), 19.00, 2.00, "R", False),
        (watch(10.0, 10.0), 20.10, 2.00, "R", True),
        # beats, but its main thread stands still outside a collective
        (watch(20.0, 10.0), 20.01, 0.01, "S", True),
        # waits in a collective: somebody else's fault
        (watch(20.0, 10.0, Phase.WAITING), 20.01, 0.01, "S", False),
        # still importing: its start has a deadline of its own
        (watch(10.0, 10.0, Phase.STARTING), 60.0, 0.0, "R", False),
        # on another host nothing is known but the beats
        (watch(10.0, 10.0), 10.2 + REMOTE_SLACK_S, 0.01, None, False),
        (watch(10.0, 10.0), 10.3 + REMOTE_SLACK_S, 0.01, None, True),
        (watch(10.0, 10.0), 10.9 + REMOTE_SLACK_S, 0.20, None, False),
    ],
)
def test_who_is_suspect(seen, now_s, step_s, state, expected):
    assert is_suspect(seen, now_s, step_s, True, state) is expected


def test_a_rank_that_owes_nothing_need_not_progress():
    idle = watch(20.0, 10.0)
    assert not is_suspect(idle, 20.01, 0.0, False, "S")
    idle.step_begins(20.0)
    assert not is_suspect(idle, 20.01, 0.0, True, "S")


def test_a_watch_follows_changes_only():
    seen = Watch.start(1.0)
    seen.observe(Reading(1, 1, Phase.IDLE), 2.0)
    seen.observe(Reading(1, 2, Phase.IDLE), 3.0)
    seen.observe(Reading(1, 2, Phase.IDLE), 4.0)
    assert (seen.progressed_s, seen.beaten_s) == (2.0, 3.0)


def test_laggards_are_those_behind():
    readings = {0: Reading(9), 1: Reading(7), 2: Reading(9)}
    assert laggards(readings) == [1]
    assert laggards({0: Reading(9), 1: Reading(9)}) == []
    assert laggards({}) == []


def test_the_page_is_shared_with_a_child_and_has_no_name():
    page = ProgressPage.create(2)
    code = (
        "import sys; from runtime.torch_tp.liveness import *\n"
        "page = ProgressPage(int(sys.argv[1]), 2); slot = page.slot(1)\n"
        "assert page.epoch_min == 7; slot.tick(); slot.tick(); slot.beat(); slot.enter(Phase.WAITING)"
    )
    page.epoch_min = 7
    child = [sys.executable, "-c", code, str(page.file_descriptor)]
    subprocess.run(child, pass_fds=[page.file_descriptor], check=True, timeout=60, cwd=os.getcwd())
    assert page.slot(1).read() == Reading(2, 1, Phase.WAITING)
    assert page.slot(0).read() == Reading()
    assert "memfd" in os.readlink(f"/proc/self/fd/{page.file_descriptor}")
    with pytest.raises(ValueError, match="0 to 1"):
        page.slot(2)
    page.close()


def test_a_private_slot_keeps_what_is_written():
    slot = Slot()
    slot.write(Reading(3, 4, Phase.IDLE))
    assert slot.read() == Reading(3, 4, Phase.IDLE)
    slot.clear()
    assert slot.read() == Reading()


def test_states_of_a_process():
    child = subprocess.Popen(["sleep", "60"])
    try:
        child.send_signal(signal.SIGSTOP)
        end_s = time.monotonic() + 60
        while process_state(child.pid) != "T" and time.monotonic() < end_s:
            pass
        assert process_state(child.pid) == "T"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(child.pid) == "Z"
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) == ""

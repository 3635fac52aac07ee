"""Nothing outlives the controller, however it ends and whatever it was doing: no process, no segment, no port."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.listening_sockets import listening_of, still_listening
from runtime.torch_tp.communicators.segments import segment_folder
from tests.conftest import PROJECT, SLOWER, heed_interrupt

LEFT_WITHIN_S = 5.0  # on a machine whose cores suffice


def session_of(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[3])


def end_session(process: subprocess.Popen) -> None:
    """All that is left of the session that `process` began, also who is stopped."""
    for number in (signal.SIGCONT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
    process.communicate()


def processes_in_session(session: int) -> list[str]:
    """Command lines of all that live in a session; workers and stores never leave their controller's."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and session_of(int(entry)) == session]
    found = []
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
            found.append(f"{pid} state={fields[0]} parent={fields[1]} {command}")
        except OSError:
            continue
    return found


def segments_of(pid: int) -> list[str]:
    return [path.name for path in segment_folder().glob(f"ballast-{pid}-*")]


class Controller:
    """A controller process that leads a session of its own."""

    def __init__(self, model: Path, ranks: int, start: str) -> None:
        command = [sys.executable, "-m", "tests.runtime.torch_tp.controller_program", str(model), str(ranks), start]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
        self.process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=heed_interrupt,
        )  # fmt: skip
        self.ports: dict[int, str] = {}

    def await_phase(self, phase: str, deadline_s: float = 120.0) -> None:
        assert self.process.stdout is not None and self.process.stdin is not None
        end_s, seen = time.monotonic() + deadline_s, b""
        while phase.encode() not in seen:
            assert select.select([self.process.stdout], [], [], max(end_s - time.monotonic(), 0.0))[0], (
                f"no {phase!r} in time, saw {seen!r}"
            )
            piece = os.read(self.process.stdout.fileno(), 1024)
            assert piece, f"the controller ended before {phase!r}, saw {seen!r}"
            seen += piece
            if b"idle" in piece and phase == "serving":
                self.process.stdin.write(b"go on\n")
                self.process.stdin.flush()

    def leftovers(self) -> list[str]:
        return processes_in_session(self.process.pid) + segments_of(self.process.pid) + still_listening(self.ports)

    def note_ports(self) -> None:
        """Those that are listened on now are to be gone with the rest."""
        self.ports = listening_of(
            int(entry) for entry in os.listdir("/proc") if entry.isdigit() and session_of(int(entry)) == self.process.pid
        )

    def end(self) -> None:
        end_session(self.process)


@pytest.fixture
def controller(request, dreams) -> Iterator[Controller]:
    controller = Controller(dreams, *request.param)
    yield controller
    controller.end()


ALL = list(
    itertools.product([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ["loading", "idle", "serving"], [(2, "plain"), (4, "nursery")])
)
QUICK = {
    (signal.SIGINT, "loading", (2, "plain")),
    (signal.SIGTERM, "idle", (4, "nursery")),
    (signal.SIGKILL, "serving", (4, "nursery")),
    (signal.SIGKILL, "loading", (2, "plain")),
}
CASES = [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in ALL]


def await_nothing_left(controller: Controller) -> list[str]:
    end_s = time.monotonic() + LEFT_WITHIN_S * SLOWER
    while (left := controller.leftovers()) and time.monotonic() < end_s:
        controller.process.poll()
        time.sleep(0.05)
    return left


@pytest.mark.fault("K21")
@pytest.mark.parametrize(("number", "phase", "controller"), CASES, indirect=["controller"])
def test_nothing_is_left(controller, number, phase):
    controller.await_phase(phase)
    assert len(controller.leftovers()) > 1  # else this test could not fail
    controller.note_ports()
    os.kill(controller.process.pid, number)
    assert await_nothing_left(controller) == []


@pytest.mark.fault("K21")
@pytest.mark.parametrize("controller", [(2, "nursery")], indirect=True)
def test_two_interrupts_from_the_terminal_and_a_stopped_worker_leave_nothing(controller):
    """Ctrl-C goes to the whole process group; a stopped worker hears nothing, and is killed all the same."""
    controller.await_phase("serving")
    workers = [int(line.split()[0]) for line in processes_in_session(controller.process.pid)]
    os.kill(max(workers), signal.SIGSTOP)
    for _ in range(2):
        os.killpg(controller.process.pid, signal.SIGINT)
        time.sleep(0.05)
    assert await_nothing_left(controller) == []

"""`train.py` and the other commands of `agents`: bad input is one line, exit code 2 and no folder; nothing outlives an interrupted run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from tests.conftest import GUARD_S, SLOWER, heed_interrupt

PROJECT = Path(__file__).resolve().parents[1]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(PROJECT / "train.py"), *arguments]


def train_here(capsys, *arguments: str) -> tuple[int, str]:
    """Run train.py's main in this process: (exit code, standard error)."""
    from train import main

    code = main(list(arguments))
    return code, capsys.readouterr().err


@pytest.fixture
def experiment(tmp_path):
    """Writes an experiment file that differs from the smoke test's in the given text; returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(f"name: mine\n{text}\n", encoding="utf-8")
        return str(path)

    return write


MISTAKES = {
    "unknown cluster": ("worlds: {clusters: [mixed-9]}", 'cluster "mixed-9"'),
    "no cluster": ("worlds: {clusters: []}", "worlds.clusters"),
    "unknown trace": ("trace: {name: azure-chat}", 'trace "azure-chat" unknown; did you mean'),
    "unknown router": ("compare: {routers: [least_wrk_left]}", 'did you mean "least_work_left"'),
    "unknown splitter": ("compare: {splitters: [plan]}", 'split heuristic "plan" unknown'),
    "no rebalancer": ("compare: {rebalancers: []}", "no rebalance heuristic is listed"),
    "unknown PPO setting": ("ppo: {route: {learning_speed: 1}}", "ppo.route: .*learning_speed"),
    "PPO setting out of range": ("ppo: {split: {gamma_per_s: 1.5}}", "gamma_per_s=1.5"),
    "leftover samples (K01)": ("training_environments: 2\nppo: {route: {n_steps: 65, minibatch_size: 128}}", "leaves 2 over"),
    "window beyond the trace": ("trace: {test_s: [90000, 90010]}", "trace.test_s=.* holds 0 requests"),
    "cluster larger than the policy": ("max_candidates: {route: 4, split: 48, rebalance: 48}", "max_candidates.route=4: .*raise it"),
    "size of an agent missing": ("max_candidates: {route: 16}", "max_candidates: no size for split"),
    "unknown key": ("world: {}", "world"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_experiment_is_one_line_and_leaves_nothing(mistake, experiment, tmp_path, capsys):
    text, said = MISTAKES[mistake]
    run_dir = tmp_path / "run"
    code, err = train_here(capsys, "--experiment", experiment(text), "--run-dir", str(run_dir), "--processes", "1")
    assert code == 2
    assert err.count("\n") == 1 and err.startswith("train.py: "), err
    assert re.search(said, err), err
    assert not run_dir.exists()


def test_unknown_experiment(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, err = train_here(capsys, "--experiment", "smok")
    assert code == 2 and 'did you mean "smoke"' in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_run_dir_in_use_is_not_touched(capsys, tmp_path):
    (tmp_path / "results.json").write_text("kept")
    code, err = train_here(capsys, "--experiment", "smoke", "--run-dir", str(tmp_path), "--processes", "1")
    assert code == 2 and "is not empty; name a new directory or pass --resume" in err
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_resume_without_a_run(capsys, tmp_path):
    code, err = train_here(capsys, "--resume", "--run-dir", str(tmp_path / "gone"))
    assert code == 2 and "is not a directory; name the interrupted run with --run-dir" in err
    assert not (tmp_path / "gone").exists()


def test_negative_numbers(capsys, tmp_path):
    for flag, value in (("--seed", "-1"), ("--processes", "0"), ("--decisions", "0")):
        code, err = train_here(capsys, "--experiment", "smoke", "--run-dir", str(tmp_path / "run"), flag, value)
        assert code == 2 and err.count("\n") == 1, (flag, err)
        assert not (tmp_path / "run").exists()


def test_unknown_agent_is_refused_by_the_parser(tmp_path):
    found = subprocess.run(command("--agent", "router"), capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert found.returncode == 2
    assert "invalid choice: 'router'" in found.stderr and "Traceback" not in found.stderr
    assert list(tmp_path.iterdir()) == []


def children_of(pid: int) -> set[int]:
    """Process ids of all living descendants (Linux)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    while True:
        more = {child for child, parent in parents.items() if parent in found | {pid}} - found
        if not more:
            return found
        found |= more


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.fault("K21")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=["SIGKILL", "SIGTERM", "SIGINT"])
def test_no_child_outlives_the_run(sent, tmp_path, kernels):
    """The evaluation's workers are at work when the signal comes; soon the run and all its descendants are gone."""
    arguments = ["--experiment", "smoke", "--run-dir", str(tmp_path / "run"), "--processes", "2"]
    run = subprocess.Popen(
        command(*arguments), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"COLUMNS": "100"}, preexec_fn=heed_interrupt,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + GUARD_S
        # the fork server, the resource tracker and two workers
        while len(children := children_of(run.pid)) < 4 and time.monotonic() < deadline and run.poll() is None:
            time.sleep(0.1)
        assert len(children) >= 4, f"no workers after 120 s: {run.poll()} {run.stderr.read() if run.poll() is not None else ''}"
        time.sleep(1.0)  # well into a world
        children = children_of(run.pid)
        run.send_signal(sent)
        deadline = time.monotonic() + 5.0 * SLOWER
        while time.monotonic() < deadline and (run.poll() is None or any(map(is_running, children))):
            time.sleep(0.05)
        left = [pid for pid in children if is_running(pid)]
        assert run.poll() is not None and not left, f"{sent.name}: run {run.poll()}, children left {left}"
        if sent is signal.SIGINT:
            assert run.returncode == 1
            assert run.stderr.read().splitlines()[-1].startswith("train.py: interrupted; go on with --resume --run-dir")
    finally:
        for pid in (run.pid, *children_of(run.pid), *children):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        run.wait(timeout=GUARD_S)


def test_the_next_commands_name_an_interpreter_that_the_shell_finds(monkeypatch, tmp_path):
    """`make train` runs `.venv/bin/python`; plain `python` in the caller's shell is another, or none."""
    environment = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(environment))
    monkeypatch.setattr(train.shutil, "which", lambda name: "/usr/bin/python")
    assert train.interpreter() == ".venv/bin/python"
    monkeypatch.setattr(train.shutil, "which", lambda name: str(environment))
    assert train.interpreter() == "python"
    monkeypatch.setattr(sys, "executable", "/opt/a b/python")
    assert train.interpreter() == "'/opt/a b/python'"

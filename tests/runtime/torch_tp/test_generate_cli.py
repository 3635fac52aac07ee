"""`python -m runtime.torch_tp generate`: what it prints, how it survives a kill, how it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.torch_tp.__main__ import main
from tests.conftest import SLOWER, heed_interrupt

PROMPT = "I sense a gentle hum"


def run(*arguments: str, deadline_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime.torch_tp", "generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)


@pytest.fixture(scope="module")
def survived(dreams: Path) -> dict:
    """One run on two unequal ranks, of which one is killed at token 40, as JSON."""
    done = run("--model", str(dreams), "--speeds", "1,0.5", "--max-tokens", "90", "--ignore-eos", "--kill-rank", "1@40", "--json", PROMPT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_answer_survives_a_killed_rank(survived):
    """The text up to the end of the README's sample, and beyond the kill; one recovery; every time part present."""
    assert survived["text"].startswith(", a gentle hum of probability unfolding. Contrast edges sharpen, a kaleidoscope of probability.")
    assert len(survived["tokens"]) == 90
    assert survived["report"]["recoveries"] == 1
    assert "rank 1" in survived["changes"][0]
    assert survived["report"]["parts"]["redone_s"] > 0


def test_text_output_shows_plan_tokens_and_times(dreams, capsys):
    assert main(["generate", "--model", str(dreams), "--ranks", "1", "--max-tokens", "12", PROMPT]) == 0
    said = capsys.readouterr().out
    assert "query heads" in said and "a gentle hum" in said and "where the time went" in said and "communication" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0", "x"], "--ranks 0"),
        (["--speeds", "1,a", "x"], "--speeds"),
        (["--speeds", "1,0", "x"], "above 0"),
        (["--speeds", "1,1", "--ranks", "3", "x"], "3 numbers"),
        (["--model", "no-such-model", "x"], "no-such-model"),
        (["--kill-rank", "2@1", "x"], "0 to 1"),
        (["--kill-rank", "1", "x"], "RANK@TOKEN"),
        (["--slide", "1:2:3@4", "x"], "2 shares"),
        (["--max-tokens", "0", "x"], "max_tokens=0"),
        (["--max-tokens", "128", "x"], "exceed 128"),
        (["--temperature", "-1", "x"], "temperature"),
        (["--devices", "cpu,cpu,cpu", "x"], "--devices"),
        (["--devices", "nope", "x"], "'nope' must be cpu, cuda or cuda:N"),
        (["--threads", "0", "x"], "threads=0"),
        (["--speeds", "1,1e-30", "--emulate", "x"], "slow_factor"),
        (["--chat", "x"], "chat template"),
    ],
)
def test_bad_input_is_one_line_and_code_2(dreams, capsys, arguments, said):
    model = [] if "--model" in arguments else ["--model", str(dreams)]
    assert main(["generate", *model, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err


def test_wrong_options_are_one_line_and_help_states_units_and_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--no-such-option", "x"])
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0 and "default 128" in said and "tokens" in said


@pytest.mark.fault("K21")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_is_stopped(dreams, number):
    command = [sys.executable, "-m", "runtime.torch_tp", "generate", "--model", str(dreams), "--max-tokens", "100", "--ignore-eos", PROMPT]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=heed_interrupt)
    assert process.stdout is not None
    assert "model" in process.stdout.readline()
    family = descendants(process.pid)
    assert len(family) >= 2
    process.send_signal(number)
    code = process.wait(120.0)
    process.stdout.close()
    assert code in ((-9,) if number == signal.SIGKILL else (130, 0))
    end_s = time.monotonic() + 5.0 * SLOWER
    while any(Path(f"/proc/{pid}").exists() for pid in family):
        assert time.monotonic() < end_s, "processes are left"
        time.sleep(0.05)
    assert not [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"ballast-{process.pid}-")]


def descendants(pid: int) -> set[int]:
    """Children, and theirs, of a process."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it is gone, or a thread of it
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            children = {int(child) for child in (task / "children").read_text().split()}
            found |= children.union(*(descendants(child) for child in children))
    return found

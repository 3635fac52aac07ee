"""Records of a real served run over emulated groups: they read back, as a trace and as decisions, and nothing of the prompts is in them."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from agents.policy_bundle import load_bundle, write_bundle
from envs.traces import load_trace, open_trace
from runtime.records.decision_records import DecisionFile, RecordError
from runtime.rollout.recorded import compare_with_records
from tests.conftest import GUARD_S, PROJECT
from tests.runtime.scheduling.test_policy_faults import contents
from tests.runtime.test_serve import Running

SECRET = "the-word-that-nobody-may-read"
CALLS = 40
DECISIONS_WRITTEN = 'ballast_records_total{kind="decisions",outcome="written"}'


def counted(page: str, beginning: str) -> float:
    """Sum of the page's rows that begin so."""
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(beginning))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, kernels):
    """A served run with a policy: CALLS calls, one refused, one left; killed with SIGKILL. Gives its folder."""
    folder = tmp_path_factory.mktemp("recorded")
    write_bundle(folder / "bundle", contents())
    (folder / "service.yaml").write_text(
        yaml.safe_dump({"cluster": "unlike-3", "bundle": "bundle", "scheduler": {"deadline_ms": 500}, "records": {"dir": "records"}})
    )
    running = Running("--config", str(folder / "service.yaml"))
    try:
        end_s = time.monotonic() + GUARD_S
        while 'ballast_policy_state{state="ready"} 1' not in running.get("/metrics")[1]:
            assert time.monotonic() < end_s
            time.sleep(0.1)

        def one(i: int) -> int:
            asked = {"model": "Mistral-7B", "prompt": f"{SECRET} {i}", "max_tokens": 3 + i % 5, "user": f"user-{i % 4}", "ignore_eos": True}
            return running.post("/v1/completions", asked | {"session_id": f"s{i % 4}", "service_class": "code"})[0]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(one, range(CALLS))) == [200] * CALLS
        stream = running.stream("/v1/completions", {"model": "Mistral-7B", "prompt": SECRET, "max_tokens": 4000, "ignore_eos": True})
        next(stream)
        stream.close()
        end_s = time.monotonic() + GUARD_S
        while f'kind="requests",outcome="written"}} {CALLS + 1}' not in running.get("/metrics")[1]:
            assert time.monotonic() < end_s, running.get("/metrics")[1]
            time.sleep(0.1)
        while (page := running.get("/metrics")[1]) and counted(page, DECISIONS_WRITTEN) < counted(page, "ballast_decisions_total{"):
            assert time.monotonic() < end_s, page
            time.sleep(0.1)
        assert 'ballast_records_total{kind="decisions",outcome="dropped"} 0' in page
    finally:
        running.process.kill()
        running.process.wait(GUARD_S)
    return folder


def one_file(folder: Path, kind: str) -> Path:
    (path,) = (folder / "records").glob(f"{kind}-*.jsonl")
    return path


def test_requests_read_back_as_a_trace(recorded):
    """Recognised, with lengths, classes, sessions and times as they were; the call that was left has what it got."""
    path = one_file(recorded, "requests")
    table, rows = load_trace(path), list(open_trace(path))
    assert len(table) == CALLS + 1 and (np.diff(table.arrival_s) >= 0).all()
    whole = [row for row in rows if row.extra["end"] == "done"]
    assert len(whole) == CALLS and {row.output_tokens for row in whole} == {3, 4, 5, 6, 7}
    assert {row.service_class for row in whole} == {"code"} and len({row.session for row in whole}) == 4
    assert len({row.extra["user"] for row in whole}) == 4
    assert all(row.output_limit_tokens == row.output_tokens for row in whole)
    assert all(0 < row.extra["ttft_s"] <= row.extra["e2e_s"] < 60 and row.extra["group"] in ("pair", "solo-l4") for row in whole)
    assert all(row.extra["expected_ttft_s"] > 0 and row.extra["attempts"] >= 1 for row in whole)
    assert sum(row.extra["source"] == "policy" for row in whole) >= 3  # on full cores it may be late for a while
    (left,) = [row for row in rows if row.extra["end"] == "left"]
    assert left.output_tokens < 4000


def test_inspect_and_convert_take_the_records(recorded, tmp_path):
    def traces(*arguments: str) -> str:
        done = subprocess.run([sys.executable, "-m", "envs.traces", *arguments], cwd=PROJECT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    path = str(one_file(recorded, "requests"))
    assert "format ballast" in traces("inspect", path)
    traces("convert", path, str(tmp_path / "again.jsonl.gz"))
    assert [row.extra for row in open_trace(tmp_path / "again.jsonl.gz")] == [row.extra for row in open_trace(path)]


def test_nothing_of_the_prompts_or_names_is_written(recorded):
    for path in (recorded / "records").iterdir():
        text = path.read_text()
        assert SECRET not in text and "user-1" not in text and "prompt_ids" not in text


def test_decisions_can_be_made_again(recorded):
    """The bundle, asked with the recorded observation and mask in this process, chooses what was recorded, with the recorded scores."""
    policy, decided = load_bundle(recorded / "bundle"), 0
    file = DecisionFile(one_file(recorded, "decisions"))
    assert file.head.groups == ["pair", "solo-l4"]
    for record in file:
        rows, context = record.observation()
        assert record.command == "route" and record.expected_ttft_s > 0 and record.expected_tpot_s > 0 and len(record.utility) == 2
        if record.source == "policy":
            decided += 1
            index, scores = policy.choose_scored(rows, context, record.allowed)
            assert index == record.chosen and record.cause == ""
            said = np.array([np.nan if score is None else score for score in record.scores])
            np.testing.assert_allclose(said[record.allowed], scores[record.allowed], rtol=1e-6)
    assert decided >= 3
    (_, agreement, *_) = compare_with_records(recorded / "bundle", recorded / "records")
    assert agreement.startswith("agreement")


def test_a_torn_last_line_is_left_out_and_counted(recorded, tmp_path):
    """Both kinds, cut at every length of their last line: one row less, one counted; a broken line before the last is an error with its
    number."""
    for kind in ("requests", "decisions"):
        data = one_file(recorded, kind).read_bytes()
        lines = data.splitlines(keepends=True)
        last = len(lines[-1])
        for cut in {1, 2, last // 2, last - 2}:
            path = tmp_path / f"{kind}-{cut}.jsonl"
            path.write_bytes(data[:-cut] if cut > 1 else data[: -last + 1])
            if kind == "requests":
                stream = open_trace(path)
                assert len(list(stream)) == len(lines) - 2
                assert stream.report.left_out["last line unfinished (its writer was killed)"] == 1
            else:
                file = DecisionFile(path)
                assert len(list(file)) == len(lines) - 2 and file.torn == 1
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b"".join([*lines[:3], lines[3][:20] + b"\n", *lines[4:]]))
    with pytest.raises(RecordError, match="line 4"):
        list(DecisionFile(broken))
    lying = json.loads(lines[2])
    lying["chosen"] = 99
    broken.write_bytes(b"".join([*lines[:2], json.dumps(lying).encode() + b"\n"]))
    with pytest.raises(RecordError, match="chosen=99"):
        list(DecisionFile(broken))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    command = [
        sys.executable,
        "-m",
        "runtime",
        "serve",
        "--cluster",
        "unlike-3",
        "--port",
        "0",
        "--record-dir",
        str(tmp_path / "file" / "x"),
    ]
    done = subprocess.run(
        command, cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and "records.dir" in done.stderr

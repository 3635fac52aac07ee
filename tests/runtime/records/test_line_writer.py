"""Lines reach the disk whole; a disk that is slow, full or gone costs records and holds up nobody."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from runtime.records.line_writer import CLOSE_S, LineWriter
from tests.conftest import GUARD_S, PROJECT, SLOWER


def writer(folder: Path, *, file_bytes: int = 1 << 20, files_max: int = 100, queue_max: int = 100_000) -> LineWriter:
    return LineWriter(folder, "things", "now", '{"head": 1}', json.dumps, file_bytes, files_max, queue_max)


def read(folder: Path) -> list[list[dict]]:
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("things-*.jsonl"))]


def test_every_line_is_there_in_order_and_files_follow_one_another(tmp_path):
    """10,000 items of about 20 bytes in files of at most 4,000 bytes, each with its head."""
    lines = writer(tmp_path, file_bytes=4000)
    lines.start()
    for number in range(10_000):
        lines.put({"n": number})
    lines.close()
    files = read(tmp_path)
    assert len(files) > 10 and all(file[0] == {"head": 1} for file in files)
    assert all(path.stat().st_size <= 4000 + 20 * 256 for path in tmp_path.iterdir())
    assert [item["n"] for file in files for item in file[1:]] == list(range(10_000))
    assert (lines.written, lines.dropped) == (10_000, 0)


def test_the_oldest_files_are_deleted(tmp_path):
    lines = writer(tmp_path, file_bytes=1000, files_max=3)
    lines.start()
    for number in range(3000):
        lines.put({"n": number})
    lines.close()
    files = read(tmp_path)
    assert len(files) == 3 and files[-1][-1]["n"] == 2999


def test_a_full_disk_costs_records_and_leaves_whole_lines(tmp_path):
    """A process whose files may have 3,000 bytes (RLIMIT_FSIZE: a write beyond fails like one on a full disk) puts 2,000 items: none
    waits, the rest is counted as dropped, and what is there reads back."""
    code = f"""
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
sys.path.insert(0, {str(PROJECT)!r})
from pathlib import Path
from runtime.records.line_writer import LineWriter
lines = LineWriter(Path({str(tmp_path)!r}), "things", "now", '{{"head": 1}}', json.dumps, 1 << 20, 100, 100_000)
lines.start()
longest = 0.0
for number in range(2000):
    began = time.perf_counter(); lines.put({{"n": number}}); longest = max(longest, time.perf_counter() - began)
time.sleep(0.3); lines.close()
print(json.dumps([lines.written, lines.dropped, longest]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    written, dropped, longest_s = json.loads(done.stdout)
    assert dropped > 0 and written + dropped == 2000 and longest_s < 1.0 * SLOWER
    assert sum(len(file) - 1 for file in read(tmp_path)) == written


def test_a_writer_that_hangs_holds_up_nobody(tmp_path):
    """The writer's thread is stuck, as in a write to a disk that hangs: 5,000 puts take no time, what the queue cannot hold is counted, and
    closing waits no longer than its limit."""
    is_well = threading.Event()

    def encode(item: dict) -> str:
        is_well.wait()
        return json.dumps(item)

    lines = LineWriter(tmp_path, "things", "now", '{"head": 1}', encode, 1 << 20, 100, 1000)
    lines.start()
    lines.put({"n": 0})
    end_s = time.monotonic() + GUARD_S
    while lines._waiting:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    began_s = time.perf_counter()
    for number in range(5000):
        lines.put({"n": number})
    assert time.perf_counter() - began_s < 5.0 * SLOWER
    assert lines.dropped == 4000
    began_s = time.perf_counter()
    lines.close()
    assert time.perf_counter() - began_s < CLOSE_S + 2.0 * SLOWER
    is_well.set()


def until(condition, limit_s: float = GUARD_S) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_disk_full_from_the_start_gets_no_empty_files_and_costs_no_old_ones(tmp_path, monkeypatch):
    """Not even a head can be written, 30 times; then there is room again. The files of the run before are all still there."""
    for number in range(2):
        (tmp_path / f"things-before-{number}.jsonl").write_text('{"head": 1}\n{"n": 0}\n')
    is_full, tries, write = [True], [], os.write

    def full(descriptor: int, data: bytes) -> int:
        if is_full[0]:
            tries.append(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr("runtime.records.line_writer.os.write", full)
    monkeypatch.setattr("runtime.records.line_writer.RETRY_S", 0.001)
    lines = writer(tmp_path, files_max=3)
    lines.start()
    while len(tries) < 30:
        lines.put({"n": 1})
        time.sleep(0.005)
    assert len(list(tmp_path.iterdir())) <= 3
    is_full[0] = False
    lines.put({"n": 2})
    until(lambda: lines.written)
    lines.close()
    assert [len(file) >= 2 for file in read(tmp_path)] == [True] * 3


def test_a_name_that_is_taken_is_stepped_over(tmp_path, monkeypatch):
    """A clock that was put back, or a container in which every run is process 1."""
    monkeypatch.setattr("runtime.records.line_writer.RETRY_S", 0.001)
    for number in range(3):
        (tmp_path / f"things-now-{number:06d}.jsonl").write_text("theirs\n")
    lines = writer(tmp_path)
    lines.start()

    def came() -> bool:
        lines.put({"n": 1})
        return lines.written > 0

    until(came)
    lines.close()
    assert [path.read_text() for path in sorted(tmp_path.iterdir())[:3]] == ["theirs\n"] * 3


def test_a_run_whose_clock_was_put_back_keeps_its_own_file(tmp_path):
    """By name it is older than all the others."""
    for number in range(5):
        (tmp_path / f"things-tomorrow-{number}.jsonl").write_text("\n")
    lines = writer(tmp_path, files_max=3)
    lines.start()
    lines.put({"n": 7})
    until(lambda: lines.written)
    lines.close()
    assert json.loads((tmp_path / "things-now-000000.jsonl").read_text().splitlines()[1]) == {"n": 7}
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_is_deleted_under_the_writer_is_followed_by_another(tmp_path):
    """And a folder that goes away costs records, counted, until it is back."""
    folder = tmp_path / "records"
    folder.mkdir()
    lines = writer(folder)
    lines.start()
    lines.put({"n": 0})
    until(lambda: lines.written == 1)
    shutil.rmtree(folder)
    lines.put({"n": 1})
    until(lambda: lines.dropped == 1)
    folder.mkdir()
    time.sleep(1.1)
    lines.put({"n": 2})
    until(lambda: lines.written == 2)
    lines.close()
    assert [file[1:] for file in read(folder)] == [[{"n": 2}]]

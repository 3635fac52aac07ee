"""Compiled code on disk is made anew when anything that it was made from has changed, also in another file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from envs.perf_model import kernel_cache

PROGRAM = """
import sys
from pathlib import Path
from envs.perf_model import kernel_cache
kernel_cache.PROJECT = Path(sys.argv[1])
sys.path.insert(0, sys.argv[1])
from upper.middle import middle
print(middle(1.0), sum(middle.stats.cache_hits.values()))
"""


def run(project: Path) -> tuple[float, int]:
    environment = {**os.environ, "PYTHONPATH": str(kernel_cache.PROJECT)}
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM, str(project)], capture_output=True, text=True, env=environment, timeout=300, check=True
    )
    value, hits = done.stdout.split()
    return float(value), int(hits)


def test_a_change_in_another_file_is_compiled_anew(tmp_path: Path):
    """`middle` calls a function of a second file, which reads a constant of a third. numba alone would go on with the old constant."""
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper" / "middle.py").write_text(
        "from envs.perf_model.kernel_cache import cached_njit\nfrom upper import lower\n\n"
        "@cached_njit()\ndef middle(x):\n    return lower.scaled(x)\n"
    )
    (tmp_path / "upper" / "lower.py").write_text(
        "from envs.perf_model.kernel_cache import cached_njit\nfrom upper.constants import (\n    SCALE,\n)\n\n"
        "@cached_njit()\ndef scaled(x):\n    return SCALE * x\n"
    )
    constants = tmp_path / "upper" / "constants.py"
    constants.write_text("SCALE = 2.0\n")
    assert run(tmp_path) == (2.0, 0)
    assert run(tmp_path) == (2.0, 1)
    constants.write_text("SCALE = 3.0\n")
    assert run(tmp_path) == (3.0, 0)
    assert run(tmp_path) == (3.0, 1)


def test_a_stamp_covers_what_is_imported_through_others_and_nothing_else():
    project = kernel_cache.PROJECT
    covered, waiting = set(), [project / "envs/decision/predictor.py"]
    while waiting:
        if (path := waiting.pop()) not in covered:
            covered.add(path)
            waiting.extend(kernel_cache._read(path, project)[1])
    names = {str(path.relative_to(project)) for path in covered}
    assert {"envs/decision/predictor.py", "envs/perf_model/step_time.py", "envs/domain/requests.py"} <= names
    assert "envs/cluster/cluster_process.py" not in names and not any(name.startswith(("runtime/", "agents/")) for name in names)


def test_nothing_is_kept_on_disk_by_numbas_own_rule():
    offenders = [
        str(path.relative_to(kernel_cache.PROJECT))
        for folder in ("envs", "agents", "runtime", "benchmarks")
        for path in (kernel_cache.PROJECT / folder).rglob("*.py")
        if path != Path(kernel_cache.__file__) and re.search(r"cache\W{1,3}True", path.read_text(encoding="utf-8"))
    ]
    assert offenders == []

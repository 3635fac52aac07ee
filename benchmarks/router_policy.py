"""A small route policy for the cluster of the router benchmark: trained on made-up traffic like the benchmark's own, kept for the next run.

It shall decide, and cost what a policy costs; how well it decides is the experiments' business, not this one's.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.router_processes import CLUSTER, PROJECT
from envs.decision.observation import schema_hash
from envs.traces.formats.ballast import head_line, row_line
from envs.traces.trace_row import TraceRow

TRAIN_S = 1200.0
REQUESTS_PER_S = 400.0
SPAN_S = 90.0
PROMPT_TOKENS, OUTPUT_TOKENS = 69, 20
"""Of the benchmark's requests, as the gateway guesses and the scripted servers answer."""
LENGTH_SPREAD = 0.3
EXPERIMENT: dict[str, Any] = {
    "name": "router-benchmark", "shortened": True, "seed": 1,
    "trace": {"name": "traffic.jsonl", "train_s": [0, 50], "validation_s": [50, 70], "test_s": [70, 90]},
    "worlds": {"clusters": ["cluster.yaml"], "requests": 150, "train_load": [0.1, 1.3]},
    "compare": {
        "validation_worlds": 2, "test_worlds": 1, "routers": ["shortest_queue", "net_utility"], "splitters": ["planner"],
        "rebalancers": ["never"], "clairvoyant": False, "bootstrap": 100,
    },
    "tune": {"rounds": 1, "candidates": 2, "worlds": 1},
    "max_candidates": {"route": 16},
    "imitate": {"route": "what_if"},
    "ppo": {"route": {"total_decisions": 512, "n_steps": 256, "minibatch_size": 128, "scaling_decisions": 1024, "clone_decisions": 4096}},
}  # fmt: skip


def benchmark_bundle() -> Path:
    """The bundle's directory: from an earlier run where cluster, training and observation are the same, else trained now (minutes).

    Raises: subprocess.CalledProcessError, subprocess.TimeoutExpired.
    """
    text = json.dumps([CLUSTER, EXPERIMENT, REQUESTS_PER_S, SPAN_S, PROMPT_TOKENS, OUTPUT_TOKENS, LENGTH_SPREAD, schema_hash()])
    kept = Path(tempfile.gettempdir()) / f"ballast-benchmarks-{os.getuid()}"
    run_dir = kept / hashlib.sha256(text.encode()).hexdigest()[:16]
    bundle = run_dir / "run" / "bundle" / "route"
    if not (bundle / "bundle.json").is_file():
        print(f"training a policy for the benchmark's cluster, once, into {run_dir}", flush=True)
        kept.mkdir(mode=0o700, exist_ok=True)
        _train(run_dir)
    return bundle


def _train(run_dir: Path) -> None:
    """A run that was broken off is begun anew beside its remains."""
    work = Path(tempfile.mkdtemp(prefix="training-", dir=run_dir.parent))
    (work / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (work / "traffic.jsonl").write_text(_traffic())
    (work / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    command = [sys.executable, str(PROJECT / "train.py"), "--experiment", "experiment.yaml", "--agent", "route", "--run-dir", "run"]
    path = os.pathsep.join(part for part in (str(PROJECT), os.environ.get("PYTHONPATH", "")) if part)
    subprocess.run(command, cwd=work, check=True, timeout=TRAIN_S, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
    work.rename(run_dir)


def _traffic() -> str:
    """Poisson arrivals; lengths vary about those of the benchmark's requests, so that nothing is a constant in training."""
    rng = np.random.default_rng(1)
    count = int(SPAN_S * REQUESTS_PER_S)
    arrivals_s = np.sort(rng.uniform(0.0, SPAN_S, count))
    prompts, outputs = (mean * np.exp(LENGTH_SPREAD * rng.standard_normal(count)) for mean in (PROMPT_TOKENS, OUTPUT_TOKENS))
    columns = arrivals_s.tolist(), np.rint(prompts).astype(int).tolist(), np.rint(outputs).astype(int).tolist()
    rows = (TraceRow(*row) for row in zip(*columns, strict=True))
    return "\n".join((head_line("router benchmark", "chat", synthetic=True), *map(row_line, rows))) + "\n"

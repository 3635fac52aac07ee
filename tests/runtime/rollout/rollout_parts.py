"""Parts for tests of rollouts: evaluation files, bundles, settings that pass quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from agents.evaluation_file import EvaluationFile
from agents.policy_bundle import bundle_digests, write_bundle
from tests.runtime.scheduling.test_policy_faults import contents

KEY = b"0123456789abcdef0123"


def bundle(folder: Path, seed: int = 0) -> Path:
    """A bundle like that of the policies' tests; another seed gives other weights, and the same choices among groups of one kind."""
    made = contents()
    made.weights["out.bias"][:] = seed
    return write_bundle(folder, made)


def evaluation(path: Path, bundle_folder: Path, gain: float = 0.05, worlds: int = 24, key: bytes | None = None, **results: Any) -> Path:
    """A file as `agents.evaluate` writes it: the bundle's goodput is `gain` above net_utility's, give or take 0.01 a world."""
    rng = np.random.default_rng(3)
    base = 0.8 + rng.normal(0, 0.05, worlds)
    ours = base + gain + rng.normal(0, 0.01, worlds)
    rows = {"net_utility": base, "ppo_route": ours}
    content = {
        "trace_name": "t", "world_names": [f"w{i}" for i in range(worlds)], "is_shortened": False, "learned": ["ppo_route"],
        "policies": {name: [{"goodput": float(value)} for value in values] for name, values in rows.items()},
    }  # fmt: skip
    EvaluationFile("tiny", content | results, (), {"route": bundle_digests(bundle_folder)}).write(path, key)
    return path


QUICK = {
    "slice_s": 0.2, "washout_s": 0.0, "sticky_s": 0.0, "faults_max": 100, "fallback_max": 1.0,
    "shadow": {"decisions_min": 30, "min_s": 0.3, "fallback_max": 1.0, "regret_max": 10.0, "agreement_min": 0.0},
    "canary": [
        {"share": 0.5, "calls_min": 5, "pairs_min": 2, "min_s": 0.5, "margin": 2.0},
        {"share": 1.0, "calls_min": 5, "pairs_min": 2, "min_s": 0.5, "margin": 2.0},
    ],
}  # fmt: skip
"""Stages that pass within a second or two: margins of 2 ask for nothing but counts, and being late on a busy machine is no fault."""

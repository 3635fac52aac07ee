"""Writes a calibration: the measured tables, the kernel profiles fitted to them, and a cluster file that simulates these very ranks."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from envs.domain.units import GIB
from envs.perf_model.coefficients import SCHEMA_VERSION
from envs.scenario.cluster_file import load_cluster
from envs.scenario.cluster_spec import ClusterSpec
from runtime.local_measurement import Measurement, ReduceRow, StepRow
from runtime.step_time_fit import RankFit, fit_link, fit_rank, is_held_out, predicted_step_s, score, uniform_plan

TDP_W = 100.0
"""Assumed, since nothing here says what a CPU rank draws; no result of the simulator's timing depends on it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was written, and how far the simulator is off on the sizes it was not fitted to."""

    cluster: Path
    profiles: Path
    tables: tuple[Path, ...]
    held_out_error: dict[str, float]


def write_calibration(measurement: Measurement, folder: Path, name: str, *, slots_max: int, kv_tokens_max: int) -> Calibration:
    """Fit `measurement` and write NAME.yaml, NAME.profiles.json and the tables into `folder`, each as a whole or not at all.

    Raises: ValueError when the measurement does not suffice; ScenarioError when the cluster could not be simulated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = sorted({row.rank for row in measurement.steps})
    fits = [fit_rank(measurement, rank) for rank in ranks]
    tables = (_write_table(folder / f"{name}.steps.csv", StepRow, measurement.steps),
              _write_table(folder / f"{name}.all_reduce.csv", ReduceRow, measurement.reduces))  # fmt: skip
    profiles, cluster = folder / f"{name}.profiles.json", folder / f"{name}.yaml"
    _write_profiles(profiles, name, fits)
    document = _cluster_document(measurement, fits, name, slots_max, kv_tokens_max)
    _write(cluster, _heading(measurement) + yaml.safe_dump(document, sort_keys=False, width=140))
    error = held_out_error(load_cluster(cluster), measurement)
    for fit in fits:
        fit.profile["held_out_error"] = {"step": error}
    _write_profiles(profiles, name, fits)
    return Calibration(cluster, profiles, tables, error)


def held_out_error(cluster: ClusterSpec, measurement: Measurement) -> dict[str, float]:
    """The simulator's step times against the measured ones, on sizes that no fit saw."""
    first = [row for row in measurement.steps if row.rank == 0]
    rows = [row for index, row in enumerate(first) if is_held_out(index)]
    plan = uniform_plan(measurement.plan)
    predicted = np.array([predicted_step_s(cluster.groups[0], plan, row) for row in rows])
    return score(predicted, np.array([row.step_s for row in rows]))


def _write_table(path: Path, row_type: type[StepRow] | type[ReduceRow], rows: Sequence[StepRow | ReduceRow]) -> Path:
    temporary = path.with_suffix(".part")
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(row_type)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    os.replace(temporary, path)
    return path


def _write_profiles(path: Path, name: str, fits: Sequence[RankFit]) -> None:
    profiles = {f"rank{rank}": fit.profile for rank, fit in enumerate(fits)}
    _write(
        path, json.dumps({"schema_version": SCHEMA_VERSION, "calibration": name, "profiles": profiles}, indent=1, allow_nan=False) + "\n"
    )


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _heading(measurement: Measurement) -> str:
    lines = ["# Written by `python -m runtime calibrate`: rates are what these ranks reached, not a datasheet's. tdp_w is assumed."]
    if any(factor > 1.0 for factor in measurement.slow_factors):
        factors = ", ".join(f"{factor:g}" for factor in measurement.slow_factors)
        lines.append(f"# EMULATED: slow factors {factors} were played by waiting; no such devices exist here.")
    return "\n".join(lines) + "\n"


def _cluster_document(measurement: Measurement, fits: Sequence[RankFit], name: str, slots_max: int, kv_tokens_max: int) -> dict[str, Any]:
    model = measurement.model
    link = fit_link(measurement.reduces, model.weight_number_bytes)
    link_name = f"{name}-link"
    links = [] if link is None else [
        {"name": link_name, "latency_us": link.alpha_s * 1e6, "gb_per_s": 1e-9 / link.beta_s_per_byte,
         "source": "all-reduces of these ranks", "checked": True}
    ]  # fmt: skip
    own_link = link_name if links else "pcie4"
    gpus = []
    for rank, fit in enumerate(fits):
        factor = measurement.slow_factors[rank]
        note = f", emulated {factor:g} times slower" if factor > 1.0 else ""
        gpus.append({
            "name": f"{name}-rank{rank}", "tflop_per_s": fit.flop_per_s * 1e-12, "memory_gib": measurement.memory_bytes[rank] / GIB,
            "memory_gb_per_s": fit.memory_bytes_per_s * 1e-9, "tdp_w": TDP_W, "architecture": platform.machine(),
            "kernel_profile": f"{name}.profiles.json#rank{rank}", "link": own_link, "has_bf16": False,
            "source": f"measured on this machine{note}", "checked": True,
        })  # fmt: skip
    ranks = [{"gpu": gpu["name"], "node": measurement.nodes[rank]} for rank, gpu in enumerate(gpus)]
    group: dict[str, Any] = {"name": "local", "ranks": ranks, "inner_link": own_link, "outer_link": own_link}
    return {
        "name": name,
        "description": f"{len(fits)} rank(s) of this machine, calibrated with {model.name}",
        "model": {"name": model.name, "weight_dtype": model.weight_dtype, "kv_dtype": model.kv_dtype},
        "groups": [group],
        "limits": {
            "max_running": slots_max, "context_tokens": model.context_tokens, "kv_block_tokens": 16, "kv_blocks": kv_tokens_max // 16,
        },
        "own_gpus": gpus,
        "own_links": links,
        "own_models": [{
            "name": model.name, "layers": model.layers, "hidden": model.hidden, "query_heads": model.query_heads,
            "kv_heads": model.kv_heads, "head_dim": model.head_dim, "mlp_width": model.mlp_width, "vocabulary": model.vocabulary,
            "context_tokens": model.context_tokens, "tied_embeddings": model.tied_embeddings, "source": "its own config.json",
        }],
    }  # fmt: skip

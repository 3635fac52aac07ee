"""The capability profiles of an experiment's clusters, for its report: devices and groups, their ranking, whom they suit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.decision import capability as C
from envs.decision.predictor import class_limits
from envs.domain.plans import TpGroup
from envs.domain.requests import SERVICE_CLASSES
from envs.domain.snapshot import FloatArray
from envs.scenario.cluster_spec import ClusterSpec
from envs.traces.trace_table import TraceTable

PHASES: dict[str, dict[str, float]] = {
    "prefill": {"flop_per_s": 1.0, "link_bytes_per_s": 0.25, "step_time": -C.STEP_SPREAD},
    "decode": {"memory_bytes_per_s": 1.0, "memory_bytes": 0.25, "step_time": -C.STEP_SPREAD},
}
"""Weights of the two rankings: what a phase is bound by, and what the steps were measured to lose of it."""


def capability_rows(
    clusters: Sequence[ClusterSpec], trace: TraceTable, summaries: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], ...]:
    """One row per kind of device and one per group of every cluster.

    Keys: cluster, kind (device or group), name, vector (C.FEATURES, standardised; at rest but for step_time, which is the mean
    over `summaries` of what was measured of the group's slowest rank), prefill_rank and decode_rank (1 = best of its kind in
    the cluster), and for groups affinity (class name -> cosine with what the class's median request needs).
    """
    rows: list[dict[str, Any]] = []
    classes = np.unique(trace.class_index)
    for cluster in clusters:
        devices = {place.gpu.name: (place.gpu, group.slowest_link) for group in cluster.groups for place in group.ranks}
        rates = C.static_rates([gpu for gpu, _ in devices.values()], [link for _, link in devices.values()])
        idle = [C.DeviceState()] * len(devices)
        rows += _ranked(cluster.name, "device", list(devices), C.capability_vector(rates, idle, C.CATALOGUE_SCALE))
        group_rates = np.array([C.group_rates(_rank_rates(group)) for group in cluster.groups])
        states = [C.DeviceState(step_ratio=ratio) for ratio in _measured(cluster, summaries)]
        vectors = C.capability_vector(group_rates, states, C.CATALOGUE_SCALE)
        found = _ranked(cluster.name, "group", [group.name for group in cluster.groups], vectors)
        static = slice(0, len(C.STATIC_FEATURES))
        centred = vectors[:, static] - vectors[:, static].mean(axis=0)
        for index, need in zip(classes, _needs(cluster, trace, classes), strict=True):
            cosine = C.similarity(centred, need[None, static])[:, 0]
            for row, value in zip(found, cosine, strict=True):
                row["affinity"][SERVICE_CLASSES[index].name] = round(float(value), 3)
        rows += found
    return tuple(rows)


def _rank_rates(group: TpGroup) -> FloatArray:
    return C.static_rates([place.gpu for place in group.ranks], [group.slowest_link] * len(group.ranks))


def _measured(cluster: ClusterSpec, summaries: Sequence[Mapping[str, Any]]) -> list[float]:
    """Mean measured / declared time of each group's slowest rank over the cluster's worlds; NaN where none was played."""
    seen = [row["slowest_rank_ratio"] for row in summaries if row.get("cluster") == cluster.name and "slowest_rank_ratio" in row]
    return np.mean(seen, axis=0).tolist() if seen else [float("nan")] * len(cluster.groups)


def _needs(cluster: ClusterSpec, trace: TraceTable, classes: np.ndarray) -> FloatArray:
    """Need of every class of the trace, by its median prompt and answer, relative to all classes' mean; shape (present, 10)."""
    prompts, answers = np.full(len(SERVICE_CLASSES), 512.0), np.full(len(SERVICE_CLASSES), 128.0)
    for index in classes:
        chosen = trace.class_index == index
        prompts[index] = np.median(trace.prompt_tokens[chosen])
        answers[index] = np.median(trace.output_tokens[chosen])
    limits = class_limits()
    return C.class_needs(cluster.model, prompts, answers, limits[:, 0] + limits[:, 1] * prompts, limits[:, 2])[classes]


def _ranked(cluster: str, kind: str, names: Sequence[str], vectors: FloatArray) -> list[dict[str, Any]]:
    places = {phase: np.argsort(C.rank_by(vectors, weights)) + 1 for phase, weights in PHASES.items()}
    return [
        {
            "cluster": cluster,
            "kind": kind,
            "name": name,
            "vector": [round(float(value), 3) for value in vectors[i]],
            **{f"{phase}_rank": int(place[i]) for phase, place in places.items()},
            "affinity": {},
        }
        for i, name in enumerate(names)
    ]

"""Times of a single request in an idle group, by the schedulers' own model: decides whether a world can meet its limits."""

from __future__ import annotations

import numpy as np

from envs.cluster.group_set import GroupSet
from envs.cluster.world import WorldOptions
from envs.domain.snapshot import FloatArray, IntArray
from envs.perf_model.step_time import step_parts
from envs.scenario.cluster_spec import ClusterSpec
from envs.traces.trace_table import TraceTable


def unloaded_times(cluster: ClusterSpec, options: WorldOptions, trace: TraceTable) -> tuple[FloatArray, FloatArray, IntArray, IntArray]:
    """TTFT and TPOT in seconds, shape (groups, classes), of each class's median prompt alone in each group, with the class
    indices and median prompts they belong to, shape (classes,)."""
    groups = GroupSet(cluster, options, np.zeros(1, np.int64), np.zeros(0, np.int64))
    state = groups.state
    classes = np.unique(trace.class_index).astype(np.int64)
    prompts = np.array([int(np.median(trace.prompt_tokens[trace.class_index == c])) for c in classes])
    alive = [g for g in range(len(cluster.groups)) if not cluster.parked[g]]
    ttft_s = np.empty((len(alive), len(classes)))
    tpot_s = np.empty_like(ttft_s)
    model = (state.predicted_rank_cost, state.predicted_group_cost, state.plain_residual, state.plain_slow)
    for row, g in enumerate(alive):
        for column, prompt in enumerate(prompts):
            prefill = step_parts(g, *model, prompt, 0, 0.5 * prompt * prompt, 0.0, 0, 0, 0, 0, 1)
            decode = step_parts(g, *model, 1, 0, 0.0, 0.0, prompt, 0, 1, 0, 1)
            ttft_s[row, column] = sum(prefill[:4])
            tpot_s[row, column] = sum(decode[:4])
    return ttft_s, tpot_s, classes, prompts

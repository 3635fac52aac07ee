"""What an agent is shown: no future, only finite numbers in range, one row per candidate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.cluster.cluster_process import ClusterProcess
from envs.decision import predictor as P
from envs.decision.observation import BOUND, CONTEXT, FEATURES, GROUP_FEATURES, ROUTE_FEATURES, encode, route_and_group_rows, schema_hash
from envs.domain.commands import CommandKind
from tests.envs import small_worlds as W
from tests.envs.small_worlds import ALL, LIMITS, RandomLegal, play, traffic, world


def observations(table, seed: int):
    """(time, kind, observation bytes, tables) at every decision point before the first request ends by itself."""
    process = ClusterProcess(world(table, W.cluster(replace(LIMITS, kv_blocks=900)), control_tick_s=0.5, cold_start_s=2.0), ALL)
    anybody = RandomLegal(seed)
    seen = []
    while (point := process.next_decision()) is not None and set(np.unique(process.outcomes.kind)) <= {
        1,
        3,
        4,
    }:  # refused, before or after they began; unfinished
        candidates, context = encode(point, 40)
        shown = (candidates.tobytes(), context.tobytes(), point.mask.tobytes(), point.commands, point.estimates.tobytes())
        known = tuple(np.asarray(getattr(point.tables, name)).tobytes() for name in ("remaining_tokens", "remaining_quantiles", "plan"))
        seen.append((process.env.now, point.decision, shown, known))
        process.apply(point, anybody.choose(point))
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_true_output_lengths_of_unfinished_requests_are_invisible(seed):
    """Two worlds that differ in the true lengths of requests that have not ended, in each other respect alike (their
    declared limits, too): every observation, estimate, mask and table is the same to the bit. A small pool with a shared
    prefix makes evictions and preemptions happen, which must not depend on the future either."""
    rng = np.random.default_rng(seed)
    n = 60
    arrivals = np.cumsum(rng.exponential(0.12, n))
    prompts = rng.integers(64, 900, n)
    prefixes = [[int(rng.integers(3)) * 9 + k for k in range(min(9, prompt // 64))] for prompt in prompts]
    shorter = rng.integers(400, 700, n)
    tables = [
        W.trace(arrivals, prompts, outputs, rng.integers(0, 1, n), 1500, prefixes, 64)
        for outputs in (shorter, shorter + rng.integers(1, 700, n))
    ]
    one, other = (observations(table, seed=seed) for table in tables)
    common = min(len(one), len(other))
    assert common > 40
    for a, b in zip(one[:common], other[:common], strict=True):
        assert a[:2] == b[:2]
        assert a[2] == b[2], f"{a[1]} at {a[0]} s sees the future"
        assert a[3] == b[3]


def test_features_stay_in_range_and_empty_rows_are_zero():
    """Every decision of a busy world with random moves: float32, within the bound, rows beyond the candidates zero, the
    kind's one-hot matches the command, the features of group rows are those of the command's group."""
    kinds = set()

    def see(process, point):
        candidates, context = encode(point, 40)
        assert candidates.dtype == context.dtype == np.float32
        assert candidates.shape == (40, len(FEATURES)) and context.shape == (len(CONTEXT),)
        assert np.abs(candidates).max() <= BOUND and np.abs(context).max() <= BOUND
        assert not candidates[len(point.commands) :].any()
        one_hot = candidates[: len(point.commands), : len(CommandKind)]
        assert (one_hot.argmax(axis=1) == [command.kind for command in point.commands]).all() and (one_hot.sum(axis=1) == 1).all()
        rows = np.clip(route_and_group_rows(point), -BOUND, BOUND).astype(np.float32)
        at = FEATURES.index("running_fraction")
        for i, command in enumerate(point.commands):
            kinds.add(command.kind)
            if command.group_index >= 0:
                assert (candidates[i, at : at + len(GROUP_FEATURES)] == rows[command.group_index, : len(GROUP_FEATURES)]).all()
        if point.request is not None:
            context_row = dict(zip(CONTEXT, context, strict=True))
            assert context_row["log_prompt_tokens"] == pytest.approx(np.log1p(point.request.prompt_tokens), rel=1e-6)
            assert context_row["log_waited_s"] == pytest.approx(np.log1p(point.view.now_s - point.request.arrival_s), abs=1e-6)
            assert rows.shape[1] == len(GROUP_FEATURES) + len(ROUTE_FEATURES)

    spec = world(traffic(150, 15.0, 8, output_mean=150), control_tick_s=1.0, cold_start_s=2.0, rebuild_s=0.5, drain_s=40.0)
    play(spec, dict.fromkeys(ALL, RandomLegal(8)), on_point=see)
    assert {CommandKind.ROUTE, CommandKind.HOLD, CommandKind.REFUSE, CommandKind.KEEP, CommandKind.SET_SPLIT, CommandKind.MIGRATE} <= kinds


def test_more_candidates_than_rows_are_refused_not_cut():
    process = ClusterProcess(world(W.trace([0.0], 10, 2)))
    with pytest.raises(ValueError, match="raise max_candidates"):
        encode(process.next_decision(), 4)


def test_an_earlier_snapshot_does_not_change_afterwards():
    """Arrays of a recorded view are its own: playing on changes none of them."""
    process = ClusterProcess(world(traffic(80, 10.0, 5), control_tick_s=0.5), ALL)
    anybody = RandomLegal(3)
    kept = []
    while (point := process.next_decision()) is not None:
        if len(kept) < 60:
            view = point.view
            names = [name for name in view._fields if isinstance(getattr(view, name), np.ndarray)]
            kept.append((view, {name: getattr(view, name).copy() for name in names}))
        process.apply(point, anybody.choose(point))
    for view, before in kept:
        for name, values in before.items():
            assert np.array_equal(getattr(view, name), values), name


def test_schema_hash_names_the_features():
    assert len(schema_hash()) == 64 and len(set(FEATURES)) == len(FEATURES) and len(set(CONTEXT)) == len(CONTEXT)


def test_features_of_baseline_profile_and_measured_ratios_by_hand():
    """Groups of three kinds at one decision: each of version 3's features against numpy on the snapshot and the tables."""
    process = ClusterProcess(world(traffic(60, 8.0, 3, output_mean=100)))
    point = None
    for _ in range(40):
        point = process.next_decision()
        process.apply(point, int(np.flatnonzero(point.mask)[0]))
    point = process.next_decision()
    view, tables, c = point.view, point.tables, point.request.class_index
    rows = dict(zip(GROUP_FEATURES + ROUTE_FEATURES, route_and_group_rows(point).T, strict=True))
    present = [ratio[ratio > 0] for ratio in view.rank_ratio]
    assert rows["log_slowest_rank"] == pytest.approx([np.log(ratio.max()) for ratio in present])
    assert rows["log_rank_spread"] == pytest.approx([np.log(ratio.max() / ratio.min()) for ratio in present])
    assert rows["correction_std"] == pytest.approx(view.correction_std)
    base = tables.baseline[c] * view.correction[:, None]
    best = base[point.allowed_groups, P.B_TIME_S].min()
    assert rows["log_baseline_ttft_over_limit"] == pytest.approx(np.log(base[:, P.B_TTFT_RATIO]))
    assert rows["log_baseline_time_over_best"] == pytest.approx(np.log(base[:, P.B_TIME_S] / best))
    free = view.kv_blocks_free * view.kv_block_tokens
    assert rows["log_baseline_kv_over_free"] == pytest.approx(np.log(tables.baseline[c, :, P.B_KV_TOKENS] / free))
    assert rows["profile_affinity"] == pytest.approx(point.affinity)
    assert rows["log_class_ttft_ratio"] == pytest.approx(np.log(view.class_ratio[:, c, 0]))
    assert rows["log_class_tpot_ratio"] == pytest.approx(np.log(view.class_ratio[:, c, 1]))
    assert np.abs(rows["log_slowest_rank"][0]) > 0.01 and np.unique(rows["profile_affinity"]).size > 1

"""Calibration: a rank whose terms are known is found again, and real ranks give a cluster that can be simulated."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from envs.cluster.group_set import GroupSet
from envs.cluster.world import WorldOptions
from envs.decision.layer_cuts import layer_plans
from envs.domain.specs import ModelSpec
from envs.domain.units import GIB
from envs.perf_model.coefficients import profile
from envs.scenario.cluster_file import load_cluster
from envs.scenario.scenario_error import ScenarioError
from runtime.__main__ import build_parser, main, rank_settings
from runtime.calibration_files import write_calibration
from runtime.local_measurement import Measurement, ReduceRow, StepRow, measure
from runtime.step_time_fit import Work, fit_link, fit_rank, non_negative_least_squares, predicted_step_s, uniform_plan
from runtime.torch_tp.supervisor import RankSettings, Supervisor, SupervisorSettings

MODEL = ModelSpec("known", 4, 256, 8, 4, 32, 1024, 4096, weight_dtype="fp32", kv_dtype="fp32", context_tokens=1024)
PLAN = layer_plans(MODEL, (1.0, 1.0), version=1)
FLOP_PER_S, BYTES_PER_S = 2e10, 8e9
FIXED_S, PAIR_S, TOKEN_S, HOST_S = 2e-4, 2e-7, 1e-6, 5e-4
ALPHA_S, BETA = 2e-5, 4e-10


def known_rows(slow: float = 1.0) -> tuple[StepRow, ...]:
    """What two ranks with exactly these terms would measure; rank 1 is `slow` times slower."""
    rows = []
    sizes = [("prefill", m, m * m / 2.0, 0, 1) for m in (2, 4, 8, 16, 32, 64, 128, 256, 512)]
    sizes += [("decode", b, 0.0, b * c, b) for c in (16, 512, 900) for b in (1, 2, 4, 8, 16)]
    for kind, tokens, pairs, kv, sequences in sizes:
        reduce_s = 2 * MODEL.layers * (ALPHA_S + BETA * tokens * MODEL.hidden * 4)
        times = []
        for rank, factor in ((0, 1.0), (1, slow)):
            work = Work.of(MODEL, PLAN, rank)
            gemm = [max(flop * tokens / FLOP_PER_S, moved / BYTES_PER_S) for flop, moved in
                    ((work.attention_flop, work.attention_bytes), (work.mlp_flop, work.mlp_bytes))]  # fmt: skip
            attention = gemm[0] + FIXED_S + PAIR_S * pairs + work.kv_bytes / BYTES_PER_S * kv + TOKEN_S * tokens
            head = max(work.head_flop * sequences / FLOP_PER_S, work.head_bytes / BYTES_PER_S)
            times.append((attention * factor, gemm[1] * factor, head * factor))
        step = sum(max(time[operation] for time in times) for operation in range(3)) + reduce_s + HOST_S
        for rank in (0, 1):
            waited = step - sum(times[rank]) - HOST_S  # for the sums, and for the slower rank
            rows.append(StepRow(rank, kind, tokens, pairs, kv, sequences, *times[rank], waited, HOST_S, step))
    return tuple(rows)


def known_measurement(slow: float = 1.0) -> Measurement:
    reduces = tuple(ReduceRow(2, size, ALPHA_S + BETA * size, 1.0) for size in (1024, 16384, 262144, 1048576))
    return Measurement(MODEL, PLAN, (1.0, slow), (8 * GIB, 8 * GIB), ("n", "n"), known_rows(slow), reduces)


def test_known_terms_are_found_again():
    fit = fit_rank(known_measurement(), 0)
    work = Work.of(MODEL, PLAN, 0)
    assert fit.flop_per_s * fit.profile["compute_efficiency"] == pytest.approx(FLOP_PER_S, rel=0.06)
    assert fit.memory_bytes_per_s * fit.profile["memory_efficiency"] == pytest.approx(BYTES_PER_S, rel=0.06)
    assert fit.profile["attention_overhead_s"] * MODEL.layers == pytest.approx(FIXED_S, rel=0.1)
    assert work.pair_flop / (fit.flop_per_s * fit.profile["prefill_attention_efficiency"]) == pytest.approx(PAIR_S, rel=0.1)
    assert fit.memory_bytes_per_s * fit.profile["decode_attention_efficiency"] == pytest.approx(BYTES_PER_S, rel=0.1)


def test_the_ring_over_the_fitted_link_takes_what_was_measured():
    """Two ranks: 2 messages of half the bytes; 4-byte numbers where the simulator counts 2."""
    link = fit_link(known_measurement().reduces, 4.0)
    assert link is not None
    assert 2 * link.alpha_s == pytest.approx(ALPHA_S, rel=1e-6)
    assert 2 * (1 / 2) * link.beta_s_per_byte * 1000 * 2 == pytest.approx(BETA * 1000 * 4, rel=1e-6)
    assert fit_link((), 4.0) is None


def test_the_simulator_predicts_steps_it_was_not_fitted_to(tmp_path):
    written = write_calibration(known_measurement(2.0), tmp_path, "known", slots_max=16, kv_tokens_max=16384)
    assert written.held_out_error["rows"] == 8
    assert written.held_out_error["median"] < 0.03
    assert written.held_out_error["p90"] < 0.10
    cluster = load_cluster(written.cluster)
    assert [place.gpu.name for place in cluster.groups[0].ranks] == ["known-rank0", "known-rank1"]
    fast, slow = (place.gpu.flop_per_s for place in cluster.groups[0].ranks)
    assert fast / slow == pytest.approx(2.0, rel=0.05)
    assert "EMULATED: slow factors 1, 2" in written.cluster.read_text()
    # a step twice as deep in context costs the difference of its KV, as the rows say
    group, plan = cluster.groups[0], uniform_plan(PLAN)
    short, long = (
        next(row for row in known_rows(2.0) if (row.kind, row.tokens, row.kv_tokens) == ("decode", 16, 16 * c)) for c in (16, 900)
    )
    difference = predicted_step_s(group, plan, long) - predicted_step_s(group, plan, short)
    assert difference == pytest.approx(long.step_s - short.step_s, rel=0.1)


def test_a_moved_calibration_still_loads_and_a_missing_profile_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    written = write_calibration(known_measurement(), tmp_path / "a", "known", slots_max=4, kv_tokens_max=4096)
    moved = tmp_path / "b"
    (tmp_path / "a").rename(moved)
    cluster = load_cluster(moved / written.cluster.name)
    assert profile(cluster.groups[0].ranks[1].gpu.kernel_profile).name == "rank1"
    document = json.loads((moved / written.profiles.name).read_text())
    del document["profiles"]["rank1"]
    (moved / written.profiles.name).write_text(json.dumps(document))
    with pytest.raises(ScenarioError, match=r"rank1.*did you mean.*rank0"):
        load_cluster(moved / written.cluster.name)
    (moved / written.profiles.name).unlink()
    with pytest.raises(ScenarioError, match="calibrate again"):
        load_cluster(moved / written.cluster.name)


def test_a_rank_without_work_cannot_be_fitted():
    alone = layer_plans(MODEL, (1.0, 0.0), version=1)
    with pytest.raises(ValueError, match="rank 1 has no work"):
        fit_rank(replace(known_measurement(), plan=alone), 1)


def test_least_squares_stay_non_negative():
    columns = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert non_negative_least_squares(columns, np.array([1.0, 3.0, 5.0])) == pytest.approx([1.0, 2.0])
    assert non_negative_least_squares(columns, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative_least_squares(columns, -np.ones(3)).tolist() == [0.0, 0.0]


def test_real_ranks_give_a_cluster_that_is_simulated(dreams, nursery, tmp_path):
    settings = SupervisorSettings(kv_tokens_max=1024, slots_max=4)
    with Supervisor(dreams, [RankSettings(), RankSettings(slow_factor=2.0)], settings, nursery=nursery) as supervisor:
        supervisor.start()
        measurement = measure(supervisor, context_tokens=18, slots_max=4, repeats=2)
    assert {row.rank for row in measurement.steps} == {0, 1}
    assert {row.tokens for row in measurement.steps if row.kind == "prefill"} == {2, 4, 8, 16}
    assert all(row.step_s > 0 and row.attention_s > 0 and row.mlp_s > 0 for row in measurement.steps)
    assert [row.size_bytes for row in measurement.reduces] == sorted(row.size_bytes for row in measurement.reduces)
    written = write_calibration(measurement, tmp_path, "tiny", slots_max=4, kv_tokens_max=1024)
    with open(written.tables[0], newline="") as file:
        assert len(list(csv.DictReader(file))) == len(measurement.steps)
    cluster = load_cluster(written.cluster)
    groups = GroupSet(cluster, WorldOptions(), np.zeros(1, np.int64), np.zeros(0, np.int64))
    assert np.isfinite(groups.state.rank_cost).all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "3", "--slow-factors", "1,2"], "2 entries for 3 ranks"),
        (["--slow-factors", "fast"], "could not convert"),
        (["--slow-factors", "0.5"], "a device faster than this host"),
        (["--ranks", "0"], "within 1 to 256"),
        (["--ranks", "100000"], "within 1 to 256"),
        (["--repeats", "0"], "--repeats 0"),
        (["--devices", "nope"], "must be cpu, cuda or cuda:N"),
        (["--budget-s", "nan"], "--budget-s nan"),
        (["--slots", "0"], "--slots 0"),
        (["--slots", "99999999"], "--slots"),
        (["--context", "-5"], "--context -5"),
        (["--name", "../x"], "--name '../x'"),
        (["--name", ""], "--name ''"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(dreams, capsys):
    assert main(["calibrate", "--model", str(dreams), "--out", "/dev/null/calibrated"]) == 2
    error = capsys.readouterr().err
    assert "--out '/dev/null/calibrated'" in error and error.count("\n") == 1


def test_speeds_stay_alike_so_that_every_rank_gets_the_same_work():
    options = build_parser().parse_args(["calibrate", "--ranks", "2", "--slow-factors", "1,4"])
    ranks = rank_settings(options)
    assert [(rank.speed, rank.slow_factor) for rank in ranks] == [(1.0, 1.0), (1.0, 4.0)]

"""What the controller concludes from the ranks' busy seconds."""

from __future__ import annotations

import numpy as np
import pytest

from envs.decision.layer_cuts import layer_plans
from envs.domain.plans import LayerPlans, SplitPlan
from envs.domain.specs import ModelSpec
from runtime.torch_tp.profiler import RankProfile, StepForecast, balanced_cuts, step_ratio, width_shares, work_units
from runtime.torch_tp.steps import SliceCommand, StepCommand

MODEL = ModelSpec("m", 2, 64, 4, 4, 16, 160, 512, weight_dtype="fp32", kv_dtype="fp32")
OLD = LayerPlans.uniform(SplitPlan((3, 1), (3, 2), (400, 112), mlp_block=32, version=1), 2)
NEW = LayerPlans.uniform(SplitPlan((2, 2), (4, 1), (256, 256), mlp_block=32, version=2), 2)


def command(*parts: tuple[int, int, bool], decode_steps: int = 1) -> StepCommand:
    """Slices as (plan version, tokens, wants sample)."""
    slices = tuple(SliceCommand(slot, str(slot), version, (1,) * tokens, 0, wants) for slot, (version, tokens, wants) in enumerate(parts))
    return StepCommand(1, slices, decode_steps=decode_steps)


def test_work_follows_each_slots_plan_for_heads_and_the_newest_for_the_rest():
    """10 tokens under (3, 1) and 1 under (2, 2), two layers; 11 tokens on columns (128, 32); one sample on rows (256, 256)."""
    units = work_units((OLD, NEW), command((1, 10, False), (2, 1, True)))
    assert units[:, 0].tolist() == [2 * (10 * 3 + 1 * 2), 2 * (10 * 1 + 1 * 2)]
    assert units[:, 1].tolist() == [2 * 11 * 128, 2 * 11 * 32]
    assert units[:, 2].tolist() == [256, 256]


def test_passes_count_as_often_as_they_ran():
    once = work_units((NEW,), command((2, 1, True), decode_steps=4), passes=1)
    assert work_units((NEW,), command((2, 1, True), decode_steps=4), passes=3).tolist() == (3 * once).tolist()


def test_speeds_are_found_whatever_the_step_contains():
    """Worker 1 is truly half as fast in attention and alike in MLP; steps of all sizes, 5 % noise, declared alike."""
    rng = np.random.default_rng(3)
    profile = RankProfile([1.0, 1.0, 1.0])
    truth = np.array([[1.0, 1.0, 1.0], [0.5, 1.0, 1.0]])
    members = (0, 2)  # ids need not be ranks
    for step in range(60):
        units = work_units((OLD,), command((1, int(rng.integers(1, 200)), True)))
        busy = units / truth * rng.uniform(1e-7, 1e-5) * rng.normal(1.0, 0.05, units.shape)
        profile.observe(members, units, {0: busy[0], 2: busy[1]}, step * 0.05)
    speeds = profile.speeds(members)
    assert speeds[1] / speeds[0] == pytest.approx([0.5, 1.0, 1.0], rel=0.1)
    assert profile.speeds([1]).tolist() == [[1.0, 1.0, 1.0]]  # never seen


def test_a_jump_is_followed_within_a_few_steps():
    profile = RankProfile([1.0, 1.0])
    units = work_units((OLD,), command((1, 8, True)))
    for step in range(80):
        slow = 1.0 if step < 70 else 4.0
        profile.observe((0, 1), units, {0: units[0] * 1e-6, 1: units[1] * 1e-6 * slow}, step * 0.05)
    speeds = profile.speeds((0, 1))
    assert (speeds[1] / speeds[0] < 0.4).all()


def test_an_operation_that_one_rank_does_alone_says_nothing():
    profile = RankProfile([1.0, 2.0])
    alone = LayerPlans.uniform(SplitPlan((4, 0), (5, 0), (512, 0), mlp_block=32, version=3), 2)
    units = work_units((alone,), command((3, 5, True)))
    profile.observe((0, 1), units, {0: (0.3, 0.2, 0.1), 1: (0.0, 0.0, 0.0)}, 0.0)
    assert profile.speeds((0, 1)).tolist() == [[1.0] * 3, [2.0] * 3]
    assert profile.samples((0, 1)).tolist() == [[0] * 3, [0] * 3]


def test_balanced_cuts_take_each_operation_for_itself():
    speeds = np.array([[1.0, 3.0, 1.0], [1.0, 1.0, 1.0]])
    plan = layer_plans(MODEL, version=4, mlp_block=32, **balanced_cuts(speeds))
    shares = width_shares(plan)
    assert shares[:, 0].tolist() == [0.5, 0.5]
    assert shares[:, 1] == pytest.approx([0.75, 0.25], abs=0.06)  # 5 blocks in each of 2 layers
    assert shares[:, 2].tolist() == [0.5, 0.5]


def test_step_ratio_by_hand():
    """Speeds 1 : 0.5. Attention: even halves take 0.5 / 0.5 = 1, two to one 2/3 / 1 = 0.667, in both ranks. MLP stays.

    With attention 60 % of the busy time: 0.6 x 0.667 + 0.4 = 0.8.
    """
    speeds = np.array([[1.0, 1.0, 1.0], [0.5, 1.0, 1.0]])
    even = np.full((2, 3), 0.5)
    uneven = even.copy()
    uneven[:, 0] = [2 / 3, 1 / 3]
    assert step_ratio(speeds, even, uneven, np.array([0.6, 0.4, 0.0])) == pytest.approx(0.8)
    assert step_ratio(speeds, even, even, np.array([0.6, 0.4, 0.1])) == 1.0
    assert step_ratio(speeds, even, uneven, np.zeros(3)) == 1.0


def test_forecast_of_a_step_is_made_of_passes_and_prompt_tokens():
    forecast = StepForecast(weight=1.0)
    assert forecast.predict(command((1, 100, True))) == 0.0  # nothing measured yet
    forecast.observe(command((1, 1, True), decode_steps=4), 4, 0.080)
    forecast.observe(command((1, 101, True)), 1, 0.520)
    assert forecast.predict(command((1, 1, True), decode_steps=8)) == pytest.approx(0.160)
    assert forecast.predict(command((1, 201, True))) == pytest.approx(0.020 + 200 * 0.005)

"""Cuts per layer: each exact, together within a unit of any ratio."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.decision.layer_cuts import diffused_widths, layer_plans
from envs.domain.plans import LayerPlans, SplitPlan
from envs.domain.specs import ModelSpec

MODEL = ModelSpec("small", layers=30, hidden=64, query_heads=9, kv_heads=3, head_dim=8, mlp_width=96, vocabulary=100)


@given(
    units=st.integers(1, 40),
    shares=st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda values: sum(values) > 0.01),
    layers=st.integers(1, 40),
)
def test_running_totals_follow_the_shares(units, shares, layers):
    """Every layer sums to the units, no width is negative, a rank without a share gets none, and after any number of layers each
    rank's total differs from its exact share by less than one unit per rank."""
    cuts = np.array(diffused_widths(units, shares, layers))
    assert (cuts.sum(axis=1) == units).all() and cuts.min() >= 0
    exact = units * np.array(shares) / sum(shares)
    assert (cuts[:, np.array(shares) == 0] == 0).all()
    drift = np.cumsum(cuts, axis=0) - exact * np.arange(1, layers + 1)[:, None]
    assert np.abs(drift).max() < len(shares) + 1e-6


def test_four_to_one_on_nine_heads():
    """7.2 heads of 9: 7:2 and 8:1 in turn, four to one; 30 layers hold exactly 216 heads."""
    plans = layer_plans(MODEL, [4.0, 1.0], mlp_block=4, version=5)
    heads = [plan.query_heads for plan in plans.layers]
    assert set(heads) == {(7, 2), (8, 1)}
    assert sum(width for width, _ in heads) == 216
    assert plans.version == 5 and plans.vocabulary_rows == (80, 20)
    plans.check_covers(MODEL)


def test_whole_ratios_give_one_cut():
    plans = layer_plans(MODEL, [2.0, 1.0], mlp_block=4)
    assert {plan.query_heads for plan in plans.layers} == {(6, 3)}
    assert {plan.mlp_blocks for plan in plans.layers} == {(16, 8)}


def test_each_cut_may_have_its_own_shares():
    plans = layer_plans(MODEL, [1.0, 2.0], mlp_shares=[1.0, 0.0], vocabulary_shares=[0.0, 1.0], mlp_block=4)
    assert plans.layers[0].query_heads == (3, 6) and plans.layers[0].mlp_blocks == (24, 0) and plans.vocabulary_rows == (0, 100)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shares": [0.0, 0.0]}, "not all zero"),
        ({"shares": [1.0, -1.0]}, ">= 0"),
        ({"shares": [1.0], "mlp_block": 5}, "does not divide"),
        ({"shares": [1.0, 1.0], "mlp_shares": [1.0]}, "mlp_shares has 1 ranks"),
    ],
)
def test_bad_shares_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        layer_plans(MODEL, **arguments)


def test_layer_plans_agree_in_ranks_and_vocabulary():
    one, two = SplitPlan((9,), (24,), (100,), mlp_block=4), SplitPlan((4, 5), (12, 12), (50, 50), mlp_block=4)
    other = SplitPlan((4, 5), (12, 12), (60, 40), mlp_block=4)
    with pytest.raises(ValueError, match="layer 1 is cut over 2 ranks"):
        LayerPlans(1, (one, two))
    with pytest.raises(ValueError, match="the vocabulary has one cut"):
        LayerPlans(1, (two, other))
    with pytest.raises(ValueError, match="no layers"):
        LayerPlans(1, ())
    with pytest.raises(ValueError, match="2 plans, the model has 30 layers"):
        LayerPlans(1, (two, two)).check_covers(MODEL)
    uniform = LayerPlans.uniform(two, 30)
    uniform.check_covers(MODEL)
    assert uniform.ranks == 2 and uniform.version == two.version

"""What a rank owns: ranges side by side, KV heads shared where a cut divides them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import layer_plans as any_plan

from envs.domain.plans import LayerPlans, SplitPlan
from runtime.torch_tp.config import config_of
from runtime.torch_tp.shares import Interval, kv_interval, share_of

CONFIG = config_of(
    {
        "model_type": "llama",
        "hidden_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 20,
        "vocab_size": 50,
    },
    "shares",
)


@given(st.integers(1, 4).flatmap(lambda ranks: any_plan(CONFIG.to_spec(), ranks, 1, 4)))
def test_ranges_cover_the_model_once(plan):
    """Query heads, columns and rows belong to exactly one rank; a KV head to every rank with one of its queries, and no other."""
    shares = [share_of(plan, CONFIG, rank) for rank in range(plan.ranks)]
    for layer in range(3):
        assert [head for share in shares for head in range(share.query[layer].start, share.query[layer].end)] == list(range(9))
        assert [column for share in shares for column in range(share.mlp[layer].start, share.mlp[layer].end)] == list(range(20))
        for share in shares:
            query, kv = share.query[layer], share.kv[layer]
            assert set(range(kv.start, kv.end)) == {head // 3 for head in range(query.start, query.end)}
    assert [row for share in shares for row in range(share.vocabulary.start, share.vocabulary.end)] == list(range(50))


def test_a_kv_head_cut_in_two_belongs_to_both():
    assert kv_interval(Interval(0, 4), CONFIG) == Interval(0, 2)
    assert kv_interval(Interval(4, 9), CONFIG) == Interval(1, 3)
    assert kv_interval(Interval(4, 4), CONFIG).width == 0


def test_wrong_ranks_and_intervals_are_refused():
    plan = LayerPlans.uniform(SplitPlan((9,), (5,), (50,), mlp_block=4, version=1), 3)
    with pytest.raises(ValueError, match="rank 1 is not in plan version 1, which has 1 ranks"):
        share_of(plan, CONFIG, 1)
    with pytest.raises(ValueError, match="start <= end"):
        Interval(3, 2)


def test_interval_arithmetic():
    assert Interval(2, 5).intersection(Interval(4, 9)) == Interval(4, 5)
    assert Interval(2, 3).intersection(Interval(5, 9)).width == 0
    assert Interval(2, 5).scaled(8) == Interval(16, 40)
    assert Interval(2, 5).covers(Interval(2, 4)) and not Interval(2, 5).covers(Interval(1, 3)) and Interval(2, 5).covers(Interval(9, 9))

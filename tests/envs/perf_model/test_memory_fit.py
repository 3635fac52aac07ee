"""Bytes of a split plan, counted by hand, and the subset of ranks to fall back on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.domain.plans import RankPlace, SplitPlan, TpGroup
from envs.domain.specs import GpuSpec, LinkSpec, ModelSpec
from envs.perf_model.memory_fit import (
    UNBOUNDED_TOKENS,
    InfeasibleSplit,
    Overlap,
    StepRoom,
    apportion,
    default_mlp_block,
    fill_shares,
    fits,
    kv_bytes_per_token,
    kv_head_ranges,
    kv_tokens_max,
    proportional_plan,
    smallest_subset,
    unit_ranges,
    weight_bytes,
    workspace_bytes,
)

A100 = GpuSpec("A100-80G", 312e12, 80 * 10**9, 2039e9, 400, "ampere", "a100", "nvlink")
L40S = GpuSpec("L40S", 362e12, 48 * 10**9, 864e9, 350, "ada", "l40s", "pcie")
A10 = GpuSpec("A10", 125e12, 24 * 10**9, 600e9, 150, "ampere", "a10", "pcie")
H6K2 = ModelSpec("h6k2", 2, 96, 6, 2, 16, 256, 512)
LLAMA_70B = ModelSpec("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_8B = ModelSpec("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256)
LINK = LinkSpec("nvlink", 2e-6, 1 / 250e9)


def group_of(model: ModelSpec, *gpus: GpuSpec) -> TpGroup:
    return TpGroup("g", model, tuple(RankPlace(gpu, "node-0") for gpu in gpus), LINK, LINK)


def test_weights_by_hand_where_a_cut_divides_a_kv_head():
    """h6k2 cut 2:4. Rank 0: Q, O of 2 heads, K, V of KV head 0; rank 1: 4 heads and both KV heads, as head 2 is of KV head 0.
    A Q, K, V or O slice is 96 x 16 x 2 layers x 2 bytes = 6,144 bytes; a column 3 x 96 x 2 x 2 = 1,152; a row 2 x 96 x 2 = 384;
    norms (2 x 2 + 1) x 96 x 2 = 960."""
    split = SplitPlan((2, 4), (200, 56), (512, 0))
    expected = [6 * 6144 + 200 * 1152 + 512 * 384 + 960, 12 * 6144 + 56 * 1152 + 960]
    assert weight_bytes(H6K2, split).tolist() == expected
    assert kv_bytes_per_token(H6K2, split).tolist() == [2 * 2 * 16 * 2, 2 * 2 * 2 * 16 * 2]


def test_one_rank_holds_exactly_the_model_and_its_norms():
    for model in (H6K2, LLAMA_70B, replace(LLAMA_8B, tied_embeddings=True, weight_dtype="int8")):
        norms = (2 * model.layers + 1) * model.hidden * model.weight_number_bytes
        split = proportional_plan(model, [1.0])
        assert weight_bytes(model, split).tolist() == [pytest.approx(model.weight_bytes + norms)]
        assert kv_bytes_per_token(model, split).tolist() == [model.kv_bytes_per_token]


def test_experts_are_all_held():
    """8 experts: 8 x the columns' bytes, and a router of hidden x 8 per layer on every rank."""
    experts = replace(H6K2, experts=8, experts_active=2)
    split = SplitPlan((6,), (256,), (512,))
    more = weight_bytes(experts, split)[0] - weight_bytes(H6K2, split)[0]
    assert more == 7 * 256 * 1152 + 2 * 96 * 8 * 2


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(lambda widths: sum(widths) > 0), st.integers(1, 4))
def test_kv_heads_held_match_counting_heads_one_by_one(widths, per_run):
    total = sum(widths) * per_run
    model = ModelSpec("m", 1, 16, total, sum(widths), 4, 8, 8)
    # Widths of the query heads are the KV widths shuffled against the runs: any split of `total` heads.
    heads = apportion(total, [width + 0.1 for width in widths])
    start, ranges = 0, kv_head_ranges(model, unit_ranges(heads))
    for width, (first, last) in zip(heads, ranges.tolist(), strict=True):
        assert last - first == len({head // per_run for head in range(start, start + width)})
        start += width


def test_overlap_is_held_on_inner_sides_only():
    """h6k2 cut 3:3 with 1 head, 2 blocks, 10 rows of overlap: one neighbour each, and a head beyond 3 opens a KV head."""
    split = SplitPlan((3, 3), (128, 128), (256, 256))
    more = weight_bytes(H6K2, split, Overlap(1, 2, 10)) - weight_bytes(H6K2, split)
    assert more.tolist() == [4 * 6144 + 2 * 1152 + 10 * 384] * 2
    assert weight_bytes(H6K2, SplitPlan((6,), (256,), (512,)), Overlap(1, 2, 10))[0] == pytest.approx(
        weight_bytes(H6K2, SplitPlan((6,), (256,), (512,)))[0]
    )


def test_workspace_by_hand():
    """100 tokens, 8 sequences: 5 buffers of 100 x 96 x 2; 2 x 100 x 16 x 2 per query and per KV head (3 + 1); 2 x 100 x 2 per
    column (128); 4 x 8 per row (256)."""
    split = SplitPlan((3, 3), (128, 128), (256, 256))
    expected = 5 * 19200 + 4 * 6400 + 128 * 400 + 256 * 32
    assert workspace_bytes(H6K2, split, StepRoom(100, 8)).tolist() == [expected, expected]


def test_kv_tokens_max_is_what_just_fits():
    """Llama-70B on 4 A100: (72e9 - weights - workspace) / (2 KV heads x 80 layers x 2 x 128 x 2 bytes), not one more."""
    group = group_of(LLAMA_70B, *[A100] * 4)
    split = proportional_plan(LLAMA_70B, [1] * 4)
    per_rank, tokens = kv_tokens_max(group, split)
    left = 72e9 - weight_bytes(LLAMA_70B, split)[0] - workspace_bytes(LLAMA_70B, split)[0]
    assert tokens == int(left // (2 * 80 * 2 * 128 * 2)) == per_rank.min()
    assert fits(group, split, tokens) and not fits(group, split, tokens + 1)
    assert kv_tokens_max(group, split, overlap=Overlap(8, 20, 1000))[1] < tokens


def test_ranks_without_kv_do_not_bound_the_tokens_but_overfull_ones_do():
    group = group_of(LLAMA_8B, A100, A10)
    columns, rows = (7168, 7168), (64128, 64128)
    per_rank, tokens = kv_tokens_max(group, SplitPlan((32, 0), columns, rows))
    assert per_rank[1] == UNBOUNDED_TOKENS and tokens == per_rank[0] > 0
    big = group_of(LLAMA_70B, A100, A10)
    per_rank, tokens = kv_tokens_max(big, SplitPlan((64, 0), (0, 28672), (128256, 0)))
    assert per_rank[1] == 0 and tokens == 0
    assert not fits(big, SplitPlan((64, 0), (0, 28672), (128256, 0)), 0)


@given(st.integers(1, 300), st.lists(st.floats(0, 10), min_size=1, max_size=8).filter(lambda shares: sum(shares) > 0.01))
def test_apportion_is_within_one_of_the_exact_share(units, shares):
    """Quota rule of largest remainder: floor or ceiling of the exact share; sums exactly; zero share, zero width."""
    widths = apportion(units, shares)
    assert sum(widths) == units
    for width, share in zip(widths, shares, strict=True):
        exact = units * share / sum(shares)
        assert abs(width - exact) < 1 + 1e-6
        assert share > 0 or width == 0


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_apportion_refuses_shares_that_mean_nothing(shares):
    with pytest.raises(ValueError, match="must be finite, >= 0 and not all zero"):
        apportion(8, shares)


@pytest.mark.parametrize(("width", "block"), [(28672, 128), (256, 4), (344, 4), (1600, 16), (97, 1), (11008, 128), (4099, 1), (9999, 11)])
def test_default_mlp_block(width, block):
    """Power of two with at least 64 blocks left, at most 128; 9,999 = 11 x 909; a prime width goes column by column."""
    assert default_mlp_block(replace(H6K2, mlp_width=width)) == block


def test_plans_refuse_a_block_that_does_not_divide():
    with pytest.raises(ValueError, match="mlp_block=100 does not divide mlp_width=256"):
        proportional_plan(H6K2, [1, 1], mlp_block=100)


def test_smallest_subset_is_the_fewest_then_the_fastest_ranks():
    """16-bit 8B (16 GB) fits one A10 of 21.6 usable GB: of three kinds the A100 has the most bandwidth, and a measured speed
    overrides the datasheet. 70B (141 GB) just fits both A100 (144 GB usable); 20,000 tokens of KV (6.6 GB) take an L40S more."""
    assert smallest_subset(group_of(LLAMA_8B, A10, A100, L40S)) == (1,)
    assert smallest_subset(group_of(LLAMA_8B, A10, A100, L40S), bytes_per_s=np.array([1e9, 1e9, 2e9])) == (2,)
    assert smallest_subset(group_of(LLAMA_70B, A10, A100, L40S, L40S, A100)) == (1, 4)
    assert smallest_subset(group_of(LLAMA_70B, A10, A100, L40S, L40S, A100), 20000) == (1, 2, 4)
    assert smallest_subset(group_of(LLAMA_70B, A100, A100, A100), bytes_per_s=np.ones(3)) == (0, 1)


def test_smallest_subset_leaves_lost_ranks_out_and_says_when_nothing_fits():
    group = group_of(LLAMA_8B, A10, A100)
    assert smallest_subset(group, bytes_per_s=np.array([1.0, 0.0])) == (0,)
    with pytest.raises(InfeasibleSplit, match="the 1 live ranks"):
        smallest_subset(group_of(LLAMA_70B, A100, A100, A100), bytes_per_s=np.array([1.0, 0.0, 0.0]))


def test_smallest_subset_fits_by_its_own_memory_plan():
    group = group_of(LLAMA_70B, A10, A100, L40S, L40S, A100)
    subset = smallest_subset(group, 20000)
    part = replace(group, ranks=tuple(group.ranks[index] for index in subset))
    assert fits(part, proportional_plan(LLAMA_70B, fill_shares(part, 20000)), 20000)


@pytest.mark.parametrize("fraction", [0.0, 1.1])
def test_memory_fraction_must_be_a_fraction(fraction):
    with pytest.raises(ValueError, match="memory_fraction"):
        fits(group_of(LLAMA_8B, A100), proportional_plan(LLAMA_8B, [1]), memory_fraction=fraction)

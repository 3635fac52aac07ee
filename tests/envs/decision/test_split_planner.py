"""The planner against brute force over every split, against hand-computed costs, and on degrees that do not divide a model."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.decision import split_planner, split_search
from envs.decision.split_planner import (
    CORNERS,
    InfeasibleSplit,
    MixForecast,
    PlanTerms,
    RankSpeed,
    StepMix,
    corner_plan,
    deviation,
    plan,
    possible_degrees,
    rank_times,
    ranks_worth_using,
    resplit_price,
    step_cost_s,
)
from envs.domain.plans import RankPlace, SplitPlan, TpGroup
from envs.domain.specs import GpuSpec, LinkSpec, ModelSpec
from envs.domain.units import GIB
from envs.perf_model.memory_fit import Overlap, StepRoom, fits, kv_tokens_max

SHARED = Path(os.environ.get("BALLAST_SHARED", Path(__file__).resolve().parents[3].parent / "shared"))
FAST_LINK = LinkSpec("nvlink", 2e-6, 1 / 250e9)
SLOW_LINK = LinkSpec("ethernet", 50e-6, 1 / 1.25e9)
A100 = GpuSpec("A100-80G", 312e12, 80 * 10**9, 2039e9, 400, "ampere", "a100", "nvlink")
L40S = GpuSpec("L40S", 362e12, 48 * 10**9, 864e9, 350, "ada", "l40s", "pcie")
LLAMA_70B = ModelSpec("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256)
SMALL_ROOM = StepRoom(16, 4)


def group_of(model: ModelSpec, *gpus: GpuSpec, link: LinkSpec = FAST_LINK) -> TpGroup:
    return TpGroup("g", model, tuple(RankPlace(gpu, "node-0") for gpu in gpus), link, SLOW_LINK)


# --- strategies and oracle ----------------------------------------------------------------------------------------------------


@st.composite
def small_problems(draw: st.DrawFn, kinds: int | None = None):
    """A model of up to 12 heads over up to 3 unlike ranks; GPUs are big enough, `memory_scale` says how tightly they fit."""
    per_run = draw(st.sampled_from([1, 1, 2, 3, 4]))
    kv_heads = draw(st.integers(1, 12 // per_run))
    model = ModelSpec("tiny", 2, 64, kv_heads * per_run, kv_heads, 16, 16 * draw(st.integers(1, 6)), draw(st.integers(3, 8)))
    ranks = draw(st.integers(1, min(3, model.query_heads)))
    rate = st.floats(0.2, 5.0)
    speed = RankSpeed(
        np.array([draw(rate) * 1e9 for _ in range(ranks)]), np.array([draw(rate) * 1e7 for _ in range(ranks)])
    )
    share = {1: st.sampled_from([0.0, 1.0]), 2: st.floats(0.05, 0.95), None: st.floats(0.0, 1.0)}[kinds]
    mix = StepMix(draw(st.integers(1, 64)), draw(st.integers(1, 4000)), draw(st.integers(1, 256)), draw(share), 128)
    return model, ranks, speed, mix


def splits(units: int, ranks: int) -> list[tuple[int, ...]]:
    """Every way to write `units` as `ranks` ordered widths >= 0."""
    cuts = combinations_with_replacement(range(units + 1), ranks - 1)
    return [tuple(int(w) for w in np.diff((0, *cut, units))) for cut in cuts]


def brute_force(group: TpGroup, mix: StepMix, speed: RankSpeed, terms: PlanTerms, rows: tuple[int, ...] | None = None):
    """Least cost over all heads x blocks (x rows, unless given) that fit, by looking at every one; None if none fits.

    Stages add up (asserted in test_stages_add_up), so each cut is costed once beside an arbitrary cut of the others; memory adds
    up likewise, in bytes recovered from how many KV tokens the plan admits.
    """
    model, ranks = group.model, len(group.ranks)
    block = terms.mlp_block
    alone = (model.query_heads, *(0,) * (ranks - 1)), (model.mlp_width // block, *(0,) * (ranks - 1))
    base = [alone[0], alone[1], (model.vocabulary, *(0,) * (ranks - 1))]
    options = [splits(model.query_heads, ranks), splits(model.mlp_width // block, ranks), splits(model.vocabulary, ranks)]
    if rows is not None:
        options[2] = [rows]

    def cost(parts: list[tuple[int, ...]]) -> float:
        return step_cost_s(group, SplitPlan(*parts, mlp_block=block), mix, speed=speed, terms=terms)

    costs, used = [], []
    for stage in range(3):
        variants = [[*base[:stage], option, *base[stage + 1 :]] for option in options[stage]]
        costs.append(np.array([cost(parts) for parts in variants]))
        used.append(np.array([plain_bytes(group, stage, option, mix, terms) for option in options[stage]]))
    total_s = costs[0][:, None, None] + costs[1][None, :, None] + costs[2][None, None, :] - 2 * cost(base)
    free = np.array([p.gpu.memory_bytes for p in group.ranks]) * terms.memory_fraction - plain_constant(group, terms)
    bytes_ = used[0][:, None, None, :] + used[1][None, :, None, :] + used[2][None, None, :, :]
    feasible = (bytes_ <= free).all(axis=3)
    return float(total_s[feasible].min()) if feasible.any() else None


def plain_constant(group: TpGroup, terms: PlanTerms) -> float:
    """Norms (two per layer and a last one) and five token x hidden buffers, all in 2-byte numbers."""
    model = group.model
    return (2 * model.layers + 1) * model.hidden * 2 + 5 * terms.room.step_tokens * model.hidden * 2


def plain_bytes(group: TpGroup, stage: int, widths: tuple[int, ...], mix: StepMix, terms: PlanTerms) -> list[float]:
    """Weights, workspace and KV per rank of one cut, counted head by head."""
    model, tokens = group.model, terms.room.step_tokens
    kv_tokens = mix.kv_tokens + mix.prefill_tokens
    per_run = model.query_heads // model.kv_heads
    result, start = [], 0
    for width in widths:
        if stage == 0:
            kv_heads = len({head // per_run for head in range(start, start + width)})
            matrix = model.layers * model.hidden * model.head_dim * 2
            kv = kv_heads * kv_tokens * model.layers * 2 * model.head_dim * 2
            result.append((width + kv_heads) * (2 * matrix + 2 * tokens * model.head_dim * 2) + kv)
        elif stage == 1:
            result.append(width * terms.mlp_block * (model.layers * 3 * model.hidden * 2 + 2 * tokens * 2))
        else:
            result.append(width * (2 * model.hidden * 2 + 4 * terms.room.sequences))
        start += width
    return result


def group_with_memory(model: ModelSpec, memory_bytes: list[int]) -> TpGroup:
    """GpuSpec refuses less than 1 GiB, so tiny models sit on GPUs whose memory is offset by `memory_fraction` and ballast KV."""
    gpus = [GpuSpec(f"gpu-{i}", 1e12, size, 1e11, 100, "x", "x", "x") for i, size in enumerate(memory_bytes)]
    return group_of(model, *gpus)


# --- against brute force ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(small_problems())
def test_no_split_is_faster_where_memory_is_ample(problem):
    """Heads, blocks and rows are covered, the plan fits, and no other split of <= 12 heads over <= 3 ranks costs less."""
    model, ranks, speed, mix = problem
    terms = PlanTerms(mlp_block=16, room=SMALL_ROOM)
    group = group_with_memory(model, [GIB] * ranks)
    best = plan(group, mix, speed=speed, terms=terms)
    best.check_covers(model)
    assert fits(group, best, int(mix.kv_tokens + mix.prefill_tokens), room=SMALL_ROOM)
    assert step_cost_s(group, best, mix, speed=speed, terms=terms) == pytest.approx(
        brute_force(group, mix, speed, terms), rel=1e-9
    )


def tight_group(model: ModelSpec, mix: StepMix, tightness: list[float], room: StepRoom) -> tuple[TpGroup, PlanTerms]:
    """Ranks that hold `tightness` of the whole model each.

    A tiny model needs far less than the 1 GiB that GpuSpec asks for, so the usable fraction of memory is tiny too.
    """
    terms = PlanTerms(mlp_block=16, room=room)
    group = group_with_memory(model, [GIB] * len(tightness))
    whole = (model.query_heads, model.mlp_width // 16, model.vocabulary)
    parts = sum(sum(plain_bytes(group, stage, (width,), mix, terms)) for stage, width in enumerate(whole))
    usable = [parts * share + plain_constant(group, terms) for share in tightness]
    fraction = min(usable) / GIB
    return group_with_memory(model, [int(size / fraction) for size in usable]), replace(terms, memory_fraction=fraction)


@pytest.mark.parametrize("enumerated_max", [3000, 0], ids=["by enumeration", "by limits"])
@settings(max_examples=60, deadline=None)
@given(problem=small_problems(kinds=1), data=st.data())
def test_no_split_is_faster_where_memory_binds(enumerated_max, problem, data):
    """One kind of step: beside its vocabulary cut no heads x blocks that fit cost less; nothing is found only if nothing fits."""
    check_tight(enumerated_max, problem, data, slack=1.0)


@settings(max_examples=40, deadline=None)
@given(problem=small_problems(kinds=2), data=st.data())
def test_no_split_is_faster_where_memory_binds_and_kinds_mix(problem, data):
    """Both kinds of step, few enough head cuts to enumerate: exact as well."""
    check_tight(3000, problem, data, slack=1.0)


@settings(max_examples=40, deadline=None)
@given(problem=small_problems(kinds=2), data=st.data())
def test_mixed_kinds_by_limits_stay_close(problem, data):
    """Both kinds by limits on their mean: a local optimum, at most a quarter above the best (cuts of <= 12 heads are coarse)."""
    check_tight(0, problem, data, slack=1.25)


def check_tight(enumerated_max: int, problem, data, slack: float) -> None:
    model, ranks, speed, mix = problem
    tightness = data.draw(st.lists(st.floats(1.0 / ranks - 0.1, 0.9 / ranks + 0.5), min_size=ranks, max_size=ranks))
    group, terms = tight_group(model, mix, tightness, SMALL_ROOM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_planner, "ENUMERATED_CUTS_MAX", enumerated_max)
        try:
            best = plan(group, mix, speed=speed, terms=terms)
        except InfeasibleSplit:
            assert brute_force(group, mix, speed, terms) is None
            return
    best.check_covers(model)
    assert fits(group, best, int(mix.kv_tokens + mix.prefill_tokens), terms.memory_fraction, room=SMALL_ROOM)
    cost_s = step_cost_s(group, best, mix, speed=speed, terms=terms)
    rows = best.vocabulary_rows
    assert cost_s <= brute_force(group, mix, speed, terms, rows) * slack * (1 + 1e-9)

"""Choosing tokens from a cut vocabulary: the same on every rank and for every cut, and distributed as the softmax says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from runtime.torch_tp.requests import SamplingSettings, TokenLogprobs
from runtime.torch_tp.sampling import SampledTokens, SamplingState, draw, logprobs_of, sample, uniform
from runtime.torch_tp.shares import Interval, cut
from runtime.torch_tp.steps import BROKEN_TOKEN, NewSlot
from tests.runtime.torch_tp.fake_communicator import fake_group

ROWS = 60


def state(sampling: SamplingSettings | None = None, seed: int = 0, **more) -> SamplingState:
    return SamplingState(NewSlot(0, "r", 0, 100, seed, sampling or SamplingSettings(), **more), ROWS)


def sampled(logits: torch.Tensor, widths: tuple[int, ...], make_states, positions) -> SampledTokens:
    """Sample on one thread per rank; every rank must come to the same."""
    group = fake_group(len(widths))

    def on_rank(rank: int) -> SampledTokens:
        interval: Interval = cut(widths, rank)
        return sample(logits[:, interval.start : interval.end], interval, group[rank], make_states(), positions)

    with ThreadPoolExecutor(len(widths)) as pool:
        results = list(pool.map(on_rank, range(len(widths))))
    assert all(result == results[0] for result in results)
    return results[0]


CUTS = [(60,), (30, 30), (47, 13), (1, 59), (0, 60), (20, 0, 40), (7, 31, 1, 21)]

KINDS = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "all": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}


@pytest.mark.parametrize("widths", CUTS[1:])
def test_any_cut_gives_the_same_tokens_and_logprobs(widths):
    """A batch with every kind of row; prompts and answers so far feed the penalties."""
    logits = torch.randn(2 * len(KINDS), ROWS, generator=torch.Generator().manual_seed(5)) * 3

    def states():
        prompt, output = tuple(range(0, 30, 2)), (3, 3, 5)
        plain = [state(SamplingSettings(**kind), seed=i, prompt=prompt, output=output) for i, kind in enumerate(KINDS.values())]
        return plain + [
            state(SamplingSettings(**kind), seed=i, prompt=prompt, output=output, logprobs=i) for i, kind in enumerate(KINDS.values())
        ]

    positions = list(range(18, 18 + 2 * len(KINDS)))
    whole = sampled(logits, (ROWS,), states, positions)
    assert sampled(logits, widths, states, positions) == whole
    assert whole.tokens[0] == int(logits[0].argmax())
    assert [item is not None for item in whole.logprobs] == [False] * len(KINDS) + [True] * len(KINDS)


@pytest.mark.parametrize("widths", CUTS)
def test_ties_go_to_the_lowest_id(widths):
    logits = torch.zeros(3, ROWS)
    logits[1, [13, 46, 59]] = 2.0
    logits[2, 59] = 1.0
    assert sampled(logits, widths, lambda: [state(), state(), state()], [1, 1, 1]).tokens == (0, 13, 59)


DRAWS = 2000


@pytest.mark.parametrize(("kind", "widths"), [("temperature", (47, 13)), ("top_k", (60,)), ("top_p", (7, 31, 22)), ("min_p", (30, 0, 30))])
def test_draws_follow_the_exact_softmax(kind, widths):
    """Chi-squared over 2,000 positions against numpy's own softmax with the cuts redone by sorting; p > 1e-4 per case."""
    chosen = SamplingSettings(**KINDS[kind])
    row = torch.randn(ROWS, generator=torch.Generator().manual_seed(11)) * 1.5
    batch = 500
    counts = np.zeros(ROWS)
    for first in range(0, DRAWS, batch):
        found = sampled(row.expand(batch, ROWS), widths, lambda: [state(chosen, seed=77)] * batch, range(first, first + batch))
        counts += np.bincount(found.tokens, minlength=ROWS)
    expected = exact_distribution(row.double().numpy(), chosen)
    assert counts[expected == 0].sum() == 0, "a token that was cut off was drawn"
    merged_expected, merged_counts = merge_small(expected * DRAWS, counts)
    assert stats.chisquare(merged_counts, merged_expected).pvalue > 1e-4


def exact_distribution(logits: np.ndarray, chosen: SamplingSettings) -> np.ndarray:
    """Temperature, then top-k, top-p and min-p in that order, one token at a time."""
    scaled = logits / chosen.temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept = order[: chosen.top_k] if chosen.top_k else order
    total, running, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        running += weights[i]
        if running >= chosen.top_p * total:
            break
    kept = [i for i in nucleus if weights[i] >= chosen.min_p * weights[order[0]]]
    out = np.zeros(len(weights))
    out[kept] = weights[kept] / weights[kept].sum()
    return out


def merge_small(expected: np.ndarray, counts: np.ndarray) -> tuple[list[float], list[float]]:
    """Cells under five expected draws go together, as the test demands."""
    small = expected < 5
    merged = [*expected[~small], expected[small].sum()]
    got = [*counts[~small], counts[small].sum()]
    return (merged, got) if merged[-1] > 0 else (merged[:-1], got[:-1])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_cuts_of_the_distribution_match_the_slow_way(data, seed):
    """Every token that may be drawn, and only those, for random logits (with ties) and settings."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=ROWS) * 2, data.draw(st.integers(0, 2)))
    chosen = SamplingSettings(
        temperature=data.draw(st.sampled_from([0.3, 1.0, 2.0])),
        top_k=data.draw(st.sampled_from([0, 1, 3, 17, 59, 60, 500])),
        top_p=data.draw(st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.05, 1.0])),
    )
    expected = exact_distribution(logits, chosen)
    drawn = {draw(logits, chosen, seed, position) for position in range(50)}
    assert all(expected[token] > 0 for token in drawn)
    if (expected > 0).sum() == 1:
        assert drawn == {int(expected.argmax())}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-12])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 5e-324}])
def test_a_temperature_near_zero_is_greedy(temperature, cuts):
    """A logit divided by the smallest number is infinite; the likeliest token is drawn all the same, and no warning given."""
    logits = np.array([2.0, -3.0, 7.0, 6.999, -np.inf])
    with np.errstate(all="raise", under="ignore"):
        assert draw(logits, SamplingSettings(temperature=temperature, **cuts), 1, 2) == 2
        assert draw(-np.abs(logits) - 1.0, SamplingSettings(temperature=temperature, **cuts), 1, 2) == 0


def test_chance_belongs_to_seed_and_position():
    """Uniform by Kolmogorov-Smirnov over positions and over seeds, and no state: asking twice gives the same."""
    along = [uniform(3, position) for position in range(3000)]
    across = [uniform(seed, 9) for seed in range(3000)]
    for numbers in (along, across):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.06
    assert along[17] == uniform(3, 17)
    assert uniform(2**63 - 1, 2**40) < 1.0


def test_a_row_does_not_depend_on_its_batch():
    """The same request alone and among others, before and after a re-prefill (a new state from its ids): the same token."""
    logits = torch.randn(4, ROWS, generator=torch.Generator().manual_seed(2))
    chosen = SamplingSettings(temperature=1.0, frequency_penalty=0.5, seed=4)
    alone = sampled(logits[2:3], (20, 40), lambda: [state(chosen, 4, output=(1, 2))], [7]).tokens
    others = SamplingSettings(temperature=0.5)

    def states():
        return [state(), state(others, 1), state(chosen, 4, output=(1, 2)), state(others, 9)]

    assert sampled(logits, (13, 47), states, [3, 4, 7, 9]).tokens[2:3] == alone
    grown = state(chosen, 4, output=(1,))
    grown.accept(2)
    assert sampled(logits[2:3], (60,), lambda: [grown], [7]).tokens == alone


def test_penalties_by_hand():
    """CTRL's factor on prompt and answer, presence once and frequency per occurrence on the answer alone."""
    chosen = SamplingSettings(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    logits = torch.zeros(ROWS)
    logits[:5] = torch.tensor([4.0, -1.0, 3.0, -2.0, 1.0])
    penalised = state(chosen, prompt=(0, 1), output=(2, 2, 3)).adjusted(logits, 0, 5)
    assert penalised[:5].tolist() == [2.0, -2.0, 1.5 - 1.0 - 0.25, -4.0 - 0.5 - 0.25, 1.0]
    part = state(chosen, prompt=(0, 1), output=(2, 2, 3)).adjusted(logits[2:4], 2, 5)
    assert part.tolist() == penalised[2:4].tolist()


@pytest.mark.parametrize("widths", [(60,), (8, 52)])
@pytest.mark.parametrize("kind", [{}, {"temperature": 1.0}])
def test_stop_ids_are_banned_below_stop_from_and_then_stop(widths, kind):
    logits = torch.zeros(1, ROWS)
    logits[0, 7], logits[0, 30] = 50.0, 40.0

    def states():
        return [state(SamplingSettings(**kind), stop_ids=(7,), stop_from=10)]

    before = sampled(logits, widths, states, [9])
    after = sampled(logits, widths, states, [10])
    assert (before.tokens, before.has_stopped) == ((30,), False)
    assert (after.tokens, after.has_stopped) == ((7,), True)


def test_logprobs_are_the_models_own():
    """Before penalties and temperature; top in order of likelihood, ties to the lowest id."""
    row = np.log([0.1, 0.4, 0.4, 0.1])
    found = logprobs_of(row, 3, 3)
    assert found.chosen == pytest.approx(np.log(0.1), abs=1e-6)
    assert [token for token, _ in found.top] == [1, 2, 0]
    assert logprobs_of(row, 1, 0) == TokenLogprobs(pytest.approx(np.log(0.4), abs=1e-6), ())
    logits = torch.randn(1, ROWS)
    chosen = SamplingSettings(temperature=0.7, repetition_penalty=3.0)
    result = sampled(logits, (9, 51), lambda: [state(chosen, prompt=tuple(range(ROWS)), logprobs=2)], [4])
    expected = torch.log_softmax(logits[0].double(), 0)
    assert result.logprobs[0].chosen == pytest.approx(float(expected[result.tokens[0]]), abs=1e-9)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [{}, {"temperature": 1.0, "repetition_penalty": 1.2}])
def test_a_broken_row_is_marked_and_leaves_the_others_alone(broken, kind):
    logits = torch.zeros(3, ROWS)
    logits[0, 3] = logits[2, 4] = 40.0
    logits[1, 50] = broken
    found = sampled(logits, (30, 30), lambda: [state(SamplingSettings(**kind)) for _ in range(3)], [1, 1, 1])
    assert found.tokens == (3, BROKEN_TOKEN, 4) and found.has_stopped
    nothing = torch.full((1, ROWS), -torch.inf)
    assert sampled(nothing, (60,), lambda: [state(SamplingSettings(**kind), logprobs=1)], [1]).tokens == (BROKEN_TOKEN,)

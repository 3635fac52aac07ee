"""Output lengths: brute force over every length, published means, real rows, bounded memory."""

import csv
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from envs.decision.length_estimator import BIN_EDGES, BINS, OUTPUT_MIXTURES, LengthEstimator, mixture_weights
from envs.domain.requests import CLASS_INDEX

CHAT, CODE, BATCH = CLASS_INDEX["chat"], CLASS_INDEX["code"], CLASS_INDEX["batch"]


def every_length(estimator, class_index):
    """P(L = n) for n = 0 .. 32767, spelt out from the bin weights."""
    weights = estimator._weights[class_index]
    probability = np.zeros(BIN_EDGES[-1])
    for k in range(BINS):
        probability[BIN_EDGES[k] : BIN_EDGES[k + 1]] = weights[k] / weights.sum() / (BIN_EDGES[k + 1] - BIN_EDGES[k])
    return probability


def trained():
    estimator = LengthEstimator()
    rng = np.random.default_rng(5)
    for tokens in rng.geometric(1 / 90, 300):
        estimator.observe(CHAT, int(tokens))
    return estimator


@pytest.mark.parametrize("class_index", [CHAT, CODE, BATCH])
def test_expected_remaining_equals_the_sum_over_every_length(class_index):
    estimator = trained()
    probability = every_length(estimator, class_index)
    lengths = np.arange(len(probability))
    generated = np.array([0, 1, 2, 3, 7, 8, 63, 64, 100, 127, 500, 1023, 4000, 9000, 32000, 32766])
    expected = [((lengths - g) * probability)[g + 1 :].sum() / probability[g + 1 :].sum() for g in generated]
    assert estimator.expected_remaining(class_index, generated) == pytest.approx(expected, rel=1e-9)
    assert estimator.mean(class_index) == pytest.approx(expected[0])


@pytest.mark.parametrize("generated", [0, 5, 100, 700])
def test_samples_follow_the_conditional_distribution(generated):
    """An even grid of 20,000 uniforms: the empirical distribution is within one grid step of the exact one everywhere."""
    estimator = trained()
    probability = every_length(estimator, CHAT)
    probability[: generated + 1] = 0.0
    exact = np.cumsum(probability / probability.sum())
    count = 20_000
    draws = estimator.sample_remaining(CHAT, generated, (np.arange(count) + 0.5) / count)
    assert draws.min() >= 1
    empirical = np.cumsum(np.bincount(draws + generated, minlength=len(exact))) / count
    assert np.abs(empirical - exact).max() <= 1.01 / count


def test_inputs_broadcast_and_extremes_are_safe():
    estimator = LengthEstimator()
    assert estimator.expected_remaining(np.arange(3)[:, None], np.arange(5)[None, :]).shape == (3, 5)
    assert estimator.expected_remaining([], []).shape == (0,)
    assert estimator.expected_remaining(CHAT, [40_000, 1_000_000]).tolist() == [1.0, 1.0]
    assert estimator.sample_remaining(CHAT, [0, 40_000], [0.0, 0.5]).tolist() == [1, 1]
    assert 1 <= estimator.sample_remaining(CHAT, 0, np.nextafter(1.0, 0.0)) < BIN_EDGES[-1]


@pytest.mark.fault("K13")
@pytest.mark.parametrize(("name", "mean_tokens", "tolerance"), [("chat", 211, 0.05), ("code", 27.5, 0.10), ("batch", 291, 0.10)])
def test_the_prior_has_the_published_means(name, mean_tokens, tolerance):
    """Published means of the traces; the fits they come from and 24 bins cost some per cent."""
    assert LengthEstimator().mean(CLASS_INDEX[name]) == pytest.approx(mean_tokens, rel=tolerance)
    assert mixture_weights(OUTPUT_MIXTURES[name]).sum() == pytest.approx(1.0)


def test_an_answer_longer_than_any_seen_goes_on_in_proportion():
    remaining = LengthEstimator().expected_remaining(CODE, [1000, 2000, 4000])
    assert (remaining > 50).all() and (remaining < [4000, 8000, 16000]).all()


def test_it_learns_one_class_and_leaves_the_others():
    estimator = LengthEstimator()
    before = estimator.expected_remaining([CODE, BATCH], 10).copy()
    for _ in range(1000):
        estimator.observe(CHAT, 900)
    assert estimator.mean(CHAT) == pytest.approx(900, rel=0.05)
    assert (estimator.expected_remaining([CODE, BATCH], 10) == before).all()


def test_old_traffic_is_forgotten():
    estimator = LengthEstimator(half_life_answers=200)
    for tokens in [900] * 1000 + [40] * 2000:
        estimator.observe(CHAT, tokens)
    assert estimator.mean(CHAT) == pytest.approx(40, rel=0.1)


def test_memory_does_not_grow():
    estimator = LengthEstimator()
    size = sum(sys.getsizeof(value) for value in vars(estimator).values())
    for tokens in range(1, 3000):
        estimator.observe(BATCH, tokens)
    assert sum(sys.getsizeof(value) for value in vars(estimator).values()) == size
    assert estimator.tables().shape == (3, 3, BINS + 1)


def test_an_answer_without_tokens_is_refused():
    with pytest.raises(ValueError, match="output_tokens=0"):
        LengthEstimator().observe(CHAT, 0)


@pytest.fixture
def azure():
    shared = Path(os.environ.get("BALLAST_SHARED", Path(__file__).parents[3].parent / "shared"))
    folder = shared / "traces" / "azure2023"
    if not folder.is_dir():
        pytest.skip(f"real traces are not at {folder}; set BALLAST_SHARED")
    return folder


@pytest.mark.parametrize(
    ("name", "class_index"), [("AzureLLMInferenceTrace_conv.csv", CHAT), ("AzureLLMInferenceTrace_code.first2of3.csv", CODE)]
)
def test_on_real_rows_the_conditional_mean_is_close(azure, name, class_index):
    """24 bins and the prior lose at most 6 % of E[remaining | generated] as counted from the very rows.

    The same rows and no forgetting: the traces drift by 10 to 20 % between their halves, which no histogram can foresee.
    """
    with (azure / name).open(newline="") as file:
        tokens = np.array([int(row["GeneratedTokens"]) for row in csv.DictReader(file)])
    tokens = tokens[tokens > 0]
    estimator = LengthEstimator(half_life_answers=1e6)
    for value in tokens.tolist():
        estimator.observe(class_index, value)
    for generated in (0, 5, 20, 50, 100, 200):
        truth = (tokens[tokens > generated] - generated).mean()
        assert estimator.expected_remaining(class_index, generated) == pytest.approx(truth, rel=0.06), generated

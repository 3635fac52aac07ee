"""Classes from features known at arrival; baselines by hand; nothing known yet (K13)."""

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest

from envs.decision.request_classes import (
    CLASS_FEATURES,
    CLASS_PRIOR,
    GapStatistics,
    TypicalPrompts,
    class_baseline,
    class_log_scores,
    classify,
    label_class,
)
from envs.domain.requests import CLASS_INDEX

CHAT, CODE, BATCH = CLASS_INDEX["chat"], CLASS_INDEX["code"], CLASS_INDEX["batch"]


def test_a_label_decides_whatever_the_features_say():
    assert classify("batch", 100, session_turn=5, burstiness=12.0) == BATCH
    assert classify(" Interactive ", 30_000) == CHAT
    with pytest.raises(ValueError, match='"chatt" unknown; did you mean "chat"'):
        label_class("chatt")


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (dict(prompt_tokens=1000), CHAT),
        (dict(prompt_tokens=1000, session_turn=3, prefix_share=0.5, burstiness=1.0), CHAT),
        (dict(prompt_tokens=1900, session_turn=3, prefix_share=0.9), CODE),
        (dict(prompt_tokens=1500, burstiness=12.0), CODE),
        (dict(prompt_tokens=3400, session_turn=0, prefix_share=0.0), BATCH),
        (dict(prompt_tokens=1_000_000), CHAT),  # beyond every trace: the prior decides
        (dict(prompt_tokens=1_000_000, session_turn=8, prefix_share=0.99), CODE),
    ],
)
def test_clear_cases(features, expected):
    assert classify(None, **features) == expected


def test_scores_by_hand():
    """Two features apart, the scores differ by the logarithms of their probabilities alone."""
    plain = class_log_scores(800)
    more = class_log_scores(800, prefix_share=0.4, session_turn=0)
    assert more - plain == pytest.approx([math.log(0.37 * 0.5), math.log(0.65 * 0.35), math.log(0.05 * 0.98)])
    at_peak = class_log_scores(round(math.exp(7.71)))[BATCH]
    density = 0.546 / 0.30
    density += 0.362 / 0.15 * math.exp(-0.5 * (0.42 / 0.15) ** 2)  # sigma 0.10 counts as 0.15
    density += 0.093 / 1.53 * math.exp(-0.5 * (1.60 / 1.53) ** 2)
    assert at_peak == pytest.approx(math.log(0.2 * density), abs=1e-3)


@pytest.mark.fault("K13")
def test_scores_stay_finite_at_the_extremes():
    for prompt in (1, 10, 1_000_000):
        for burst in (None, 1e-3, 1e3):
            assert np.isfinite(class_log_scores(prompt, 1.0, 10_000, burst)).all()
    assert sum(CLASS_PRIOR.values()) == pytest.approx(1.0) and set(CLASS_FEATURES) == set(CLASS_INDEX)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (dict(prompt_tokens=0), "prompt_tokens"),
        (dict(prompt_tokens=1, prefix_share=1.1), "prefix_share"),
        (dict(prompt_tokens=1, session_turn=-1), "session_turn"),
        (dict(prompt_tokens=1, burstiness=0.0), "burstiness"),
    ],
)
def test_features_out_of_range_are_named(wrong, name):
    with pytest.raises(ValueError, match=name):
        classify(None, **wrong)


@pytest.mark.fault("K13")
def test_burstiness_is_unknown_until_enough_gaps_were_seen():
    gaps = GapStatistics(gaps_min=2)
    assert gaps.burstiness is None
    for now_s in (0.0, 1.0):
        gaps.arrive(now_s)
        assert gaps.burstiness is None
    gaps.arrive(4.0)  # gaps 1 and 3: mean 2, standard deviation 1
    assert gaps.burstiness == pytest.approx(0.5)
    ties = GapStatistics(gaps_min=2)
    for _ in range(10):
        ties.arrive(5.0)
    assert ties.burstiness is None
    with pytest.raises(ValueError, match="time order"):
        ties.arrive(4.0)


def test_burstiness_of_poisson_arrivals_is_one():
    """Weighted over about 64 gaps, so the average over many instants is what must be near 1."""
    gaps, seen = GapStatistics(), []
    for now_s in np.cumsum(np.random.default_rng(2).exponential(1.0, 20_000)):
        gaps.arrive(float(now_s))
        if gaps.burstiness is not None:
            seen.append(gaps.burstiness)
    assert np.mean(seen) == pytest.approx(1.0, abs=0.06)


def test_baseline_by_hand():
    """1,000 prompt tokens at 10,000 and 2,000 tokens/s, 101 output tokens at 20 and 50 ms, 160 kB of KV per token."""
    base = class_baseline([1000, 3000], [101, 1], [10_000, 2000, 0], [0.02, 0.05, 0.05], 160_000)
    assert base.ttft_s.tolist() == [[0.1, 0.5, math.inf], [0.3, 1.5, math.inf]]
    assert base.time_s[:, :2] == pytest.approx(np.array([[2.1, 5.5], [0.3, 1.5]]))
    assert base.kv_bytes[:, 0].tolist() == [1101 * 160_000, 3001 * 160_000] and base.kv_bytes.shape == (2, 3)
    with pytest.raises(ValueError, match="output_tokens"):
        class_baseline([10], [0], [1.0], [0.1], 1.0)


@pytest.fixture
def traces():
    shared = Path(os.environ.get("BALLAST_SHARED", Path(__file__).parents[3].parent / "shared"))
    if not (shared / "traces").is_dir():
        pytest.skip(f"real traces are not under {shared}; set BALLAST_SHARED")
    return shared / "traces"


def test_on_real_rows_more_features_mean_fewer_mistakes(traces):
    """Balanced over the three sources: prompt length alone beats a guess (1/3) clearly, the client's burstiness adds to it."""
    sources = {
        CHAT: ("azure2023/AzureLLMInferenceTrace_conv.csv", "ContextTokens", 1.05),
        CODE: ("azure2023/AzureLLMInferenceTrace_code.first2of3.csv", "ContextTokens", 12.7),
        BATCH: ("lengths/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", "num_prefill_tokens", None),
    }
    by_length, with_burst = [], []
    for index, (name, column, burst) in sources.items():
        with (traces / name).open(newline="") as file:
            prompts = [int(row[column]) for row in csv.DictReader(file)][:6000:4]
        by_length.append(np.mean([classify(None, p) == index for p in prompts]))
        with_burst.append(np.mean([classify(None, p, burstiness=burst) == index for p in prompts]))
    assert np.mean(by_length) > 0.55
    assert np.mean(with_burst) > np.mean(by_length) + 0.1


def test_typical_prompts_begin_published_and_follow_arrivals():
    """The prior is worth 20 arrivals: after 20 prompts of e times the prior's the mean has moved half a log unit."""
    prompts = TypicalPrompts(prior_arrivals=20, memory_arrivals=100)
    start = prompts.tokens()[CHAT]
    assert start == pytest.approx(math.exp(0.633 * 6.27 + 0.291 * 6.98 + 0.076 * 8.32))
    other = prompts.tokens()[CODE]
    for _ in range(20):
        prompts.observe(CHAT, round(start * math.e))
    assert prompts.tokens()[CHAT] == pytest.approx(start * math.exp(0.5), rel=0.01)
    assert prompts.tokens()[CODE] == other
    with pytest.raises(ValueError, match="prior_arrivals=0"):
        TypicalPrompts(prior_arrivals=0)

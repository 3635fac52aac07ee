"""Synthetic twins against the published figures, and how the default traces are found."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from envs.traces import TraceError
from envs.traces.default_traces import default_trace, find_trace
from envs.traces.synthetic_twin import TWINS, draw_lengths, synthesize
from envs.traces.trace_statistics import arrivals_of, counts_per, sharing_of
from envs.traces.trace_table import TraceTable
from envs.traces.twin_parameters import CODE_PROMPT, CONV_OUTPUT, CONV_PROMPT, MOONCAKE_PROMPT

SEEDS = range(8)


@pytest.fixture(scope="module")
def twins() -> dict[str, list[TraceTable]]:
    """An hour of each twin for eight seeds: the published figures are of one hour, so single hours scatter."""
    return {kind: [synthesize(kind, 3600.0, 1.0, np.random.default_rng(seed)) for seed in SEEDS] for kind in TWINS}


def dispersion(table: TraceTable, window_s: float) -> float:
    counts = counts_per(table, window_s)
    return float(counts.var() / counts.mean())


def test_twins_are_deterministic_and_marked():
    for kind in TWINS:
        one, two = (synthesize(kind, 300.0, rng=np.random.default_rng(3)) for _ in range(2))
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "session", "prefix_ids"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), (kind, name)
        assert one.synthetic and "synthetic twin" in one.source and one.session_names
        other = synthesize(kind, 300.0, rng=np.random.default_rng(4))
        assert not np.array_equal(one.arrival_s, other.arrival_s)


def test_conversation_twin_matches_the_published_arrivals(twins: dict[str, list[TraceTable]]):
    """5.53 req/s; CV of gaps 1.09; variance / mean 1.4, 3.9, 16 at 1, 10, 60 s; lag-1 .85 a minute; peak / mean 1.52.

    Mean of eight hours against the one measured; the tolerance is about two standard errors of that mean."""
    tables = twins["azure-conv"]
    stats = [arrivals_of(table) for table in tables]
    assert np.mean([s.rate_per_s for s in stats]) == pytest.approx(5.53, rel=0.10)
    assert np.mean([s.gap_cv for s in stats]) == pytest.approx(1.09, abs=0.04)
    for window_s, published, tolerance in ((1, 1.4, 0.1), (10, 3.9, 0.8), (60, 16.0, 4.0)):
        assert np.mean([dispersion(table, window_s) for table in tables]) == pytest.approx(published, abs=tolerance)
    assert np.mean([s.minute_lag1 for s in stats]) == pytest.approx(0.85, abs=0.12)
    assert np.mean([s.minute_peak_to_mean for s in stats]) == pytest.approx(1.52, abs=0.15)


def test_code_twin_is_on_and_off(twins: dict[str, list[TraceTable]]):
    """3.12 req/s; CV 12.7; bursts of mean 67 (p50 26, p90 151); silences over 1 s of mean 15.7 (p50 3.2, p90 40)."""
    tables = twins["azure-code"]
    assert np.mean([table.rate_per_s for table in tables]) == pytest.approx(3.12, rel=0.15)
    assert np.mean([arrivals_of(table).gap_cv for table in tables]) == pytest.approx(12.7, rel=0.20)
    silences_s, bursts = [], []
    for table in tables:
        gaps_s = np.diff(table.arrival_s)
        cuts = np.flatnonzero(gaps_s > 1.0)
        silences_s.append(gaps_s[cuts])
        bursts.append(np.diff(np.concatenate(([-1], cuts))))
    silence_s, burst = np.concatenate(silences_s), np.concatenate(bursts)
    assert silence_s.mean() == pytest.approx(15.7, rel=0.15)
    assert np.quantile(silence_s, 0.5) == pytest.approx(3.2, rel=0.25)
    assert np.quantile(silence_s, 0.9) == pytest.approx(40, rel=0.35), "two exponentials cannot meet p50, p90 and mean at once"
    assert burst.mean() == pytest.approx(67, rel=0.15)
    assert np.quantile(burst, 0.5) == pytest.approx(26, rel=0.25) and np.quantile(burst, 0.9) == pytest.approx(151, rel=0.2)
    assert np.mean([dispersion(table, 1) for table in tables]) == pytest.approx(13, rel=0.3)
    assert np.mean([dispersion(table, 60) for table in tables]) == pytest.approx(160, rel=0.3)
    assert set(tables[0].class_index.tolist()) == {1}


def test_mooncake_twin_shares_prefixes_as_published(twins: dict[str, list[TraceTable]]):
    """3.26 req/s on a 3 s tick, counts a minute CV .12; 24.8 blocks a request, 35 % reused, 37 % of requests reuse more than
    the first block, gaps p10 / 50 / 90 = 42 / 123 / 453 s."""
    tables = twins["mooncake"]
    assert all(np.all(table.arrival_s % 3.0 == 0) for table in tables)
    assert np.mean([table.rate_per_s for table in tables]) == pytest.approx(3.26, rel=0.05)
    cvs = [counts_per(table, 60.0).std() / counts_per(table, 60.0).mean() for table in tables]
    assert np.mean(cvs) == pytest.approx(0.12, abs=0.02)
    sharing = [s for s in map(sharing_of, tables) if s is not None]
    assert len(sharing) == len(tables)
    assert np.mean([s.blocks_per_request for s in sharing]) == pytest.approx(24.8, rel=0.04)
    assert np.mean([s.reused_fraction for s in sharing]) == pytest.approx(0.35, abs=0.02)
    assert np.mean([s.requests_reusing_fraction for s in sharing]) == pytest.approx(0.37, abs=0.02)
    assert np.mean([s.gap_s_p10_p50_p90 for s in sharing], axis=0) == pytest.approx([42, 123, 453], rel=0.2)
    table = tables[0]
    assert np.array_equal(np.diff(table.prefix_offsets), -(-table.prompt_tokens // 512))
    assert set(table.prefix_ids[table.prefix_offsets[:-1]].tolist()) == {0}, "all requests begin with the same block"
    for i in range(0, len(table), 97):
        blocks = table.prefix_blocks(i)
        assert np.unique(blocks).size == blocks.size, "no block twice in one prompt"


def test_spread_ticks_leave_counts_and_rows_alone():
    ticked, spread = (synthesize("mooncake", 600.0, rng=np.random.default_rng(1), spread_ticks=s) for s in (False, True))
    assert np.array_equal(ticked.arrival_s, np.floor(spread.arrival_s / 3.0) * 3.0)
    assert np.array_equal(ticked.prompt_tokens, spread.prompt_tokens)


@pytest.mark.parametrize("kind", TWINS)
def test_rate_scale_and_duration(kind: str):
    """Twice the rate gives about twice the requests in the same hours, none beyond the end."""
    slow, fast = (sum(len(synthesize(kind, 3600.0, scale, np.random.default_rng([9, seed]))) for seed in range(4)) for scale in (1.0, 2.0))
    assert fast / slow == pytest.approx(2.0, rel=0.25)
    short = synthesize(kind, 45.0, rng=np.random.default_rng(2))
    assert len(short) == 0 or short.arrival_s[-1] < 45.0


def test_lengths_match_the_mixture_means():
    """Mean of a lognormal mixture: sum of w exp(mu + sigma^2 / 2); bounds cut little. Published means are 1,155 and 211."""
    rng = np.random.default_rng(5)
    for mixture, published in ((CONV_PROMPT, 1155), (CONV_OUTPUT, 211), (CODE_PROMPT, 2028), (MOONCAKE_PROMPT, 12449)):
        tokens = draw_lengths(mixture, 60_000, rng)
        closed = sum(weight * np.exp(mu + sigma**2 / 2) for weight, mu, sigma in mixture.components)
        assert tokens.mean() == pytest.approx(closed, rel=0.08)
        assert tokens.mean() == pytest.approx(published, rel=0.05)
        assert tokens.min() >= mixture.least and tokens.max() <= mixture.most


def test_a_few_clients_carry_most_requests(twins: dict[str, list[TraceTable]]):
    """ServeGen m-large: the first 1 / 5 / 10 clients carry 16 / 43 / 63 %."""
    table = twins["azure-conv"][0]
    clients = [int(name.split("/")[0].removeprefix("client-")) for name in table.session_names]
    shares = np.sort(np.bincount(np.array(clients)[table.session]))[::-1] / len(table)
    assert [shares[:1].sum(), shares[:5].sum(), shares[:10].sum()] == pytest.approx([0.16, 0.43, 0.63], abs=0.02)


def test_sharing_counts_a_prefix_only_from_its_beginning():
    """By hand: request 2 hits blocks 0 and 1 (gap of block 1: 4 s); request 3 misses at once, so its later block is no hit."""
    table = synthesize("mooncake", 30.0, rng=np.random.default_rng(0)).take(np.arange(3))
    from dataclasses import replace

    hand = replace(
        table,
        arrival_s=np.array([0.0, 4.0, 6.0]),
        prefix_offsets=np.array([0, 3, 6, 8]),
        prefix_ids=np.array([0, 1, 2, 0, 1, 5, 9, 1]),
    )
    sharing = sharing_of(hand)
    assert sharing is not None and sharing.blocks == 8
    assert sharing.reused_fraction == 2 / 8 and sharing.requests_reusing_fraction == 1 / 3
    assert sharing.gap_s_p10_p50_p90 == (4.0, 4.0, 4.0)


def test_default_trace_says_where_it_came_from(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """No file: the twin. A file in the named folder: that one, before any other place."""
    caplog.set_level(logging.INFO)
    twin = default_trace("azure-conv", [tmp_path], duration_s=120.0)
    assert twin.synthetic and "source=twin" in caplog.text
    path = tmp_path / "AzureLLMInferenceTrace_conv.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    monkeypatch.setenv("BALLAST_TRACES", str(tmp_path))
    real = default_trace("azure-conv")
    assert not real.synthetic and real.source == str(path) and len(real) == 1
    assert f"source={path}" in caplog.text
    monkeypatch.setenv("BALLAST_TRACES", str(tmp_path / "gone"))
    with pytest.raises(TraceError, match=r"BALLAST_TRACES=.* is no folder"):
        default_trace("azure-conv")
    with pytest.raises(TraceError, match='did you mean "mooncake"'):
        default_trace("moncake", [tmp_path])


def test_default_traces_find_the_shared_files(shared: Path, tmp_path: Path):
    names = {name: find_trace(name, [shared / "traces"]) for name in TWINS}
    assert {name: path.name for name, path in names.items() if path} == {
        "azure-conv": "AzureLLMInferenceTrace_conv.csv",
        "azure-code": "AzureLLMInferenceTrace_code.first2of3.csv",
        "mooncake": "conversation_trace.first2of3.jsonl.gz",
    }
    code = names["azure-code"]
    assert code is not None
    shutil.copy(code, tmp_path / "AzureLLMInferenceTrace_code.csv")
    table = default_trace("azure-code", [tmp_path])
    assert len(table) == 7148 and set(table.class_index.tolist()) == {1}
    spread = default_trace("mooncake", [shared / "traces"])
    assert np.unique(spread.arrival_s).size == 7689, "ticks are spread by default"


def test_unknown_twin_and_bad_numbers():
    with pytest.raises(TraceError, match='did you mean "azure-code"'):
        synthesize("azure-cod")
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TraceError, match="duration_s"):
            synthesize("mooncake", bad)

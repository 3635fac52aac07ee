"""Mixed traffic: parts on one clock with their labels, batch rows at their rate."""

from __future__ import annotations

import numpy as np
import pytest

from agents.experiment_config import load_experiment
from agents.mixed_traffic import TracePart, batch_requests, mixed_traffic
from agents.row_classes import class_shares
from envs.domain.requests import CLASS_INDEX
from envs.traces import TraceError


@pytest.fixture
def no_files(monkeypatch, tmp_path):
    """Twins and fitted lengths, as on a machine without the traces."""
    monkeypatch.setattr("envs.traces.default_traces.search_folders", lambda: ())
    monkeypatch.setattr("agents.mixed_traffic.search_folders", lambda: ())


def test_batch_requests_come_at_their_rate_and_with_published_lengths(no_files):
    """2,000 expected in 1,000 s, standard deviation 45. Median prompt of arXiv summarization about 2,700 tokens, answer 170."""
    table = batch_requests(1000.0, 2.0, np.random.default_rng(1))
    assert len(table) == pytest.approx(2000, abs=225)
    assert np.median(table.prompt_tokens) == pytest.approx(2700, rel=0.15)
    assert np.median(table.output_tokens) == pytest.approx(170, rel=0.15)
    assert table.synthetic and (table.class_index == CLASS_INDEX["batch"]).all() and table.is_labelled.all()


def test_parts_keep_their_labels_and_their_clock(no_files):
    """Half the rate doubles a part's span; every row has the label of its part; arrivals are sorted."""
    parts = [TracePart(name="azure-conv", label="chat"), TracePart(name="azure-code", label="code", rate=0.5), TracePart(name="batch")]
    table = mixed_traffic(parts, "label", 3)
    assert set(class_shares(table)) == {"chat", "code", "batch"} and table.is_labelled.all()
    span_s = {name: table.arrival_s[table.class_index == index].max() for name, index in CLASS_INDEX.items()}
    assert span_s["code"] == pytest.approx(2 * span_s["chat"], rel=0.1)
    assert (np.diff(table.arrival_s) >= 0).all()
    again = mixed_traffic(parts, "label", 3)
    assert (again.arrival_s == table.arrival_s).all() and (again.prompt_tokens == table.prompt_tokens).all()


def test_unlabelled_parts_are_refused_or_classified_each_by_itself(no_files):
    parts = [TracePart(name="azure-conv"), TracePart(name="azure-code")]
    with pytest.raises(TraceError, match="have no label"):
        mixed_traffic(parts, "label", 3)
    table = mixed_traffic(parts, "classifier", 3)
    assert class_shares(table)["chat"] > 0.5 and class_shares(table)["code"] > 0.1


def test_the_shipped_mix_has_every_class_in_every_window(no_files):
    config = load_experiment("mixed-classes")
    table = mixed_traffic(config.trace.parts, config.classes.source, config.seed)
    for window in (config.trace.train_s, config.trace.validation_s, config.trace.test_s):
        first, last = np.searchsorted(table.arrival_s, window)
        shares = class_shares(table.take(np.arange(first, last)))
        assert set(shares) == set(CLASS_INDEX) and min(shares.values()) > 0.03


def test_measured_batch_lengths_are_taken_where_they_are_found(shared, monkeypatch):
    """The lengths are rows of the file itself, prompt and answer together; the arrivals are made up, so the table is synthetic."""
    monkeypatch.setattr("agents.mixed_traffic.search_folders", lambda: (shared / "traces",))
    table = batch_requests(200.0, 2.0, np.random.default_rng(1))
    text = (shared / "traces" / "lengths" / "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv").read_text()
    pairs = {tuple(line.split(",")[:2]) for line in text.splitlines()[1:]}
    assert {(str(p), str(o)) for p, o in zip(table.prompt_tokens, table.output_tokens, strict=True)} <= pairs
    assert table.synthetic and "arXiv" in table.source

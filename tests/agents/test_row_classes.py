"""Classes of an experiment's rows: from the trace, from labels, or by the classifier, which knows no row's future."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agents.row_classes import class_shares, classified, with_classes
from envs.domain.requests import CLASS_INDEX
from envs.traces import TraceError, TraceRow, table_of_rows
from envs.traces.synthetic_twin import synthesize

CHAT, CODE, BATCH = CLASS_INDEX["chat"], CLASS_INDEX["code"], CLASS_INDEX["batch"]


def rows_with_labels():
    labels = ["interactive", None, "CODE", "summarization", None]
    return table_of_rows([TraceRow(float(i), 800, 50, label) for i, label in enumerate(labels)], "made up")


def test_labels_and_their_aliases_are_kept_and_the_rest_is_the_traces():
    table = rows_with_labels()
    assert table.is_labelled.tolist() == [True, False, True, True, False]
    assert with_classes(table).class_index.tolist() == [CHAT, CHAT, CODE, BATCH, CHAT]


def test_label_source_refuses_rows_without_one():
    with pytest.raises(TraceError, match="2 of 5 rows have no label of chat, code, batch"):
        with_classes(rows_with_labels(), "label")
    labelled = rows_with_labels().take(np.array([0, 2, 3]))
    assert with_classes(labelled, "label").class_index.tolist() == [CHAT, CODE, BATCH]


def test_classifier_leaves_labels_alone():
    """A 100-token prompt looks like chat; the label code stays."""
    table = table_of_rows([TraceRow(0.0, 100, 5, "code"), TraceRow(1.0, 100, 5)], "made up")
    assert with_classes(table, "classifier").class_index.tolist() == [CODE, CHAT]


def test_classes_may_be_mapped_and_unknown_names_are_told():
    table = rows_with_labels()
    assert with_classes(table, mapping={"chat": "batch"}).class_index.tolist() == [BATCH, BATCH, CODE, BATCH, BATCH]
    with pytest.raises(ValueError, match='service class "chta" unknown; did you mean "chat"'):
        with_classes(table, mapping={"chta": "code"})
    with pytest.raises(ValueError, match='class source "guess" unknown'):
        with_classes(table, "guess")


@pytest.mark.parametrize(("kind", "least_chat", "least_code"), [("azure-conv", 0.9, 0.0), ("azure-code", 0.0, 0.6)])
def test_twins_of_the_published_traces_are_told_apart(kind, least_chat, least_code):
    """Near-Poisson chat and on/off code bursts: most rows of each get their own class from features at arrival."""
    shares = class_shares(with_classes(synthesize(kind, 600.0, rng=np.random.default_rng(3)), "classifier"))
    assert shares.get("chat", 0.0) >= least_chat and shares.get("code", 0.0) >= least_code


def test_neither_answers_nor_later_rows_are_looked_at():
    table = synthesize("mooncake", 300.0, rng=np.random.default_rng(5))
    whole = classified(table)
    assert (classified(replace(table, output_tokens=table.output_tokens * 3)) == whole).all()
    half = len(table) // 2
    assert (classified(table.take(np.arange(half))) == whole[:half]).all()


def test_a_prefix_counts_as_shared_only_once_it_was_seen():
    """Two rows of one long shared prompt, nothing else known: the prior decides the first; the second reuses all of it, which
    batch does in 5 % of cases and chat in 37 %."""
    blocks = tuple(range(100))
    table = table_of_rows([TraceRow(0.0, 1600, 9, prefix_blocks=blocks, block_tokens=16) for _ in range(2)], "made up")
    first, second = classified(table).tolist()
    assert (first, second) == (BATCH, CODE)

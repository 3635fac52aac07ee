"""The drill, short: faults of every sort strike a real service, nothing is lost, and nothing is left of it."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from benchmarks.drill import GROUPS, run
from benchmarks.drill_clients import CONTENT, Answer, Reference
from benchmarks.drill_faults import KINDS
from benchmarks.drill_figures import Found, Strike, bars
from benchmarks.drill_service import drilled
from runtime.torch_tp.config import read_config
from tests.conftest import GUARD_S, SLOWER

REFERENCE = Reference((1, 2), 3, "one two six", (3, 7, 11), (2.0, 1e-5, 2.0))


def test_only_a_token_that_rounding_decided_may_differ():
    assert REFERENCE.is_tie("one ten six")
    assert not REFERENCE.is_tie("own two six") and not REFERENCE.is_tie("one two sit") and not REFERENCE.is_tie("one two")


def answered(name: str, verdict: str, *at_s: float) -> Answer:
    return Answer(name, len(at_s), True, 0.0, list(at_s), at_s[-1], verdict)


def test_figures_of_a_kill_by_hand():
    """Killed at 1.0, noticed at 1.1. Of two streams in the group, tokens came again at 1.5 and 1.7: 0.4 after the notice, 0.7 after the
    strike for the slower one. A third stream was elsewhere and took 3 s, where calm ones took 2 s: 1.5 times. One answer was lost."""
    strikes = [Strike(KINDS["kill"], "a", 1.0, 1.1, 2.0), Strike(None, "a", 11.0)]
    calm = Answer("d", 2, False, 10.0, [], 12.0, "whole")
    answers = [
        answered("a", "whole", 0.9, 1.5, 1.6), answered("b", "whole", 0.95, 1.7, 1.8), answered("c", "whole", 0.9, 1.05, 3.0), calm,
        answered("e", "lost", 0.5),
    ]  # fmt: skip
    found = Found(answers, strikes, {"a": ("a", 1), "b": ("a", 1), "c": ("b", 1), "d": ("b", 1)})
    values = {bar.name: bar.value for bar in bars(found, ["process 7"])}
    assert values["kill: noticed after s, worst"] == pytest.approx(0.1)
    assert values["kill: next token after notice s, median"] == pytest.approx(0.4)
    assert found.stood_still_s("kill") == pytest.approx([0.7])
    assert values["requests elsewhere: p99 of their time / in calm"] == pytest.approx(1.5)
    assert values["requests lost"] == 1 and values["processes, segments or ports left at the end"] == 1


def test_a_short_drill_loses_nothing_and_leaves_nothing(dreams, tmp_path, kernels, monkeypatch):
    """Six faults, one of each sort, while 30 requests run: all are noticed and outlived, every answer has the text given in calm."""
    monkeypatch.setattr("benchmarks.drill.UNSEEN_S", GUARD_S)
    monkeypatch.setattr("benchmarks.drill_service.LEFT_AFTER_S", 5.0 * SLOWER)
    groups = GROUPS["small"]
    options = argparse.Namespace(requests=30, faults=6, clients=6, seed=1, no_calm=True)
    with drilled(tmp_path, dreams, read_config(dreams), groups) as service:
        found = asyncio.run(run(service, dreams, options))
    assert service.process.returncode == 0 and service.left() == []
    assert not [answer for answer in found.answers if answer.verdict not in CONTENT]
    assert {strike.kind.name for strike in found.strikes if strike.kind} == {"kill", "freeze", "cut", "slow", "garble", "group"}
    assert all(found.missed(name) == 0 for name, kind in KINDS.items() if kind.rule is not None)
    assert all(strike.whole_s is not None for strike in found.strikes if strike.kind)

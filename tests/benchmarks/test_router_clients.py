"""Callers of the router drills notice what they are there to notice: a token twice, one missing, an end that is none."""

from __future__ import annotations

import pytest

from benchmarks.router_clients import Callers, Outcome, failed

END = b"data: [DONE]\n\n"


def event(token: int) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":" t%d"}}]}\n\n' % token


def judged(data: bytes, is_stream: bool = True) -> Outcome:
    outcome = Outcome(status=200)
    Callers("http://127.0.0.1:1", tokens=3)._judge(outcome, data, is_stream)
    return outcome


def test_whole_answers():
    assert judged(event(0) + event(1) + event(2) + END).is_whole
    assert judged(b'{"choices":[{"message":{"content":" t0 t1 t2"}}]}', is_stream=False).is_whole


@pytest.mark.parametrize(
    "data",
    [
        event(0) + event(1) + event(1) + event(2) + END,
        event(0) + event(2) + END,
        event(0) + event(2) + event(1) + END,
        event(0) + event(1) + event(2),
        event(0) + event(1) + event(2) + b'data: {"error":{"message":"lost"}}\n\n' + END,
        b"",
    ],
    ids=["twice", "missing", "out of order", "no end", "error event", "nothing"],
)
def test_answers_that_are_not_whole(data):
    outcome = judged(data)
    assert not outcome.is_whole and outcome.error and failed([outcome]) == 1

"""A few strikes of the long drill (`python -m benchmarks.tp_drill --strikes 200`): one of each kind, at random moments under load."""

from __future__ import annotations

import random

import pytest

from benchmarks.tp_drill import Drill, Findings, Reference, reference_of, requests_of
from runtime.torch_tp.engine import Engine, EngineSettings
from runtime.torch_tp.requests import GenerationRequest, RequestReport, TokenEvent
from runtime.torch_tp.supervisor import RankSettings


@pytest.mark.fault("K20")
@pytest.mark.fault("K25")
def test_strikes_under_load_lose_double_and_change_nothing(dreams, nursery):
    rng = random.Random(20)
    settings = EngineSettings(kv_tokens_max=1024, slots_max=8, with_text=False, wait_deadline_s=120.0)
    ranks = [RankSettings(speed=1.0), RankSettings(speed=0.5), RankSettings(speed=0.75)]
    with Engine.start(dreams, ranks, settings, nursery=nursery) as engine:
        asked = requests_of(rng, 6, engine.config.context_tokens, engine.config.vocabulary, 60)
        references = [reference_of(engine, request) for request in asked]
        with Drill(engine, references, rng, width=4) as drill:
            for kind in ("kill", "slide", "cut", "freeze", "kill"):
                drill.strike(kind, rng.uniform(0.0, 0.3))
        engine.check()
    findings = drill.findings
    assert findings.answers >= 4 and findings.details == []
    assert (findings.lost_requests, findings.lost_or_doubled_tokens, findings.changed_answers) == (0, 0, 0)
    assert len(findings.stood_still_s) == 4


def test_the_drill_notices_what_it_looks_for():
    """Its judge is shown a lost, a doubled and a changed token, a tie, and a request that ended in an error."""
    asked = GenerationRequest("a", (1,), 3, ignore_eos=True)
    reference = Reference(asked, (5, 6, 7), (1.0, 0.0001, 1.0))
    report = RequestReport(0, 0, 0, 0, 1, 3, 0, 0, 0, 0, (0.0,) * 9)

    def judged(tokens: list[int], places: list[int], reason: str = "length") -> Findings:
        drill = Drill.__new__(Drill)
        drill.findings = Findings()
        events = [TokenEvent("a", place, token) for place, token in zip(places, tokens, strict=True)]
        end = TokenEvent("a", len(tokens), None, finish_reason=reason, report=report)
        drill._judge(reference, asked, [*events, end], None)
        return drill.findings

    assert judged([5, 6, 7], [0, 1, 2]).details == []
    assert judged([5, 6], [0, 1]).lost_or_doubled_tokens == 1
    assert judged([5, 6, 6, 7], [0, 1, 1, 2]).lost_or_doubled_tokens == 1
    assert judged([5, 9, 7], [0, 1, 2]).ties == 1
    assert judged([5, 6, 9], [0, 1, 2]).changed_answers == 1
    assert judged([5], [0], "error").lost_requests == 1

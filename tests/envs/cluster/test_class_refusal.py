"""A class that only times out is refused for a while, the others go on, and it comes back through probes."""

from __future__ import annotations

import numpy as np
import pytest

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.world import WorldOptions
from envs.decision.circuit_breaker import State
from envs.domain.requests import CLASS_INDEX, OutcomeKind
from envs.scheduling_env import world_summary
from tests.envs import small_worlds as W
from tests.envs.small_worlds import PAIR, SOLO, check_laws, world

CHAT, CODE = CLASS_INDEX["chat"], CLASS_INDEX["code"]


class ByClass:
    """Code to the single card, everything else to the pair."""

    def choose(self, point):
        index = SOLO if point.request.class_index == CODE else PAIR
        return index if point.mask[index] else point.view.groups + 1


def rush(**options) -> ClusterProcess:
    """30 s of code prompts at about twice what one card computes, then one short request a second; chat throughout."""
    code = np.concatenate([np.arange(0.0, 30.0, 0.1), np.arange(60.0, 100.0, 1.0)])
    chat = np.arange(0.05, 100.0, 1.0)
    arrivals = np.concatenate([code, chat])
    prompts = np.concatenate([np.where(code < 30.0, 500, 100), np.full(len(chat), 100)])
    classes = np.concatenate([np.full(len(code), CODE), np.full(len(chat), CHAT)])
    order = np.argsort(arrivals, kind="stable")
    table = W.trace(arrivals[order], prompts[order], 20, classes[order])
    process = ClusterProcess(world(table, class_timeout_limits=2.0, class_timeout_fraction=0.5, **options))
    process.run({"route": ByClass()})
    check_laws(process)
    return process


def test_only_the_class_that_times_out_is_refused():
    process = rush()
    outcomes, classes = process.outcomes, process.trace.class_index
    refused = np.array([outcomes.outcome(i).reason == "class_refused" for i in range(len(classes))])
    assert refused.sum() > 20 and (classes[refused] == CODE).all()
    assert (outcomes.kind[refused] == OutcomeKind.REFUSED).all()
    assert (outcomes.kind[classes == CHAT] == OutcomeKind.COMPLETED).all()
    assert world_summary(process)["failure_reasons"]["class_refused"] == refused.sum()
    assert process.trace.arrival_s[refused].min() > 1.0, "the first ones had to time out before anybody knew"


def test_the_class_comes_back_through_probes():
    """After the rush the short requests are probes that succeed: the breaker closes and the last 20 all complete."""
    process = rush()
    assert process.class_breaker.states()[CODE] == State.CLOSED
    last = np.flatnonzero(process.trace.class_index == CODE)[-20:]
    assert (process.outcomes.kind[last] == OutcomeKind.COMPLETED).all()
    assert not process._class_leases


def test_refusing_relieves_the_class_that_was_drowning():
    """With the breaker more of the class's requests meet twice their TTFT limit than without, where the queue only grows."""

    def in_time(process: ClusterProcess) -> int:
        outcomes, trace = process.outcomes, process.trace
        limit_s = 2.0 * (0.5 + 0.4e-3 * trace.prompt_tokens)
        late = ~(outcomes.first_token_s - trace.arrival_s <= limit_s)
        return int((~late & (trace.class_index == CODE)).sum())

    with_breaker = rush()
    table = with_breaker.world.trace
    without = ClusterProcess(world(table, class_timeout_limits=1e9))
    without.run({"route": ByClass()})
    assert in_time(with_breaker) >= in_time(without)


def test_limits_are_checked():
    for wrong in ({"class_timeout_fraction": 0.0}, {"class_timeout_limits": 0.5}):
        with pytest.raises(ValueError, match="class_timeout"):
            WorldOptions(**wrong)

"""Detection delays: the table of DESIGN section 7, number by number."""

import dataclasses

import numpy as np
import pytest

from envs.decision.detection import DETECTION, FailureKind, detection_delay_s, next_token_delay_s, within_promise


def test_killed_and_gone_do_not_depend_on_the_step():
    steps_s = np.array([0.0, 0.03, 2.0])
    assert detection_delay_s(FailureKind.RANK_KILLED, steps_s) == pytest.approx([0.05] * 3)
    assert next_token_delay_s(FailureKind.RANK_KILLED, steps_s) == pytest.approx([0.20] * 3)
    assert detection_delay_s(FailureKind.GROUP_GONE, steps_s) == pytest.approx([1.0] * 3)
    assert next_token_delay_s(FailureKind.GROUP_GONE) == pytest.approx(3.0)


@pytest.mark.fault("K20")
def test_a_frozen_rank_is_suspected_after_five_steps_but_not_before_a_quarter_second():
    steps_s = np.array([0.0, 0.03, 0.05, 0.1, 0.6, 1.0])
    assert detection_delay_s(FailureKind.RANK_FROZEN, steps_s) == pytest.approx([0.25, 0.25, 0.25, 0.5, 3.0, 5.0])
    assert next_token_delay_s(FailureKind.RANK_FROZEN, 0.1) == pytest.approx(1.1)
    assert within_promise(FailureKind.RANK_FROZEN, steps_s).tolist() == [True] * 5 + [False]


def test_every_kind_has_a_rule_that_keeps_its_promise_when_idle():
    assert len(DETECTION) == len(FailureKind)
    assert all(within_promise(kind) for kind in FailureKind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DETECTION[0].noticed_s = 0.0


@pytest.mark.parametrize("step_s", [-1.0, np.nan, np.inf])
def test_a_step_that_is_no_time_is_refused(step_s):
    with pytest.raises(ValueError, match="predicted_step_s"):
        detection_delay_s(FailureKind.RANK_FROZEN, step_s)

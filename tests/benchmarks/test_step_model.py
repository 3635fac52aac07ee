"""The model behind "ideal gain": closed forms where they exist, and a fit that finds what was put in."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.conditions import MachineLoad
from benchmarks.tp_split import StepModel
from runtime.torch_tp.profiler import OPERATIONS

COUNT = len(OPERATIONS)
EVEN = np.full((2, COUNT), 0.5)


def model(base_s: float, rest_s: float, factors: tuple[float, ...]) -> StepModel:
    return StepModel(np.full(COUNT, base_s), np.array([3.0, 6.0, 1.0]), rest_s, np.array(factors))


@pytest.mark.parametrize(("factors", "gain"), [((2.0, 4.0), 1.5), ((2.0, 8.0), 2.5), ((1.0, 1.0), 1.0), ((3.0, 3.0, 6.0), 5 / 3)])
def test_work_that_divides_gains_what_arithmetic_says(factors, gain):
    """Even: the slowest rank's 1/n at 1/k of the speed; exact: all speeds together. 1 : 1/2 gives (1/2 x 2) / (1 / 1.5) = 1.5."""
    even = np.full((len(factors), COUNT), 1 / len(factors))
    assert model(0.0, 0.0, factors).ideal_gain(even) == pytest.approx(gain)


def test_exact_shares_end_together_or_leave_the_slow_rank_idle():
    """base 1 s: at width w a rank of factor f needs f (1 + 6 w); 2 (1 + 6 w) = 4 (1 + 6 (1 - w)) gives w = 26 / 36."""
    shares = model(1.0, 0.0, (2.0, 4.0)).exact_shares()
    assert shares.sum(axis=0) == pytest.approx(np.ones(COUNT))
    assert shares[0, 1] == pytest.approx(26 / 36)
    # vocabulary: 8 x 1 s for nothing at all is worse than 2 (1 + 1) for everything
    slow = model(1.0, 0.0, (2.0, 8.0))
    assert slow.exact_shares()[:, 2] == pytest.approx([1.0, 0.0])
    assert slow.pass_s(slow.exact_shares()) == pytest.approx(2 * (1 + 3) + 2 * (1 + 6 * 0.9) + 2 * (1 + 1))


def test_what_no_cut_changes_lowers_the_gain():
    """10 s of work at factors 2 and 4: even 20 s, exact 40/3 s; 20 s on top of both: 40 / (100/3) = 1.2."""
    assert model(0.0, 20.0, (2.0, 4.0)).ideal_gain(EVEN) == pytest.approx(1.2)


def test_fit_finds_the_model_that_made_the_runs():
    truth = model(0.25, 2.0, (2.0, 4.0))
    runs = []
    for share in (0.5, 0.75):
        shares = np.stack([np.full(COUNT, share), np.full(COUNT, 1 - share)])
        busy_s = truth.factors[:, None] * (truth.base_s + truth.width_s * shares)
        runs.append((shares, busy_s, truth.pass_s(shares)))
    found = StepModel.fit(runs, (2.0, 4.0))
    assert found.base_s == pytest.approx(truth.base_s)
    assert found.width_s == pytest.approx(truth.width_s)
    assert found.rest_s == pytest.approx(2.0)


def test_a_busy_machine_voids_an_emulation():
    assert MachineLoad([0.5, 0.55, 0.9]).is_void_for_emulation is False
    assert MachineLoad([0.5, 0.61, 0.9]).is_void_for_emulation is True

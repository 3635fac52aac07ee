"""Online correction: Kalman by hand, a plain-loop twin, jumps, outliers, and nothing measured yet (K13)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.decision.online_correction import RATIO_MAX, RATIO_MIN, CorrectionSettings, initial, restarted, update

SHAPE = (3, 2, 4)


@pytest.mark.fault("K13")
def test_nothing_measured_yet_means_ratio_one():
    state = initial(SHAPE)
    assert (state.ratio == 1.0).all() and (state.samples == 0).all() and np.isfinite(state.uncertainty).all()
    for predicted_s, observed_s in [(0.0, 0.0), (0.0, 1.0), (1.0, math.nan), (math.nan, 1.0), (1.0, math.inf), (1.0, -1.0)]:
        state = update(state, predicted_s, observed_s, 0.1)
    assert (state.ratio == 1.0).all() and (state.samples == 0).all()
    assert initial((0, 0, 4)).ratio.shape == update(initial((0, 0, 4)), 1.0, 1.0, 1.0).ratio.shape == (0, 0, 4)


def test_two_steps_by_hand():
    """Prior variance .25, noise .01: gain 25/26 on log 1.5; then variance .01 x 25/26 + .0004, and the next gain from it."""
    state = update(initial((1,)), 1.0, 1.5, 0.0)
    first = 25 / 26 * math.log(1.5)
    assert state.ratio[0] == pytest.approx(math.exp(first))
    state = update(state, 1.0, 1.6, 1.0)
    variance = 0.25 / 26 + 0.0004
    gain = variance / (variance + 0.01)
    assert state.log_ratio[0] == pytest.approx(first + gain * (math.log(1.6) - first))
    assert state.variance[0] == pytest.approx((1 - gain) * variance)
    assert state.uncertainty[0] == pytest.approx(math.sqrt(state.variance[0]), rel=0.01)


def test_converges_to_the_true_ratio_of_each_element():
    rng = np.random.default_rng(1)
    truth = rng.uniform(0.3, 4.0, SHAPE)
    state = initial(SHAPE)
    for _ in range(300):
        state = update(state, 0.02, 0.02 * truth * rng.lognormal(0.0, 0.1, SHAPE), 0.02)
    assert np.abs(state.ratio / truth - 1).max() < 0.06  # 3 standard deviations of the settled filter, about 0.017
    assert (state.uncertainty < 0.03).all()


def test_a_jump_is_followed_within_three_steps_and_an_outlier_is_not():
    state = initial((2,))
    for _ in range(200):
        state = update(state, 1.0, 1.0, 0.03)
    state = update(state, 1.0, [30.0, 2.0], 0.03)  # one stalled step on element 0
    assert state.ratio[0] < 1.1
    for _ in range(2):
        state = update(state, 1.0, [1.0, 2.0], 0.03)
    assert state.ratio[0] == pytest.approx(1.0, abs=0.1)
    assert state.ratio[1] == pytest.approx(2.0, rel=0.05)


def test_what_was_learnt_fades():
    state = initial((1,))
    for _ in range(100):
        state = update(state, 1.0, 2.0, 0.03)
    settled = state.uncertainty[0]
    state = update(state, math.nan, math.nan, 60.0)
    assert state.uncertainty[0] > 5 * settled
    assert state.ratio[0] == pytest.approx(2.0, rel=0.01)
    assert update(state, math.nan, math.nan, 1e9).variance[0] == CorrectionSettings().prior_std ** 2


def test_ratio_stays_in_its_bounds():
    high, low = initial((1,)), initial((1,))
    for _ in range(50):
        high, low = update(high, 1e-9, 1e9, 1.0), update(low, 1e9, 1e-9, 1.0)
    assert high.ratio[0] == pytest.approx(RATIO_MAX, rel=1e-4)
    assert low.ratio[0] == pytest.approx(RATIO_MIN, rel=1e-4)
    assert high.ratio[0] <= RATIO_MAX and low.ratio[0] >= RATIO_MIN


def plain_update(log_ratio, variance, surprises, predicted, observed, elapsed, s=CorrectionSettings()):  # noqa: B008
    """The filter for one element, in the order of the textbook."""
    variance = min(variance + s.drift_std_per_sqrt_s**2 * elapsed, s.prior_std**2)
    if not (0 < predicted < math.inf and 0 < observed < math.inf):
        return log_ratio, variance, surprises
    measured = math.log(min(max(observed / predicted, RATIO_MIN), RATIO_MAX))
    innovation, spread = measured - log_ratio, math.sqrt(variance + s.noise_std**2)
    if abs(innovation) > s.surprise * spread:
        side = math.copysign(1, innovation)
        surprises = surprises + side if surprises * side > 0 else side
        if abs(surprises) == s.surprises_to_restart:
            surprises, variance = 0, s.prior_std**2
        else:
            innovation = side * s.surprise * spread
    else:
        surprises = 0
    gain = variance / (variance + s.noise_std**2)
    log_ratio = min(max(log_ratio + gain * innovation, math.log(RATIO_MIN)), math.log(RATIO_MAX))
    return log_ratio, variance * (1 - gain), surprises


times = st.one_of(st.floats(1e-4, 1e3), st.sampled_from([0.0, -1.0, math.nan, math.inf]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(times, times, st.floats(0, 100)), min_size=1, max_size=30))
def test_agrees_with_a_plain_loop(steps):
    """Two elements, the second seeing the inputs in reverse roles, against the twin."""
    state, twins = initial((2,)), [(0.0, 0.25, 0), (0.0, 0.25, 0)]
    for a_s, b_s, elapsed_s in steps:
        before = state.log_ratio.copy()
        new = update(state, [a_s, b_s], [b_s, a_s], elapsed_s)
        assert (state.log_ratio == before).all()  # the old state is left alone
        state = new
        twins = [plain_update(*twin, p, o, elapsed_s) for twin, (p, o) in zip(twins, [(a_s, b_s), (b_s, a_s)], strict=True)]
    assert state.log_ratio == pytest.approx([twin[0] for twin in twins], abs=1e-9)
    assert state.variance == pytest.approx([twin[1] for twin in twins], rel=1e-9)


def test_a_replaced_rank_starts_again():
    state = update(initial(SHAPE), 1.0, 2.0, 0.1)
    mask = np.zeros(SHAPE, dtype=bool)
    mask[1, 0] = True
    again = restarted(state, mask)
    assert (again.ratio[mask] == 1.0).all() and (again.samples[mask] == 0).all()
    assert (again.ratio[~mask] == state.ratio[~mask]).all()


def test_settings_refuse_nonsense():
    with pytest.raises(ValueError, match="noise_std"):
        CorrectionSettings(noise_std=0.0)

"""The cross-entropy method: it climbs a hill whose top is known, asks for common worlds, and repeats itself exactly."""

from __future__ import annotations

import numpy as np
import pytest

from agents.cross_entropy import tune_linear_score
from agents.heuristics.predicting import LinearScore

SIZE = len(LinearScore.features())
TOP = LinearScore.start() + np.random.default_rng(42).normal(0.0, 0.3, SIZE)


def height(weights, worlds) -> float:
    """A paraboloid with its top at TOP; `worlds` play no part."""
    return -float(((weights - TOP) ** 2).sum())


def tune(score=height, seed=0, **settings):
    return tune_linear_score(lambda rng: (), score, np.random.default_rng(seed), **settings)


def test_climbs_a_known_hill():
    """27 weights start about .3 from the top in each direction; forty rounds leave under a tenth of the squared distance."""
    tuned = tune(rounds=40, candidates=40, elites=8)
    start = height(LinearScore.start(), ())
    assert height(tuned, ()) > 0.1 * start, f"{height(tuned, ())} of {start}"


def test_starts_from_the_score_that_is_known_to_work():
    """The first candidate of the first round is the starting point itself, so that tuning compares with it."""
    seen = []
    tune(lambda weights, worlds: seen.append(weights.copy()) or 0.0, rounds=1, candidates=3, elites=1)
    assert np.array_equal(seen[0], LinearScore.start())
    assert len(seen) == 3 and not np.array_equal(seen[1], seen[2])


def test_candidates_of_a_round_meet_the_same_worlds():
    """Common worlds: three rounds of four candidates see three sets of worlds, each set four times."""
    met = []
    tune_linear_score(
        lambda rng: (int(rng.integers(2**32)),), lambda weights, worlds: met.append(worlds) or 0.0, np.random.default_rng(0),
        rounds=3, candidates=4, elites=2,
    )  # fmt: skip
    assert len(met) == 12
    assert all(len(set(met[i : i + 4])) == 1 for i in (0, 4, 8))
    assert len(set(met)) == 3


def test_mean_moves_seven_tenths_of_the_way_to_the_elite():
    """One round, one elite: mean = .3 start + .7 elite, where the elite is the best drawn."""
    drawn = []
    tuned = tune(lambda weights, worlds: drawn.append(weights.copy()) or height(weights, worlds), rounds=1, candidates=6, elites=1)
    elite = max(drawn, key=lambda weights: height(weights, ()))
    assert tuned == pytest.approx(0.3 * LinearScore.start() + 0.7 * elite)


def test_same_seed_same_weights():
    assert np.array_equal(tune(rounds=3), tune(rounds=3))
    assert not np.array_equal(tune(rounds=3), tune(rounds=3, seed=1))


def test_progress_is_told_each_round():
    lines = []
    tune(rounds=2, progress=lines.append)
    assert [line.split(":")[0] for line in lines] == ["cross-entropy round 1/2", "cross-entropy round 2/2"]

"""The adviser at the environment's side: same worlds, legal advice, same advice for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from agents.advised_env import AdvisedEnv
from agents.experiment import Companions
from envs.default_worlds import make_env
from envs.scheduling_env import EnvSettings
from envs.world_sampler import WorldSampler


def worlds_of() -> WorldSampler:
    return make_env(requests=40)._worlds  # type: ignore[return-value]


def follow(seed: int, advisor: str) -> tuple[list[int], list[float]]:
    env = AdvisedEnv(worlds_of(), None, EnvSettings(), advisor)
    observation, _ = env.reset(seed=seed)
    advice, rewards, ended = [], [], False
    while not ended:
        advice.append(env.expert_action())
        assert observation["mask"][advice[-1]] == 1.0
        observation, reward, terminated, truncated, _ = env.step(advice[-1])
        rewards.append(reward)
        ended = terminated or truncated
    assert env.expert_action() == 0
    return advice, rewards


@pytest.mark.parametrize("advisor", ["what_if", "power_of_two", "net_utility"])
def test_advice_is_legal_and_a_function_of_the_seed(advisor):
    first, again = follow(5, advisor), follow(5, advisor)
    assert first == again
    assert len(first[0]) >= 40


def test_an_advised_world_is_the_unadvised_one():
    """The adviser draws after everybody else: worlds, faults and companions stay what they were."""
    advised, plain = AdvisedEnv(worlds_of(), Companions(()), EnvSettings(), "what_if"), make_env(requests=40)
    observations = [env.reset(seed=3)[0] for env in (advised, plain)]
    for _ in range(30):
        for name, value in observations[0].items():
            np.testing.assert_array_equal(value, observations[1][name])
        action = advised.expert_action()
        observations = [env.step(action)[0] for env in (advised, plain)]


def test_a_heuristic_advises_on_one_kind_of_decision():
    with pytest.raises(ValueError, match="one kind of decision"):
        AdvisedEnv(worlds_of(), None, EnvSettings(asked=("route", "split")), "what_if")

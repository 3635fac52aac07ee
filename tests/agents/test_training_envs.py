"""Random streams of parallel environments, and what the vector wrapper keeps and hides."""

from __future__ import annotations

import numpy as np
import pytest
from toy_env import ObviousChoiceEnv

from agents.training_envs import STREAM_CLONING, STREAM_TRAINING, build_training_envs, episode_seed


def first_candidates(root_seed: int, count: int, worker_processes: bool = False, start_method: str = "forkserver") -> np.ndarray:
    """First feature of the first candidate in 100 decisions of each environment: (envs, 100)."""
    env = build_training_envs([ObviousChoiceEnv] * count, root_seed, worker_processes, start_method)
    try:
        observation = env.reset()
        rows = []
        for _ in range(100):
            rows.append(observation["candidates"][:, 0, 0])
            observation = env.step(observation["mask"].argmax(axis=1))[0]
    finally:
        env.close()
    return np.stack(rows, axis=1)


@pytest.mark.fault("K05")
def test_eight_environments_draw_eight_streams():
    """Seed 7: eight different streams, the same again on a rerun; seed 8 shares none of them."""
    seven, again, eight = first_candidates(7, 8), first_candidates(7, 8), first_candidates(8, 8)
    assert np.array_equal(seven, again)
    everything = np.concatenate([seven, eight])
    assert len(np.unique(everything, axis=0)) == 16
    # Not even one number is shared: no stream is a shifted copy of another.
    assert len(np.unique(everything)) == everything.size


@pytest.mark.fault("K05")
def test_streams_are_the_same_in_processes_however_they_start():
    expected = first_candidates(7, 2)
    for start_method in ("forkserver", "spawn"):
        assert np.array_equal(first_candidates(7, 2, True, start_method), expected)


@pytest.mark.fault("K05")
def test_no_episode_seed_is_used_twice():
    """20 neighbouring runs x 8 environments x 20 episodes x 2 streams."""
    seeds = {
        episode_seed(root, stream, env, episode)
        for root in range(20)
        for stream in (STREAM_CLONING, STREAM_TRAINING)
        for env in range(8)
        for episode in range(20)
    }
    assert len(seeds) == 20 * 2 * 8 * 20


def test_episodes_follow_the_seed_sequence_not_the_number_of_recordings():
    """Recording decisions for the scaling must not move the training episodes."""
    env = build_training_envs([ObviousChoiceEnv], 3, False)
    fresh = env.reset()["candidates"].copy()
    env.start_stream(STREAM_CLONING)
    other = env.reset()["candidates"].copy()
    for _ in range(90):
        observation = env.step(env.env_method("best_action"))[0]
    env.start_stream(STREAM_TRAINING)
    assert np.array_equal(env.reset()["candidates"], fresh)
    assert not np.array_equal(other, fresh) and observation is not None


@pytest.mark.fault("K04")
def test_cut_is_kept_for_the_buffer_and_hidden_from_the_algorithm():
    env = build_training_envs([ObviousChoiceEnv] * 2, 0, False)
    env.reset()
    for step in range(40):
        _, _, dones, infos = env.step(env.env_method("best_action"))
        assert dones.all() == (step == 39)
        assert not any(info["TimeLimit.truncated"] for info in infos)
        assert env.latest.truncated.all() == (step == 39)
    assert set(env.latest.final_observations) == {0, 1}
    assert infos[0]["was_truncated"] and "summary" in infos[0]


def test_restored_episode_goes_on_as_the_original():
    original = build_training_envs([ObviousChoiceEnv] * 2, 5, False)
    observation = original.reset()
    for _ in range(57):
        observation = original.step(original.env_method("best_action"))[0]
    copy = build_training_envs([ObviousChoiceEnv] * 2, 5, False)
    restored = copy.restore_episodes(original.episode_states())
    assert all(np.array_equal(restored[key], observation[key]) for key in observation)
    for _ in range(60):
        actions = original.env_method("best_action")
        ours, theirs = copy.step(actions), original.step(actions)
        assert all(np.array_equal(ours[0][key], theirs[0][key]) for key in observation)
        assert np.array_equal(ours[1], theirs[1])


class NoElapsed(ObviousChoiceEnv):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, info | {"elapsed_s": -1.0}


class NoLegalAction(ObviousChoiceEnv):
    def _draw(self):
        observation = super()._draw()
        self._observation["mask"][:] = 0.0
        return observation | {"mask": np.zeros_like(observation["mask"])}


class OtherMask(ObviousChoiceEnv):
    def action_masks(self):
        return np.ones(6, dtype=bool)


def test_broken_environments_are_named():
    env = build_training_envs([NoElapsed], 0, False)
    observation = env.reset()
    with pytest.raises(ValueError, match=r"elapsed_s.*-1\.0"):
        env.step(observation["mask"].argmax(axis=1))
    with pytest.raises(ValueError, match="no legal action"):
        build_training_envs([NoLegalAction], 0, False).reset()
    with pytest.raises(ValueError, match="differs from the mask"):
        build_training_envs([OtherMask], 0, False).reset()
    with pytest.raises(ValueError, match="no environment factories"):
        build_training_envs([], 0, False)

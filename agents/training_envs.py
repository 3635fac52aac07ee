"""Environments for training: own random stream per environment and episode, worker processes that die with their
parent, elapsed seconds and cuts kept for the buffer, and episodes that can be rebuilt after a kill by replaying them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper

from agents.smdp_buffer import Transitions
from agents.worker_processes import die_with_parent

KILLED_WORKER_JOIN_S = 5.0

STREAM_SCALING, STREAM_CLONING, STREAM_TRAINING = 0, 1, 2
"""Phases with random streams of their own, so that recording more observations does not move the training episodes."""


class ReplayMismatch(RuntimeError):
    """An episode cannot be rebuilt from its seed and actions."""


class WorkerDied(RuntimeError):
    """The process of an environment is gone."""


EnvFactory = Callable[[], gymnasium.Env]


def episode_seed(root_seed: int, stream: int, env_index: int, episode_index: int) -> int:
    """Seed of one episode, derived through numpy's SeedSequence: adding (seed + i) would let neighbouring runs share
    all but one stream (fault K05)."""
    sequence = np.random.SeedSequence(root_seed, spawn_key=(stream, env_index, episode_index))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


class SeededEpisodes(gymnasium.Wrapper):
    """Seeds every episode from (root seed, stream, environment, episode) and remembers its actions.

    An episode is a function of its seed and its actions, so the pair is a complete, small checkpoint of it.
    """

    def __init__(self, env: gymnasium.Env, root_seed: int, env_index: int) -> None:
        super().__init__(env)
        self._root_seed, self._env_index = root_seed, env_index
        self._stream, self._episode_index = STREAM_TRAINING, -1
        self._actions: list[int] = []

    def start_stream(self, stream: int) -> None:
        """Begin episode 0 of `stream` at the next reset."""
        self._stream, self._episode_index = stream, -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode; `seed` is ignored on purpose, since the stream decides."""
        self._episode_index += 1
        self._actions = []
        return self.env.reset(seed=self.current_seed(), options=options)

    def current_seed(self) -> int:
        return episode_seed(self._root_seed, self._stream, self._env_index, self._episode_index)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._actions.append(int(action))
        return self.env.step(int(action))

    def episode_state(self) -> tuple[int, int, list[int]]:
        """(stream, episode index, actions so far)."""
        return self._stream, self._episode_index, list(self._actions)

    def restore_episode(self, stream: int, episode_index: int, actions: Sequence[int]) -> Any:
        """Replay the episode; returns the observation it is at, or None where the replay took another course.

        (None rather than an exception: an exception would end a worker process and lose its message.)
        """
        self._stream, self._episode_index = stream, episode_index - 1
        observation, _ = self.reset()
        for action in actions:
            if not observation["mask"][action] > 0.5:
                return None
            observation, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                return None
        return observation


class _WorkerEnv:
    """Builds one environment, in the worker process when there is one."""

    def __init__(self, factory: EnvFactory, root_seed: int, env_index: int) -> None:
        self.factory, self.root_seed, self.env_index = factory, root_seed, env_index

    def __call__(self) -> SeededEpisodes:
        if multiprocessing.parent_process() is not None:
            die_with_parent()
        return SeededEpisodes(self.factory(), self.root_seed, self.env_index)


class SmdpVecEnv(VecEnvWrapper):
    """Keeps the latest `Transitions` and answers masks from the observation it has just seen.

    `TimeLimit.truncated` is cleared before the algorithm sees it: the buffer carries the value on, once, with the
    discount of the elapsed time; the algorithm would add a second one with the discount of one second.
    """

    latest: Transitions

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        self._masks = np.zeros((venv.num_envs, 0), dtype=bool)

    def start_stream(self, stream: int) -> None:
        self.venv.env_method("start_stream", stream)

    def reset(self) -> Any:
        observation = self.venv.reset()
        self._take_masks(observation)
        asked = np.stack(self.venv.env_method("action_masks"))
        if not np.array_equal(asked, self._masks):
            raise ValueError("action_masks() differs from the mask in the observation; both must say the same")
        return observation

    def _take_masks(self, observation: dict[str, np.ndarray]) -> None:
        self._masks = observation["mask"] > 0.5
        if not self._masks.any(axis=1).all():
            raise ValueError("an environment offers no legal action; hold or refuse must always be allowed")

    def step_wait(self) -> Any:
        try:
            observation, rewards, dones, infos = self.venv.step_wait()
        except (EOFError, ConnectionResetError) as error:
            raise WorkerDied("a training environment's process died; its own message is above this one on stderr") from error
        self._take_masks(observation)
        elapsed_s = np.array([_elapsed_of(info) for info in infos])
        truncated = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        final = {i: infos[i]["terminal_observation"] for i in np.flatnonzero(truncated)}
        self.latest = Transitions(elapsed_s, truncated, final)
        infos = [info | {"TimeLimit.truncated": False, "was_truncated": cut} for info, cut in zip(infos, truncated, strict=True)]
        return observation, rewards, dones, infos

    def kill_workers(self) -> None:
        """End the worker processes at once, without a word to them.

        `close` first collects the answers that it believes outstanding; after an interrupt in the middle of a step one of
        them has been read already, and it would wait for ever.
        """
        for process in getattr(self.venv, "processes", ()):
            process.kill()
        for process in getattr(self.venv, "processes", ()):
            process.join(KILLED_WORKER_JOIN_S)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        if method_name == "action_masks" and indices is None:
            return list(self._masks)
        return self.venv.env_method(method_name, *method_args, indices=indices, **method_kwargs)

    def episode_states(self) -> list[tuple[int, int, list[int]]]:
        return self.venv.env_method("episode_state")

    def restore_episodes(self, states: Sequence[tuple[int, int, Sequence[int]]]) -> dict[str, np.ndarray]:
        """Rebuild every environment's running episode; returns the stacked observation."""
        observations = [self.venv.env_method("restore_episode", *state, indices=[index])[0] for index, state in enumerate(states)]
        if any(observation is None for observation in observations):
            raise ReplayMismatch("a replayed episode took another course: the environment is not a function of its seed and actions")
        stacked = {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}
        self._take_masks(stacked)
        return stacked


def _elapsed_of(info: dict[str, Any]) -> float:
    elapsed_s = info.get("elapsed_s")
    if elapsed_s is None or not np.isfinite(elapsed_s) or elapsed_s < 0:
        raise ValueError(f'info["elapsed_s"]={elapsed_s!r}; every step must report the finite seconds to the next decision, 0 on a tie')
    return float(elapsed_s)


def build_training_envs(
    factories: Sequence[EnvFactory], root_seed: int, worker_processes: bool, start_method: str = "forkserver"
) -> SmdpVecEnv:
    """One environment per factory, in worker processes or in this one; the numbers are the same either way."""
    if not factories:
        raise ValueError("no environment factories given; at least one is needed")
    workers = [_WorkerEnv(factory, root_seed, index) for index, factory in enumerate(factories)]
    if not worker_processes:
        return SmdpVecEnv(DummyVecEnv(list(workers)))  # type: ignore[arg-type]
    if start_method == "forkserver":
        # Imported once in the fork server instead of once per worker.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["agents.training_envs"])
    return SmdpVecEnv(SubprocVecEnv(list(workers), start_method=start_method))  # type: ignore[arg-type]

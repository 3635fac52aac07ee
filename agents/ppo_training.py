"""PPO training of one decision: settings, the loop over rollouts, stopping on bad numbers, and exact resuming.

The loop drives sb3-contrib's MaskablePPO one rollout at a time, so that everything needed to go on (weights, moments,
random streams, running episodes) can be saved between two of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.logger import Logger

from agents.checkpoints import (
    Checkpoint,
    CheckpointError,
    load_module,
    load_optimizer,
    module_tensors,
    optimizer_tensors,
    read_checkpoint,
    replace_file,
    write_checkpoint,
)
from agents.expert_cloning import CloneReport, Expert, clone_from, record_decisions
from agents.policies.candidate_policy import CandidatePolicy, parameters_of, require_finite
from agents.smdp_buffer import SmdpRolloutBuffer
from agents.tensorboard_metrics import EpisodeMetrics, TensorboardWriter
from agents.training_envs import STREAM_SCALING, STREAM_TRAINING, EnvFactory, ReplayMismatch, SmdpVecEnv, build_training_envs

logger = logging.getLogger(__name__)

LAST_CHECKPOINT = "checkpoint_last.safetensors"
BEST_CHECKPOINT = "checkpoint_best.safetensors"
LEARNING_CURVE = "learning_curve.json"

PolicyFunction = Callable[[dict[str, np.ndarray]], int]
"""One observation (unbatched arrays) to one action."""


@dataclass(frozen=True, slots=True)
class PpoSettings:
    """Settings of one training run; every field has a working default."""

    total_decisions: int = 400_000
    """Decisions to train on; rounded up to whole rollouts."""
    n_steps: int = 1024
    """Decisions per environment and rollout."""
    minibatch_size: int = 512
    """Samples per gradient step; must divide n_steps x environments."""
    epochs: int = 3
    """Passes over each rollout."""
    learning_rate: float = 3e-4
    """Adam's step at the start."""
    learning_rate_final_fraction: float = 0.1
    """What is left of it at the end; it falls linearly."""
    entropy_coefficient: float = 2e-3
    """Reward for staying undecided."""
    clip_range: float = 0.2
    """PPO's limit on the change of a choice's probability, as a ratio."""
    value_coefficient: float = 0.5
    """Weight of the critic's loss. Actor and critic share nothing and are clipped apart."""
    max_grad_norm: float = 0.5
    """Largest gradient norm, of actor and critic each."""
    kl_stop: float = 0.02
    """A rollout's updates stop once the policy has moved this far (approximate KL)."""
    gamma_per_s: float = 0.9
    """Discount per elapsed second: 0.9 is a horizon of 9.5 s."""
    lambda_per_s: float = 0.7
    """Decay of the advantage trace per elapsed second."""
    hidden: int = 64
    """Width of the networks' layers."""
    activation: str = "tanh"
    """Their activation, tanh or relu."""
    observation_clip: float = 5.0
    """Scaled inputs are clipped to plus or minus this."""
    scaling_decisions: int = 4096
    """Decisions recorded before training to fit the frozen observation scaling and the reward scale."""
    scale_rewards: bool = True
    """Divide rewards by the spread of the recorded returns, for the critic's sake."""
    clone_decisions: int = 0
    """Decisions of the expert to imitate before PPO; 0 starts from a uniform policy."""
    clone_epochs: int = 5
    """Passes over them."""
    evaluate_every_rollouts: int = 5
    """Rollouts between two evaluations on validation worlds."""
    checkpoint_every_rollouts: int = 1
    """Rollouts between two checkpoints."""
    worker_processes: bool = True
    """One process per environment; False runs all in this one, with the same numbers."""
    start_method: str = "forkserver"
    """How worker processes start: forkserver or spawn."""
    seed: int = 0
    """Root of every random stream of the run."""

    def __post_init__(self) -> None:
        for name in ("total_decisions", "n_steps", "epochs", "hidden", "scaling_decisions"):
            if getattr(self, name) < 1:
                raise ValueError(f"PpoSettings.{name}={getattr(self, name)} must be at least 1")
        for name in ("evaluate_every_rollouts", "checkpoint_every_rollouts", "clone_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"PpoSettings.{name}={getattr(self, name)} must be at least 1")
        for name in ("gamma_per_s", "lambda_per_s"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"PpoSettings.{name}={getattr(self, name)} must be above 0 and at most 1 (it is per second)")
        if self.start_method not in ("forkserver", "spawn"):
            raise ValueError(f'PpoSettings.start_method="{self.start_method}" unknown; known: forkserver, spawn')
        if self.seed < 0 or self.clone_decisions < 0:
            raise ValueError(f"PpoSettings.seed={self.seed} and clone_decisions={self.clone_decisions} must not be negative")

    def check_rollout(self, environments: int) -> None:
        """Refuse a rollout that does not split into whole minibatches (fault K01): the advantages of a leftover sample
        would be divided by the spread of one number."""
        samples = self.n_steps * environments
        if self.minibatch_size < 2 or samples < 2:
            raise ValueError(f"rollout of {samples} samples with minibatch_size={self.minibatch_size}: both must be at least 2")
        if samples % self.minibatch_size:
            raise ValueError(
                f"rollout of {samples} samples (n_steps={self.n_steps} x {environments} environments) leaves "
                f"{samples % self.minibatch_size} over after minibatches of minibatch_size={self.minibatch_size}; "
                "choose a minibatch_size that divides it"
            )

    def digest(self) -> str:
        """SHA-256 of the settings that decide the numbers; how the workers run is not one of them."""
        values = dataclasses.asdict(self)
        for name in ("worker_processes", "start_method", "checkpoint_every_rollouts"):
            values.pop(name)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """One line of progress, given to `progress` after each rollout."""

    decisions: int
    total_decisions: int
    decisions_per_s: float
    tags: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPolicy:
    """The result of `train_ppo`: the policy (the best on validation where there was one) and how it came about."""

    policy: CandidatePolicy
    settings: PpoSettings
    history: tuple[dict[str, float], ...]
    best_score: float | None
    clone_report: CloneReport | None
    run_dir: Path

    def act(self, observation: dict[str, np.ndarray]) -> int:
        """Greedy choice for one observation."""
        return self.policy.act(observation)

    def value(self, observation: dict[str, np.ndarray]) -> float:
        """The critic's value of one observation, in units of the reward."""
        batch = {key: torch.as_tensor(np.asarray(array, dtype=np.float32)).unsqueeze(0) for key, array in observation.items()}
        with torch.no_grad():
            return float(self.policy.predict_values(batch) * self.policy.return_scale)


def train_ppo(
    make_env_fns: Sequence[EnvFactory],
    config: PpoSettings,
    run_dir: str | Path,
    evaluate: Callable[[PolicyFunction], float] | None = None,
    progress: Callable[[RolloutProgress], None] | None = None,
    *,
    expert: Expert | None = None,
    resume: bool = False,
) -> TrainedPolicy:
    """Train one policy, or go on with an interrupted run.

    Args:
        make_env_fns: one factory per parallel environment (must survive cloudpickle with worker processes).
        evaluate: score of a greedy policy on validation worlds, higher is better; the best is kept.
        expert: labels for cloning (`config.clone_decisions` > 0), and half of the decisions that the scaling is fitted on.
        resume: continue from the run directory's checkpoint; it ends with the numbers of an uninterrupted run.
    Raises: ValueError before the first step for settings that cannot work; FileExistsError when `run_dir` holds another
        run; NonFiniteTraining when a reward, gradient or weight is not finite (the last good checkpoint stays).
    """
    config.check_rollout(len(make_env_fns))
    if config.clone_decisions and expert is None:
        raise ValueError(f"clone_decisions={config.clone_decisions} needs an expert to imitate")
    directory = Path(run_dir)
    checkpoint = _checkpoint_to_resume(directory, config, resume)
    torch.set_num_threads(1)
    env = build_training_envs(make_env_fns, config.seed, config.worker_processes, config.start_method)
    run = None
    try:
        run = _PpoRun(env, config, directory)
        if checkpoint is None:
            run.prepare(expert)
        else:
            run.restore(checkpoint)
        run.train(evaluate, progress)
        result = run.result()
        env.close()
        return result
    except BaseException:
        env.kill_workers()
        raise
    finally:
        if run is not None:
            run.close()


def _checkpoint_to_resume(directory: Path, config: PpoSettings, resume: bool) -> Checkpoint | None:
    path = directory / LAST_CHECKPOINT
    if not path.exists():
        return None
    if not resume:
        raise FileExistsError(f"{directory} already holds a run; resume it or choose another directory")
    checkpoint = read_checkpoint(path)
    if checkpoint.state["settings_sha256"] != config.digest():
        raise CheckpointError(f"{path} was made with other settings; resume with the same ones or choose another directory")
    return checkpoint


class _PpoRun:
    """State of one training run between rollouts."""

    def __init__(self, env: SmdpVecEnv, config: PpoSettings, directory: Path) -> None:
        self.env, self.config, self.directory = env, config, directory
        init_seed, sample_seed, self._record_seed, shuffle_seed = np.random.SeedSequence(config.seed).spawn(4)
        torch.manual_seed(int(init_seed.generate_state(1)[0]))
        self.shuffle_rng = np.random.default_rng(shuffle_seed)
        self.model = _build_model(env, config, self.shuffle_rng)
        torch.manual_seed(int(sample_seed.generate_state(1)[0]))
        self.policy: CandidatePolicy = self.model.policy  # type: ignore[assignment]
        self.buffer: SmdpRolloutBuffer = self.model.rollout_buffer  # type: ignore[assignment]
        self.buffer.predict_values = self.policy.predict_values
        self.metrics = EpisodeMetrics(env.num_envs)
        self.history: list[dict[str, float]] = []
        self.rollouts = 0
        self.best_score: float | None = None
        self.clone_report: CloneReport | None = None
        self._writer: TensorboardWriter | None = None

    def prepare(self, expert: Expert | None) -> None:
        """Fit the frozen scaling, imitate the expert if asked to, and save the starting point."""
        config = self.config
        record_rng, clone_rng = (np.random.default_rng(seed) for seed in self._record_seed.spawn(2))
        fraction = 1.0 if expert is None else 0.5
        recording = record_decisions(self.env, STREAM_SCALING, config.scaling_decisions, record_rng, expert, fraction)
        flat = recording.flat()
        self.policy.normaliser.fit(flat["candidates"], flat["context"], flat["mask"])
        if config.scale_rewards:
            spread = float(recording.returns(config.gamma_per_s).std())
            if spread > 1e-6:
                self.policy.return_scale.fill_(spread)
        self.buffer.reward_scale = float(self.policy.return_scale)
        if config.clone_decisions:
            assert expert is not None
            self.clone_report = clone_from(
                self.policy,
                self.env,
                expert,
                config.clone_decisions,
                clone_rng,
                gamma_per_s=config.gamma_per_s,
                epochs=config.clone_epochs,
            )
            logger.info("cloned expert agreement_fraction=%.3f decisions=%d", self.clone_report.agreement_fraction, config.clone_decisions)
        self.env.start_stream(STREAM_TRAINING)
        self.model._setup_learn(self._total(), self.metrics, reset_num_timesteps=True)
        self.save()

    def _total(self) -> int:
        rollout = self.config.n_steps * self.env.num_envs
        return -(-self.config.total_decisions // rollout) * rollout

    def train(self, evaluate: Callable[[PolicyFunction], float] | None, progress: Callable[[RolloutProgress], None] | None) -> None:
        model, total = self.model, self._total()
        config_values = {name: str(value) for name, value in dataclasses.asdict(self.config).items()}
        self._writer = TensorboardWriter(self.directory / "tensorboard", config_values, model.num_timesteps)
        if evaluate is not None and not self.history:  # the start is a candidate, too: PPO need not improve on what was imitated
            tags = {"train/validation_score": self._validate(evaluate)}
            self.history.append({"decisions": 0.0, **tags})
            self._writer.write(0, tags)
        while model.num_timesteps < total:
            started_s = time.perf_counter()
            self._one_rollout(total)
            tags = self._collect_tags()
            is_last = model.num_timesteps >= total
            if evaluate is not None and (is_last or self.rollouts % self.config.evaluate_every_rollouts == 0):
                tags["train/validation_score"] = self._validate(evaluate)
            self.history.append({"decisions": float(model.num_timesteps), **tags})
            if is_last or self.rollouts % self.config.checkpoint_every_rollouts == 0:
                self.save()
            # Speed depends on the machine, so it is shown but not part of the reproducible history.
            speed = self.config.n_steps * self.env.num_envs / (time.perf_counter() - started_s)
            self._writer.write(model.num_timesteps, tags | {"train/decisions_per_s": speed})
            if progress is not None:
                progress(RolloutProgress(model.num_timesteps, total, speed, tags))

    def _one_rollout(self, total: int) -> None:
        model = self.model
        model.collect_rollouts(self.env, self.metrics, self.buffer, self.config.n_steps, use_masking=True)
        observations = {key: value.reshape(-1, *value.shape[2:]) for key, value in self.buffer.observations.items()}
        self.policy.normaliser.widen_ranges(observations["candidates"], observations["context"], observations["mask"])
        model._update_current_progress_remaining(model.num_timesteps, total)
        model.train()
        require_finite(parameters_of(self.policy), "weight")
        self.rollouts += 1

    def _collect_tags(self) -> dict[str, float]:
        tags = self.metrics.take()
        recorded = self.model.logger.name_to_value
        for name, value in recorded.items():
            # An explained variance of constant returns is NaN: nothing was measured.
            if name.startswith("train/") and isinstance(value, (int, float, np.number)) and np.isfinite(value):
                tags[name] = float(value)
        self.model.logger.dump(self.model.num_timesteps)
        return tags

    def _validate(self, evaluate: Callable[[PolicyFunction], float]) -> float:
        # Evaluation must not move the training's random stream.
        with torch.random.fork_rng(devices=[]):
            self.policy.set_training_mode(False)
            score = float(evaluate(self.policy.act))
        if not np.isfinite(score):
            raise ValueError(f"evaluate returned {score}; a validation score must be finite")
        if self.best_score is None or score > self.best_score:
            self.best_score = score
            write_checkpoint(
                self.directory / BEST_CHECKPOINT,
                module_tensors(self.policy, "policy"),
                {"score": score, "decisions": self.model.num_timesteps, "settings_sha256": self.config.digest()},
            )
        return score

    def save(self) -> None:
        """Write the checkpoint. Never called with weights that are not finite."""
        require_finite(parameters_of(self.policy), "weight")
        model = self.model
        tensors = module_tensors(self.policy, "policy") | optimizer_tensors(self.policy.optimizer, "optimizer")
        tensors["torch_rng"] = torch.get_rng_state().numpy()
        tensors["episode_starts"] = np.asarray(model._last_episode_starts, dtype=np.uint8)
        for key, value in model._last_obs.items():  # type: ignore[union-attr]
            tensors[f"observation/{key}"] = value
        episodes = []
        for index, (stream, episode_index, actions) in enumerate(self.env.episode_states()):
            episodes.append([stream, episode_index])
            tensors[f"episode_actions/{index}"] = np.array(actions, dtype=np.int64)
        state = {
            "settings_sha256": self.config.digest(),
            "settings": dataclasses.asdict(self.config),
            "decisions": model.num_timesteps,
            "updates": model._n_updates,
            "rollouts": self.rollouts,
            "episodes": episodes,
            "running_rewards": self.metrics.running_rewards(),
            "shuffle_rng": self.shuffle_rng.bit_generator.state,
            "best_score": self.best_score,
            "clone_report": None if self.clone_report is None else dataclasses.asdict(self.clone_report),
            "history": self.history,
        }
        write_checkpoint(self.directory / LAST_CHECKPOINT, tensors, state)
        replace_file(self.directory / LEARNING_CURVE, json.dumps(self.history, indent=1, allow_nan=False).encode())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put the run back to where the checkpoint was written."""
        model, state = self.model, checkpoint.state
        load_module(self.policy, checkpoint.part("policy"))
        load_optimizer(self.policy.optimizer, checkpoint.part("optimizer"))
        self.buffer.reward_scale = float(self.policy.return_scale)
        model.num_timesteps, model._n_updates = state["decisions"], state["updates"]
        self.rollouts, self.best_score, self.history = state["rollouts"], state["best_score"], list(state["history"])
        self.clone_report = None if state["clone_report"] is None else CloneReport(**state["clone_report"])
        self.metrics.restore_running_rewards(state["running_rewards"])
        self.shuffle_rng.bit_generator.state = state["shuffle_rng"]
        actions = checkpoint.part("episode_actions")
        episodes = [(stream, index, actions[str(i)].tolist()) for i, (stream, index) in enumerate(state["episodes"])]
        try:
            observation = self.env.restore_episodes(episodes)
        except ReplayMismatch as error:
            raise CheckpointError(f"{self.directory / LAST_CHECKPOINT} cannot be resumed: {error}") from error
        for key, saved in checkpoint.part("observation").items():
            if not np.array_equal(observation[key], saved):
                raise CheckpointError(
                    f"replayed episodes show other {key} than the checkpoint: the environment is not a function of its seed and actions"
                )
        model._last_obs = observation
        model._last_episode_starts = checkpoint.tensors["episode_starts"].astype(bool)
        model._setup_learn(self._total() - model.num_timesteps, self.metrics, reset_num_timesteps=False)
        torch.set_rng_state(torch.from_numpy(checkpoint.tensors["torch_rng"].copy()))
        logger.info("resumed decisions=%d rollouts=%d", model.num_timesteps, self.rollouts)

    def result(self) -> TrainedPolicy:
        low, high = self.policy.normaliser.candidate_low.clone(), self.policy.normaliser.candidate_high.clone()
        context_low, context_high = self.policy.normaliser.context_low.clone(), self.policy.normaliser.context_high.clone()
        if self.best_score is not None:
            load_module(self.policy, read_checkpoint(self.directory / BEST_CHECKPOINT).part("policy"))
        # The ranges are what training has seen altogether, whichever weights are kept.
        for name, value in (
            ("candidate_low", low),
            ("candidate_high", high),
            ("context_low", context_low),
            ("context_high", context_high),
        ):
            getattr(self.policy.normaliser, name).copy_(value)
        self.policy.set_training_mode(False)
        return TrainedPolicy(self.policy, self.config, tuple(self.history), self.best_score, self.clone_report, self.directory)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _build_model(env: SmdpVecEnv, config: PpoSettings, shuffle_rng: np.random.Generator) -> MaskablePPO:
    def learning_rate(progress_remaining: float) -> float:
        final = config.learning_rate_final_fraction
        return config.learning_rate * (final + (1.0 - final) * progress_remaining)

    model = MaskablePPO(
        CandidatePolicy,
        env,
        learning_rate=learning_rate,
        n_steps=config.n_steps,
        batch_size=config.minibatch_size,
        n_epochs=config.epochs,
        gamma=config.gamma_per_s,
        gae_lambda=config.lambda_per_s,
        clip_range=config.clip_range,
        ent_coef=config.entropy_coefficient,
        vf_coef=config.value_coefficient,
        max_grad_norm=float("inf"),  # GuardedAdam clips actor and critic apart
        # The library stops at 1.5 times its target.
        target_kl=config.kl_stop / 1.5,
        rollout_buffer_class=SmdpRolloutBuffer,
        rollout_buffer_kwargs={"transitions": env, "rng": shuffle_rng},
        policy_kwargs={
            "hidden": config.hidden,
            "activation": config.activation,
            "observation_clip": config.observation_clip,
            "max_grad_norm": config.max_grad_norm,
        },
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model

"""Training: it learns, refuses what would poison it, stops on bad numbers, and goes on after a kill as if nothing were."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_env import ObviousChoiceEnv, PoisonedEnv

from agents.checkpoints import CheckpointError, read_checkpoint
from agents.policies.candidate_policy import NonFiniteTraining
from agents.ppo_training import BEST_CHECKPOINT, LAST_CHECKPOINT, LEARNING_CURVE, PpoSettings, train_ppo
from agents.training_envs import WorkerDied
from tests.conftest import GUARD_S, SLOWER, heed_interrupt

SMALL = PpoSettings(
    total_decisions=1200,
    n_steps=100,
    minibatch_size=50,
    hidden=16,
    scaling_decisions=100,
    worker_processes=False,
    evaluate_every_rollouts=2,
)


def correct_fraction(act, decisions: int = 400) -> float:
    """Share of obvious choices that a policy gets right in fresh episodes."""
    env = ObviousChoiceEnv()
    observation, _ = env.reset(seed=999)
    correct = 0
    for _ in range(decisions):
        action = act(observation)
        correct += action == env.best_action()
        observation, _, _, truncated, _ = env.step(action)
        if truncated:
            observation, _ = env.reset()
    return correct / decisions


def run_script(run_dir: Path, settings: PpoSettings, stops_at: int = -1, **env_keywords) -> subprocess.Popen:
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here.parents[1]}{os.pathsep}{here}"}
    command = [sys.executable, str(here / "run_toy_training.py"), str(run_dir)]
    command += [json.dumps(dataclasses.asdict(settings)), json.dumps(env_keywords), str(stops_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=heed_interrupt)


def test_obvious_choice_is_learnt(tmp_path):
    """From uniform (about 30 % right) to above 90 % in 8,000 decisions; the best on validation is what comes back."""
    settings = PpoSettings(
        total_decisions=8000, n_steps=200, minibatch_size=200, learning_rate=4e-3, scaling_decisions=300, worker_processes=False,
        evaluate_every_rollouts=3, kl_stop=0.04,
    )  # fmt: skip
    trained = train_ppo([ObviousChoiceEnv] * 4, settings, tmp_path, evaluate=correct_fraction)
    score = correct_fraction(trained.act)
    assert score > 0.9
    assert score == trained.best_score == max(row.get("train/validation_score", 0) for row in trained.history)
    assert read_checkpoint(tmp_path / BEST_CHECKPOINT).state["score"] == score
    curve = json.loads((tmp_path / LEARNING_CURVE).read_text())
    assert [row["decisions"] for row in curve] == [800.0 * i for i in range(11)]  # the start, then every rollout
    assert curve[-1]["serve/goodput_fraction"] > 2 * curve[1]["serve/goodput_fraction"]
    assert list((tmp_path / "tensorboard").glob("events*"))


@pytest.mark.fault("K01")
@pytest.mark.parametrize(
    ("n_steps", "environments", "minibatch", "numbers"),
    [(65, 1, 64, ("65", "64")), (1, 1, 1, ("1", "1")), (33, 2, 64, ("66", "64")), (64, 1, 1, ("64", "1"))],
)
def test_leftover_samples_are_refused_before_the_first_step(tmp_path, n_steps, environments, minibatch, numbers):
    def never():
        raise AssertionError("an environment was built")

    settings = dataclasses.replace(SMALL, n_steps=n_steps, minibatch_size=minibatch)
    with pytest.raises(ValueError) as caught:
        train_ppo([never] * environments, settings, tmp_path / "run")
    assert all(number in str(caught.value) for number in numbers)
    assert not (tmp_path / "run").exists()


@pytest.mark.fault("K01")
def test_bad_reward_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    """Rewards turn NaN at step 100 of each environment: during scaling (50 of its steps) and the first rollout they
    are fine, in the second they are not. The checkpoint of the first is left."""
    settings = dataclasses.replace(SMALL, n_steps=25, scaling_decisions=100)
    with pytest.raises(NonFiniteTraining, match="reward"):
        train_ppo([PoisonedEnv] * 2, settings, tmp_path)
    checkpoint = read_checkpoint(tmp_path / LAST_CHECKPOINT)
    assert checkpoint.state["decisions"] == 50
    assert all(np.isfinite(array).all() for name, array in checkpoint.part("policy").items())


@pytest.mark.fault("K01")
def test_bad_weight_is_never_written(tmp_path, monkeypatch):
    """A weight turned infinite by an update (here put there) stops the run before the checkpoint."""
    from sb3_contrib import MaskablePPO

    genuine = MaskablePPO.train

    def poisoned(self):
        genuine(self)
        if self.num_timesteps >= 600:
            with torch.no_grad():
                self.policy.scorer.second.bias[3] = float("inf")

    monkeypatch.setattr(MaskablePPO, "train", poisoned)
    with pytest.raises(NonFiniteTraining, match=r"weight scorer\.second\.bias"):
        train_ppo([ObviousChoiceEnv] * 2, SMALL, tmp_path)
    checkpoint = read_checkpoint(tmp_path / LAST_CHECKPOINT)
    assert checkpoint.state["decisions"] == 400
    assert np.isfinite(checkpoint.tensors["policy/scorer.second.bias"]).all()


def test_killed_run_resumes_to_the_same_numbers(tmp_path):
    """SIGKILL after the third rollout, where it waits for it, with episodes of 37 decisions cut across rollouts; then the same command
    again."""
    keywords = {"episode_decisions": 37}
    whole = run_script(tmp_path / "whole", SMALL, **keywords)
    killed = run_script(tmp_path / "killed", SMALL, **keywords, stops_at=600)
    for line in killed.stdout:
        if int(line) == 600:
            killed.kill()
            break
    killed.wait(GUARD_S)
    assert killed.returncode == -signal.SIGKILL
    assert whole.wait(GUARD_S) == 0
    assert read_checkpoint(tmp_path / "killed" / LAST_CHECKPOINT).state["decisions"] < 1200
    resumed = run_script(tmp_path / "killed", SMALL, **keywords)
    lines = resumed.communicate(timeout=GUARD_S)[0].split()
    assert resumed.returncode == 0
    assert int(lines[0]) > 200  # it did not start over
    for name in (LAST_CHECKPOINT, BEST_CHECKPOINT):
        ours, theirs = read_checkpoint(tmp_path / "killed" / name), read_checkpoint(tmp_path / "whole" / name)
        assert ours.state == theirs.state
        assert ours.tensors.keys() == theirs.tensors.keys()
        for key, array in theirs.tensors.items():
            assert np.array_equal(ours.tensors[key], array), key
    assert (tmp_path / "killed" / LEARNING_CURVE).read_text() == (tmp_path / "whole" / LEARNING_CURVE).read_text()


def test_worker_processes_change_no_number(tmp_path):
    apart = train_ppo([ObviousChoiceEnv] * 2, dataclasses.replace(SMALL, total_decisions=400, worker_processes=True), tmp_path / "apart")
    together = train_ppo([ObviousChoiceEnv] * 2, dataclasses.replace(SMALL, total_decisions=400), tmp_path / "together")
    assert apart.history == together.history
    for name, weight in together.policy.state_dict().items():
        assert torch.equal(apart.policy.state_dict()[name], weight), name


def test_run_directory_is_not_mixed_up(tmp_path):
    settings = dataclasses.replace(SMALL, total_decisions=200)
    train_ppo([ObviousChoiceEnv] * 2, settings, tmp_path)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train_ppo([ObviousChoiceEnv] * 2, settings, tmp_path)
    with pytest.raises(CheckpointError, match="other settings"):
        train_ppo([ObviousChoiceEnv] * 2, dataclasses.replace(settings, seed=1), tmp_path, resume=True)


class UnseededEnv(ObviousChoiceEnv):
    """Ignores its seed: cannot be replayed."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=int(time.time_ns() % 2**32))


def test_environment_that_ignores_its_seed_cannot_be_resumed_silently(tmp_path):
    settings = dataclasses.replace(SMALL, total_decisions=200)
    train_ppo([UnseededEnv] * 2, settings, tmp_path)
    with pytest.raises(CheckpointError, match="not a function of its seed"):
        train_ppo([UnseededEnv] * 2, settings, tmp_path, resume=True)


def test_cloning_matches_the_expert_before_any_ppo(tmp_path):
    """2,000 labelled decisions of an obvious rule: well above the uniform policy's 30 %, and PPO starts from there."""
    settings = dataclasses.replace(
        SMALL, total_decisions=200, clone_decisions=2000, clone_epochs=12, learning_rate=1e-5, hidden=32, entropy_coefficient=0.0
    )
    trained = train_ppo([ObviousChoiceEnv] * 2, settings, tmp_path, expert="best_action")
    assert trained.clone_report.agreement_fraction > 0.9
    assert correct_fraction(trained.act) > 0.85


def test_the_start_is_a_candidate_for_the_best(tmp_path):
    """PPO that only spoils what was imitated (steps of 0.3) is not what is kept."""
    settings = dataclasses.replace(
        SMALL,
        total_decisions=400,
        clone_decisions=2000,
        clone_epochs=12,
        learning_rate=0.3,
        kl_stop=1e9,
        hidden=32,
        evaluate_every_rollouts=1,
    )
    trained = train_ppo([ObviousChoiceEnv] * 2, settings, tmp_path, evaluate=lambda act: correct_fraction(act), expert="best_action")
    scores = [row["train/validation_score"] for row in trained.history]
    assert trained.history[0]["decisions"] == 0.0
    assert scores[0] == max(scores) > min(scores)
    assert trained.best_score == scores[0] == correct_fraction(trained.act)


def test_expert_as_a_function_and_its_mistakes(tmp_path):
    settings = dataclasses.replace(SMALL, total_decisions=200, clone_decisions=100)
    masked_argmax = lambda o: int(np.where(o["mask"] > 0.5, o["candidates"][:, 0], -np.inf).argmax())  # noqa: E731
    assert train_ppo([ObviousChoiceEnv] * 2, settings, tmp_path / "a", expert=masked_argmax).clone_report.decisions == 100
    with pytest.raises(ValueError, match="forbidden candidate"):
        train_ppo([ObviousChoiceEnv] * 2, settings, tmp_path / "b", expert=lambda o: int(o["mask"].argmin()))
    with pytest.raises(ValueError, match="needs an expert"):
        train_ppo([ObviousChoiceEnv] * 2, settings, tmp_path / "c")


def test_training_ranges_cover_what_was_seen(tmp_path):
    trained = train_ppo([ObviousChoiceEnv] * 2, dataclasses.replace(SMALL, total_decisions=400), tmp_path)
    normaliser = trained.policy.normaliser
    assert (normaliser.candidate_low < -2).all() and (normaliser.candidate_high > 2).all()
    assert torch.isfinite(normaliser.context_low).all()


@pytest.mark.fault("K21")
def test_workers_die_with_their_parent(tmp_path):
    """Three runs side by side; one parent each is killed, terminated, interrupted."""
    settings = dataclasses.replace(SMALL, total_decisions=10**6, worker_processes=True)
    parents = []
    for sent in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        pids = tmp_path / f"pids_{sent}"
        pids.mkdir()
        parents.append((sent, pids, run_script(tmp_path / f"run_{sent}", settings, pid_dir=str(pids))))
    for sent, pids, parent in parents:
        parent.stdout.readline()  # one rollout is done
        workers = [int(path.name) for path in pids.iterdir()]
        assert len(workers) == 2 and parent.pid not in workers
        parent.send_signal(sent)
        parent.wait(GUARD_S)
        deadline_s = time.monotonic() + 5.0 * SLOWER
        while any(is_running(pid) for pid in workers):
            assert time.monotonic() < deadline_s, f"a worker outlived its parent after {sent}"
            time.sleep(0.02)


class FailingEnv(ObviousChoiceEnv):
    def step(self, action):
        raise ZeroDivisionError("on purpose")


def test_worker_that_fails_ends_the_run_with_a_word(tmp_path):
    with pytest.raises(WorkerDied, match="process died"):
        train_ppo([FailingEnv], dataclasses.replace(SMALL, worker_processes=True), tmp_path)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_long_step_does_not_keep_a_worker_alive(tmp_path):
    """A worker stuck inside an environment's step is ended too: the watch does not wait for the pipe to be read."""
    code = (
        "import sys, time; sys.path[:0] = sys.argv[1:3]\n"
        "from functools import partial\n"
        "from agents.training_envs import build_training_envs\n"
        "from test_ppo_training import StuckEnv\n"
        "if __name__ == '__main__':\n"
        "    env = build_training_envs([partial(StuckEnv, pid_dir=sys.argv[3])], 0, True)\n"
        "    env.reset(); env.step_async([0]); print('stepping', flush=True); time.sleep(600)\n"
    )
    script = tmp_path / "stuck.py"
    script.write_text(code)
    pids = tmp_path / "pids"
    pids.mkdir()
    here = Path(__file__).parent
    parent = subprocess.Popen([sys.executable, str(script), str(here.parents[1]), str(here), str(pids)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "stepping\n"
    worker = int(next(pids.iterdir()).name)
    assert is_running(worker)
    parent.kill()
    parent.wait(GUARD_S)
    deadline_s = time.monotonic() + 5.0 * SLOWER
    while is_running(worker):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class StuckEnv(ObviousChoiceEnv):
    def step(self, action):
        time.sleep(600)
        return super().step(action)


def test_settings_name_what_is_wrong():
    for keywords, message in (
        ({"gamma_per_s": 0.0}, "gamma_per_s"),
        ({"n_steps": 0}, "n_steps"),
        ({"start_method": "fork"}, "forkserver, spawn"),
    ):
        with pytest.raises(ValueError, match=message):
            PpoSettings(**keywords)


def test_partial_factories_keep_their_arguments(tmp_path):
    """A loop variable captured by reference would give every environment the last value."""
    factories = [partial(ObviousChoiceEnv, episode_decisions=count) for count in (10, 20)]
    trained = train_ppo(factories, dataclasses.replace(SMALL, total_decisions=200), tmp_path)
    assert trained.history[0]["train/episodes"] == 100 / 10 + 100 / 20

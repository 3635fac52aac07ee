"""Script of the kill tests: train on the toy environment, one line per rollout. Arguments: run directory, JSON settings,
JSON keywords of the environment, the decisions after which it stops itself (SIGSTOP)."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial

from toy_env import ObviousChoiceEnv

from agents.ppo_training import PpoSettings, train_ppo


def main() -> None:
    run_dir, settings, env_keywords = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    stops_at = int(sys.argv[4])
    factories = [partial(ObviousChoiceEnv, **env_keywords)] * 2
    train_ppo(
        factories,
        PpoSettings(**settings),
        run_dir,
        evaluate=lambda policy: float(sum(policy(observation) == best for observation, best in EXAM)),
        progress=lambda line: told(line.decisions, stops_at),
        resume=True,
    )


def told(decisions: int, stops_at: int) -> None:
    print(decisions, flush=True)
    if decisions == stops_at:
        os.kill(os.getpid(), signal.SIGSTOP)


def exam() -> list:
    env = ObviousChoiceEnv()
    pairs = []
    for seed in range(30):
        observation, _ = env.reset(seed=10_000 + seed)
        pairs.append((observation, env.best_action()))
    return pairs


if __name__ == "__main__":
    EXAM = exam()
    main()

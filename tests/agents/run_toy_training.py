"""Script of the kill tests: train on the toy environment, one line per rollout. Arguments: run directory, JSON settings,
JSON keywords of the environment."""

from __future__ import annotations

import json
import sys
from functools import partial

from toy_env import ObviousChoiceEnv

from agents.ppo_training import PpoSettings, train_ppo


def main() -> None:
    run_dir, settings, env_keywords = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    factories = [partial(ObviousChoiceEnv, **env_keywords)] * 2
    train_ppo(
        factories,
        PpoSettings(**settings),
        run_dir,
        evaluate=lambda policy: float(sum(policy(observation) == best for observation, best in EXAM)),
        progress=lambda line: print(line.decisions, flush=True),
        resume=True,
    )


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

"""The environment with a heuristic at its side that says what it would choose: labels for imitation (`agents.expert_cloning`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agents import heuristics
from envs.scheduling_env import CompanionSource, EnvSettings, SchedulingEnv, WorldSource


class AdvisedEnv(SchedulingEnv):
    """`advisor`: name of a heuristic of the one decision that is asked. It sees what the agent sees, and chance of its own."""

    def __init__(self, worlds: WorldSource, companions: CompanionSource | None, settings: EnvSettings, advisor: str) -> None:
        if len(settings.asked) != 1:
            raise ValueError(f"AdvisedEnv: asked={settings.asked}; a heuristic advises on one kind of decision")
        super().__init__(worlds, companions, settings)
        self._advisor_name = advisor

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        found = super().reset(seed=seed, options=options)
        # drawn after the world's and the companions' streams, so that an advised world is the same as an unadvised one
        self._advisor = heuristics.make(self.settings.asked[0], self._advisor_name, self.np_random.spawn(1)[0])
        return found

    def expert_action(self) -> int:
        """What the advisor would choose now; 0, the only legal action, when the world has ended."""
        return 0 if self.point is None else int(self._advisor.choose(self.point))

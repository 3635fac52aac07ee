"""What the controller keeps of the steps that the ranks carried out: their times, the ranks' speeds, how long the next should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs.domain.plans import LayerPlans
from envs.domain.specs import ModelSpec
from runtime.torch_tp.link_cost import LinkCost
from runtime.torch_tp.orders import StepDone, StepOrder
from runtime.torch_tp.overlap import pays_in_halves
from runtime.torch_tp.profiler import RankProfile, StepForecast, step_ratio, width_shares, work_units
from runtime.torch_tp.steps import RankTimings, StepCommand, StepResult


class StepAccount:
    """predicted_s: of the step under way; last_done: what each rank said of the last. model, link: once they are known."""

    def __init__(self, declared_speeds: Sequence[float], overlap: str) -> None:
        """overlap: as in SupervisorSettings."""
        self.model: ModelSpec | None = None
        self.link: LinkCost | None = None
        self.profile = RankProfile(declared_speeds)
        self._overlap = overlap
        self.predicted_s = 0.0
        self.last_done: dict[int, StepDone] = {}
        self._forecast = StepForecast()

    def begins(self, command: StepCommand, ranks: int) -> StepOrder:
        """What to tell the ranks."""
        self.predicted_s = self._forecast.predict(command)
        return StepOrder(command, self._overlaps(command, ranks))

    def _overlaps(self, command: StepCommand, ranks: int) -> bool:
        if self._overlap != "auto":
            return self._overlap == "always" and ranks > 1
        assert self.model is not None
        return pays_in_halves(command, self.model.hidden * self.model.weight_number_bytes, self.link)

    def ended(
        self,
        command: StepCommand,
        answers: Mapping[int, StepDone],
        members: Sequence[int],
        plans: Sequence[LayerPlans],
        began_s: float,
        ended_s: float,
    ) -> StepResult:
        """Learn from a step; returns what came of it. plans: the live ones, oldest first."""
        timings = tuple(
            RankTimings(worker, done.compute_s, done.memory_stall_s, done.communication_s, done.host_s)
            for worker, done in sorted(answers.items())
        )
        result = StepResult(command.step, answers[min(answers)].tokens, timings, began_s, ended_s)
        self._forecast.observe(command, result.passes, ended_s - began_s)
        if command.slices:
            busy_s = {worker: done.busy_s for worker, done in answers.items()}
            self.profile.observe(members, work_units(plans, command, result.passes), busy_s, ended_s)
        self.last_done = dict(answers)
        return result

    def ratio(self, members: Sequence[int], old: LayerPlans, new: LayerPlans) -> float:
        """Expected busy time of steps like the last one under `new` ÷ under `old`; 1.0 before the first step."""
        busy_s = self.profile.last_busy_s[list(members)].max(axis=0)
        return step_ratio(self.profile.speeds(members), width_shares(old), width_shares(new), busy_s)

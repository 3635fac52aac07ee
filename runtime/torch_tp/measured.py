"""What an engine did so far, added up step by step."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.torch_tp.steps import RankTimings, StepCommand, StepResult


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engine did so far. ranks: per worker id, times summed over all steps (s). step_s: wall time of all steps."""

    steps: int
    passes: int
    tokens: int
    step_s: float
    ranks: tuple[RankTimings, ...]
    rebuilds: int
    slides: int
    preemptions: int
    prefix_hit_tokens: int


class Totals:
    """Adds up steps."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankTimings] = {}
        self._steps = self._passes = self._tokens = 0
        self._step_s = 0.0

    def add(self, command: StepCommand, result: StepResult) -> None:
        self._steps += 1
        self._passes += result.passes if command.slices else 0
        self._tokens += sum(len(item.tokens) for item in result.tokens)
        self._step_s += result.ended_s - result.began_s
        for timing in result.timings:
            old = self._ranks.get(timing.rank)
            self._ranks[timing.rank] = timing if old is None else old + timing

    def measured(self, *, rebuilds: int, slides: int, preemptions: int, prefix_hit_tokens: int) -> Measured:
        ranks = tuple(self._ranks[worker] for worker in sorted(self._ranks))
        return Measured(self._steps, self._passes, self._tokens, self._step_s, ranks, rebuilds, slides, preemptions, prefix_hit_tokens)

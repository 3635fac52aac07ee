"""Drives a real group with a real batcher until its requests are answered: what the engine does, with a hook before each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.torch_tp.batcher import Batcher, BatcherSettings
from runtime.torch_tp.requests import GenerationRequest, SamplingSettings
from runtime.torch_tp.resplit import Slide
from runtime.torch_tp.steps import StepResult
from runtime.torch_tp.supervisor import GroupRebuilt, Supervisor, SupervisorSettings

SETTINGS = SupervisorSettings(kv_tokens_max=1024, slots_max=8)
PROMPTS = ((1, 397, 261), (1, 300, 301, 302), (1, 450, 264, 312, 266), (1, 273))
STEPS_MAX = 2000


@dataclass
class Run:
    """What came of it. tokens: answer of each prompt; rebuilt: every GroupRebuilt met."""

    tokens: list[list[int]]
    steps: int = 0
    rebuilt: list[GroupRebuilt] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    slides: list[Slide] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)


class Driver:
    """One batcher over one supervisor. `before_step(driver)` may kill, slide and join; `slide` begins a change of plan."""

    def __init__(
        self, supervisor: Supervisor, before_step: Callable[[Driver], None] = lambda driver: None, decode_steps_max: int = 1, **more: int
    ):
        self.supervisor = supervisor
        settings = BatcherSettings(
            context_tokens=128,
            kv_tokens_max=1024,
            slots_max=8,
            vocabulary=512,
            decode_steps_max=decode_steps_max,
            chunk_tokens_max=64,
            **more,
        )
        self.batcher = Batcher(settings, plan_version=supervisor.plan.version)
        self.run = Run([])
        self._before_step = before_step
        self._slide: Slide | None = None

    @property
    def is_sliding(self) -> bool:
        return self._slide is not None

    def slide(self, shares: Sequence[float]) -> None:
        self._slide = Slide(self.supervisor, self.supervisor.next_plan(shares))
        self.run.slides.append(self._slide)

    def generate(self, prompts: Sequence[tuple[int, ...]] = PROMPTS, max_tokens: int = 40, sampling: SamplingSettings | None = None) -> Run:
        run = self.run
        run.tokens = [[] for _ in prompts]
        for index, prompt in enumerate(prompts):
            request = GenerationRequest(str(index), prompt, max_tokens, sampling or SamplingSettings(), ignore_eos=True)
            self.batcher.submit(request, time.monotonic())
        while not self.batcher.is_idle:
            assert run.steps < STEPS_MAX, "the requests come to no end"
            self._before_step(self)
            try:
                self._advance_slide()
                command = self.batcher.next_step(time.monotonic())
                if command is None:
                    continue
                result = self.supervisor.step(command)
            except GroupRebuilt as error:
                run.rebuilt.append(error)
                self._slide = None
                self.batcher.lost_kv()
                self.batcher.use_plan(error.change.plan.version)
                continue
            run.steps += 1
            run.results.append(result)
            for event in self.batcher.apply(result, time.monotonic()):
                if event.token is not None:
                    answer = run.tokens[int(event.request_id)]
                    assert event.index == len(answer), "a token was lost or doubled"
                    answer.append(event.token)
        return run

    def finish_slide(self, deadline_s: float = 120.0) -> None:
        """Bring a slide to its end that was under way when the last request ended: ranks may prepare more slowly than they step."""
        until_s = time.monotonic() + deadline_s
        while self._slide is not None:
            assert time.monotonic() < until_s, "the slide comes to no end"
            self._advance_slide()

    def _advance_slide(self) -> None:
        slide = self._slide
        if slide is None:
            return
        step = slide.advance()
        if step is not None and step.moved:
            self.batcher.moved_kv(step.moved, step.moved_to)
            self.run.moved += step.moved
        if step is not None and step.new_plan is not None:
            self.batcher.use_plan(step.new_plan.version)
        if slide.is_over:
            self._slide = None


def generate(
    supervisor: Supervisor, before_step: Callable[[Driver], None] = lambda driver: None, *, decode_steps_max: int = 1, **options: object
) -> Run:
    return Driver(supervisor, before_step, decode_steps_max).generate(**options)  # type: ignore[arg-type]

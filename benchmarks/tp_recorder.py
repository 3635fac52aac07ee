"""An engine whose every step, change of plan and change of members is kept with its times, as the controller saw them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.domain.plans import LayerPlans
from envs.domain.requests import CLASS_INDEX
from envs.domain.snapshot import FloatArray
from runtime.torch_tp.answer_stream import Answer
from runtime.torch_tp.config import read_config
from runtime.torch_tp.engine import Engine, EngineSettings
from runtime.torch_tp.model_folder import model_folder
from runtime.torch_tp.nursery import Nursery
from runtime.torch_tp.orders import Prepared, PrepareOrder, Switched, SwitchOrder
from runtime.torch_tp.profiler import Cuts
from runtime.torch_tp.requests import GenerationRequest
from runtime.torch_tp.steps import StepCommand, StepResult
from runtime.torch_tp.supervisor import GroupChange, RankSettings, Supervisor, SupervisorSettings

ANSWER_DEADLINE_S = 300.0
_request_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """busy_s: shape (members, operations), of the whole step; plan: the newest when the step was sent."""

    command: StepCommand
    result: StepResult
    busy_s: FloatArray
    plan: LayerPlans

    @property
    def is_decode(self) -> bool:
        """Whether the step did nothing but decode: no prompt, and no slot that was new."""
        return bool(self.command.slices) and not self.command.new_slots and all(len(part.tokens) == 1 for part in self.command.slices)

    @property
    def wall_s(self) -> float:
        return self.result.ended_s - self.result.began_s

    @property
    def pass_s(self) -> float:
        return self.wall_s / self.result.passes

    @property
    def tokens(self) -> int:
        return sum(len(slot.tokens) for slot in self.result.tokens)


class RecordingSupervisor(Supervisor):
    """records: steps that came to an end. prepared, switches: of every change of plan; a switch with its wall time at the controller.

    held_cuts: what a plan by measured speeds is to be instead, so that runs in between do not change it; None: nothing.
    """

    held_cuts: Cuts | None = None
    records: list[StepRecord]
    prepared: list[Prepared]
    switches: list[tuple[Switched, float]]

    def keep_records(self) -> None:
        self.records, self.prepared, self.switches = [], [], []

    def next_plan(self, shares: Sequence[float] | None = None, **cuts: Any) -> LayerPlans:
        held = self.held_cuts if shares is None else None
        return super().next_plan(shares, **cuts) if held is None else super().next_plan(**held)

    def step(self, command: StepCommand) -> StepResult:
        plan = self.plan
        result = super().step(command)
        busy_s = np.array([self.last_done[worker].busy_s for worker in self.members])
        self.records.append(StepRecord(command, result, busy_s, plan))
        return result

    def prepare(self, order: PrepareOrder) -> Future[Prepared]:
        future = super().prepare(order)
        future.add_done_callback(lambda done: None if done.exception() else self.prepared.append(done.result()))
        return future

    def switch(self, order: SwitchOrder, plan: LayerPlans | None = None) -> Switched:
        begin_s = time.monotonic()
        switched = super().switch(order, plan)
        self.switches.append((switched, time.monotonic() - begin_s))
        return switched


class RecordedEngine(Engine):
    """What `Engine.start` gives, over a RecordingSupervisor and without text."""

    @property
    def recorder(self) -> RecordingSupervisor:
        assert isinstance(self.supervisor, RecordingSupervisor)
        return self.supervisor

    @classmethod
    def begin(cls, model: str, ranks: Sequence[RankSettings], *, kv_tokens_max: int = 4096, slots_max: int = 16) -> RecordedEngine:
        folder = model_folder(model)
        settings = EngineSettings(kv_tokens_max=kv_tokens_max, slots_max=slots_max, with_text=False)
        nursery = Nursery()
        nursery.start()

        def make_supervisor(note: Callable[[GroupChange], None]) -> RecordingSupervisor:
            limits = SupervisorSettings(kv_tokens_max=kv_tokens_max, slots_max=slots_max)
            recorder = RecordingSupervisor(folder, ranks, limits, nursery=nursery, on_change=note)
            recorder.keep_records()
            return recorder

        try:
            return cls(make_supervisor, read_config(folder), None, settings, nursery)
        except BaseException:
            nursery.close()
            raise

    def answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[Answer], list[StepRecord]]:
        """Greedy answers of exactly `tokens` tokens to prompts that are submitted together, and the steps that it took."""
        before = len(self.recorder.records)
        streams = [self.submit(request) for request in requests_for(prompts, tokens)]
        answers = [stream.result(ANSWER_DEADLINE_S) for stream in streams]
        short = [answer for answer in answers if len(answer.tokens) != tokens]
        if short:
            raise RuntimeError(f"{len(short)} answers are not {tokens} tokens long: {short[0].finish_reason} {short[0].detail}")
        return answers, self.recorder.records[before:]


def requests_for(prompts: Sequence[Sequence[int]], tokens: int) -> list[GenerationRequest]:
    """Of the class whose limits are loosest, so that the batch fills at once and throughput counts."""
    return [
        GenerationRequest(f"bench-{next(_request_numbers)}", tuple(ids), tokens, class_index=CLASS_INDEX["batch"], ignore_eos=True)
        for ids in prompts
    ]


def decode_tokens_per_s(records: Sequence[StepRecord], batch: int) -> float:
    """Rate of the steps in which `batch` sequences decode and nothing else happens, whatever lies between these steps included.

    Sequences may be admitted, and therefore end, one after the other; before all are there and once the first has left it is another
    batch. Raises: ValueError where there was no such step.
    """
    full = [index for index, record in enumerate(records) if record.is_decode and len(record.command.slices) == batch]
    if not full or full[0] == 0:
        raise ValueError(f"no step decodes {batch} sequences and nothing else; let the answers be longer")
    run = records[full[0] : full[-1] + 1]
    return sum(record.tokens for record in run) / (run[-1].result.ended_s - records[full[0] - 1].result.ended_s)

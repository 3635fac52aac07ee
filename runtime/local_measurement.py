"""Measures what real ranks need for steps of many sizes, one table row per rank and step, and what their all-reduces cost.

Steps go through the very engine that serves: the same kernels, communicator and controller. Leaves to `step_time_fit` what follows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from envs.domain.plans import LayerPlans
from envs.domain.specs import ModelSpec
from runtime.torch_tp.orders import StepDone
from runtime.torch_tp.profiler import OPERATIONS
from runtime.torch_tp.requests import SamplingSettings
from runtime.torch_tp.steps import NewSlot, PrefixCopy, SliceCommand, StepCommand
from runtime.torch_tp.supervisor import Supervisor

CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCHES = (1, 2, 4, 8, 16)
REDUCE_BYTES = (1024, 4096, 16384, 65536, 262144, 1048576)
FILL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class StepRow:
    """One rank in steps of one size, in s, lower quartiles over the repeats: what other processes take is no property of the rank.

    tokens: computed; pairs: query-key pairs of prompt tokens; kv_tokens:
    read by decoding ones; sequences: rows of logits. step_s: the whole step as the controller saw it."""

    rank: int
    kind: str
    tokens: int
    pairs: float
    kv_tokens: int
    sequences: int
    attention_s: float
    mlp_s: float
    vocabulary_s: float
    communication_s: float
    host_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class ReduceRow:
    """All-reduces of one size over `ranks` ranks: the slowest rank's median and 99th percentile."""

    ranks: int
    size_bytes: int
    time_s_p50: float
    time_s_p99: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything that was measured, and under which plan."""

    model: ModelSpec
    plan: LayerPlans
    slow_factors: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    nodes: tuple[str, ...]
    steps: tuple[StepRow, ...]
    reduces: tuple[ReduceRow, ...]


def measure(supervisor: Supervisor, *, context_tokens: int, slots_max: int, repeats: int = 5, budget_s: float = 120.0) -> Measurement:
    """Run the steps on a group that stands and serves nothing else. Stops adding sizes when `budget_s` is spent.

    Raises: GroupRebuilt when a rank is lost meanwhile; a table of two different groups would be of no use.
    """
    probe = _Probe(supervisor, repeats)
    end_s = time.monotonic() + budget_s
    rows: list[StepRow] = []
    for tokens in CHUNKS:
        if tokens <= context_tokens - 2 and time.monotonic() < end_s:
            rows += probe.prefill(tokens)
    contexts = sorted({min(16, context_tokens // 2), max(1, context_tokens // 2), max(1, int(context_tokens * 0.9))})
    for context in contexts:
        for batch in BATCHES:
            if batch <= slots_max and time.monotonic() < end_s:
                rows += probe.decode(batch, context)
    members = supervisor.members
    ranks = [supervisor.rank_settings(worker) for worker in members]
    assert supervisor.model_spec is not None
    return Measurement(
        supervisor.model_spec,
        supervisor.plan,
        tuple(rank.slow_factor for rank in ranks),
        supervisor.memory_bytes(),
        supervisor.nodes(),
        tuple(rows),
        tuple(ReduceRow(len(members), *row) for row in supervisor.profile_all_reduce(REDUCE_BYTES, 40)),
    )


class _Probe:
    """Issues step commands on slots of its own and collects the ranks' times."""

    def __init__(self, supervisor: Supervisor, repeats: int) -> None:
        self._supervisor = supervisor
        self._repeats = repeats
        self._step = 0

    def prefill(self, tokens: int) -> list[StepRow]:
        """A prompt of `tokens` tokens in one step."""
        samples = []
        for _ in range(self._repeats + 1):
            samples.append(self._run((self._slice(0, tokens, 0),), new_slots=(self._new(0, tokens + 1),)))
        return self._rows("prefill", samples[1:], tokens, tokens * tokens / 2.0, 0, 1)

    def decode(self, batch: int, context: int) -> list[StepRow]:
        """One token for each of `batch` sequences that hold `context` tokens."""
        room = context + self._repeats + 2
        new = tuple(self._new(slot, room) for slot in range(batch))
        filled = 0
        while filled < context:
            part = min(FILL_TOKENS, context - filled)
            self._run((self._slice(0, part, filled, wants=False),), new_slots=new[:1] if filled == 0 else ())
            filled += part
        copies = tuple(PrefixCopy(0, slot, context) for slot in range(1, batch))
        samples = []
        for index in range(self._repeats + 1):
            slices = tuple(self._slice(slot, 1, context + index) for slot in range(batch))
            samples.append(self._run(slices, new_slots=new[1:] if index == 0 else (), copies=copies if index == 0 else ()))
        # after the discarded first one, `repeats` steps whose context grew by one each
        kv_tokens = batch * round(context + 1 + (self._repeats + 1) / 2)
        rows = self._rows("decode", samples[1:], batch, 0.0, kv_tokens, batch)
        self._run((), releases=tuple(range(batch)))
        return rows

    def _new(self, slot: int, room: int) -> NewSlot:
        return NewSlot(slot, f"probe-{slot}", self._supervisor.plan.version, room, 0, SamplingSettings())

    def _slice(self, slot: int, tokens: int, start: int, wants: bool = True) -> SliceCommand:
        return SliceCommand(slot, f"probe-{slot}", self._supervisor.plan.version, (1,) * tokens, start, wants)

    def _run(
        self,
        slices: tuple[SliceCommand, ...],
        *,
        new_slots: tuple[NewSlot, ...] = (),
        releases: Iterable[int] = (),
        copies: tuple[PrefixCopy, ...] = (),
    ) -> tuple[float, dict[int, StepDone]]:
        self._step += 1
        command = StepCommand(self._step, slices, new_slots=new_slots, releases=tuple(releases), prefix_copies=copies)
        result = self._supervisor.step(command)
        return result.ended_s - result.began_s, self._supervisor.last_done

    def _rows(
        self, kind: str, samples: Sequence[tuple[float, dict[int, StepDone]]], tokens: int, pairs: float, kv_tokens: int, sequences: int
    ) -> list[StepRow]:
        rows = []
        step_s = _quartile([took_s for took_s, _ in samples])
        for rank, worker in enumerate(self._supervisor.members):
            done = [by_worker[worker] for _, by_worker in samples]
            busy = [_quartile([item.busy_s[operation] for item in done]) for operation in range(len(OPERATIONS))]
            communication_s = _quartile([item.communication_s for item in done])
            host_s = _quartile([item.host_s for item in done])
            times = (*busy, communication_s, host_s, step_s)
            rows.append(StepRow(rank, kind, tokens, pairs, kv_tokens, sequences, *times))
        return rows


def _quartile(values: Sequence[float]) -> float:
    return float(np.percentile(values, 25))

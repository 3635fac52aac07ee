"""EMULATION: a group without devices. Calibrated step times pass in real time (`envs.group_kernel`), the tokens are synthetic.

For tests of everything above a group, up to 64 of them in one process, and for trying a policy before owning the GPUs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from envs.decision import predictor as P
from envs.decision.length_estimator import LengthEstimator
from envs.decision.move_prices import copy_s
from envs.domain.plans import SplitPlan, TpGroup
from envs.group_kernel import layout as L
from envs.group_kernel import reading as R
from envs.group_kernel.advance import join
from envs.group_kernel.jump import cut_jump, jump_duration_s, steps_done_by
from envs.group_kernel.queue import take_out
from envs.scenario.cluster_spec import ClusterLimits
from runtime.backends.emulated_kernel import KernelSettings, PlanSlots, kernel_of, kv_tokens, slow_down
from runtime.backends.interface import (
    NOTHING,
    OWN_GROUP_COMMANDS,
    Backend,
    BackendBusy,
    BackendFault,
    BadCall,
    Begun,
    GivenBack,
    GroupReport,
    KvPart,
    MoveRefused,
    PlanReport,
    SplitDone,
)
from runtime.backends.kernel_report import KernelReader, times_of_record
from runtime.backends.synthetic_text import SyntheticDecoder, SyntheticText
from runtime.calls import Call, Piece
from runtime.request_notes import AnswerTimes
from runtime.torch_tp.requests import SamplingSettings
from runtime.torch_tp.stop_strings import AnswerText

logger = logging.getLogger(__name__)

REPORT_AGE_MAX_S = 0.05
LATEST_STEP_S = 0.5  # longest sleep while something runs
TAKEN_MAX = 64  # calls whose KV has come and that have not


@dataclass(eq=False)
class _Inside:
    """A call in the group. sent: tokens whose pieces were handed over. error: what ended it otherwise."""

    call: Call
    answer: SyntheticText
    text: AnswerText
    slot: int
    sent: int
    first: int
    pieces: deque[Piece] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    is_over: bool = False


class EmulatedBackend:
    """Implements `Backend`. `kill` and `slow_down` are for drills."""

    is_emulation = True
    keeps_prefixes = False
    can = OWN_GROUP_COMMANDS
    kv_home = "emulated"

    def __init__(
        self,
        group: TpGroup,
        group_index: int,
        limits: ClusterLimits,
        settings: KernelSettings | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = group.name
        self.group_index = group_index
        self._limits, self._settings, self._now_s = limits, settings or KernelSettings(), now_s
        self._settle(group)
        self._lengths = LengthEstimator()
        self._inside: dict[int, _Inside] = {}
        self._names: dict[int, str] = {}
        self._taken: dict[str, int] = {}  # by call: tokens whose KV has come
        self._next_id = 0
        self._scratch = np.empty(L.SLOT_INTS, np.int64), np.empty(L.SLOT_FLOATS)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_dead = False

    def _settle(self, group: TpGroup) -> None:
        """A kernel of `group`, with nobody inside."""
        self._group = group
        self._state = kernel_of(group, self._limits, self._settings, self._now_s())
        self._plans = PlanSlots(self._state, group, self._limits, self._settings)
        self._reader = KernelReader(self._state)
        self._report: GroupReport | None = None

    async def start(self) -> None:
        self._is_dead = False
        self._state.group_float[0, L.GF_CLOCK_S] = self._now_s()
        self._task = asyncio.create_task(self._run(), name=f"emulated-{self.name}")

    async def close(self) -> None:
        self.kill("closed")
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._report = None

    @property
    def is_alive(self) -> bool:
        return not self._is_dead and self._task is not None

    def kill(self, reason: str = "killed") -> None:
        """The group is gone: every call inside ends with a fault, now."""
        self._is_dead = True
        self._taken.clear()
        for key in list(self._inside):
            self._end(key, BackendFault(f"{self.name}: {reason}"))

    def slow_down(self, compute: Sequence[float], memory: Sequence[float]) -> None:
        """From now on the ranks take so many times as long."""
        cut_jump(self._state, 0, self._now_s())
        slow_down(self._state, compute, memory)

    def report(self) -> GroupReport | None:
        now_s = self._now_s()
        if self.is_alive and (self._report is None or now_s - self._report.at_s >= REPORT_AGE_MAX_S):
            self._advance(now_s)
            said = self._reader.report(0, now_s, self._names)
            has_pace = self._state.group_float[0, L.GF_PREDICTED_S] > 0.0  # a newcomer is no faster or slower than declared: nobody knows
            self._report = replace(said, plan=self._plan_report(), correction=said.correction if has_pace else None)
        return self._report

    def _plan_report(self) -> PlanReport:
        plan = self._plans.current
        columns = tuple(float(blocks * plan.mlp_block) for blocks in plan.mlp_blocks)
        heads = tuple(map(float, plan.query_heads))
        return PlanReport(self._plans.version, heads, columns, plan.vocabulary_rows, tuple(range(plan.ranks)))

    async def set_split(self, plan: SplitPlan) -> SplitDone:
        if not self.is_alive:
            raise MoveRefused(f"{self.name}: not running")
        now_s = self._now_s()
        self._advance(now_s)
        paused_s = self._plans.switch(plan, now_s)
        self._report = None
        self._wake.set()
        return SplitDone(self._plans.version, paused_s)

    def why_not_join(self, donor: Backend) -> str:
        if not isinstance(donor, EmulatedBackend):
            return f"{donor.name} is of another kind"
        if donor._group.model != self._group.model:
            return f"model differs: {self._group.model.name!r} in {self.name}, {donor._group.model.name!r} in {donor.name}"
        return ""

    def join(self, donor: Backend, merged: TpGroup) -> Callable[[], None]:
        old = self._group
        self._settle(merged)
        return lambda: self._settle(old)

    async def give_kv(self, call_id: str, after: int) -> KvPart:
        """It takes what the simulator takes for it, beside the steps."""
        tokens = self._tokens_held(call_id)
        if tokens <= after:
            raise MoveRefused(f"{self.name}: the call does not run here, or its KV is there already")
        seconds = copy_s(self._group, tokens - after)
        await asyncio.sleep(seconds)
        return KvPart(tokens, round((tokens - after) * self._group.model.kv_bytes_per_token), seconds, call_id)

    def _tokens_held(self, call_id: str) -> int:
        self._advance(self._now_s())
        for row in self._reader.residents(0).tolist():
            if self._names.get(row[R.V_REQUEST]) == call_id and row[R.V_ADMITTED]:
                held = row[R.V_PROMPT] + row[R.V_GENERATED] - row[R.V_PREFILL_LEFT]
                return int(held) if row[R.V_PREFILL_LEFT] else int(held) - 1  # the last token's is still to come
        return 0

    async def take_kv(self, part: KvPart) -> None:
        if not self.is_alive:
            raise MoveRefused(f"{self.name}: not running")
        while len(self._taken) >= TAKEN_MAX:
            del self._taken[next(iter(self._taken))]
        self._taken[part.place] = part.tokens

    async def probe(self) -> bool:
        return self.is_alive

    def continues(self, call: Call, begun: Begun) -> bool:
        return len(begun.tokens) == begun.pieces

    async def submit(self, call: Call, begun: Begun = NOTHING) -> AsyncIterator[Piece]:
        if not self.is_alive:
            raise BackendFault(f"{self.name}: not running")
        key, inside = self._enter(call, begun)
        try:
            while True:
                while inside.pieces:
                    piece = inside.pieces.popleft()
                    yield piece
                    if piece.finish_reason is not None:
                        return
                if inside.error is not None:
                    raise inside.error
                inside.changed.clear()
                await inside.changed.wait()
        finally:
            self._leave(key)

    def _enter(self, call: Call, begun: Begun) -> tuple[int, _Inside]:
        most = min(self._limits.context_tokens, kv_tokens(self._state))
        if call.prompt_tokens + call.max_tokens > most:
            raise BadCall(f"{call.prompt_tokens} prompt tokens and max_tokens={call.max_tokens} exceed {most}", reason="too_long")
        answer, text = SyntheticText(call, self._lengths), AnswerText(SyntheticDecoder(), call.stop_strings)
        text.follow(begun.tokens)
        done, now_s = len(begun.tokens), self._now_s()
        self._advance(now_s)
        key = self._next_id
        limits = P.class_limits()[call.class_index]
        slot = -1
        if self._state.group_int[0, L.GI_WAITING] < self._limits.queue_limit:
            slot = join(
                self._state, 0, now_s, key, call.class_index, max(1, call.prompt_tokens + done), max(1, len(answer) - done), now_s,
                P.queue_key(now_s - begun.waited_s, call.class_index, 2.0), limits[2],
            )  # fmt: skip
        if slot < 0:
            raise BackendBusy(f"{self.name}: queue full")
        if kv_tokens_taken := self._taken.pop(call.call_id, 0):
            self._state.slot_int[0, slot, L.SI_DONE] = min(kv_tokens_taken, call.prompt_tokens + done - 1)
        self._next_id += 1
        inside = self._inside[key] = _Inside(call, answer, text, slot, done, done)
        self._names[key] = call.call_id
        self._wake.set()
        return key, inside

    def _leave(self, key: int) -> None:
        """The caller is done with it; where the group is not, its slot and KV are free now."""
        inside = self._inside.pop(key, None)
        self._names.pop(key, None)
        if inside is not None and not inside.is_over:
            self._take_out(key, inside)
            self._wake.set()

    def _take_out(self, key: int, inside: _Inside) -> None:
        now_s = self._now_s()
        self._advance(now_s)
        if not inside.is_over and self._state.slot_int[0, inside.slot, L.SI_REQUEST] == key:
            take_out(self._state, 0, inside.slot, now_s, *self._scratch)
            cut_jump(self._state, 0, now_s)

    def _end(self, key: int, error: Exception) -> None:
        inside = self._inside[key]
        inside.error = error
        if not inside.is_over:
            self._take_out(key, inside)
            inside.is_over = True
        inside.changed.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            now_s = self._now_s()
            self._advance(now_s)
            delay_s = self._next_step_s(now_s) - now_s
            try:
                async with asyncio.timeout(max(0.0, min(delay_s, LATEST_STEP_S)) if delay_s < np.inf else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _next_step_s(self, now_s: float) -> float:
        """When the next token may be there; inf while idle."""
        ints, group = self._state.group_int[0], self._state.group_float[0]
        if not ints[L.GI_JUMP_ACTIVE]:
            return now_s + 0.001 if ints[L.GI_RUNNING] + ints[L.GI_WAITING] else np.inf
        done = steps_done_by(group, now_s, ints[L.GI_JUMP_STEPS])
        return float(group[L.GF_JUMP_START_S] + jump_duration_s(group, done + 1))

    def _advance(self, now_s: float) -> None:
        """Bring the kernel to the present and hand over what was made meanwhile."""
        if self._is_dead:
            return
        self._reader.advance(now_s)
        for row in self._reader.residents(0).tolist():
            if row[R.V_GENERATED] and (inside := self._inside.get(row[R.V_REQUEST])) is not None:
                self._hand_over(inside, row[R.V_GENERATED])
        state = self._state
        for index in range(int(state.record_count[0])):
            row = state.record_int[index]
            inside = self._inside.get(int(row[L.RI_REQUEST]))
            if inside is None or inside.is_over:
                continue
            if row[L.RI_KIND] == L.RECORD_COMPLETED:
                self._hand_over(inside, int(row[L.RI_GENERATED]), times_of_record(row, state.record_float[index]))
            inside.is_over = True
            if row[L.RI_KIND] == L.RECORD_TOO_LARGE:
                inside.error = GivenBack(f"{self.name}: larger than the KV pool that the new split leaves")  # it fitted when it came
            elif row[L.RI_KIND] != L.RECORD_COMPLETED:
                inside.error = BackendFault(f"{self.name}: given up after waiting")
            inside.changed.set()
        state.record_count[0] = 0

    def _hand_over(self, inside: _Inside, generated: int, times: AnswerTimes | None = None) -> None:
        """Pieces of the tokens up to the `generated`-th of this attempt; times: of an answer that is whole."""
        upto = min(inside.first + generated, len(inside.answer))
        if inside.sent >= upto or inside.text.matched is not None:
            return
        call = inside.call
        for index in range(inside.sent, upto):
            token = inside.answer[index]
            text, reason = inside.text.push(token), None
            if inside.text.matched is not None:
                reason = "stop"
            elif index + 1 == len(inside.answer):
                text += inside.text.finish()
                reason = inside.answer.finish_reason if inside.text.matched is None else "stop"
            ends = {"prompt_tokens": call.prompt_tokens, "output_tokens": index + 1, "times": times} if reason else {}
            inside.pieces.append(Piece(index, token, text, None, reason, **ends))
            if reason is not None:
                break
        inside.sent = upto
        inside.changed.set()


def rehearse(group: TpGroup, limits: ClusterLimits, settings: KernelSettings | None = None) -> None:
    """Play calls of nobody's on a clock of their own, all at once: loads the compiled code that such groups need."""
    clock_s = [0.0]
    backend = EmulatedBackend(group, 0, limits, settings, lambda: clock_s[0])
    call = Call("", "", "completion", (), 1, 2, SamplingSettings(), (), None, 0, 0, None, None, math.inf)
    _, inside = backend._enter(call, NOTHING)
    while not inside.is_over:
        clock_s[0] = backend._next_step_s(clock_s[0]) + 1e-6
        backend._advance(clock_s[0])
        backend._reader.report(0, clock_s[0], backend._names)
    key, _ = backend._enter(call, NOTHING)
    backend._leave(key)
    backend._plans.switch(backend._plans.current, clock_s[0])

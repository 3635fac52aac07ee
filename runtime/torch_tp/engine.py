"""The engine as callers see it: start a model on unlike ranks, submit requests, read their tokens, change the split, hurt a rank.

One thread runs the loop: it asks the batcher for a step, has the supervisor's ranks carry it out, hands the tokens on, and between two
steps tends the group (plans that slide, ranks that return). What happens to a rank happens to no request: what its KV held is computed
again from token ids. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.domain.plans import LayerPlans
from runtime.torch_tp.answer_stream import AnswerStream
from runtime.torch_tp.batcher import Batcher, BatcherSettings, Load, Progress
from runtime.torch_tp.config import ModelConfig, read_config
from runtime.torch_tp.kv_handovers import GivenKv, KvHandovers
from runtime.torch_tp.measured import Measured, Totals
from runtime.torch_tp.model_folder import model_folder
from runtime.torch_tp.nursery import Nursery
from runtime.torch_tp.orders import StepDone
from runtime.torch_tp.plan_changes import PlanChanges
from runtime.torch_tp.requests import GenerationRequest, Refused, TokenEvent
from runtime.torch_tp.resplit import SlideStep
from runtime.torch_tp.steps import StepCommand, StepResult
from runtime.torch_tp.supervisor import GroupChange, GroupGone, GroupRebuilt, RankSettings, Supervisor, SupervisorSettings
from runtime.torch_tp.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
CHANGES_KEPT = 1000
RESTARTS_IN_A_ROW_MAX = 3
VOID_STEPS_MAX = 2  # so many steps in a row may come to nothing, without a rank being lost, before newcomers in them are suspected
BUSY_WAIT_S = 0.005  # while nothing runs but a plan is being prepared


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits and habits of one engine; times in s, sizes in tokens.

    batcher: fields of BatcherSettings to set otherwise. with_text: detokenise (events carry text, stop strings work). has_nursery: keep
    a process that starts workers in milliseconds. revives: start lost local ranks again and take them back in. corrects_split: move
    the split by the ranks' measured speeds, asked every correct_every_s, where it pays. wait_deadline_s: longest silence of a stream.
    """

    kv_tokens_max: int = 8192
    slots_max: int = 32
    dtype: str = "float32"
    communicator: str = "auto"
    with_text: bool = True
    has_nursery: bool = True
    revives: bool = True
    corrects_split: bool = False
    correct_every_s: float = 2.0
    wait_deadline_s: float = 300.0
    batcher: Mapping[str, Any] | None = None
    supervisor: Mapping[str, Any] | None = None


class Engine:
    """Serves one model. `submit`, `cancel` and the rest may be called from any thread. Use as a context manager, or `close` it."""

    def __init__(
        self,
        make_supervisor: Callable[[Callable[[GroupChange], None]], Supervisor],
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        settings: EngineSettings,
        nursery: Nursery | None = None,
    ) -> None:
        """For `start`. make_supervisor: one that is not started yet and tells its changes; again where a whole group was lost."""
        self.config = config
        self.tokenizer = tokenizer
        self.settings = settings
        self.changes: deque[GroupChange] = deque(maxlen=CHANGES_KEPT)
        self._make_supervisor = make_supervisor
        self._rebuilds = -1  # the first group is none
        self._restarts_in_a_row = 0
        self._void_in_a_row = 0
        self._proven: set[str] = set()  # requests that got a token in a step that came to its end
        self._nursery = nursery
        self._plan_changes = PlanChanges(
            revives=settings.revives, corrects=settings.corrects_split, correct_every_s=settings.correct_every_s, on_step=self._moved
        )
        self.supervisor = make_supervisor(self._note_change)
        self.supervisor.start()
        limits: dict[str, Any] = {
            "context_tokens": config.context_tokens,
            "kv_tokens_max": settings.kv_tokens_max,
            "slots_max": settings.slots_max,
            "vocabulary": config.vocabulary,
            "eos_ids": config.eos_ids,
        }
        make_text = None if tokenizer is None else tokenizer.stream_decoder
        self.batcher = Batcher(
            BatcherSettings(**(limits | dict(settings.batcher or {}))), plan_version=self.supervisor.plan.version, make_text=make_text
        )
        self._lock = threading.Lock()  # over batcher and streams; never held while a rank is asked
        self._wake = threading.Condition(self._lock)
        self._kv_handovers = KvHandovers((config.layers, config.kv_heads, config.head_dim, settings.dtype), self.batcher, self._wake)
        self._streams: dict[str, AnswerStream] = {}
        self._is_closing = False
        self._gone: str | None = None
        self._totals = Totals()
        self.last_step: tuple[StepCommand, StepResult, dict[int, StepDone]] | None = None  # with what each worker said of it
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls,
        model: str | Path,
        ranks: Sequence[RankSettings],
        settings: EngineSettings | None = None,
        *,
        nursery: Nursery | None = None,
        on_change: Callable[[GroupChange], None] = lambda change: None,
    ) -> Engine:
        """Start workers, load the model, form the group: by the ranks' speeds.

        nursery: one that runs already and is not ours to close; None: as the settings say.
        Raises: CheckpointError for a model that cannot be read, ValueError for bad settings, GroupGone when no rank came up.
        """
        chosen = settings or EngineSettings()
        folder = model_folder(model)
        config = read_config(folder)
        tokenizer = load_tokenizer(folder) if chosen.with_text else None
        own_nursery = Nursery() if nursery is None and chosen.has_nursery else None
        limits = SupervisorSettings(
            kv_tokens_max=chosen.kv_tokens_max,
            slots_max=chosen.slots_max,
            dtype=chosen.dtype,
            communicator=chosen.communicator,
            **dict(chosen.supervisor or {}),
        )
        try:
            if own_nursery is not None:
                own_nursery.start()

            def make_supervisor(note: Callable[[GroupChange], None]) -> Supervisor:
                def told(change: GroupChange) -> None:
                    note(change)
                    on_change(change)

                return Supervisor(folder, ranks, limits, nursery=nursery or own_nursery, on_change=told)

            return cls(make_supervisor, config, tokenizer, chosen, own_nursery)
        except BaseException as error:
            if own_nursery is not None:
                own_nursery.close()
            if isinstance(error, TimeoutError):
                raise GroupGone(
                    f"no group of {len(ranks)} rank(s) stood within {limits.start_deadline_s:g} s; is the machine busy?"
                ) from error
            raise

    # --- callers ------------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> AnswerStream:
        """Take a request in; its events come through the stream. Raises: Refused, with the reason."""
        with self._wake:
            if self._gone is not None or self._is_closing:
                raise Refused("closed", f"nothing is served here any more: {self._gone or 'the engine is closed'}")
            self.batcher.submit(request, time.monotonic())
            stream = AnswerStream(request.request_id, self.cancel, self.settings.wait_deadline_s)
            self._streams[request.request_id] = stream
            self._wake.notify()
        return stream

    def cancel(self, request_id: str) -> bool:
        """End a request; its KV is free before the next step. False where there is none of that id."""
        with self._wake:
            is_known = self.batcher.cancel(request_id, time.monotonic())
            self._deliver(self.batcher.drain_events())
            self._wake.notify()
        return is_known

    def take_out(self, request_id: str) -> GenerationRequest | None:
        """End a request here with the reason "moved"; returns what to submit elsewhere, None where there is none of that id."""
        with self._wake:
            moved = self.batcher.take_out(request_id, time.monotonic())
            self._deliver(self.batcher.drain_events())
            self._wake.notify()
        return moved

    def give_kv(self, request_id: str, after: int, deadline_s: float) -> GivenKv:
        """Have a running request's KV, from token `after` on, written where another engine on this host can `take_kv` it, which the
        request may then go on in. Raises: GroupError where it cannot be done, TimeoutError; nothing has changed then."""
        return self._kv_handovers.give(request_id, after, deadline_s)

    def take_kv(self, given: GivenKv, deadline_s: float) -> GivenKv:
        """Have KV that another engine gave ready for a request that begins alike. Raises: as `give_kv`."""
        return self._kv_handovers.take(given, deadline_s)

    def set_plan(
        self, shares: Sequence[float] | None = None, deadline_s: float = 60.0, *, cuts: Mapping[str, Sequence[float]] | None = None
    ) -> LayerPlans:
        """Slide to the split by `shares` (one per member, in rank order; None: by measured speeds) while requests run.

        cuts: "mlp_shares", "vocabulary_shares" where they are not the same.
        Returns the plan in force. Raises: GroupError when it could not be done (a rank was lost meanwhile, no room), TimeoutError.
        """
        with self._wake:
            if self._gone is not None or self._is_closing:
                raise GroupGone(self._gone or "the engine is closed")
            told = self._plan_changes.wish(None if shares is None else {"shares": shares, **(cuts or {})})
            self._wake.notify()
        return told.result(deadline_s)

    def load(self) -> Load:
        with self._lock:
            return self.batcher.load(time.monotonic())

    def check(self) -> None:
        """Raise AssertionError unless slots, KV tokens and requests are conserved."""
        with self._lock:
            self.batcher.check()
            assert set(self._streams) == self.batcher.request_ids, "streams and requests differ"

    def measured(self) -> Measured:
        with self._lock:
            return self._totals.measured(
                rebuilds=max(0, self._rebuilds),
                slides=self._plan_changes.completed,
                preemptions=self.batcher.preemptions,
                prefix_hit_tokens=self.batcher.prefix_hit_tokens,
            )

    @property
    def is_changing_plan(self) -> bool:
        return self._plan_changes.is_sliding or self._plan_changes.has_wishes

    @property
    def plan_paused_s(self) -> float:
        """How long nothing ran for changes of the split, all in all."""
        return self._plan_changes.paused_s

    def progress(self) -> list[Progress]:
        """Of every request inside, those that run first."""
        with self._lock:
            return self.batcher.progress()

    @property
    def is_serving(self) -> bool:
        """Whether a token could be made: the loop runs and a group stands or is being rebuilt."""
        return self._gone is None and not self._is_closing and self._thread.is_alive()

    def signal_rank(self, worker: int, number: signal.Signals) -> bool:
        """For drills: SIGKILL, SIGSTOP, SIGCONT. False where the worker has no process on this host."""
        pid = self.supervisor.pid_of(worker)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Stop: open requests end with the reason "error", workers leave, nothing is left behind. May be called twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
            supervisor = self.supervisor
        supervisor.close()  # also ends a step under way
        self._thread.join(10.0)
        if self._nursery is not None:
            self._nursery.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the loop -----------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        reason = "the engine is closed"
        try:
            while self._turn():
                pass
        except GroupGone as error:
            reason = str(error)
        except Exception as error:  # a bug of ours: say so to every caller rather than leave them waiting
            logger.exception("engine stopped reason=%s", error)
            reason = f"the engine failed: {type(error).__name__}: {error}"
        with self._wake:
            self._gone = reason
            self.batcher.fail_all(reason, time.monotonic())
            self._deliver(self.batcher.drain_events())
        self._plan_changes.close(GroupGone(reason))
        self._kv_handovers.close(GroupGone(reason))

    def _turn(self) -> bool:
        """One round of the loop; False when the engine closes. Raises: GroupGone."""
        with self._wake:
            if self.batcher.is_idle and not self._is_closing:
                if self._plan_changes.is_sliding or self._kv_handovers.is_under_way:
                    self._wake.wait(BUSY_WAIT_S)
                elif not (self._plan_changes.has_wishes or self._kv_handovers.has_work):
                    self._wake.wait(IDLE_WAIT_S)
            if self._is_closing:
                return False
        began_s = time.monotonic()
        command: StepCommand | None = None
        try:
            with self._lock:
                self.batcher.use_plan(self.supervisor.plan.version)  # another one where a step lived through the loss of a rank
            # a slide moves slots, and what is copied from or to them would not know where they are
            if not self._kv_handovers.is_under_way:
                self._plan_changes.tend(self.supervisor)
            if not self._plan_changes.is_sliding:
                self._kv_handovers.tend(self.supervisor)
            with self._lock:
                command = self.batcher.next_step(time.monotonic())
                self._deliver(self.batcher.drain_events())
            if command is None:
                return True
            result = self.supervisor.step(command)
            self.last_step = command, result, self.supervisor.last_done
        except GroupRebuilt as error:
            self._begin_again(error.change, str(error), began_s)
            if command is not None and not error.change.lost:
                self._suspect(command, str(error))
            return True
        except GroupGone as error:
            self._restart(error, began_s)
            return True
        self._restarts_in_a_row = self._void_in_a_row = 0
        with self._lock:
            self._proven.update(part.request_id for part in command.slices if part.wants_sample)
            self._totals.add(command, result)
            self._deliver(self.batcher.apply(result, time.monotonic()))
        return True

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        """Hand events to their streams; under the lock, so that they keep their order."""
        for event in events:
            if event.finish_reason is None:
                self._streams[event.request_id].push(event)
            else:
                self._proven.discard(event.request_id)
                self._kv_handovers.ended(event.request_id)
                self._streams.pop(event.request_id).push(event)

    def _note_change(self, change: GroupChange) -> None:
        """From the supervisor's thread: a new epoch, also one that a step lived through (buddies)."""
        self.changes.append(change)
        self._rebuilds += 1

    def _moved(self, step: SlideStep) -> None:
        """A slide changed something between two steps."""
        with self._lock:
            now_s = time.monotonic()
            self.batcher.note_pause(now_s - step.pause_s, now_s)
            self.batcher.moved_kv(step.moved, step.moved_to)
            if step.new_plan is not None:
                self.batcher.use_plan(step.new_plan.version)

    def _begin_again(self, change: GroupChange, detail: str, began_s: float) -> None:
        """The group was rebuilt and holds nothing: every running request is computed again from its ids."""
        with self._lock:
            self.batcher.lost_kv(None, time.monotonic(), pause_began_s=began_s)
            self.batcher.use_plan(change.plan.version)
        self._plan_changes.group_rebuilt(self.supervisor, detail)
        logger.info(
            "begun again epoch=%d members=%s plan_version=%d lost=%s", change.epoch, change.members, change.plan.version,
            [lost.worker for lost in change.lost],
        )  # fmt: skip

    def _suspect(self, command: StepCommand, detail: str) -> None:
        """A step failed though every rank lives. If that goes on, a request that never got a token may be the reason: it ends, so that
        the others do not end with it."""
        self._void_in_a_row += 1
        if self._void_in_a_row < VOID_STEPS_MAX:
            return
        with self._lock:
            for request_id in {part.request_id for part in command.slices} - self._proven:
                logger.warning("request suspected request_id=%s reason=%s", request_id, detail)
                self.batcher.fail(request_id, f"{self._void_in_a_row} steps with it in them failed: {detail}", time.monotonic())
            self._deliver(self.batcher.drain_events())

    def _restart(self, gone: GroupGone, began_s: float) -> None:
        """No rank is left: start all of them anew and go on. Raises: GroupGone where that is not wanted, or has failed too often."""
        self._restarts_in_a_row += 1
        if self._is_closing or not self.settings.revives or self._restarts_in_a_row > RESTARTS_IN_A_ROW_MAX:
            raise gone
        logger.warning("whole group lost, starting anew reason=%s", gone)
        self.supervisor.close()
        supervisor = self._make_supervisor(self._note_change)
        with self._lock:
            self.supervisor = supervisor
            if self._is_closing:
                raise gone
        try:
            change = supervisor.start()
        except TimeoutError as error:
            raise GroupGone(f"the group was lost ({gone}) and did not come back in time") from error
        self._begin_again(change, str(gone), began_s)


def request_for(
    tokenizer: Tokenizer | None, request_id: str, prompt: str | Sequence[Mapping[str, Any]] | Sequence[int], max_tokens: int, **more: Any
) -> GenerationRequest:
    """A request from text, a conversation, or token ids; `more` as in GenerationRequest. Raises: ValueError without a tokenizer."""
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
        if tokenizer is None:
            raise ValueError("text needs a tokenizer; the engine was started without one (with_text=False)")
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt)  # type: ignore[arg-type]
    else:
        ids = list(prompt)  # type: ignore[arg-type]
    return GenerationRequest(request_id, tuple(ids), max_tokens, **more)

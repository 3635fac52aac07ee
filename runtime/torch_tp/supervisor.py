"""The controller's side of a group of workers: starts them, watches them, and rebuilds the group on those that are left.

One thread owns every socket, the watch and the epochs; callers post what they want and wait. No rank is special: any may die, be
stopped, or come late, and a step either gives all its tokens or raises `GroupRebuilt` once the survivors stand ready again. What a
step holds and what follows for the requests is the batcher's business. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from envs.decision.detection import FailureKind
from envs.decision.layer_cuts import layer_plans
from envs.domain.plans import LayerPlans
from envs.domain.specs import ModelSpec
from runtime.torch_tp.communicators.segment_names import segment_name
from runtime.torch_tp.front_door import FrontDoor
from runtime.torch_tp.group_values import (
    GroupChange,
    GroupError,
    GroupGone,
    GroupRebuilt,
    LostRank,
    RankSettings,
    SupervisorSettings,
)
from runtime.torch_tp.link_cost import PROBE_REPEATS, PROBE_SIZES_BYTES, LinkCost
from runtime.torch_tp.liveness import Phase, ProgressPage, Reading, Slot, Watch, is_suspect, laggards, process_state
from runtime.torch_tp.nursery import Nursery, NurseryGone
from runtime.torch_tp.orders import (
    Beat,
    Configuration,
    Configured,
    Failure,
    Hello,
    Loaded,
    LoadOrder,
    Prepared,
    PrepareOrder,
    ReduceOrder,
    StepDone,
    StepOrder,
    Switched,
    SwitchOrder,
)
from runtime.torch_tp.overlap import pays_in_halves
from runtime.torch_tp.profiler import RankProfile, StepForecast, balanced_cuts, step_ratio, width_shares, work_units
from runtime.torch_tp.protocol import PROTOCOL_VERSION, Kind, Message, ProtocolError, tokens_match, unpack
from runtime.torch_tp.rendezvous import RendezvousProcess
from runtime.torch_tp.resplit import over_members, taken_over
from runtime.torch_tp.slot_records import SlotRecords
from runtime.torch_tp.steps import RankTimings, StepCommand, StepResult, tokens_from_wire
from runtime.torch_tp.worker_link import Child, Standing, WorkerLink, reap, spawn

__all__ = [
    "GroupChange",
    "GroupError",
    "GroupGone",
    "GroupRebuilt",
    "LostRank",
    "RankSettings",
    "Supervisor",
    "SupervisorSettings",
]

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.02
IDLE_WATCH_EVERY_S = 0.05
REBUILDS_IN_A_ROW_MAX = 3
BLAME_AFTER_S = 0.1
"""A rank that died shows by its socket within ms; if nobody did, a failed collective is nobody's death and the group is rebuilt whole."""

Answer = TypeVar("Answer")
CHANGES_KEPT = 256


@dataclass(slots=True)
class _Round:
    """One order to all members and the answers so far."""

    answer_kind: Kind
    waiting: set[int]
    future: Future[Any]
    finish: Callable[[dict[int, Any]], Any]
    deadline_s: float
    answers: dict[int, Any] = field(default_factory=dict)
    command: StepCommand | None = None


class Supervisor:
    """See the module. Public methods may be called from any one thread at a time; `step` from the engine's."""

    def __init__(
        self,
        model: str | Path,
        ranks: Sequence[RankSettings],
        settings: SupervisorSettings | None = None,
        *,
        nursery: Nursery | None = None,
        on_change: Callable[[GroupChange], None] = lambda change: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if not ranks:
            raise ValueError("Supervisor: no ranks; give RankSettings for at least one")
        self.model = str(model)
        self.settings = settings or SupervisorSettings()
        self._nursery = nursery
        self._on_change = on_change
        self._now_s = now_s
        self.token = self.settings.token or secrets.token_urlsafe(24)
        self._page = ProgressPage.create(len(ranks))
        now = now_s()
        self._links = [
            WorkerLink(worker, rank, self._page.slot(worker) if not rank.is_remote else Slot(), Watch.start(now))
            for worker, rank in enumerate(ranks)
        ]
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.plans: tuple[LayerPlans, ...] = ()
        self.model_spec: ModelSpec | None = None
        self.changes: list[GroupChange] = []
        self.stale_messages = 0
        self._version = 0
        self._lost: list[LostRank] = []
        self._dying: list[Child] = []
        self._joining: tuple[int, ...] = ()
        self._needs_regroup = False
        self._keeps_kv = False
        self._buddied: set[int] = set()
        self._is_whole = False
        self._blame_at_s = float("inf")
        self._failure_detail = ""
        self._rebuilds_in_a_row = 0
        self._unreported: GroupRebuilt | None = None
        self._gone: str | None = None
        self._predicted_step_s = 0.0
        self._forecast = StepForecast()
        self.profile = RankProfile([rank.speed for rank in ranks])
        self.last_done: dict[int, StepDone] = {}
        self._records = SlotRecords()
        self._rounds: dict[Kind, _Round] = {}
        self._post_lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._drain_wake)
        self._door: FrontDoor | None = None
        self._link_cost: LinkCost | None = None
        self._store: RendezvousProcess | None = None
        self._store_deadline_s = float("inf")
        self._started: Future[GroupChange] = Future()
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    # --- for callers --------------------------------------------------------------------------------------------------------

    def start(self) -> GroupChange:
        """Spawn and load all workers and form the first group; a rank lost meanwhile is left out.

        Raises: GroupGone when none came up, with what the last one said.
        """
        try:
            self.listen()
            if self._nursery is not None:
                self._nursery.await_ready()
            # the loop's thread starts the children, since the kernel kills them when the thread that started them ends
            self._posted.append(self._spawn_all)
            self._thread.start()
            change = self._started.result(self.settings.start_deadline_s + self.settings.configure_deadline_s)
            if self.settings.overlap == "auto" and len(set(self.nodes())) > 1:
                times_s = [median_s for _, median_s, _ in self.profile_all_reduce(PROBE_SIZES_BYTES, PROBE_REPEATS)]
                self._link_cost = LinkCost.fit(PROBE_SIZES_BYTES, times_s)
            return change
        except (NurseryGone, TimeoutError) as error:
            self.close()
            raise GroupGone(f"the workers did not come up: {error or 'their start took too long'}") from error
        except BaseException:
            self.close()
            raise

    def listen(self) -> None:
        """Open the door for remote workers, where settings ask for one; `address` then says where. Part of `start`, may come earlier."""
        host, port = self.settings.listen_host, self.settings.listen_port
        if host is not None and self._door is None:
            self._door = FrontDoor(host, port, self.token, self._links, self._selector, self._adopt, self._now_s)

    @property
    def address(self) -> str | None:
        """HOST:PORT where remote workers join; None without `listen_host`."""
        return None if self._door is None else self._door.address

    @property
    def plan(self) -> LayerPlans:
        """The plan that new requests get. Raises: GroupGone before the first group stands."""
        if not self.plans:
            raise GroupGone("no group stands yet, so there is no plan")
        return self.plans[-1]

    @property
    def spares(self) -> tuple[int, ...]:
        """Workers that are loaded and in no group: they can `join`."""
        return tuple(link.worker for link in self._links if link.standing is Standing.SPARE)

    def rank_settings(self, worker: int) -> RankSettings:
        return self._links[worker].settings

    def memory_bytes(self) -> tuple[int, ...]:
        """Memory per member: a device's own, or an equal share of its host's."""
        nodes = self.nodes()
        told = [self._links[worker].loaded for worker in self.members]
        return tuple(
            0 if loaded is None else loaded.memory_bytes // (nodes.count(node) if loaded.is_host_memory else 1)
            for loaded, node in zip(told, nodes, strict=True)
        )

    def nodes(self) -> tuple[str, ...]:
        """Communication domain of each member."""
        return tuple(self._links[worker].node for worker in self.members)

    def profile_all_reduce(self, sizes_bytes: Sequence[int], repeats: int) -> list[tuple[int, float, float]]:
        """(bytes, median s, 99th percentile s) of all-reduces over the group, between two steps; [] for a group of one."""

        def finish(answers: dict[int, list[tuple[int, float, float]]]) -> list[tuple[int, float, float]]:
            return answers[min(answers)]

        order = ReduceOrder(tuple(sizes_bytes), repeats)
        deadline_s = self.settings.step_deadline_s
        return self._ask(lambda future: self._order(Kind.PROFILE, order, future, finish, deadline_s), deadline_s)

    def await_change(self, epoch: int, deadline_s: float) -> bool:
        """Wait until the group of that epoch (or a later one) stands; False after `deadline_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.changes) and self.changes[-1].epoch >= epoch, deadline_s)

    def await_spare(self, worker: int, deadline_s: float) -> bool:
        """Wait until a worker is loaded and could `join`; False after `deadline_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: worker in self.spares, deadline_s)

    def pid_of(self, worker: int) -> int | None:
        """Process id of a worker on this host; None while it is absent, or on another."""
        return self._links[worker].pid

    def step(self, command: StepCommand) -> StepResult:
        """Run one step on every rank.

        Raises: GroupRebuilt when it could not be finished, or when slots were lost since the last step: the group stands ready again,
        all slots are empty. GroupGone when no rank is left.
        """
        return self._ask(lambda future: self._begin_step(command, future), self.settings.step_deadline_s)

    def next_plan(self, shares: Sequence[float] | None = None, **cuts: Any) -> LayerPlans:
        """A plan of the next version over the members: by `shares`, or by their measured speeds, per operation.

        cuts: as in `layer_cuts.layer_plans`.
        """
        if self.model_spec is None:
            raise GroupGone("no group stands yet, so there is nothing to plan for")
        self._version += 1
        if shares is not None:
            return layer_plans(self.model_spec, shares, version=self._version, **cuts)
        return layer_plans(self.model_spec, version=self._version, **{**balanced_cuts(self.profile.speeds(self.members)), **cuts})

    def step_ratio(self, plan: LayerPlans) -> float:
        """Expected busy time of steps like the last one under `plan` ÷ under the plan in use; 1.0 before the first step."""
        if not self.members or plan.ranks != len(self.members):
            return 1.0
        busy_s = self.profile.last_busy_s[list(self.members)].max(axis=0)
        return step_ratio(self.profile.speeds(self.members), width_shares(self.plan), width_shares(plan), busy_s)

    def slide_columns(self, plan: LayerPlans) -> Switched:
        """Cut MLP and vocabulary like `plan` from the next step on: the newest plan's version and heads. Nothing moves."""
        current = self.plan
        if plan.version != current.version or any(a.query_heads != b.query_heads for a, b in zip(plan.layers, current.layers, strict=True)):
            raise ValueError(
                f"plan version {plan.version}: slide_columns needs the version ({current.version}) and heads of the newest plan"
            )
        return self.switch(SwitchOrder(columns=plan), plan)

    def prepare(self, order: PrepareOrder) -> Future[Prepared]:
        """Have every rank get ready for a switch, beside the steps. The future ends in GroupError where a rank cannot."""
        future: Future[Prepared] = Future()
        self._post(lambda: self._order(Kind.PREPARE, order, future, _slowest_prepared, self.settings.prepare_deadline_s), future)
        return future

    def switch(self, order: SwitchOrder, plan: LayerPlans | None = None) -> Switched:
        """Put what was prepared into force, between two steps; `plan` is the one that `order` uses.

        Raises: GroupRebuilt when a rank was lost in it, like `step`. GroupError when it could not be done and nothing has changed.
        """

        def finish(answers: dict[int, Switched]) -> Switched:
            if order.uses_plan and plan is not None:
                self.plans = (*self.plans, plan)
                if self.settings.buddy_kv:
                    self._buddied.add(plan.version)
            if order.columns is not None:
                self.plans = (*self.plans[:-1], order.columns)
            moved = answers[min(answers)].moves
            self._records.moved(moved, self.plans[-1].version)
            return Switched(moved, sum(answer.kv_bytes for answer in answers.values()), max(answer.seconds for answer in answers.values()))

        def begin(future: Future[Switched]) -> None:
            self._raise_unreported()
            self._order(Kind.SWITCH, order, future, finish, self.settings.step_deadline_s)

        return self._ask(begin, self.settings.step_deadline_s)

    def slots_of_plan(self, version: int) -> tuple[int, ...]:
        """Slots that the ranks hold under a plan; those that the batcher gives up only leave with its next command."""
        return self._records.of_plan(version)

    def release_plan(self, version: int) -> None:
        """Forget a plan that no slot uses any more, between two steps. Raises: ValueError for the newest, an unknown one, or one in use."""

        def begin(future: Future[None]) -> None:
            if version not in [plan.version for plan in self.plans[:-1]]:
                raise ValueError(f"plan version {version} is not an older live plan; live: {[plan.version for plan in self.plans]}")
            if users := self._records.of_plan(version):
                raise ValueError(f"plan version {version} is used by slots {list(users)}; move or release them first")
            self.plans = tuple(plan for plan in self.plans if plan.version != version)
            for link in self._members():
                self._send(link, Message(Kind.RELEASE, self.epoch, version))
            future.set_result(None)

        self._ask(begin, self.settings.configure_deadline_s)

    def sever(self, worker: int) -> bool:
        """For drills: cut the connection to a worker, as a failing network would. False where there is none."""

        def begin(future: Future[bool]) -> None:
            connection = self._links[worker].connection
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            future.set_result(connection is not None)

        return self._ask(begin, self.settings.configure_deadline_s)

    def respawn(self, worker: int) -> None:
        """Start a lost worker again; once it is loaded it shows in `spares`. Raises: ValueError while it still runs."""
        self._ask(lambda future: self._respawn(worker, future), self.settings.start_deadline_s)

    def join(self, workers: Sequence[int]) -> GroupChange:
        """Take spares into the group, between two steps. Every slot stays valid: the plans in use are the old ones, in which those that
        joined have zero width; a `Slide` to `next_plan()` gives them work. Raises: ValueError for a worker that is no spare."""
        return self._ask(lambda future: self._change_members(tuple(workers), (), future), self.settings.configure_deadline_s)

    def leave(self, workers: Sequence[int]) -> GroupChange:
        """Let members go that have zero width in every live plan; they become spares. With one rank left, no collective is needed.

        Raises: ValueError where one of them still has work.
        """
        return self._ask(lambda future: self._change_members((), tuple(workers), future), self.settings.configure_deadline_s)

    def close(self) -> None:
        """Stop every worker and leave nothing behind. May be called twice, and from a signal handler's thread."""
        if not self._is_closing:
            self._is_closing = True
            if self._thread.ident is not None:
                self._wake()
                self._thread.join(self.settings.stop_deadline_s + 5.0)
            else:
                self._tear_down()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, begin: Callable[[Future[Answer]], None], deadline_s: float) -> Answer:
        future: Future[Answer] = Future()
        self._post(lambda: begin(future), future)
        return future.result(deadline_s + 30.0)

    def _post(self, act: Callable[[], None], future: Future[Any]) -> None:
        """Have the loop's thread do `act`; what it raises goes to `future`."""

        def run() -> None:
            try:
                if self._gone is not None:
                    raise GroupGone(self._gone)
                act()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)

        with self._post_lock:
            if self._is_closing or not self._thread.is_alive():
                raise GroupGone(self._gone or "the supervisor is closed")
            self._posted.append(run)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    def _drain_wake(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    # --- the loop -----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                pause_s = WATCH_EVERY_S if self._rounds or self._needs_regroup else IDLE_WATCH_EVERY_S
                for key, mask in self._selector.select(pause_s):
                    key.data(mask)
                while self._posted:
                    self._posted.popleft()()
                now = self._now_s()
                self._watch(now)
                self._check_deadlines(now)
                if self._needs_regroup and Kind.CONFIGURED not in self._rounds:
                    self._regroup()
        except Exception as error:
            logger.exception("supervisor stopped reason=%s", error)
            self._give_up(f"the supervisor failed: {type(error).__name__}: {error}")
        finally:
            with self._post_lock:
                self._is_closing = True
            self._tear_down()

    def _watch(self, now: float) -> None:
        self._watch_store()
        self._dying = [process for process in self._dying if process.poll() is None]
        stepping = Kind.DONE in self._rounds or Kind.CONFIGURED in self._rounds
        waiting = {worker for order in self._rounds.values() for worker in order.waiting}
        for link in self._links:
            if link.standing is Standing.ABSENT:
                continue
            link.watch.observe(link.slot.read(), now)
            if link.process is not None and link.process.poll() is not None:
                self._lose(link, FailureKind.RANK_KILLED, f"exit code {link.process.returncode}")
                continue
            owes = stepping and link.worker in waiting
            if now - min(link.watch.beaten_s, link.watch.progressed_s) < 0.2:
                continue
            state = None if link.pid is None else process_state(link.pid)
            if is_suspect(link.watch, now, self._predicted_step_s if owes else 0.0, owes, state):
                silent_s = now - min(link.watch.beaten_s, link.watch.progressed_s)
                self._lose(link, FailureKind.RANK_FROZEN, f"no sign of life for {silent_s:.3f} s (process state {state or 'unknown'})")

    def _check_deadlines(self, now: float) -> None:
        for link in self._links:
            if link.standing is Standing.LOADING and now > link.deadline_s:
                self._lose(link, FailureKind.RANK_FROZEN, f"not loaded within {self.settings.start_deadline_s:g} s")
        if self._door is not None:
            self._door.expire()
        for kind, order in list(self._rounds.items()):
            if now > order.deadline_s:
                late = sorted(order.waiting)
                logger.warning("order overdue kind=%s epoch=%d workers=%s", kind.name, self.epoch, late)
                for worker in late:
                    self._lose(self._links[worker], FailureKind.RANK_FROZEN, f"no answer {kind.name} within its deadline")
        if now > self._blame_at_s:
            self._blame_at_s = float("inf")
            self._settle_failure()

    # --- workers come -------------------------------------------------------------------------------------------------------

    def _spawn_all(self) -> None:
        self._start_store()
        for link in self._links:
            if link.settings.is_remote:
                link.standing = Standing.LOADING
                link.deadline_s = self._now_s() + self.settings.start_deadline_s
            else:
                self._spawn(link)

    def _spawn(self, link: WorkerLink) -> None:
        self._adopt(link, spawn(link, self._page, self.token, self._nursery))

    def _adopt(self, link: WorkerLink, connection: socket.socket, messages: Sequence[Message] = ()) -> None:
        now = self._now_s()
        link.adopt(connection, self._selector, lambda mask: self._on_socket(link, mask), now)
        link.deadline_s = now + self.settings.start_deadline_s
        for message in messages:
            self._on_message(link, message)

    def _on_hello(self, link: WorkerLink, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION or not tokens_match(hello.token, self.token):
            self._lose(link, FailureKind.RANK_KILLED, f"speaks protocol {hello.protocol_version}, this is {PROTOCOL_VERSION}")
            return
        link.node = hello.node
        settings = self.settings
        order = LoadOrder(
            self.model, link.settings.device, settings.dtype, link.settings.threads, settings.kv_tokens_max, settings.slots_max,
            link.settings.slow_factor, self._may_need_store,
        )  # fmt: skip
        self._send(link, Message(Kind.LOAD, self.epoch, body=order))

    def _on_loaded(self, link: WorkerLink, loaded: Loaded) -> None:
        link.loaded = loaded
        with self._changed:
            link.standing = Standing.SPARE
            self._changed.notify_all()
        link.deadline_s = float("inf")
        if self.model_spec is None:
            self.model_spec = loaded.model
        logger.info("worker loaded worker=%d pid=%s seconds=%.2f", link.worker, link.pid, loaded.seconds)
        self._start_if_all_came()

    def _start_if_all_came(self) -> None:
        if self.epoch == 0 and not any(link.standing is Standing.LOADING for link in self._links):
            self._joining = self.spares
            self._needs_regroup = True

    # --- workers go ---------------------------------------------------------------------------------------------------------

    def _lose(self, link: WorkerLink, kind: FailureKind, detail: str) -> None:
        """Drop a worker for good: killed here, fenced wherever it is. The group, if it was in it, is rebuilt."""
        if link.standing is Standing.ABSENT:
            return
        was_member = link.standing is Standing.MEMBER
        process = link.drop(self._selector)
        if process is not None:
            self._dying.append(process)
        now = self._now_s()
        self._lost.append(LostRank(link.worker, kind, detail, now, now - max(link.watch.beaten_s, link.watch.progressed_s)))
        logger.warning("rank lost worker=%d kind=%s epoch=%d detail=%s", link.worker, kind.name, self.epoch, detail)
        self._joining = tuple(worker for worker in self._joining if worker != link.worker)
        if was_member or link.worker in self.members:
            self._fence()
        self._start_if_all_came()

    def _fence(self) -> None:
        """No collective of this epoch may go on: the page's word is seen by spinning ranks at once, the message by the others."""
        self._page.epoch_min = self.epoch + 1
        for link in self._members():
            self._send(link, Message(Kind.FENCE, self.epoch + 1))
        # a step or switch under way ends in GroupRebuilt once the next group stands
        for kind in (Kind.CONFIGURED, Kind.READY, Kind.PROFILE):
            order = self._rounds.pop(kind, None)
            if order is not None and not order.future.done():
                order.future.set_exception(GroupError("a rank was lost meanwhile; the order was not carried out"))
        self._blame_at_s = float("inf")
        self._keeps_kv = False
        self._needs_regroup = True

    def _members(self) -> list[WorkerLink]:
        return [link for link in self._links if link.standing is Standing.MEMBER]

    def _on_failure(self, link: WorkerLink, message: Message, failure: Failure) -> None:
        """A rank could not do what it was told. If another one died, its socket says so in a moment; else all start afresh."""
        logger.warning("order failed worker=%d of=%s detail=%s", link.worker, Kind(failure.of).name, failure.detail)
        if failure.of == Kind.LOAD:
            self._lose(link, FailureKind.RANK_KILLED, failure.detail)
            return
        order = self._rounds.get(_ANSWERS.get(Kind(failure.of), Kind.DIE))
        if order is None or link.worker not in order.waiting:
            self._lose(link, FailureKind.RANK_KILLED, f"failed at what needs no answer: {failure.detail}")  # it is not what we think it is
            return
        order.waiting.discard(link.worker)
        if not failure.is_peer:
            self._failure_detail = f"worker {link.worker}: {failure.detail}"
            if failure.of == Kind.PREPARE:
                self._rounds.pop(Kind.READY)
                order.future.set_exception(GroupError(f"plan not prepared, nothing has changed: {self._failure_detail}"))
                return
            self._page.epoch_min = self.epoch + 1  # the others wait for this rank in vain
        self._blame_at_s = min(self._blame_at_s, self._now_s() + BLAME_AFTER_S)

    def _settle_failure(self) -> None:
        """A collective failed and nobody died: whoever is behind the others is the cause; with nobody behind, all start afresh."""
        self._rebuilds_in_a_row += 1
        behind = laggards({link.worker: link.slot.read() for link in self._members() if link.slot.read().phase is not Phase.IDLE})
        if self._rebuilds_in_a_row > REBUILDS_IN_A_ROW_MAX:
            self._give_up(f"{self._rebuilds_in_a_row} rebuilds without a step between: {self._failure_detail or 'a collective failed'}")
        elif len(behind) == 1 and not self._failure_detail:
            self._lose(self._links[behind[0]], FailureKind.RANK_FROZEN, "behind the others when a collective ran out of time")
        else:
            self._fence()

    def _give_up(self, reason: str) -> None:
        self._gone = reason
        error = GroupGone(reason)
        for order in self._rounds.values():
            if not order.future.done():
                order.future.set_exception(error)
        self._rounds.clear()
        if not self._started.done():
            self._started.set_exception(error)

    # --- epochs -------------------------------------------------------------------------------------------------------------

    def _regroup(self, plans: tuple[LayerPlans, ...] | None = None) -> None:
        """Next epoch: fresh groups over the members that are left and those that join; plans: the old ones, where KV is kept."""
        links = [link for link in self._links if link.standing is Standing.MEMBER or link.worker in self._joining]
        address = self._store_address(links)
        if address is None:
            self._store_deadline_s = min(self._store_deadline_s, self._now_s() + self.settings.start_deadline_s)
            if self._now_s() > self._store_deadline_s:
                self._give_up("the rendezvous store did not come up; see its output")
            return
        self._store_deadline_s = float("inf")
        self._needs_regroup = False
        if not links or self.model_spec is None:
            reasons = "; ".join(f"worker {lost.worker}: {lost.detail}" for lost in self._lost[-len(self._links) :])
            self._give_up(f"no rank is left ({reasons})")
            return
        takes_over = False
        if plans is None:
            plans = self._plans_taken_over(links)
            takes_over = self._keeps_kv = plans is not None
        self.epoch += 1
        self._blame_at_s = float("inf")  # who failed in the group that is gone says nothing of this one
        self._page.epoch_min = max(self._page.epoch_min, self.epoch)
        if plans is None:
            plans = self._plans_for(links)
            self._records.clear()
            self._buddied = {plan.version for plan in plans} if self.settings.buddy_kv else set()
        elif takes_over:
            self._buddied = set()  # who was lost kept somebody's KV as well
        self.plans = plans
        self.members = tuple(link.worker for link in links)
        self._is_whole = False
        for link in links:
            link.standing = Standing.MEMBER
        configuration = self._configuration(links, address, takes_over)
        deadline_s = self._now_s() + self.settings.configure_deadline_s
        self._rounds[Kind.CONFIGURED] = _Round(Kind.CONFIGURED, set(self.members), Future(), self._on_configured, deadline_s)
        for link in links:
            link.watch.step_begins(self._now_s())
            self._send(link, Message(Kind.CONFIGURE, self.epoch, self.plan.version, body=configuration))

    def _plans_taken_over(self, links: Sequence[WorkerLink]) -> tuple[LayerPlans, ...] | None:
        """The live plans with the lost members' heads at their buddies; None where the KV is not all there."""
        is_kept = self._is_whole and not self._joining and {plan.version for plan in self.plans} <= self._buddied
        if not is_kept or Kind.SWITCHED in self._rounds or self._failure_detail:
            return None
        survivors = [link.worker for link in links]
        assert self.model_spec is not None
        fresh = layer_plans(self.model_spec, version=self.plan.version, **balanced_cuts(self.profile.speeds(survivors)))
        try:
            return tuple(taken_over(plan, self.members, survivors, fresh) for plan in self.plans)
        except ValueError as error:
            logger.warning("KV is gone reason=%s", error)
            return None

    def _plans_for(self, links: Sequence[WorkerLink]) -> tuple[LayerPlans, ...]:
        assert self.model_spec is not None
        self._version += 1
        cuts = balanced_cuts(self.profile.speeds([link.worker for link in links]))
        return (layer_plans(self.model_spec, version=self._version, **cuts),)

    def _configuration(self, links: Sequence[WorkerLink], store: tuple[str, int], takes_over: bool) -> Configuration:
        by_node: dict[str, list[int]] = {}
        for link in links:
            by_node.setdefault(link.node, []).append(link.worker)
        settings = self.settings
        domains = tuple(tuple(workers) for workers in by_node.values())
        return Configuration(
            self.members, domains, settings.communicator, *store, self._segment_names(domains), settings.collective_deadline_s,
            self.plans, self._keeps_kv, settings.between, settings.wire, settings.buddy_kv, tuple(self._buddied), takes_over,
            self._joining, self._records.all() if self._joining or takes_over else (),
        )  # fmt: skip

    @property
    def _may_need_store(self) -> bool:
        """Groups inside one host meet in shared memory; all others need the store."""
        nodes = {link.settings.node for link in self._links} | {link.worker for link in self._links if link.settings.is_remote}
        return len(nodes) > 1 or self._needs_network(self._links)

    def _needs_network(self, links: Sequence[WorkerLink]) -> bool:
        return self.settings.communicator not in ("auto", "shm") or any(link.settings.device != "cpu" for link in links)

    def _start_store(self) -> None:
        """A process of its own, so that no rank owns it. Where no group needs it, it is still there to sweep up after us."""
        if self._may_need_store or self._nursery is None:
            self._store = RendezvousProcess(self.settings.listen_host or "127.0.0.1")

    def _watch_store(self) -> None:
        """A dead store harms no group that stands; the next one meets at a new one."""
        if self._store is not None and not self._store.is_alive:
            logger.warning("rendezvous store died pid=%d; starting another", self._store.pid)
            self._store.close()
            self._start_store()

    def _store_address(self, links: Sequence[WorkerLink]) -> tuple[str, int] | None:
        """Where a group of these meets; ("", 0) where it needs no store; None while the store has not told yet."""
        if len(links) < 2 or (len({link.node for link in links}) == 1 and not self._needs_network(links)):
            return "", 0
        assert self._store is not None
        try:
            return self._store.address(0.0)
        except (TimeoutError, RuntimeError):
            return None

    def _segment_names(self, domains: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
        return tuple(segment_name(os.getpid(), self.epoch, f"domain{index}") for index in range(len(domains)))

    def _on_configured(self, answers: dict[int, Configured]) -> GroupChange:
        change = GroupChange(self.epoch, self.members, tuple(self._lost), self._joining, self.plan, self._keeps_kv, self._now_s())
        logger.info(
            "group stands epoch=%d members=%s plan_version=%d configure_s=%.4f",
            self.epoch, self.members, self.plan.version, max(answer.seconds for answer in answers.values()),
        )  # fmt: skip
        is_first = not self.changes
        self._is_whole = True
        with self._changed:
            self.changes = [*self.changes[1 - CHANGES_KEPT :], change]
            self._changed.notify_all()
        self._lost, self._joining, self._keeps_kv = [], (), False
        detail = self._failure_detail or "; ".join(f"worker {lost.worker} lost: {lost.detail}" for lost in change.lost)
        self._failure_detail = ""
        if is_first:
            self._started.set_result(change)
        elif change.keeps_kv:
            self._repeat_step()
        else:
            error = GroupRebuilt(change, detail or "the group was rebuilt")
            told = [self._rounds.pop(kind) for kind in (Kind.DONE, Kind.SWITCHED) if kind in self._rounds]
            for order in told:
                order.future.set_exception(error)
            if not told:
                self._unreported = error
        self._on_change(change)
        return change

    def _respawn(self, worker: int, future: Future[None]) -> None:
        link = self._links[worker]
        if link.standing is not Standing.ABSENT or link.settings.is_remote:
            raise ValueError(f"worker {worker} is {link.standing.value}{' and remote' if link.settings.is_remote else ''}; only a lost "
                             "local one can be started again")  # fmt: skip
        self.profile.forget(worker)
        self._spawn(link)
        future.set_result(None)

    def _change_members(self, joining: tuple[int, ...], leaving: tuple[int, ...], future: Future[GroupChange]) -> None:
        is_reachable = self._store_address([link for link in self._links if link.worker in {*self.members, *joining}]) is not None
        if self._rounds or self._needs_regroup or not self.members or not is_reachable:
            raise GroupError("the group is busy or being rebuilt; change its members between two steps, with no plan in preparation")
        absent = [worker for worker in joining if worker not in self.spares]
        if absent:
            raise ValueError(f"workers {absent} are no spares; spares are {list(self.spares)}")
        members = tuple(link.worker for link in self._links if link.worker in joining or link.worker in set(self.members) - set(leaving))
        if not members:
            raise ValueError("nobody would be left; close the supervisor instead")
        plans = tuple(over_members(plan, self.members, members) for plan in self.plans)
        for worker in leaving:
            self._links[worker].standing = Standing.SPARE
        self._joining, self._keeps_kv = joining, True
        self._regroup(plans)
        self._rounds[Kind.CONFIGURED].future = future

    # --- messages -----------------------------------------------------------------------------------------------------------

    def _on_socket(self, link: WorkerLink, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and link.connection is not None:
            link.flush(self._selector)
        if not mask & selectors.EVENT_READ or link.connection is None:
            return
        try:
            data = link.connection.recv(1 << 18)
            messages = list(link.reader.feed(data))
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._lose(link, FailureKind.RANK_KILLED, f"connection failed: {error}")
            return
        if not data:
            code = None if link.process is None else link.process.poll()
            self._lose(link, FailureKind.RANK_KILLED, "connection closed" if code is None else f"exit code {code}")
            return
        for message in messages:
            self._on_message(link, message)

    def _on_message(self, link: WorkerLink, message: Message) -> None:
        try:
            if message.kind is Kind.HELLO:
                self._on_hello(link, unpack(Hello, message.body))
            elif message.kind is Kind.BEAT:
                beat = unpack(Beat, message.body)
                link.slot.write(Reading(beat.progress, beat.beat, Phase(beat.phase)))
            elif message.kind is Kind.LOADED:
                self._on_loaded(link, unpack(Loaded, message.body))
            elif message.kind is Kind.FAILED and (message.epoch == self.epoch or self.epoch == 0):
                self._on_failure(link, message, unpack(Failure, message.body))
            elif message.epoch != self.epoch:
                self.stale_messages += 1
            else:
                self._on_answer(link, message)
        except (ProtocolError, ValueError) as error:
            self._lose(link, FailureKind.RANK_KILLED, f"sent nonsense: {error}")

    def _on_answer(self, link: WorkerLink, message: Message) -> None:
        order = self._rounds.get(message.kind)
        if order is None or link.worker not in order.waiting:
            self.stale_messages += 1
            return
        order.waiting.discard(link.worker)
        order.answers[link.worker] = unpack(_BODIES[message.kind], message.body)
        if not order.waiting and self._blame_at_s == float("inf"):
            del self._rounds[message.kind]
            result = order.finish(order.answers)
            if not order.future.done():
                order.future.set_result(result)

    def _order(self, kind: Kind, body: Any, future: Future[Any], finish: Callable[[dict[int, Any]], Any], deadline_s: float, step: int = 0,
               plan_version: int = 0) -> None:  # fmt: skip
        """Tell every member, and give `future` what `finish` makes of their answers."""
        answer_kind = _ANSWERS[kind]
        if answer_kind in self._rounds:
            raise GroupError(f"a {kind.name} is under way already")
        members = self._members()
        self._rounds[answer_kind] = _Round(answer_kind, {link.worker for link in members}, future, finish, self._now_s() + deadline_s)
        now = self._now_s()
        for link in members:
            link.watch.step_begins(now)
            self._send(link, Message(kind, self.epoch, plan_version or self.plan.version, step, body))

    def _begin_step(self, command: StepCommand, future: Future[StepResult]) -> None:
        self._raise_unreported()
        began_s = self._now_s()
        deadline_s = began_s + self.settings.step_deadline_s
        order = _Round(Kind.DONE, set(), future, lambda answers: self._finish_step(command, began_s, answers), deadline_s, command=command)
        if self._needs_regroup or Kind.CONFIGURED in self._rounds:  # the rebuild under way ends this step, or begins it
            self._rounds[Kind.DONE] = order
        else:
            self._send_step(order)

    def _send_step(self, order: _Round) -> None:
        assert order.command is not None
        self._predicted_step_s = self._forecast.predict(order.command)
        body = StepOrder(order.command.to_wire(), self._overlaps(order.command))
        self._order(Kind.STEP, body, order.future, order.finish, self.settings.step_deadline_s, order.command.step)
        self._rounds[Kind.DONE].command = order.command

    def _overlaps(self, command: StepCommand) -> bool:
        assert self.model_spec is not None
        if self.settings.overlap != "auto":
            return self.settings.overlap == "always" and len(self.members) > 1
        return pays_in_halves(command, self.model_spec.hidden * self.model_spec.weight_number_bytes, self._link_cost)

    def _repeat_step(self) -> None:
        """The step that a loss cut short, once more: ranks start from where the last whole one left them, so it gives the same tokens."""
        order = self._rounds.pop(Kind.DONE, None)
        if order is not None:
            self._send_step(order)

    def _finish_step(self, command: StepCommand, began_s: float, answers: dict[int, StepDone]) -> StepResult:
        self._rebuilds_in_a_row = 0
        timings = tuple(
            RankTimings(worker, done.compute_s, done.memory_stall_s, done.communication_s, done.host_s)
            for worker, done in sorted(answers.items())
        )
        now = self._now_s()
        result = StepResult(command.step, tokens_from_wire(answers[min(answers)].tokens), timings, began_s, now)
        self._records.apply(command, result)
        self._forecast.observe(command, result.passes, now - began_s)
        if command.slices:
            units = work_units(self.plans, command, result.passes)
            self.profile.observe(self.members, units, {worker: done.busy_s for worker, done in answers.items()}, now)
        self.last_done = answers
        return result

    def _raise_unreported(self) -> None:
        if self._unreported is not None:
            error, self._unreported = self._unreported, None
            raise error

    def _send(self, link: WorkerLink, message: Message) -> None:
        link.send(message, self._selector)
        if link.is_clogged:
            self._lose(link, FailureKind.RANK_FROZEN, f"reads nothing: {len(link.outgoing)} bytes wait for it")

    # --- the end ------------------------------------------------------------------------------------------------------------

    def _tear_down(self) -> None:
        self._give_up(self._gone or "the supervisor is closed")
        while self._posted:
            self._posted.popleft()()
        for link in self._links:
            if link.connection is not None:
                self._send(link, Message(Kind.DIE, self.epoch))
        deadline_s = time.monotonic() + self.settings.stop_deadline_s
        for process in [*self._dying, *(link.process for link in self._links if link.process is not None)]:
            reap(process, deadline_s - time.monotonic())
        for link in self._links:
            link.process = None
            link.drop(self._selector)
        if self._store is not None:
            self._store.close()
        if self._door is not None:
            self._door.close()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()
        self._page.close()


_ANSWERS = {
    Kind.STEP: Kind.DONE,
    Kind.CONFIGURE: Kind.CONFIGURED,
    Kind.PREPARE: Kind.READY,
    Kind.SWITCH: Kind.SWITCHED,
    Kind.PROFILE: Kind.PROFILE,
}
_BODIES: dict[Kind, Any] = {
    Kind.DONE: StepDone,
    Kind.CONFIGURED: Configured,
    Kind.READY: Prepared,
    Kind.SWITCHED: Switched,
    Kind.PROFILE: list[tuple[int, float, float]],
}


def _slowest_prepared(answers: dict[int, Prepared]) -> Prepared:
    """What getting ready took the group: bytes of all ranks, the time of the slowest."""
    every = list(answers.values())
    return Prepared(
        every[0].moves,
        sum(answer.weight_bytes for answer in every),
        sum(answer.kv_bytes for answer in every),
        max(answer.seconds for answer in every),
    )

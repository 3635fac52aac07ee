"""A group of workers over its epochs: orders to its members and their answers, losses, and the group made anew on those that are left.

Everything here happens on one thread, the group's `control`; what a caller wants of it comes through the `Supervisor`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from envs.decision.detection import FailureKind
from envs.domain.plans import LayerPlans
from runtime.torch_tp.blame import Blame
from runtime.torch_tp.communicators.segment_names import segment_name
from runtime.torch_tp.control_thread import ControlThread
from runtime.torch_tp.group_plans import GroupPlans
from runtime.torch_tp.group_values import GroupChange, GroupError, GroupGone, GroupRebuilt, LostRank, RankSettings, SupervisorSettings
from runtime.torch_tp.meeting_place import MeetingPlace
from runtime.torch_tp.nursery import Nursery
from runtime.torch_tp.orders import Configuration, Configured, Failure, Loaded, StepDone
from runtime.torch_tp.protocol import Kind, Message, unpack
from runtime.torch_tp.roster import Roster
from runtime.torch_tp.rounds import ANSWERS, Round, Rounds
from runtime.torch_tp.step_account import StepAccount
from runtime.torch_tp.steps import StepCommand, StepResult
from runtime.torch_tp.worker_link import Standing, WorkerLink

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.02
IDLE_WATCH_EVERY_S = 0.05
CHANGES_KEPT = 256


class Group:
    """started: the first change; changes: the latest ones, oldest first."""

    def __init__(
        self,
        model: str,
        ranks: Sequence[RankSettings],
        settings: SupervisorSettings,
        token: str,
        nursery: Nursery | None,
        on_change: Callable[[GroupChange], None],
        now_s: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.control = ControlThread(self._turn, self._tear_down)
        self.roster = Roster(model, ranks, settings, token, nursery, self.control.selector, self, now_s)
        self.steps = StepAccount([rank.speed for rank in ranks], settings.overlap)
        self.plans = GroupPlans(self.steps.profile, settings.buddy_kv)
        self.started: Future[GroupChange] = Future()
        self.changes: list[GroupChange] = []
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self._nursery, self._on_change, self._now_s = nursery, on_change, now_s
        self._meeting = MeetingPlace(settings, ranks)
        self._rounds = Rounds()
        self._numbers = count(1)  # of orders that are no steps
        self._blame = Blame()
        self._is_whole = False  # whether every member of this epoch has come to be
        self._unreported: GroupRebuilt | None = None
        # of the next epoch
        self._needs_regroup = False
        self._lost: list[LostRank] = []
        self._joining: tuple[int, ...] = ()
        self._keeps_kv = False

    # --- the thread ---------------------------------------------------------------------------------------------------------

    def spawn_all(self) -> None:
        """Start the store and every local worker; the kernel kills them when the thread that started them ends, so this one does it."""
        # where no group needs the store, it still sweeps up after us, if no nursery does
        if self._meeting.may_need_store or self._nursery is None:
            self._meeting.open()
        self.roster.spawn_all(self._meeting.may_need_store)

    def _turn(self) -> float:
        now = self._now_s()
        self._meeting.watch()
        owing = self._rounds.owing() if Kind.DONE in self._rounds or Kind.CONFIGURED in self._rounds else set()
        self.roster.watch(now, owing, self.steps.predicted_s)
        for kind, order in self._rounds.overdue(now):
            logger.warning("order overdue kind=%s epoch=%d workers=%s", kind.name, self.epoch, sorted(order.waiting))
            for worker in sorted(order.waiting):
                self._lose(worker, FailureKind.RANK_FROZEN, f"no answer {kind.name} within its deadline")
        if self._blame.is_due(now):
            self._settle_failure()
        if self._needs_regroup and Kind.CONFIGURED not in self._rounds:
            self._regroup()
        return WATCH_EVERY_S if self._rounds or self._needs_regroup else IDLE_WATCH_EVERY_S

    def _tear_down(self, reason: str) -> None:
        self._give_up(reason)
        self.roster.close()
        self._meeting.close()

    def _give_up(self, reason: str) -> None:
        self.control.gone = reason
        error = GroupGone(reason)
        self._rounds.fail(error)
        if not self.started.done():
            self.started.set_exception(error)

    def spares(self) -> tuple[int, ...]:
        """Workers that are loaded and in no group."""
        return tuple(link.worker for link in self.roster.standing(Standing.SPARE))

    def absent(self) -> tuple[int, ...]:
        """Workers of this host that have no process."""
        return tuple(link.worker for link in self.roster.standing(Standing.ABSENT) if not link.settings.is_remote)

    def _members(self) -> list[WorkerLink]:
        return self.roster.standing(Standing.MEMBER)

    # --- workers come and go ------------------------------------------------------------------------------------------------

    def on_loaded(self, link: WorkerLink, loaded: Loaded) -> None:
        """From the roster."""
        self.plans.model = self.steps.model = self.plans.model or loaded.model
        self._start_if_all_came()

    def _start_if_all_came(self) -> None:
        if self.epoch == 0 and not self.roster.standing(Standing.LOADING):
            self._joining = self.spares()
            self._needs_regroup = True

    def _lose(self, worker: int, kind: FailureKind, detail: str) -> None:
        self.roster.lose(self.roster.links[worker], kind, detail)

    def on_lost(self, lost: LostRank, was_member: bool) -> None:
        """From the roster: the group, if the worker was in it, is rebuilt."""
        self._lost = [*self._lost[1 - CHANGES_KEPT :], lost]  # one that dies while it loads is only told with the next group
        logger.warning("rank lost worker=%d kind=%s epoch=%d detail=%s", lost.worker, lost.kind.name, self.epoch, lost.detail)
        self._joining = tuple(worker for worker in self._joining if worker != lost.worker)
        if was_member or lost.worker in self.members:
            self._fence()
        self._start_if_all_came()

    def _fence(self) -> None:
        """No collective of this epoch may go on: the page's word is seen by spinning ranks at once, the message by the others."""
        self.roster.page.epoch_min = self.epoch + 1
        self.tell_members(Message(Kind.FENCE, self.epoch + 1))
        # a step or switch under way ends in GroupRebuilt once the next group stands
        error = GroupError("a rank was lost meanwhile; the order was not carried out")
        self._rounds.fail(error, (Kind.CONFIGURED, Kind.READY, Kind.PROFILE, Kind.CARRIED))
        self._blame.forget()
        self._keeps_kv = False
        self._needs_regroup = True

    def _on_failure(self, link: WorkerLink, message: Message, failure: Failure) -> None:
        """A rank could not do what it was told. If another one died, its socket says so in a moment; else all start afresh."""
        logger.warning("order failed worker=%d of=%s detail=%s", link.worker, Kind(failure.of).name, failure.detail)
        if failure.of == Kind.LOAD:
            self._lose(link.worker, FailureKind.RANK_KILLED, failure.detail)
            return
        order = self._rounds.awaited(link.worker, ANSWERS.get(Kind(failure.of), Kind.DIE), message.step)
        if failure.of == Kind.PREPARE and (order is None or not failure.is_peer):
            if order is not None:  # of several that fail alike the first ends it, the others are late answers to an order given up
                error = GroupError(f"plan not prepared, nothing has changed: worker {link.worker}: {failure.detail}")
                self._rounds.fail(error, (Kind.READY,))
            return
        if order is None:  # it is not what we think it is
            self._lose(link.worker, FailureKind.RANK_KILLED, f"failed at what needs no answer: {failure.detail}")
            return
        order.waiting.discard(link.worker)
        if not failure.is_peer:
            self._blame.detail = f"worker {link.worker}: {failure.detail}"
            self.roster.page.epoch_min = self.epoch + 1  # the others wait for this rank in vain
        self._blame.hear(self._now_s())

    def _settle_failure(self) -> None:
        """A collective failed and nobody died: whoever is behind the others is the cause; with nobody behind, all start afresh."""
        if self._blame.is_hopeless:
            detail = self._blame.detail or "a collective failed"
            self._give_up(f"{self._blame.rebuilds_in_a_row} rebuilds without a step between: {detail}")
            return
        culprit = self._blame.culprit({link.worker: link.slot.read() for link in self._members()})
        if culprit is not None:
            self._lose(culprit, FailureKind.RANK_FROZEN, "behind the others when a collective ran out of time")
        else:
            self._fence()

    # --- epochs -------------------------------------------------------------------------------------------------------------

    def _regroup(self, plans: tuple[LayerPlans, ...] | None = None) -> None:
        """Next epoch: fresh groups over the members that are left and those that join; plans: the old ones, where KV is kept."""
        links = [link for link in self.roster.links if link.standing is Standing.MEMBER or link.worker in self._joining]
        address = self._meeting.address_for(links)
        if address is None:
            if self._meeting.is_late(self._now_s()):
                self._give_up("the rendezvous store did not come up; see its output")
            return
        self._needs_regroup = False
        workers = tuple(link.worker for link in links)
        if not links or self.plans.model is None:
            reasons = "; ".join(f"worker {lost.worker}: {lost.detail}" for lost in self._lost[-len(self.roster.links) :])
            self._give_up(f"no rank is left ({reasons})")
            return
        takes_over = False
        if plans is not None:
            self.plans.live = plans
        else:
            takes_over = self._keeps_kv = self._may_take_over and self.plans.take_over(self.members, workers)
            if not takes_over:
                self.plans.begin_anew(workers)
        self.epoch += 1
        self._blame.forget()  # who failed in the group that is gone says nothing of this one
        self.roster.page.epoch_min = max(self.roster.page.epoch_min, self.epoch)
        self.members = workers
        self._is_whole = False
        for link in links:
            link.standing = Standing.MEMBER
        configuration = self._configuration(links, address, takes_over)
        deadline_s = self._now_s() + self.settings.configure_deadline_s
        self._rounds[Kind.CONFIGURED] = Round(0, set(workers), Future(), self._on_configured, deadline_s)
        self._tell(links, Message(Kind.CONFIGURE, self.epoch, self.plans.newest.version, body=configuration))

    @property
    def _may_take_over(self) -> bool:
        """Whether what buddies keep of the lost ones' KV is of one moment: no member is new, no switch was under way, no rank failed."""
        return self._is_whole and not self._joining and Kind.SWITCHED not in self._rounds and not self._blame.detail

    def _configuration(self, links: Sequence[WorkerLink], store: tuple[str, int], takes_over: bool) -> Configuration:
        by_node: dict[str, list[int]] = {}
        for link in links:
            by_node.setdefault(link.node, []).append(link.worker)
        domains = tuple(tuple(workers) for workers in by_node.values())
        segments = tuple(segment_name(os.getpid(), self.epoch, f"domain{index}") for index in range(len(domains)))
        settings, plans = self.settings, self.plans
        return Configuration(
            self.members, domains, settings.communicator, *store, segments, settings.collective_deadline_s,
            plans.live, self._keeps_kv, settings.between, settings.wire, settings.buddy_kv, tuple(plans.buddied), takes_over,
            self._joining, plans.records.all() if self._joining or takes_over else (),
        )  # fmt: skip

    def _on_configured(self, answers: dict[int, Configured]) -> GroupChange:
        change = GroupChange(self.epoch, self.members, tuple(self._lost), self._joining, self.plans.newest, self._keeps_kv, self._now_s())
        logger.info(
            "group stands epoch=%d members=%s plan_version=%d configure_s=%.4f",
            self.epoch, self.members, self.plans.newest.version, max(answer.seconds for answer in answers.values()),
        )  # fmt: skip
        is_first = not self.changes
        self._is_whole = True
        self.changes = [*self.changes[1 - CHANGES_KEPT :], change]
        detail = self._blame.detail or "; ".join(f"worker {lost.worker} lost: {lost.detail}" for lost in change.lost)
        self._lost, self._joining, self._keeps_kv, self._blame.detail = [], (), False, ""
        if is_first:
            self.started.set_result(change)
        elif change.keeps_kv:
            self._repeat_step()
        else:
            error = GroupRebuilt(change, detail or "the group was rebuilt")
            if not self._rounds.fail(error, (Kind.DONE, Kind.SWITCHED)):
                self._unreported = error
        self._on_change(change)
        return change

    def change_members(self, joining: tuple[int, ...], leaving: tuple[int, ...], future: Future[GroupChange]) -> None:
        links = self.roster.links
        is_reachable = self._meeting.address_for([link for link in links if link.worker in {*self.members, *joining}]) is not None
        if self._rounds or self._needs_regroup or not self.members or not is_reachable:
            raise GroupError("the group is busy or being rebuilt; change its members between two steps, with no plan in preparation")
        absent = [worker for worker in joining if worker not in self.spares()]
        if absent:
            raise ValueError(f"workers {absent} are no spares; spares are {list(self.spares())}")
        members = tuple(link.worker for link in links if link.worker in joining or link.worker in set(self.members) - set(leaving))
        if not members:
            raise ValueError("nobody would be left; close the supervisor instead")
        plans = self.plans.over(self.members, members)
        for worker in leaving:
            links[worker].standing = Standing.SPARE
        self._joining, self._keeps_kv = joining, True
        self._regroup(plans)
        self._rounds[Kind.CONFIGURED].future = future

    # --- orders and answers -------------------------------------------------------------------------------------------------

    def on_message(self, link: WorkerLink, message: Message) -> None:
        """From the roster: a word about an epoch. Raises: ProtocolError for a body of another shape."""
        if message.kind is Kind.FAILED:
            failure = unpack(Failure, message.body)
            if message.epoch == self.epoch or failure.of == Kind.LOAD:
                self._on_failure(link, message, failure)
        elif message.epoch == self.epoch:
            order = self._rounds.answered(link.worker, message.kind, message.step, message.body)
            if order is not None and not order.waiting and not self._blame.is_pending:
                self._rounds.settle(message.kind)

    def order(
        self,
        kind: Kind,
        body: Any,
        future: Future[Any],
        finish: Callable[[dict[int, Any]], Any],
        deadline_s: float,
        command: StepCommand | None = None,
    ) -> None:
        """Tell every member, and give `future` what `finish` makes of their answers. command: of a step."""
        if ANSWERS[kind] in self._rounds:
            raise GroupError(f"a {kind.name} is under way already")
        members = self._members()
        number = next(self._numbers) if command is None else command.step
        order = Round(number, {link.worker for link in members}, future, finish, self._now_s() + deadline_s, command=command)
        self._rounds[ANSWERS[kind]] = order
        self._tell(members, Message(kind, self.epoch, self.plans.newest.version, number, body))

    def _tell(self, links: Sequence[WorkerLink], order: Message) -> None:
        """Send what is to be answered: from now on they owe a sign of progress."""
        now = self._now_s()
        for link in links:
            link.watch.step_begins(now)
            self.roster.send(link, order)

    def tell_members(self, message: Message) -> None:
        for link in self._members():
            self.roster.send(link, message)

    def begin_step(self, command: StepCommand, future: Future[StepResult]) -> None:
        self.raise_unreported()
        began_s = self._now_s()
        deadline_s = began_s + self.settings.step_deadline_s
        order = Round(command.step, set(), future, partial(self._finish_step, command, began_s), deadline_s, command=command)
        if self._needs_regroup or Kind.CONFIGURED in self._rounds:  # the rebuild under way ends this step, or begins it
            self._rounds[Kind.DONE] = order
        else:
            self._send_step(order)

    def _send_step(self, order: Round) -> None:
        assert order.command is not None
        body = self.steps.begins(order.command, len(self.members))
        self.order(Kind.STEP, body, order.future, order.finish, self.settings.step_deadline_s, order.command)

    def _repeat_step(self) -> None:
        """The step that a loss cut short, once more: ranks start from where the last whole one left them, so it gives the same tokens."""
        order = self._rounds.pop(Kind.DONE, None)
        if order is not None:
            self._send_step(order)

    def _finish_step(self, command: StepCommand, began_s: float, answers: dict[int, StepDone]) -> StepResult:
        self._blame.rebuilds_in_a_row = 0
        result = self.steps.ended(command, answers, self.members, self.plans.live, began_s, self._now_s())
        self.plans.records.apply(command, result)
        return result

    @property
    def has_unreported(self) -> bool:
        return self._unreported is not None

    def raise_unreported(self) -> None:
        if self._unreported is not None:
            error, self._unreported = self._unreported, None
            raise error

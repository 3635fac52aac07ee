"""A group of workers as the controller's other parts see it: start it, run steps on it, change its plan and its members.

One thread owns every socket, the watch and the epochs (`group`); callers post what they want and wait. No rank is special: any may die,
be stopped, or come late, and a step either gives all its tokens or raises `GroupRebuilt` once the survivors stand ready again. What a
step holds and what follows for the requests is the batcher's business. Imports no torch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from envs.domain.plans import LayerPlans
from envs.domain.specs import ModelSpec
from runtime.torch_tp.group import Group
from runtime.torch_tp.group_values import GroupChange, GroupError, GroupGone, GroupRebuilt, LostRank, RankSettings, SupervisorSettings
from runtime.torch_tp.link_cost import PROBE_REPEATS, PROBE_SIZES_BYTES, LinkCost
from runtime.torch_tp.nursery import Nursery, NurseryGone
from runtime.torch_tp.orders import Carried, CarryOrder, Prepared, PrepareOrder, ReduceOrder, StepDone, Switched, SwitchOrder
from runtime.torch_tp.protocol import Kind, Message
from runtime.torch_tp.steps import StepCommand, StepResult

__all__ = ["GroupChange", "GroupError", "GroupGone", "GroupRebuilt", "LostRank", "RankSettings", "Supervisor", "SupervisorSettings"]


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
        self.settings = settings or SupervisorSettings()
        self.token = self.settings.token or secrets.token_urlsafe(24)
        self._nursery = nursery
        self._group = Group(str(model), ranks, self.settings, self.token, nursery, on_change, now_s)
        self._roster, self._plans, self._control = self._group.roster, self._group.plans, self._group.control

    def start(self) -> GroupChange:
        """Spawn and load all workers and form the first group; a rank lost meanwhile is left out.

        Raises: GroupGone when none came up, with what the last one said.
        """
        try:
            self.listen()
            if self._nursery is not None:
                self._nursery.await_ready()
            self._control.start(self._group.spawn_all)
            change = self._group.started.result(self.settings.start_deadline_s + self.settings.configure_deadline_s)
            if self.settings.overlap == "auto" and len(set(self.nodes())) > 1:
                times_s = [median_s for _, median_s, _ in self.profile_all_reduce(PROBE_SIZES_BYTES, PROBE_REPEATS)]
                self._group.steps.link = LinkCost.fit(PROBE_SIZES_BYTES, times_s)
            return change
        except (NurseryGone, TimeoutError) as error:
            self.close()
            raise GroupGone(f"the workers did not come up: {error or 'their start took too long'}") from error
        except BaseException:
            self.close()
            raise

    def listen(self) -> None:
        """Open the door for remote workers, where settings ask for one; `address` then says where. Part of `start`, may come earlier."""
        if self.settings.listen_host is not None and self._roster.door is None:
            self._roster.open_door(self.settings.listen_host, self.settings.listen_port)

    @property
    def address(self) -> str | None:
        """HOST:PORT where remote workers join; None without `listen_host`."""
        return None if self._roster.door is None else self._roster.door.address

    @property
    def epoch(self) -> int:
        """Grows with every group that is made; 0 before the first."""
        return self._group.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """Worker ids in rank order."""
        return self._group.members

    @property
    def changes(self) -> list[GroupChange]:
        """The latest ones, oldest first."""
        return self._group.changes

    @property
    def model_spec(self) -> ModelSpec | None:
        """As the first worker that loaded the model told it."""
        return self._plans.model

    @property
    def plans(self) -> tuple[LayerPlans, ...]:
        """Live plans, oldest first."""
        return self._plans.live

    @property
    def plan(self) -> LayerPlans:
        """The plan that new requests get. Raises: GroupGone before the first group stands."""
        return self._plans.newest

    @property
    def spares(self) -> tuple[int, ...]:
        """Workers that are loaded and in no group: they can `join`."""
        return self._group.spares()

    @property
    def absent(self) -> tuple[int, ...]:
        """Workers of this host that have no process: they can be started again (`respawn`)."""
        return self._group.absent()

    @property
    def last_done(self) -> dict[int, StepDone]:
        """By worker, what it said of the last step."""
        return self._group.steps.last_done

    def rank_settings(self, worker: int) -> RankSettings:
        return self._roster.links[worker].settings

    def memory_bytes(self) -> tuple[int, ...]:
        """Memory per member: a device's own, or an equal share of its host's."""
        nodes = self.nodes()
        told = [self._roster.links[worker].loaded for worker in self.members]
        return tuple(
            0 if loaded is None else loaded.memory_bytes // (nodes.count(node) if loaded.is_host_memory else 1)
            for loaded, node in zip(told, nodes, strict=True)
        )

    def nodes(self) -> tuple[str, ...]:
        """Communication domain of each member."""
        return tuple(self._roster.links[worker].node for worker in self.members)

    def pid_of(self, worker: int) -> int | None:
        """Process id of a worker on this host; None while it is absent, or on another."""
        return self._roster.links[worker].pid

    def step(self, command: StepCommand) -> StepResult:
        """Run one step on every rank.

        Raises: GroupRebuilt when it could not be finished, or when slots were lost since the last step: the group stands ready again,
        all slots are empty. GroupGone when no rank is left.
        """
        return self._control.ask(lambda future: self._group.begin_step(command, future), self.settings.step_deadline_s)

    def profile_all_reduce(self, sizes_bytes: Sequence[int], repeats: int) -> list[tuple[int, float, float]]:
        """(bytes, median s, 99th percentile s) of all-reduces over the group, between two steps; [] for a group of one."""
        order, deadline_s = ReduceOrder(tuple(sizes_bytes), repeats), self.settings.step_deadline_s
        return self._control.ask(lambda future: self._group.order(Kind.PROFILE, order, future, _lowest, deadline_s), deadline_s)

    def raise_unreported(self) -> None:
        """Raise GroupRebuilt where slots were lost since the last step and nobody has heard of it; costs nothing where none were."""
        if self._group.has_unreported:

            def begin(future: Future[None]) -> None:
                self._group.raise_unreported()
                future.set_result(None)

            self._control.ask(begin, self.settings.configure_deadline_s)

    def next_plan(self, shares: Sequence[float] | None = None, **cuts: Any) -> LayerPlans:
        """A plan of the next version over the members: by `shares`, or by their measured speeds, per operation.

        cuts: as in `layer_cuts.layer_plans`.
        """
        return self._plans.next(self.members, shares, **cuts)

    def step_ratio(self, plan: LayerPlans) -> float:
        """Expected busy time of steps like the last one under `plan` ÷ under the plan in use; 1.0 before the first step."""
        if not self.members or plan.ranks != len(self.members):
            return 1.0
        return self._group.steps.ratio(self.members, self.plan, plan)

    def kv_bytes_ahead_of_another_plan(self) -> int:
        """KV bytes that must move between ranks before one more plan can be used; 0 where there is room for it at once."""
        return self._plans.kv_bytes_ahead_of_another()

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
        deadline_s = self.settings.prepare_deadline_s
        self._control.post(lambda: self._group.order(Kind.PREPARE, order, future, _slowest_prepared, deadline_s), future)
        return future

    def switch(self, order: SwitchOrder, plan: LayerPlans | None = None) -> Switched:
        """Put what was prepared into force, between two steps; `plan` is the one that `order` uses.

        Raises: GroupRebuilt when a rank was lost in it, like `step`. GroupError when it could not be done and nothing has changed.
        """
        deadline_s = self.settings.step_deadline_s

        def begin(future: Future[Switched]) -> None:
            self._group.raise_unreported()
            self._group.order(Kind.SWITCH, order, future, lambda answers: self._plans.switched(order, plan, answers), deadline_s)

        return self._control.ask(begin, deadline_s)

    def carry(self, order: CarryOrder) -> Future[Carried]:
        """Have every rank write a slot's KV to a file, or fill it from there, beside the steps. The future ends in GroupError where the
        group is lost meanwhile; what a rank could not do is in the answer."""
        future: Future[Carried] = Future()
        deadline_s = order.deadline_s + self.settings.prepare_deadline_s  # the ranks keep the order's own
        self._control.post(
            lambda: self._group.order(Kind.CARRY, order, future, lambda answers: self._plans.carried(order, answers), deadline_s), future
        )
        return future

    def slots_of_plan(self, version: int) -> tuple[int, ...]:
        """Slots that the ranks hold under a plan; those that the batcher gives up only leave with its next command."""
        return self._plans.records.of_plan(version)

    def release_plan(self, version: int) -> None:
        """Forget a plan that no slot uses any more, between two steps. Raises: ValueError for the newest, an unknown one, or one in use."""

        def begin(future: Future[None]) -> None:
            self._plans.release(version)
            self._group.tell_members(Message(Kind.RELEASE, self.epoch, version))
            future.set_result(None)

        self._control.ask(begin, self.settings.configure_deadline_s)

    def sever(self, worker: int) -> bool:
        """For drills: cut the connection to a worker, as a failing network would. False where there is none."""

        def begin(future: Future[bool]) -> None:
            future.set_result(self._roster.sever(worker))

        return self._control.ask(begin, self.settings.configure_deadline_s)

    def respawn(self, worker: int) -> None:
        """Start a lost worker again; once it is loaded it shows in `spares`. Raises: ValueError while it still runs."""

        def begin(future: Future[None]) -> None:
            self._roster.respawn(self._roster.links[worker])
            self._group.steps.profile.forget(worker)
            future.set_result(None)

        self._control.ask(begin, self.settings.start_deadline_s)

    def join(self, workers: Sequence[int]) -> GroupChange:
        """Take spares into the group, between two steps. Every slot stays valid: the plans in use are the old ones, in which those that
        joined have zero width; a `Slide` to `next_plan()` gives them work. Raises: ValueError for a worker that is no spare."""
        deadline_s = self.settings.configure_deadline_s
        return self._control.ask(lambda future: self._group.change_members(tuple(workers), (), future), deadline_s)

    def leave(self, workers: Sequence[int]) -> GroupChange:
        """Let members go that have zero width in every live plan; they become spares. With one rank left, no collective is needed.

        Raises: ValueError where one of them still has work.
        """
        deadline_s = self.settings.configure_deadline_s
        return self._control.ask(lambda future: self._group.change_members((), tuple(workers), future), deadline_s)

    def close(self) -> None:
        """Stop every worker and leave nothing behind. May be called twice, and from a signal handler's thread."""
        self._control.close(self.settings.stop_deadline_s + 5.0)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lowest(answers: dict[int, Any]) -> Any:
    """The answer of the lowest rank, where all say the same."""
    return answers[min(answers)]


def _slowest_prepared(answers: dict[int, Prepared]) -> Prepared:
    """What getting ready took the group: bytes of all ranks, the time of the slowest."""
    every = list(answers.values())
    return Prepared(
        every[0].moves,
        sum(answer.weight_bytes for answer in every),
        sum(answer.kv_bytes for answer in every),
        max(answer.seconds for answer in every),
    )

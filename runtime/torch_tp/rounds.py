"""Orders to all members that are under way: who still owes an answer, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from runtime.torch_tp.orders import Carried, Configured, Prepared, StepDone, Switched
from runtime.torch_tp.protocol import Kind, unpack
from runtime.torch_tp.steps import StepCommand

ANSWERS = {
    Kind.STEP: Kind.DONE,
    Kind.CONFIGURE: Kind.CONFIGURED,
    Kind.PREPARE: Kind.READY,
    Kind.SWITCH: Kind.SWITCHED,
    Kind.PROFILE: Kind.PROFILE,
    Kind.CARRY: Kind.CARRIED,
}
"""Which kind of message answers which order."""

_BODIES: dict[Kind, Any] = {
    Kind.DONE: StepDone,
    Kind.CONFIGURED: Configured,
    Kind.READY: Prepared,
    Kind.SWITCHED: Switched,
    Kind.PROFILE: list[tuple[int, float, float]],
    Kind.CARRIED: Carried,
}


@dataclass(slots=True)
class Round:
    """One order and the answers so far, by worker. number: what the answers to this very order say, so that a late one to an order
    that was given up is not taken for them. finish: makes of all answers what `future` gets. command: of a step."""

    number: int
    waiting: set[int]
    future: Future[Any]
    finish: Callable[[dict[int, Any]], Any]
    deadline_s: float
    answers: dict[int, Any] = field(default_factory=dict)
    command: StepCommand | None = None


class Rounds(dict[Kind, Round]):
    """At most one of each kind, by the kind of its answer."""

    def owing(self) -> set[int]:
        """Workers that owe some answer."""
        return {worker for order in self.values() for worker in order.waiting}

    def awaited(self, worker: int, kind: Kind, number: int) -> Round | None:
        """The order of that number, where an answer of this kind is awaited from this worker."""
        order = self.get(kind)
        return order if order is not None and order.number == number and worker in order.waiting else None

    def answered(self, worker: int, kind: Kind, number: int, body: Any) -> Round | None:
        """Note an answer; None where it is not awaited. Raises: ProtocolError for a body of another shape."""
        order = self.awaited(worker, kind, number)
        if order is None:
            return None
        order.waiting.discard(worker)
        order.answers[worker] = unpack(_BODIES[kind], body)
        return order

    def settle(self, kind: Kind) -> None:
        """All have answered: tell whoever waits."""
        order = self.pop(kind)
        result = order.finish(order.answers)
        if not order.future.done():
            order.future.set_result(result)

    def fail(self, error: Exception, kinds: Iterable[Kind] | None = None) -> bool:
        """End the open rounds of these kinds (None: all) with an error; returns whether there was one."""
        failed = [order for kind in (list(self) if kinds is None else kinds) if (order := self.pop(kind, None)) is not None]
        for order in failed:
            if not order.future.done():
                order.future.set_exception(error)
        return bool(failed)

    def overdue(self, now_s: float) -> list[tuple[Kind, Round]]:
        return [(kind, order) for kind, order in self.items() if now_s > order.deadline_s]

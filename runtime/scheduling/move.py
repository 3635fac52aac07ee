"""One move as it is told: what was ordered, by whom, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from envs.domain.commands import Command

FOREIGN = "a foreign server's own business: only routing and requeueing are possible"


@dataclass(slots=True, eq=False)
class Move:
    """One move, as it is told. at_s: Unix time. price_s: expected, took_s: from order to end, paused_s: serving it took; of a moved call,
    for how long it made no token, once the next one is there. outcome: "done", "refused" (nothing changed), "failed", None while it is
    under way. calls: moved or asked again."""

    at_s: float
    command: Command
    source: str
    reason: str
    detail: str = ""
    price_s: float | None = None
    took_s: float | None = None
    paused_s: float | None = None
    calls: int = 0
    outcome: str | None = None
    error: str = ""


class MoveUndone(RuntimeError):
    """A move that was begun, failed and was taken back. paused_s: the serving that it took all the same."""

    def __init__(self, message: str, paused_s: float) -> None:
        super().__init__(message)
        self.paused_s = paused_s

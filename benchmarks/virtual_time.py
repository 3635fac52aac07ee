"""An event loop whose clock jumps to the next timer when nothing else is to do: minutes of waiting pass in the time that the work takes."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

BEGIN_S = 1000.0
TURN_S = 1e-6


class _JumpingSelector(selectors.SelectSelector):
    now_s = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0.0)
        if timeout is None and not ready:
            raise RuntimeError("nothing is left to wait for: a task waits for what nobody will do")
        # a turn takes its time too: a timer that is due within rounding must not find the same instant for ever
        self.now_s += TURN_S if ready or timeout is None else max(TURN_S, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that takes its clock from `time` and waits by timers alone: no threads, no sockets that others write to."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Any) -> Any:
    """As asyncio.run, on the jumping clock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)

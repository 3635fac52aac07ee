"""A nursery whose workers run out of memory when told: BALLAST_TEST_FAULT="METHOD WORKER NUMBER" is the call of a store that fails.

METHOD is one of `KvStore`; of `allocate` and `grow` only copies of slots count.
"""

from __future__ import annotations

import os
from itertools import count
from typing import Any

from runtime.torch_tp import nursery_process
from runtime.torch_tp.kv_slots import SlotKv
from runtime.torch_tp.step_runner import StepRunner
from tests.runtime.torch_tp.group_driver import SETTINGS


def fail_as_told() -> None:
    """Wrap what a worker calls; the environment is read in the worker, since one nursery serves several tests."""
    begin = StepRunner.__init__

    def begin_and_know_the_worker(self: StepRunner, worker: int, *rest: Any) -> None:
        begin(self, worker, *rest)
        method, chosen, number = os.environ["BALLAST_TEST_FAULT"].split()
        if worker == int(chosen):
            fail_once(method, int(number))

    StepRunner.__init__ = begin_and_know_the_worker  # type: ignore[method-assign]


def fail_once(method: str, number: int) -> None:
    real, calls = getattr(SlotKv, method), count(1)

    def wrapped(self: SlotKv, slot: int, *rest: Any) -> Any:
        counts = method in ("export", "import_") or slot >= SETTINGS.slots_max
        if counts and next(calls) == number:
            raise MemoryError(f"as told: {method} {number}")
        return real(self, slot, *rest)

    setattr(SlotKv, method, wrapped)


if __name__ == "__main__":
    fail_as_told()
    nursery_process.main()

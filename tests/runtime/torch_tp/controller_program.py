"""A controller in its own process, for tests that end it: `python -m tests.runtime.torch_tp.controller_program MODEL RANKS nursery|plain`.

Prints a line per phase: `loading`, `idle`, `serving`.
"""

from __future__ import annotations

import sys
import threading

from runtime.torch_tp.nursery import Nursery
from runtime.torch_tp.supervisor import RankSettings, Supervisor
from tests.runtime.torch_tp.group_driver import SETTINGS, Driver, generate


def main(model: str, ranks: int, has_nursery: bool) -> None:
    nursery = None
    if has_nursery:
        nursery = Nursery()
        nursery.start()
    supervisor = Supervisor(model, [RankSettings()] * ranks, SETTINGS, nursery=nursery)
    threading.Thread(target=announce_loading, args=(supervisor,), daemon=True).start()
    with supervisor:
        supervisor.start()
        generate(supervisor)
        print("idle", flush=True)
        sys.stdin.readline()

        def before_step(driver: Driver) -> None:
            if driver.run.steps == 5:
                print("serving", flush=True)

        while True:
            generate(supervisor, before_step)


def announce_loading(supervisor: Supervisor) -> None:
    while supervisor.pid_of(0) is None:
        threading.Event().wait(0.01)
    print("loading", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "nursery")

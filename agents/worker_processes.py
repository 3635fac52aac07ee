"""Worker processes that never outlive the command that started them (fault K21)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait


def die_with_parent() -> None:
    """End this process as soon as its parent is gone, also in the middle of a long step.

    Ctrl-C reaches the whole process group; the parent decides what it means, so workers ignore it.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_workers() -> None:
    """Kill every worker process of this command at once: for Ctrl-C, where nobody waits for their results."""
    for process in multiprocessing.active_children():
        process.kill()

"""A child that never outlives its parent: the kernel kills it, and a watch notices where the kernel was not asked in time."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Call first thing in the child.

    The parent may have died before this call, and then no signal will ever come: the parent's id is compared afterwards.
    """
    _set_death_signal(signal.SIGKILL)
    if not has_parent(parent_pid):
        os._exit(0)


def leave_with_parent(parent_pid: int) -> None:
    """Leave when the parent ends, but not when only the thread that started this process does. As soon as the interpreter gets to it."""

    def look(number: int, frame: object) -> None:
        if not has_parent(parent_pid):
            os._exit(0)

    signal.signal(signal.SIGCONT, look)
    _set_death_signal(signal.SIGCONT)
    look(0, None)


def wake_with_parent() -> None:
    """Go on when the parent ends, should this process be stopped then; in place of the above. For one that notices that end by itself, by
    the end of a socket, and has something to clear away."""
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    _set_death_signal(signal.SIGCONT)


def _set_death_signal(number: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) refused; the worker would outlive its parent")


def has_parent(parent_pid: int) -> bool:
    """Whether `parent_pid` is still this process's parent; an orphan is given to another."""
    return os.getppid() == parent_pid

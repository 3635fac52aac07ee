"""How the hot functions are compiled: one decorator, so that every kernel has the same rules.

A kernel only borrows arrays: it neither allocates nor returns any, and its callers hold them while it runs. So numba's
reference counting is left out (`_nrt`). With it, every call that passes the 23 arrays of a `KernelState` on would pay
some fifty atomic operations, and most of the time of a simulated world went there. A function that must allocate takes
plain `njit`; allocating in a kernel is an error at compile time, so nothing can leak or dangle unnoticed.

Give every argument the same type at all call sites: a plain 0 or 1, like an int for a float, makes numba compile the
function and all that it calls once more. ZERO and ONE are integers that do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envs.perf_model.kernel_cache import cached_njit

ZERO: Any = np.int64(0)
ONE: Any = np.int64(1)

_OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy", "no_cfunc_wrapper": True}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on first call, and keep it on disk for the next process. Division by zero gives inf, as in numpy."""
    return _compiled(function, _OPTIONS)


def inner_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `kernel`, for functions that only other kernels and tests call. Leaving out their entry from Python would save
    compile time, but a call by mistake would then crash the interpreter instead of working."""
    return kernel(function)


def inlined_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `kernel`, its body copied to where it is called; for a few lines in an inner loop."""
    return _compiled(function, _OPTIONS | {"inline": "always"})


def _compiled(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = cached_njit(**options)(function)
    return compiled

"""What a nursery loads ahead is what its ranks call."""

from __future__ import annotations

import subprocess
import sys

from runtime.torch_tp.nursery import worker_environment
from tests.conftest import PROJECT

PROGRAM = """
import os, sys
from runtime.torch_tp import rank_kernels
before = len(os.listdir("/proc/self/task"))
rank_kernels.load()
assert len(os.listdir("/proc/self/task")) == before, "a process that forks has no threads"
loaded = {kernel.py_func.__name__: list(kernel.signatures) for kernel in rank_kernels.SIGNATURES}
assert all(len(signatures) == 1 for signatures in loaded.values()), loaded
from numba.core.dispatcher import Dispatcher
from runtime.torch_tp import row_kernels
from runtime.torch_tp.liveness import Slot
from runtime.torch_tp.orders import LoadOrder
from runtime.torch_tp.step_runner import StepRunner
StepRunner(0, LoadOrder(sys.argv[1], "cpu", "float32", 1, 256, 4, 1.0, False), Slot())
kernels = [found for found in vars(row_kernels).values() if isinstance(found, Dispatcher)]
print({kernel.py_func.__name__: list(kernel.signatures) for kernel in kernels if kernel.signatures} == loaded)
"""


def test_a_rank_that_loads_a_model_needs_no_kernel_but_those_loaded_ahead(dreams):
    command = [sys.executable, "-c", PROGRAM, str(dreams)]
    environment = worker_environment(1)  # as a nursery has it: without, libraries that are loaded on the way open pools
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "True\n", done.stdout + done.stderr

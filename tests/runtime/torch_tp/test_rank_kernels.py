"""What a nursery loads ahead is what its ranks call."""

from __future__ import annotations

import subprocess
import sys

from runtime.torch_tp.nursery import worker_environment
from tests.conftest import PROJECT

PROGRAM = """
import os, sys
from numba.core.dispatcher import Dispatcher
from runtime.torch_tp import rank_kernels, row_kernels
from runtime.torch_tp.liveness import Slot
from runtime.torch_tp.orders import LoadOrder
from runtime.torch_tp.step_runner import StepRunner
kernels = [found for found in vars(row_kernels).values() if isinstance(found, Dispatcher)]
def loaded():
    return {kernel.py_func.__name__: list(kernel.signatures) for kernel in kernels if kernel.signatures}
threads = len(os.listdir("/proc/self/task"))
rank_kernels.load()
assert len(os.listdir("/proc/self/task")) == threads, "a process that forks has no threads"
ahead = loaded()
assert len(ahead) >= len(rank_kernels.SIGNATURES) > 0, ahead
StepRunner(0, LoadOrder(sys.argv[1], "cpu", "float32", 1, 256, 4, 1.0, False), Slot())
print(loaded() == ahead or (loaded(), ahead))
"""


def test_a_rank_that_loads_a_model_needs_no_kernel_but_those_loaded_ahead(dreams):
    command = [sys.executable, "-c", PROGRAM, str(dreams)]
    environment = worker_environment(1)  # as a nursery has it: without, libraries that are loaded on the way open pools
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "True\n", done.stdout + done.stderr

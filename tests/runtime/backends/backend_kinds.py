"""The kinds of backend under one test-suite: how each is started, and what it must be able to do."""

from __future__ import annotations

from runtime.backends.emulated import EmulatedBackend
from runtime.backends.emulated_kernel import KernelSettings
from runtime.backends.group_messages import HostSettings
from runtime.backends.torch_tp import TorchTpBackend
from tests.runtime.scheduling.service_parts import LIMITS, cluster


def emulated(index: int = 0, slow_factor: float = 1.0) -> EmulatedBackend:
    return EmulatedBackend(cluster(2).groups[index], index, LIMITS, KernelSettings())


def torch_tp(folder: str, index: int = 0, slow_factor: float = 1.0, ranks: int = 2) -> TorchTpBackend:
    settings = HostSettings(
        str(folder), tuple({"slow_factor": slow_factor} for _ in range(ranks)), kv_tokens_max=2048, slots_max=8, queue_limit=32
    )
    return TorchTpBackend(f"tp{index}", index, settings)

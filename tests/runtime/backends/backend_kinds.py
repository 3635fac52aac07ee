"""The kinds of backend under one test-suite: how each is started, what it is asked, how many are inside."""

from __future__ import annotations

from runtime.backends.emulated import EmulatedBackend
from runtime.backends.emulated_kernel import KernelSettings
from runtime.backends.group_messages import HostSettings
from runtime.backends.host_starts import HostStarts
from runtime.backends.openai_http import OpenAiHttpBackend
from runtime.backends.torch_tp import TorchTpBackend
from tests.runtime.backends.scripted_server import ScriptedServer
from tests.runtime.scheduling.service_parts import LIMITS, cluster


def emulated(index: int = 0, slow_factor: float = 1.0) -> EmulatedBackend:
    return EmulatedBackend(cluster(2).groups[index], index, LIMITS, KernelSettings())


def torch_tp(folder: str, index: int = 0, slow_factor: float = 1.0, ranks: int = 2, starts: HostStarts | None = None) -> TorchTpBackend:
    how = tuple({"slow_factor": slow_factor} for _ in range(ranks))
    settings = HostSettings(str(folder), how, kv_tokens_max=2048, slots_max=8, queue_limit=32)
    return TorchTpBackend(f"tp{index}", index, settings, starts)


class WithServer(OpenAiHttpBackend):
    """An openai_http backend and the server that it speaks to."""

    def __init__(self, index: int, slow_factor: float) -> None:
        self.is_told = False
        self.server = ScriptedServer(gap_s=0.001 * slow_factor)
        super().__init__(f"http{index}", index, "http://127.0.0.1:0", "m", "key")

    async def start(self) -> None:
        if not self.is_told:  # later on the test says when the server is there
            self.is_told = True
            await self.server.start()
        self._url = self.server.url
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self.server.stop()
        self.is_told = False


def openai_http(index: int = 0, slow_factor: float = 1.0) -> WithServer:
    return WithServer(index, slow_factor)


def inside(backend) -> int:
    """Requests in the group, as it counts them itself."""
    if isinstance(backend, WithServer):
        return backend.server.in_flight
    report = backend.report()
    if report is None:
        return -1
    used = report.kv_blocks_total - report.kv_blocks_free
    return report.running + report.waiting + (used > 0 and report.running == 0)

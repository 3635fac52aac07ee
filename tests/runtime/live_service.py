"""The whole service in this process: its own loop in a thread, real gateway, scheduling and emulated groups, on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runtime.gateway.app import GatewayApp, make_app
from runtime.gateway.server import listen, make_server
from runtime.scheduling.metrics import SchedulingMetrics
from runtime.service import Service
from runtime.service_admin import ServiceAdmin
from runtime.service_config import load_service
from runtime.tracing.tracer import Tracer
from tests.conftest import GUARD_S

EMULATED = {"cluster": "unlike-3", "model": {"name": "m"}}


@dataclass
class Live:
    """A service that serves. `do` runs a function in its loop, where its parts belong."""

    url: str
    service: Service
    app: GatewayApp
    loop: asyncio.AbstractEventLoop
    tracer: Tracer | None

    def do(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(GUARD_S)


@contextlib.contextmanager
def live(folder: Path, **settings: Any) -> Iterator[Live]:
    """settings: of the service file, above those of EMULATED."""
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(EMULATED | settings))
    config = load_service(file)
    socket = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    found: list[Live] = []
    ends: list[Callable[[], None]] = []
    failures: list[BaseException] = []

    async def run() -> None:
        service = Service(config)
        tracer = Tracer(config.tracing, "test") if config.tracing is not None else None
        app = make_app(
            service, config.gateway, administered=ServiceAdmin(service, "test"), tracer=tracer, smaller_model=config.smaller_model
        )
        app.state.metrics.registry.register(SchedulingMetrics(service.dispatcher))
        app.state.rollout = service.rollout
        server = make_server(app, drain_s=2)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        ends.append(lambda: setattr(server, "should_exit", True))
        serving = asyncio.create_task(server.serve(sockets=[socket]))
        await service.start()
        while not server.started:
            await asyncio.sleep(0.005)
        found.append(Live(url, service, app, asyncio.get_running_loop(), tracer))
        try:
            await serving
        finally:
            await service.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    end_s = time.monotonic() + GUARD_S
    while not found and thread.is_alive() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert found, failures or "the service did not start"
    try:
        yield found[0]
    finally:
        for end in ends:
            end()
        thread.join(GUARD_S)
        assert not thread.is_alive() and not failures, failures

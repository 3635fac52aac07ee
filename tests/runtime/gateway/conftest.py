"""A gateway over a scripted dispatcher, on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from scripted_dispatcher import ScriptedDispatcher, Service, says, serving, wait_until


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with serving(ScriptedDispatcher()) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    """The module's service with a fresh script; every test leaves it idle."""
    dispatcher = running.dispatcher
    dispatcher.script, dispatcher.is_ready_answer = says, True
    dispatcher.calls.clear()
    dispatcher.cancelled.clear()
    yield running
    metrics = running.metrics  # the answer is here a moment before its request is counted out
    wait_until(lambda: dispatcher.open_calls == 0 and metrics.in_flight == 0 and metrics.body_bytes_in_flight == 0)


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60.0, trust_env=False) as client:
        yield client

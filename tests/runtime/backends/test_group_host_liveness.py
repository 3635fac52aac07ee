"""A group host that fills its connection and says nothing is as dead as a frozen one."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from runtime.backends import torch_tp
from runtime.backends.interface import BackendFault
from tests.conftest import GUARD_S, PROJECT
from tests.runtime.backends import backend_kinds
from tests.runtime.scheduling.service_parts import call

MUMBLER = """
import socket, sys, time
from runtime.frames import CHECK, HEAD, frame
connection = socket.socket(fileno=int(sys.argv[1]))
connection.sendall(frame(["up", {}]) + HEAD.pack(60 << 20, 60 << 20 ^ CHECK))  # a frame that will not end within the hour
while True:
    connection.sendall(bytes(100))
    time.sleep(0.02)
"""


FAILING = """
import os, sys
from runtime.backends import group_host
from runtime.torch_tp.batch import Batch
next_slices = Batch.next_slices
steps = []
def failing(batch, now_s):
    steps.append(now_s)
    if len(steps) > 8:
        raise ValueError("cannot convert float NaN to integer")
    return next_slices(batch, now_s)
Batch.next_slices = failing
sys.exit(group_host.main(sys.argv[1:]))
"""


def test_an_engine_that_failed_for_good_takes_its_process_with_it(monkeypatch, dreams, tmp_path):
    """A bug in the engine's loop at its ninth step: the call inside is lost with the reason, and the backend is not alive any more, so that
    its keeper starts another."""
    popen = subprocess.Popen
    monkeypatch.setattr(
        torch_tp.subprocess, "Popen", lambda command, **how: popen([sys.executable, "-c", FAILING, *command[3:]], cwd=PROJECT, **how)
    )

    async def drive() -> None:
        backend = backend_kinds.torch_tp(str(dreams), ranks=1)
        await backend.start()
        try:
            with pytest.raises(BackendFault, match="cannot convert float NaN"):
                async for _ in backend.submit(call(max_tokens=64, ignore_eos=True)):
                    pass
            async with asyncio.timeout(GUARD_S):
                while backend.is_alive:
                    await asyncio.sleep(0.02)
        finally:
            await backend.close()

    asyncio.run(drive())


def test_bytes_are_no_sign_of_life_but_messages_are(monkeypatch, tmp_path):
    """Scripted host: it comes up, then announces 60 MiB and sends zeros for ever. With half a second of patience it is not alive soon
    after, so that its keeper starts another."""
    popen = subprocess.Popen
    monkeypatch.setattr(torch_tp, "SILENT_S", GUARD_S)
    monkeypatch.setattr(
        torch_tp.subprocess, "Popen", lambda command, **how: popen([sys.executable, "-c", MUMBLER, command[3]], cwd=PROJECT, **how)
    )

    async def drive() -> None:
        backend = backend_kinds.torch_tp(str(tmp_path))
        await backend.start()
        try:
            assert backend.is_alive
            monkeypatch.setattr(torch_tp, "SILENT_S", 0.5)
            async with asyncio.timeout(GUARD_S):
                while backend.is_alive:
                    await asyncio.sleep(0.02)
        finally:
            monkeypatch.setattr(torch_tp, "STOP_DEADLINE_S", 0.0)
            await backend.close()

    asyncio.run(drive())

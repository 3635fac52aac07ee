"""A group host that fills its connection and says nothing is as dead as a frozen one."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from runtime.backends import torch_tp
from tests.conftest import PROJECT
from tests.runtime.backends import backend_kinds

MUMBLER = """
import socket, sys, time
from runtime.frames import frame
connection = socket.socket(fileno=int(sys.argv[1]))
connection.sendall(frame(["up", {}]) + (60 << 20).to_bytes(4, "big"))  # a frame that will not end within the hour
while True:
    connection.sendall(bytes(100))
    time.sleep(0.02)
"""


def test_bytes_are_no_sign_of_life_but_messages_are(monkeypatch, tmp_path):
    """Scripted host: it comes up, then announces 60 MiB and sends zeros for ever. With half a second of patience it is not alive soon
    after, so that its keeper starts another."""
    popen = subprocess.Popen
    monkeypatch.setattr(torch_tp, "SILENT_S", 0.5)
    monkeypatch.setattr(
        torch_tp.subprocess, "Popen", lambda command, **how: popen([sys.executable, "-c", MUMBLER, command[3]], cwd=PROJECT, **how)
    )

    async def drive() -> None:
        backend = backend_kinds.torch_tp(str(tmp_path))
        await backend.start()
        try:
            assert backend.is_alive
            async with asyncio.timeout(10.0):
                while backend.is_alive:
                    await asyncio.sleep(0.02)
        finally:
            monkeypatch.setattr(torch_tp, "STOP_DEADLINE_S", 0.0)
            await backend.close()

    asyncio.run(drive())

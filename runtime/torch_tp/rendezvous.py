"""The rendezvous store as a process of its own: torch's TCPStore on a port that the system chose, told to whoever started it.

No rank owns the store, so any rank may die; the store dies with its parent. Should the store itself die, start another
one: the next epoch's groups use the new address. After its parent's death it also removes the shared-memory segments that
the parent's ranks may have left.
`python -m runtime.torch_tp.rendezvous` is what runs in the process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.torch_tp.communicators.segment_names import sweep_stale_segments
from runtime.torch_tp.parent_death import has_parent

logger = logging.getLogger(__name__)

START_DEADLINE_S = 60.0
PARENT_CHECK_S = 0.25
SWEEPS_AFTER_PARENT_S = (0.0, 0.5, 1.5)  # its ranks may take a moment to die, too


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose, so that no two stores can want the same one. Raises: OSError when taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"the rendezvous store cannot listen on {host}:{port} ({error.strerror}); port 0 lets the system choose"
        ) from error
    return listener


def look_up_hosts_in(services: str) -> None:
    """Which name services this process asks about hosts, as in /etc/nsswitch.conf. Does nothing where the C library has no such setting.

    torch's store asks for the name of every address it connects to, only to log it. Loopback seen as IPv6
    (::ffff:127.0.0.1) is in no hosts file, so that goes out to the DNS server; where that one is slow or absent each
    connection takes 5 s or more.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", services.encode())


def _configured_services() -> str:
    try:
        lines = Path("/etc/nsswitch.conf").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("hosts:")), "files dns")


class _NumericAddresses:
    """While anybody holds it, this process asks no DNS server about hosts. The setting is the process's: the last one out puts it back, so
    that a thread that is done does not take it from the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0

    def __enter__(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                look_up_hosts_in("files")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                look_up_hosts_in(_configured_services())


_numeric_addresses = _NumericAddresses()


def serve_store(listener: socket.socket) -> Any:
    """Serve a store on `listener` (whose descriptor it takes over) from threads of torch's; lives as long as the result.

    From then on this process looks up hosts in /etc/hosts only (see `look_up_hosts_in`).
    """
    from torch.distributed import TCPStore

    _numeric_addresses.__enter__()  # for good: it asks for the name of every address that connects
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def connect_store(address: tuple[str, int], deadline_s: float) -> Any:
    """A client of the store at (host, port). Raises: OSError when the host has no address, ConnectionError when nobody answers in time."""
    from torch.distributed import TCPStore

    host, port = address
    numeric = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    try:
        with _numeric_addresses:
            return TCPStore(numeric, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=deadline_s))
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(f"no rendezvous store at {host}:{port} within {deadline_s:g} s: {error}") from error


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine that `host` is reached from (no packet is sent)."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class RendezvousProcess:
    """Starts the store's process at once; `address` waits until it has told where it listens.

    Binds a port of the system's choosing on loopback; another address and port only when asked for (several hosts).
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        where = ["--host", host, "--port", str(port), "--parent", str(os.getpid())]
        command = [sys.executable, "-m", "runtime.torch_tp.rendezvous", *where]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._address: tuple[str, int] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def address(self, deadline_s: float = START_DEADLINE_S) -> tuple[str, int]:
        """Host and port. Raises: RuntimeError when the store could not start, TimeoutError after `deadline_s`."""
        if self._address is None:
            assert self._process.stdout is not None
            line, end_s = b"", time.monotonic() + deadline_s
            while not line.endswith(b"\n"):
                if not select.select([self._process.stdout], [], [], max(0.0, end_s - time.monotonic()))[0]:
                    raise TimeoutError(f"the rendezvous store (pid {self.pid}) told no address within {deadline_s:g} s")
                piece = os.read(self._process.stdout.fileno(), 256)
                if not piece:
                    raise RuntimeError(
                        f"the rendezvous store ended with exit code {self._process.wait(5.0)} before it listened; see its stderr"
                    )
                line += piece
            host, port = line.decode().split()
            self._address = (host, int(port))
            logger.info("rendezvous store listens address=%s:%s pid=%d", host, port, self.pid)
        return self._address

    def close(self) -> None:
        """End the process; its clients' next call fails."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(5.0)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> RendezvousProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.torch_tp.rendezvous", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parent", type=int, required=True, help="pid whose death ends this process")
    options = parser.parse_args(arguments)
    # an interrupt at the terminal reaches the whole process group; the parent decides when the store goes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    address = listener.getsockname()[:2]
    store = serve_store(listener)
    print(*address, flush=True)
    while has_parent(options.parent):  # asked, not signalled: the kernel would signal the end of the starting *thread*
        time.sleep(PARENT_CHECK_S)
    del store  # closes the port
    _sweep()
    os._exit(0)  # taking down an interpreter with torch in it is seconds of work on a busy machine


def _sweep() -> None:
    for pause_s in SWEEPS_AFTER_PARENT_S:
        time.sleep(pause_s)
        sweep_stale_segments()


if __name__ == "__main__":
    sys.exit(main())

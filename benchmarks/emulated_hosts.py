"""Two hosts on one machine: network namespaces joined by a cable whose rate can be limited. Needs root and Linux' ip and tc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class EmulatedHost:
    """A namespace and its address on the cable."""

    namespace: str
    address: str

    def enter(self) -> None:
        """Move this process into the host's network; to be called before it has threads or sockets."""
        handle = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {self.namespace}")
        finally:
            os.close(handle)


def why_not() -> str | None:
    """Why emulated hosts cannot be had here; None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    try:
        with two_hosts(1e9):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        return f"network namespaces cannot be made here: {error}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=10.0)


@contextlib.contextmanager
def two_hosts(bytes_per_s: float) -> Iterator[tuple[EmulatedHost, EmulatedHost]]:
    """Two hosts and the cable between them, each end of which sends at most `bytes_per_s`. Raises: CalledProcessError when not allowed."""
    number = os.getpid() % 100_000
    hosts = [EmulatedHost(f"ballast-{os.getpid()}-{end}", f"10.199.{number % 250}.{end}") for end in (1, 2)]
    cables = [f"bl{number}x{end}" for end in (1, 2)]
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        _run("ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, cable in zip(hosts, cables, strict=True):
            within = ("ip", "-n", host.namespace)
            _run("ip", "link", "set", cable, "netns", host.namespace)
            _run(*within, "addr", "add", f"{host.address}/24", "dev", cable)
            _run(*within, "link", "set", cable, "up")
            _run(*within, "link", "set", "lo", "up")
            rate = f"{int(bytes_per_s * 8)}bit"
            bucket = ("rate", rate, "burst", "64kb", "latency", "400ms")
            _run("ip", "netns", "exec", host.namespace, "tc", "qdisc", "add", "dev", cable, "root", "tbf", *bucket)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:  # takes its end of the cable along
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, timeout=10.0)
        subprocess.run(["ip", "link", "del", cables[0]], capture_output=True, timeout=10.0)

"""A rank on another host: a network namespace with a throttled link where that can be made, else loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from runtime.torch_tp.orders import Hello
from runtime.torch_tp.protocol import PROTOCOL_VERSION, Kind, Message, encode
from runtime.torch_tp.supervisor import RankSettings, Supervisor
from runtime.torch_tp.worker import TOKEN_VARIABLE, connect
from tests.conftest import PROJECT
from tests.runtime.torch_tp.group_driver import SETTINGS, generate

NAMESPACE = f"ballast{os.getpid() % 10000}"
RATE = "40mbit"


@dataclass(frozen=True)
class Network:
    """host: an address of this machine that the other host reaches; prefix: of commands that run over there."""

    host: str
    prefix: tuple[str, ...]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def make_namespace() -> Network:
    """Raises CalledProcessError, FileNotFoundError or PermissionError where this machine cannot."""
    third = os.getpid() % 250
    here, there = f"10.231.{third}.1", f"10.231.{third}.2"
    run("ip", "netns", "add", NAMESPACE)
    run("ip", "link", "add", f"{NAMESPACE}a", "type", "veth", "peer", "name", f"{NAMESPACE}b", "netns", NAMESPACE)
    run("ip", "addr", "add", f"{here}/24", "dev", f"{NAMESPACE}a")
    run("ip", "link", "set", f"{NAMESPACE}a", "up")
    inside = ("ip", "netns", "exec", NAMESPACE)
    run(*inside, "ip", "addr", "add", f"{there}/24", "dev", f"{NAMESPACE}b")
    run(*inside, "ip", "link", "set", f"{NAMESPACE}b", "up")
    run(*inside, "ip", "link", "set", "lo", "up")
    run("tc", "qdisc", "add", "dev", f"{NAMESPACE}a", "root", "tbf", "rate", RATE, "burst", "32kbit", "latency", "400ms")
    run(*inside, "tc", "qdisc", "add", "dev", f"{NAMESPACE}b", "root", "tbf", "rate", RATE, "burst", "32kbit", "latency", "400ms")
    return Network(here, inside)


@pytest.fixture(params=["namespace", "loopback"])
def network(request) -> Iterator[Network]:
    can_make = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    if request.param == "loopback":
        if can_make:
            pytest.skip("covered by the network namespace")
        yield Network("127.0.0.1", ())
        return
    if not can_make:
        pytest.skip("a network namespace needs root, ip and tc")
    try:
        yield make_namespace()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace with a throttled link here: {error.stderr.strip()}")
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False, timeout=20)


def start_by_hand(network: Network, supervisor: Supervisor, worker: int) -> subprocess.Popen[bytes]:
    """As the documentation says, by torchrun's variables."""
    assert supervisor.address is not None
    host, port = supervisor.address.rsplit(":", 1)
    environment = {
        **os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": host, "MASTER_PORT": port, "RANK": str(worker),
        TOKEN_VARIABLE: supervisor.token,
    }  # fmt: skip
    return subprocess.Popen([*network.prefix, sys.executable, "-m", "runtime.torch_tp.worker", "--node", "elsewhere"], env=environment)


def await_exit(process: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    end_s = time.monotonic() + deadline_s
    while process.poll() is None and time.monotonic() < end_s:
        time.sleep(0.02)
    return process.returncode


@pytest.mark.fault("K20")
def test_a_rank_elsewhere_serves_is_frozen_and_wakes_too_late(dreams, nursery, network):
    """The same text as of one rank. Frozen, it is fenced for its silence; woken, it finds its socket closed and leaves."""
    settings = replace(SETTINGS, listen_host=network.host)
    with Supervisor(dreams, [RankSettings()], SETTINGS, nursery=nursery) as alone:
        alone.start()
        expected = generate(alone, max_tokens=12).tokens
    ranks = [RankSettings(), RankSettings(is_remote=True)]
    with Supervisor(dreams, ranks, settings, nursery=nursery) as supervisor:
        supervisor.listen()
        remote = start_by_hand(network, supervisor, 1)
        try:
            assert supervisor.start().members == (0, 1)
            assert generate(supervisor, max_tokens=12).tokens == expected
            remote.send_signal(signal.SIGSTOP)
            run = generate(supervisor, max_tokens=12)
            assert run.tokens == expected and supervisor.members == (0,)
            assert len(run.rebuilt) == 1 and "no sign of life" in str(run.rebuilt[0])
            remote.send_signal(signal.SIGCONT)
            assert generate(supervisor, max_tokens=12).tokens == expected
            assert await_exit(remote, 60.0) == 0
            assert supervisor.epoch == 2
        finally:
            remote.kill()
            remote.wait()


def test_strangers_are_turned_away(dreams, nursery):
    """Noise, a wrong token, an id that is not awaited: the connection is closed, and the group never hears of it."""
    settings = replace(SETTINGS, listen_host="127.0.0.1", token="right")
    ranks = [RankSettings(), RankSettings(is_remote=True)]
    supervisor = Supervisor(dreams, ranks, replace(settings, start_deadline_s=12.0), nursery=nursery)
    with supervisor:
        supervisor.listen()
        assert supervisor.address is not None
        frames = [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
            encode(Message(Kind.HELLO, body=Hello(PROTOCOL_VERSION, "wrong", 1, 1, "x"))),
            encode(Message(Kind.HELLO, body=Hello(PROTOCOL_VERSION, "right", 0, 1, "x"))),
            encode(Message(Kind.HELLO, body=Hello(PROTOCOL_VERSION, "right", 7, 1, "x"))),
            encode(Message(Kind.DONE, body=None)),
        ]
        connections = [connect(supervisor.address) for _ in frames]
        for connection, frame in zip(connections, frames, strict=True):
            connection.sendall(frame)
        change = supervisor.start()  # the remote rank never came
        assert change.members == (0,)
        for connection in connections:
            with connection:
                connection.settimeout(60.0)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""


def test_nothing_listens_beyond_loopback_unless_asked(dreams, nursery):
    with Supervisor(dreams, [RankSettings()], SETTINGS, nursery=nursery) as supervisor:
        supervisor.start()
        assert supervisor.address is None


def test_an_address_is_host_and_port():
    with pytest.raises(ValueError, match="HOST:PORT"):
        connect("somewhere")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(OSError, match="refused"):
        connect(f"127.0.0.1:{port}")

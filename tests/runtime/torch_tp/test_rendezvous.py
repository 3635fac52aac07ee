"""The rendezvous store: a free port always, loopback unless asked, gone with its parent, and nothing of the parent's left."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from benchmarks.listening_sockets import listening_of, still_listening
from runtime.torch_tp.communicators.segment_names import segment_folder, start_ticks
from runtime.torch_tp.rendezvous import RendezvousProcess, connect_store, listen, local_address_towards, serve_store
from tests.conftest import SLOWER


@pytest.mark.fault("K19")
def test_eight_groups_started_at_once_fifty_times_with_the_default_port_taken():
    """400 starts out of 400: the owner binds port 0 and tells the others. (In threads: the binding is the same as in its own process.)"""
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 29500))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE  # taken by someone else: as good
        answered, took_s = 0, []
        for _ in range(50):
            answers: list[bytes] = []

            def start(answers: list[bytes] = answers) -> None:
                listener = listen("127.0.0.1", 0)
                address = listener.getsockname()
                store = serve_store(listener)
                client = connect_store(address, 60.0)
                client.set("key", str(address[1]))
                answers.append(client.get("key") == str(address[1]).encode() and store.port == address[1])

            threads = [threading.Thread(target=start) for _ in range(8)]
            for thread in threads:
                thread.start()
            begin_s = time.monotonic()
            for thread in threads:
                thread.join(60.0)
            took_s.append(time.monotonic() - begin_s)
            answered += answers.count(True)
    assert answered == 400
    # asking a DNS server that does not answer takes 5 s: nobody may ask
    assert sorted(took_s)[25] < 4.5


@pytest.mark.fault("K19")
def test_processes_started_at_once_listen_on_loopback_only_and_know_their_port():
    stores = [RendezvousProcess() for _ in range(2)]
    try:
        addresses = [store.address(150.0) for store in stores]  # a crowded machine imports torch slowly
        assert len(set(addresses)) == 2
        for store, address in zip(stores, addresses, strict=True):
            assert list(listening_of([store.pid]).values()) == [f"0100007F:{address[1]:04X}"]  # 127.0.0.1
            connect_store(address, 60.0).set("a", "b")
    finally:
        for store in stores:
            store.close()
    assert not any(store.is_alive for store in stores)


def test_a_port_in_use_is_an_error_that_says_so():
    with listen("127.0.0.1", 0) as taken:
        with pytest.raises(OSError, match="port 0 lets the system choose"):
            listen(*taken.getsockname())
        with RendezvousProcess(*taken.getsockname()) as store, pytest.raises(RuntimeError, match="exit code 1"):
            store.address()


@pytest.mark.fault("K21")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_store_dies_with_its_parent_and_sweeps_what_the_parent_left(how):
    """The parent made a segment that nobody unlinked (as when a rank dies while the group is being built), then dies."""
    program = textwrap.dedent("""
        import os, pathlib, signal, threading
        from runtime.torch_tp.communicators.segment_names import segment_folder, segment_name
        from runtime.torch_tp.rendezvous import RendezvousProcess
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stores = []
        # started by a thread that ends at once: that is no death of the parent
        thread = threading.Thread(target=lambda: stores.append(RendezvousProcess()))
        thread.start(); thread.join()
        name = segment_name(os.getpid(), 1, "domain0")
        (segment_folder() / name).touch()
        print(stores[0].address()[1], stores[0].pid, name, flush=True)
        signal.pause()
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port, pid, name = parent.stdout.readline().split()
    time.sleep(0.6)  # longer than the store's look at its parent
    assert start_ticks(int(pid)) is not None
    ports = listening_of([int(pid)])
    assert [address.partition(":")[2] for address in ports.values()] == [f"{int(port):04X}"]
    parent.send_signal(how)
    parent.wait(60.0)
    end_s = time.monotonic() + 5.0 * SLOWER
    while start_ticks(int(pid)) is not None or (segment_folder() / name).exists() or still_listening(ports):
        assert time.monotonic() < end_s, "still there long after its parent"
        time.sleep(0.02)
    with socket.socket() as again:
        again.bind(("127.0.0.1", int(port)))


def test_gloo_uses_the_address_that_leads_to_the_store():
    assert local_address_towards("127.0.0.1", 29500) == "127.0.0.1"

"""Known faults against the service itself, with real ranks of the small checkpoint: one service of three groups for all of them.

Elsewhere: K21, K22 and K25 (`test_serve.py`), all sorts of losses under load (`test_drill.py`), answers of scripted servers (`backends`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.drill_service import DrilledService, children, write_files
from benchmarks.listening_sockets import listening_of
from runtime.torch_tp.config import read_config
from tests.conftest import GUARD_S, PROJECT, SLOWER

GROUPS = {"pair": (6.0, 12.0), "trio": (6.0, 9.0, 12.0), "single": (8.0,)}
"""The small checkpoint has 4 query heads: three ranks cannot share them evenly."""
POOL_TOKENS, CONTEXT_TOKENS = 112, 128
ASKED = {"model": "drilled", "prompt": list(range(3, 15)), "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def service(dreams, tmp_path_factory, kernels) -> Iterator[DrilledService]:
    """Started with torch's default port taken; its KV pools hold less than the context."""
    folder = tmp_path_factory.mktemp("faults")
    file = write_files(folder, dreams, read_config(dreams), GROUPS)
    cluster = yaml.safe_load((folder / "cluster.yaml").read_text())
    cluster["limits"]["kv_blocks"] = POOL_TOKENS // cluster["limits"]["kv_block_tokens"]
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else has it: as good
            taken.bind(("127.0.0.1", 29500))
        with DrilledService(file, {name: len(ranks) for name, ranks in GROUPS.items()}) as running:
            running.wait()
            yield running
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.drill_service.LEFT_AFTER_S", 5.0 * SLOWER)
        assert running.left() == []


@pytest.fixture
def client(service: DrilledService) -> Iterator[httpx.Client]:
    """Begins and ends with every group whole."""
    service.wait()
    list(service.news())
    with httpx.Client(base_url=service.url, timeout=90.0, trust_env=False) as found:
        yield found
    service.wait()


def until(condition: Callable[[], Any], within_s: float, what: str) -> float:
    """Seconds until it held."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - began_s


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {text[:300]}")

    return json.loads(text, parse_constant=refuse)


def serving(service: DrilledService) -> list[bool]:
    return [group["state"] == "serving" for group in service.state()]


def attempts_of(service: DrilledService, name: str) -> int:
    """Calls that were ever sent to the group: a count that only grows."""
    return next(int(group["attempts"]) for group in service.state() if group["name"] == name)


def breakers(client: httpx.Client) -> list[tuple[str, str]]:
    groups = strict(client.get("/admin/state").text)["groups"]
    return [(group["breaker"]["state"], group["breaker"]["reason"]) for group in groups]


def greedy(client: httpx.Client, **more: Any) -> str:
    answer = client.post("/v1/completions", json=ASKED | more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == ASKED["max_tokens"]
    return str(answer.json()["choices"][0]["text"])


@contextlib.contextmanager
def only(client: httpx.Client, name: str) -> Iterator[None]:
    """Every other group takes no new calls."""
    others = [other for other in GROUPS if other != name]
    for other in others:
        end_s = time.monotonic() + GUARD_S
        while (answer := client.post(f"/admin/groups/{other}/drain", json={})).status_code != 200:
            # a move of the service's own may be under way in it
            assert answer.status_code == 409 and "under way" in answer.text and time.monotonic() < end_s, answer.text
            time.sleep(0.05)
    try:
        yield
    finally:
        for other in others:
            client.post(f"/admin/groups/{other}/undrain", json={}).raise_for_status()


@pytest.mark.fault("K13")
def test_nothing_measured_yet(client):
    """Before the first request every number that nobody knows is null, in strict JSON, and no metric is NaN."""
    groups = strict(client.get("/admin/state").text)["groups"]
    assert [group["attempts"] for group in groups] == [0] * len(GROUPS)
    assert strict(client.get("/ready").text)["ready"] is True
    page = client.get("/metrics").text
    assert 'ballast_group_serving{group="pair"' in page and "nan" not in page.lower()


@pytest.mark.fault("K18")
def test_an_uneven_degree_says_what_one_rank_says_and_an_impossible_one_starts_nothing(client, service, tmp_path, dreams):
    """Each group alone: three ranks over four heads give the greedy text of one rank. Five ranks are refused when the file is read."""
    texts = {}
    for name in GROUPS:
        with only(client, name):
            before = {group["name"]: group["attempts"] for group in service.state()}
            texts[name] = greedy(client)
            after = {group["name"]: group["attempts"] for group in service.state()}
            assert [group for group in GROUPS if after[group] != before[group]] == [name]
    assert len(set(texts.values())) == 1
    file = write_files(tmp_path, dreams, read_config(dreams), {"five": (1.0,) * 5})
    command = [sys.executable, "-m", "runtime", "serve", "--config", str(file), "--port", "0"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "possible degrees: 1 to 4" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.fault("K19")
def test_nothing_listens_outside_loopback(service, client):
    """Three groups were started at once with port 29500 taken; what they listen on is theirs, and 127.0.0.1's."""
    family = [service.process.pid]
    for pid in family:
        family += children(pid)
    assert len(family) > sum(map(len, GROUPS.values())) + len(GROUPS)
    addresses = {address.partition(":")[0] for address in listening_of(family).values()}
    assert addresses == {"0100007F"}  # 127.0.0.1


@pytest.mark.fault("K10")
def test_a_request_that_can_never_fit_is_refused_at_the_door(client):
    """The context has 128 tokens, every pool 112: what needs more is refused with the limit named, in less than 100 ms at its
    quickest, while three that fit are served."""
    assert POOL_TOKENS < CONTEXT_TOKENS
    with ThreadPoolExecutor(3) as pool:
        good = [pool.submit(greedy, client) for _ in range(3)]
        took_s = []
        for prompt, answer in ((120, 1), (100, 13), (12, 101), (500, 500)) * 5:
            began_s = time.monotonic()
            said = client.post("/v1/completions", json=ASKED | {"prompt": [5] * prompt, "max_tokens": answer})
            took_s.append(time.monotonic() - began_s)
            error = said.json()["error"]
            assert (said.status_code, error["code"]) == (400, "context_length_exceeded") and str(POOL_TOKENS) in error["message"]
        assert min(took_s) < SLOWER * 0.1
        assert len({text.result() for text in good}) == 1
    assert client.post("/v1/completions", json=ASKED | {"prompt": [5] * 100, "max_tokens": 12}).status_code == 200


@pytest.mark.fault("K24")
def test_bad_requests_move_no_breaker(client):
    """A hundred that are too large and a hundred that are no requests, then a good one, which is served."""
    before = breakers(client)
    for place in range(100):
        assert client.post("/v1/completions", json=ASKED | {"prompt": [5] * 600}).status_code == 400
        assert client.post("/v1/completions", json=ASKED | {"temperature": 9 + place}).status_code == 400
    assert breakers(client) == before == [("closed", "")] * len(GROUPS)
    greedy(client)


@pytest.mark.fault("K20")
@pytest.mark.parametrize("moment", ["idle", "in the middle"])
@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 3.0)])
@pytest.mark.parametrize("group", ["pair", "trio"])
def test_a_dead_or_frozen_rank_hangs_nobody(client, service, group, number, within_s, moment):
    """Noticed in time (or, frozen while idle, at the first step that needs it), its process is ended, every stream is whole and has the
    text of an unbroken run, and the rank comes back."""
    whole = greedy(client)
    victim = service.ranks(group)[-1]
    struck_s = time.monotonic()
    with ThreadPoolExecutor(9) as pool:
        if moment == "idle":
            os.kill(victim, number)
        asked = []
        if moment != "idle" or number == signal.SIGSTOP:
            with only(client, group):  # until they are in it: those that it loses may go on elsewhere
                before = attempts_of(service, group)
                asked = [pool.submit(greedy, client) for _ in range(8)]
                until(lambda: attempts_of(service, group) > before, GUARD_S, "calls in the group")
                if moment != "idle":
                    os.kill(victim, number)
                struck_s = time.monotonic()
                # on a slow machine those may be over, and a frozen rank is missed when it is needed
                before = attempts_of(service, group)
                asked.append(pool.submit(greedy, client))
                until(lambda: attempts_of(service, group) > before, GUARD_S, "one more")
        news = until(lambda: [seen for seen in service.news() if seen.group == group], GUARD_S, "the loss in the log")
        assert news < SLOWER * within_s, f"noticed after {time.monotonic() - struck_s:.2f} s"
        assert [text.result() for text in asked] == [whole] * len(asked)
    until(lambda: not Path(f"/proc/{victim}").exists() or "Z" in Path(f"/proc/{victim}/stat").read_text().split()[2], GUARD_S, "its end")
    assert greedy(client) == whole


@pytest.mark.fault("K23")
def test_a_stuck_group_stalls_nobody_else(client, service):
    """One of three groups accepts and never answers (its process is stopped) while 64 clients ask: all are served. Those that never met it
    take no longer than before; of those that ask when it is known to be stuck hardly any pays for it."""

    def timed(name: str) -> float:
        began_s = time.monotonic()
        greedy_text = client.post("/v1/completions", json=ASKED | {"max_tokens": 8}, headers={"x-request-id": name})
        assert greedy_text.status_code == 200, greedy_text.text
        return time.monotonic() - began_s

    def wave(kind: str) -> dict[str, float]:
        names = [f"{kind}-{place}" for place in range(64)]
        with ThreadPoolExecutor(64) as pool:
            return dict(zip(names, pool.map(timed, names), strict=True))

    healthy = wave("healthy")
    stuck = service.host("single")
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)
    wave("first")
    until(  # started again already, maybe: what is known of it does not last
        lambda: next(g for g in service.state() if g["name"] == "single")["state"] != "serving" or service.host("single") != stuck,
        GUARD_S, "it is known to be stuck",
    )  # fmt: skip
    second = wave("second")
    # two groups do what three did, while the third starts again on the same cores
    assert max(second.values()) < SLOWER * max(healthy.values()) + 1.0
    lost = [line for line in service.log_file.read_text().splitlines() if "attempt lost call=second-" in line]
    assert len([line for line in lost if "group=single " in line]) <= len(second) // 10  # started again, on full cores, it may lose one


@pytest.mark.fault("K13")
def test_without_workers_it_says_so_at_once_and_a_new_one_gets_traffic(client, service):
    """All groups killed: 503 with Retry-After at once, and not ready. One that comes back is asked."""
    for name in GROUPS:
        os.kill(service.host(name), signal.SIGKILL)
    until(lambda: not any(serving(service)), 30.0, "all are known to be gone")
    attempts = {group["name"]: group["attempts"] for group in service.state()}
    took_s = []
    while len(took_s) < 10 and not any(serving(service)):  # on a slow machine the first may be back before ten have asked
        began_s = time.monotonic()
        said = client.post("/v1/completions", json=ASKED)
        took_s.append(time.monotonic() - began_s)
        is_ready = client.get("/ready").status_code == 200
        if any(serving(service)):
            break
        assert said.status_code == 503 and float(said.headers["retry-after"]) > 0, said.text
        assert not is_ready
    assert min(took_s, default=0.0) < SLOWER * 0.05
    strict(client.get("/admin/state").text)
    until(lambda: any(serving(service)), 120.0, "a group is back")
    until(lambda: client.post("/v1/completions", json=ASKED | {"max_tokens": 1}).status_code == 200, 120.0, "it is served")
    assert any(group["attempts"] > attempts[group["name"]] for group in service.state())

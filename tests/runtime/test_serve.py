"""`python -m runtime serve` as a process: what it prints, what it answers, how it ends. Emulated groups, and small real ranks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

import runtime.serve as serve_module
from agents.policy_bundle import write_bundle
from benchmarks.drill_service import words
from benchmarks.listening_sockets import listening_of, still_listening
from envs.scenario.scenario_error import ScenarioError
from runtime.backends.group_host import PROCESS_NAME
from runtime.service_config import load_service
from runtime.torch_tp.process_name import process_name
from tests.conftest import GUARD_S, PROJECT, SLOWER
from tests.runtime.scheduling.test_policy_faults import contents

START_S = 240.0


class Running:
    """A service process on a free port, once it has said `until`."""

    def __init__(self, *arguments: str, until: str = "ready on", **environment: str) -> None:
        command = [sys.executable, "-m", "runtime", "serve", "--port", "0", *arguments]
        env = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
        self.process = subprocess.Popen(command, cwd=PROJECT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        end_s = time.monotonic() + START_S
        while not (found := [line for line in self.lines if until in line]):
            assert self.process.poll() is None and time.monotonic() < end_s, "".join(self.lines)
            time.sleep(0.05)
        url = re.search(r"http://\S+?(?=;)", found[0])
        self.url = url.group() if url is not None else ""

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

    def post(self, path: str, body: dict, timeout_s: float = 60.0) -> tuple[int, dict, dict]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.loads(answer.read()), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), dict(error.headers)

    def stream(self, path: str, body: dict):
        """Events of a stream, as they come; the last is "[DONE]"."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body | {"stream": True}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    yield data.decode() if data == b"[DONE]" else json.loads(data)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30.0) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def children(self) -> list[int]:
        """Ids of all processes that descend from it."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
        found, known = [], {self.process.pid}
        while new := {pid for pid, parent in parents.items() if parent in known} - known:
            known |= new
            found += sorted(new)
        return found

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(GUARD_S)
        self._reader.join(GUARD_S)
        return code


@pytest.fixture(scope="module")
def emulated(kernels, tmp_path_factory):
    file = tmp_path_factory.mktemp("emulated") / "service.yaml"
    file.write_text(yaml.safe_dump({"cluster": "unlike-3", "control": {"tick_s": 0.1}}))
    running = Running("--config", str(file), NUMBA_DEBUG_CACHE="1")  # which says each kernel that is compiled or read from disk
    yield running
    running.stop()


def test_an_emulated_service_answers_and_says_what_it_is(emulated):
    assert any("EMULAT" in line for line in emulated.lines)
    status, body, _ = emulated.post("/v1/completions", {"model": "Mistral-7B", "prompt": "hello", "max_tokens": 8, "ignore_eos": True})
    assert status == 200 and body["usage"]["completion_tokens"] <= 8
    assert body["choices"][0]["text"].startswith("(emulated)")
    assert emulated.get("/ready")[0] == 200 and emulated.get("/livez")[0] == 200
    metrics = emulated.get("/metrics")[1]
    assert 'ballast_group_serving{group="pair"' in metrics
    assert 'ballast_decisions_total{cause="no_policy",source="heuristic"}' in metrics
    assert 'ballast_group_breaker_state{group="solo-l4"} 0.0' in metrics


def test_the_gateway_process_holds_no_torch_and_no_simulator(emulated):
    maps = Path(f"/proc/{emulated.process.pid}/maps").read_text()
    assert "torch" not in maps
    code = (
        "import sys, runtime.serve; print([name for name in ('torch', 'simpy', 'gymnasium', 'stable_baselines3') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_too_much_is_refused_with_the_limit_named(emulated):
    status, body, _ = emulated.post("/v1/completions", {"model": "Mistral-7B", "prompt": "hello", "max_tokens": 9000})
    assert status == 400 and "8192" in body["error"]["message"]


def test_no_kernel_is_loaded_once_it_is_ready(emulated):
    """On a new installation loading is compiling: seconds, in which no stream would get a token. Enough requests that the predictor's
    tables are made anew, a few hundred gaps between tokens, and control ticks meanwhile."""
    asked = {"model": "Mistral-7B", "prompt": "hello", "max_tokens": 6, "ignore_eos": True}
    with ThreadPoolExecutor(16) as callers:
        answers = list(callers.map(lambda _: emulated.post("/v1/completions", asked)[0], range(80)))
    assert answers == [200] * 80
    ready = next(place for place, line in enumerate(emulated.lines) if line.startswith("ready on"))
    assert any("[cache]" in line for line in emulated.lines[:ready])
    assert [line for line in emulated.lines[ready:] if "[cache]" in line] == []


def test_a_wait_for_the_kernels_is_said_and_nothing_else_is(monkeypatch, capfd):
    """The first start compiles for a minute or more; one that is quick says nothing."""
    monkeypatch.setattr(serve_module, "KERNELS_QUIET_S", 0.0)
    with serve_module._kernels_explained():
        end_s = time.monotonic() + GUARD_S
        said = ""
        while "\n" not in said and time.monotonic() < end_s:
            said += capfd.readouterr().err
    assert said.count("\n") == 1 and "compiles" in said
    monkeypatch.setattr(serve_module, "KERNELS_QUIET_S", 60.0)
    with serve_module._kernels_explained():
        pass
    assert capfd.readouterr().err == ""


def test_a_service_file_that_is_not_there_is_not_called_a_cluster_file(tmp_path):
    with pytest.raises(ScenarioError, match="give the path of a service file"):
        load_service(tmp_path / "service.yaml")


def check(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "runtime", "serve", "--check", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=GUARD_S, check=False)


def test_check_explains_and_starts_nothing(tmp_path, kernels):
    good = check("--demonstration")
    assert good.returncode == 0 and "pair: torch_tp (2 rank(s) here, EMULATED slower x1, 2)" in good.stdout
    smaller = tmp_path / "smaller.yaml"
    smaller.write_text(yaml.safe_dump({"cluster": "unlike-3", "smaller_model": {"url": "http://127.0.0.1:9", "model": "small"}}))
    nobody_there = check("--config", str(smaller))
    assert nobody_there.returncode == 0, "the service does without it"
    assert "smaller model: small at http://127.0.0.1:9, at most 32 calls at once" in nobody_there.stdout
    assert "of the classes chat, batch" in nobody_there.stdout and "smaller model: cannot be reached" in nobody_there.stdout
    refused = check("--cluster", "unlike-3", "--bundle", str(tmp_path / "none"))
    assert refused.returncode == 2 and "refused" in refused.stdout
    for folder in ("/dev/null/records", str(smaller)):
        refused = check("--cluster", "unlike-3", "--record-dir", folder)
        assert refused.returncode == 2 and "refused" in refused.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"cluster": "unlike-3", "grups": {}}, "grups"),
        ({"cluster": "unlike-3", "groups": {"pare": {}}}, 'did you mean "pair"'),
        ({"cluster": "unlike-3", "dispatch": {"hold_max": 3}}, "hold_max_s"),
        ({"cluster": "unlike-3", "groups": {"pair": {"kind": "torch_tp"}}}, "model.path"),
        ({"cluster": "unlike-3", "groups": {"pair": {"kind": "openai_http", "url": "nowhere"}}}, "http://"),
        ({"cluster": "unlike-3", "smaller_model": {"url": "http://127.0.0.1:none", "model": "small"}}, "smaller_model.url"),
        ({"cluster": "unlike-3", "dispatch": {"hold_max_s": float("nan")}}, "hold_max_s"),
        ({}, "cluster"),
    ],
)
def test_a_bad_file_is_one_line_and_code_2(tmp_path, content, said):
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(content))
    bad = check("--config", str(file))
    assert bad.returncode == 2 and said in bad.stderr and bad.stderr.count("\n") == 1, bad.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--port", "65536"), ("--port", "-1"), ("--host", ""), ("--bundle", ""), ("--demonstration", "--config", "service.yaml")],
)
def test_a_bad_flag_is_one_line_and_code_2(arguments):
    bad = check("--cluster", "unlike-3", *arguments)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1, bad.stderr


@pytest.mark.parametrize("closing", ["| exec 3<&-", ">&- 2>&- <&-"])
def test_nobody_need_listen_to_what_it_says(closing):
    """As in `python -m runtime serve | head -1`, or by a starter that closes everything."""
    command = f"{{ {sys.executable} -m runtime serve --cluster unlike-3 --check {closing}; echo ${{PIPESTATUS[0]}} >&4; }} 4>&1"
    done = subprocess.run(["bash", "-c", command], cwd=PROJECT, capture_output=True, text=True, timeout=GUARD_S, check=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("loading the kernels")]  # where that takes a while
    assert done.stdout.strip() == "0" and not said


def test_an_address_is_told_as_a_url_has_it():
    assert [serve_module.reachable(host) for host in ("127.0.0.1", "0.0.0.0", "::1", "::", "localhost")] == [
        "127.0.0.1", "127.0.0.1", "[::1]", "[::1]", "localhost",
    ]  # fmt: skip


def test_a_service_that_cannot_start_ends_and_says_why(monkeypatch):
    """Its groups raise at their start: it does not listen on without them, and the error comes out once all is closed."""
    from runtime.serve import serve
    from runtime.service import Service
    from runtime.service_config import load_service

    closed = []

    async def start(service: Service) -> None:
        raise RuntimeError("no groups today")

    async def close(service: Service) -> None:
        closed.append(service)

    monkeypatch.setattr(Service, "start", start)
    monkeypatch.setattr(Service, "close", close)
    config = load_service(None, "unlike-3", port=0)
    with pytest.raises(RuntimeError, match="no groups today"):
        asyncio.run(asyncio.wait_for(serve(config, lambda: config), GUARD_S))
    assert len(closed) == 1


# --- small real ranks ---------------------------------------------------------------------------------------------------------

CLUSTER = {
    "name": "tiny", "model": {"name": "tiny", "weight_dtype": "fp32", "kv_dtype": "fp32"},
    "groups": [
        {"name": "pair", "ranks": [{"gpu": "core", "node": "here", "count": 2}], "inner_link": "pcie4", "outer_link": "pcie4"},
        {"name": "single", "ranks": [{"gpu": "core", "node": "here"}], "outer_link": "pcie4"},
    ],
    "limits": {"max_running": 8, "queue_limit": 32, "context_tokens": 128, "kv_blocks": 128},
    "own_gpus": [{"name": "core", "tflop_per_s": 0.05, "memory_gib": 4.0, "memory_gb_per_s": 10.0, "tdp_w": 30.0, "kernel_profile": "t4",
                  "link": "pcie4", "has_bf16": False, "source": "a guess"}],
    "own_models": [{"name": "tiny", "layers": 4, "hidden": 64, "query_heads": 4, "kv_heads": 4, "head_dim": 16, "mlp_width": 172,
                    "vocabulary": 512, "context_tokens": 128, "source": "its config.json"}],
}  # fmt: skip


def ordered(running: Running, path: str) -> None:
    """An operator's order, once no move of the service's own is under way in the group."""
    end_s = time.monotonic() + GUARD_S
    while (answer := running.post(path, {}))[0] != 200:
        assert answer[0] == 409 and "under way" in answer[1]["error"]["message"] and time.monotonic() < end_s, answer
        time.sleep(0.05)


@pytest.mark.parametrize("signals", [1, 2])
def test_who_is_cut_off_at_the_end_is_told(tmp_path, kernels, signals):
    """Longer than `drain_s`, or told to stop twice: a stream ends in an error event, any other answer is the error, an operator's order too
    (ranks join the group that those calls are in); nothing is logged as a failure of ours."""
    file = tmp_path / "service.yaml"
    cluster = yaml.safe_load((PROJECT / "envs/scenario/clusters/unlike-3.yaml").read_text())
    spare = copy.deepcopy(cluster["groups"][-1]) | {"name": "spare", "parked": True}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster | {"groups": [*cluster["groups"], spare]}))
    file.write_text(yaml.safe_dump({"cluster": "cluster.yaml", "drain_s": 1 if signals == 1 else 60}))
    running = Running("--config", str(file))
    asked = {"model": "Mistral-7B", "prompt": "hello", "max_tokens": 4000, "ignore_eos": True}
    try:
        with ThreadPoolExecutor(2) as pool:
            names = [group["name"] for group in cluster["groups"]]
            ordered(running, f"/admin/groups/{names[0]}/drain")
            events = running.stream("/v1/completions", asked)
            assert next(events)["choices"][0]["text"]
            plain = pool.submit(running.post, "/v1/completions", asked)
            while json.loads(running.get("/admin/state")[1])["service"]["in_flight"] < 2:
                time.sleep(0.02)
            order = pool.submit(running.post, "/admin/groups/spare/join", {"target": names[1]})
            while not json.loads(running.get("/admin/state")[1])["moves_under_way"]:
                time.sleep(0.02)
            assert not order.done()
            for _ in range(signals):
                running.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            seen = list(events)
            assert seen[-1] == "[DONE]" and seen[-2]["error"]["code"] == "draining"
            for told in (plain, order):
                status, body, _ = told.result(timeout=GUARD_S)
                assert (status, body["error"]["code"]) == (503, "draining")
    finally:
        assert running.stop() == 0
    assert not any("Traceback" in line for line in running.lines)


@pytest.fixture(scope="module")
def ranks_file(dreams, tmp_path_factory, kernels):
    """The small checkpoint on a slow pair and a slow single rank: about 10 ms a token."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    service = {
        "cluster": "cluster.yaml",
        "model": {"name": "tiny", "path": str(dreams)},
        "groups": {
            "pair": {"kind": "torch_tp", "ranks": [{"slow_factor": 12.0}, {"slow_factor": 12.0}]},
            "single": {"kind": "torch_tp", "ranks": [{"slow_factor": 12.0}]},
        },
        # a slow machine is not to be taken for a silent group
        "dispatch": {"restart_s": 0.2, "first_token_floor_s": 60.0, "silence_slack_s": 60.0, "hold_max_s": 60.0, "retry_wait_s": 60.0},
    }
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(service))
    return str(file)


@pytest.fixture(scope="module")
def ranks(ranks_file):
    running = Running("--config", ranks_file)
    yield running
    running.stop()


def hosts(running: Running) -> list[int]:
    return [pid for pid in running.children() if process_name(pid).startswith(f"{PROCESS_NAME} ")]


@pytest.mark.parametrize("times", [1, 2])
def test_told_to_stop_before_it_is_ready_it_ends_at_once_and_quietly(ranks_file, times):
    """Its ranks are loading meanwhile, and nobody waits until they have."""
    running = Running("--config", ranks_file, until="Application startup complete")
    for _ in range(times - 1):
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)  # two at once are one
    began_s, children = time.monotonic(), running.children()
    assert running.stop() == 0
    took_s, said = time.monotonic() - began_s, "".join(running.lines)
    assert took_s < 30.0
    gone_within(children, 5.0 * SLOWER)  # ranks end with their parents, a moment later
    assert "ready on" not in said and "Traceback" not in said and "never retrieved" not in said, said


def gone_within(pids: list[int], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while left := [" ".join(words(pid)) for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end_s, left
        time.sleep(0.05)


def both_serve(running: Running) -> None:
    end_s = time.monotonic() + GUARD_S
    while not all(group["state"] == "serving" for group in json.loads(running.get("/admin/state")[1])["groups"]) or len(hosts(running)) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.2)


ASKED = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 90, "temperature": 0, "ignore_eos": True}


@pytest.mark.fault("K25")
def test_a_whole_group_killed_in_mid_stream(ranks):
    """Eight greedy streams, one group's process killed with SIGKILL at the tenth token: all whole, the text of an unbroken run, usage
    right, and the group comes back."""
    both_serve(ranks)
    _, whole, _ = ranks.post("/v1/completions", ASKED)
    text = whole["choices"][0]["text"]
    victim, before = hosts(ranks)[0], set(hosts(ranks))
    texts, usages, killing = [None] * 8, [None] * 8, [victim]

    def one(i: int) -> None:
        said, finishes = [], []
        for event in ranks.stream("/v1/completions", ASKED | {"stream_options": {"include_usage": True}}):
            if event == "[DONE]":
                continue
            assert "error" not in event, event
            usages[i] = event.get("usage") or usages[i]
            for choice in event["choices"]:
                said.append(choice["text"])
                finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
            if len(said) == 10:
                with contextlib.suppress(IndexError):  # another stream was first
                    os.kill(killing.pop(), signal.SIGKILL)
        assert finishes == ["length"]
        texts[i] = "".join(said)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    assert texts == [text] * 8
    assert all(usage["completion_tokens"] == 90 for usage in usages)
    end_s = time.monotonic() + GUARD_S
    while len(set(hosts(ranks)) - {victim}) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.2)
    assert victim in before


def test_seeded_sampling_is_the_same_in_every_group(ranks):
    both_serve(ranks)
    asked = ASKED | {"temperature": 1.0, "seed": 7, "max_tokens": 30}
    assert len({ranks.post("/v1/completions", asked)[1]["choices"][0]["text"] for _ in range(6)}) == 1


def test_a_client_that_leaves_frees_its_place(ranks):
    """That it left was seen before its answer was whole, which would have freed the place as well."""

    def left() -> float:
        return float(re.search(r"^ballast_client_departures_total (\S+)$", ranks.get("/metrics")[1], re.MULTILINE)[1])

    both_serve(ranks)
    before = left()
    stream = ranks.stream("/v1/completions", ASKED)
    next(stream)
    stream.close()
    end_s = time.monotonic() + GUARD_S
    while left() == before or any(
        f'ballast_group_running{{group="{g}",model_name="tiny"}} 0' not in ranks.get("/metrics")[1] for g in ("pair", "single")
    ):
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.fault("K22")
def test_ready_is_false_while_nothing_can_make_a_token(ranks):
    """Both hosts frozen: /ready is 503 within 3 s although every process is there, /livez stays 200. They are then replaced, and it is
    ready again. On full cores it may take so long that they are replaced first: they are frozen again, a few times."""
    is_noticed = False
    for _ in range(4):
        both_serve(ranks)
        frozen = hosts(ranks)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        while ranks.get("/ready")[0] == 200:
            assert time.monotonic() - began_s < GUARD_S
        is_noticed = time.monotonic() - began_s < 4.5  # the request itself may take 1.5 s; they are given up after 5
        assert ranks.get("/livez")[0] == 200
        while ranks.get("/ready")[0] != 200:
            assert time.monotonic() - began_s < GUARD_S
            time.sleep(0.2)
        assert set(hosts(ranks)) != set(frozen)
        status, body, _ = ranks.post("/v1/completions", ASKED)
        assert status == 200 and body["usage"]["completion_tokens"] == 90
        if is_noticed:
            return
    raise AssertionError("it was ready until they were given up")


@pytest.mark.fault("K21")
def test_nothing_outlives_a_killed_service(dreams, ranks, tmp_path_factory):
    """SIGKILL: soon no process of it is left, and nobody listens on its port."""
    both_serve(ranks)
    children = ranks.children()
    ports = listening_of([ranks.process.pid, *children])
    assert len(children) >= 4 and ports
    ranks.process.kill()
    ranks.process.wait(GUARD_S)
    end_s = time.monotonic() + 5.0 * SLOWER
    gone_within(children, 5.0 * SLOWER)
    while left := still_listening(ports):
        assert time.monotonic() < end_s, left
        time.sleep(0.05)


def test_a_served_policy_decides_and_its_death_is_not_felt(tmp_path, kernels):
    """A bundle over emulated groups: the policy decides; its process killed with SIGKILL, requests go on by the heuristic, and it is
    started again."""
    write_bundle(tmp_path / "bundle", contents())
    service = tmp_path / "service.yaml"
    service.write_text(yaml.safe_dump({"cluster": "unlike-3", "scheduler": {"deadline_ms": 200}}))  # tests share their cores
    running = Running("--config", str(service), "--bundle", str(tmp_path / "bundle"))
    asked = {"model": "Mistral-7B", "prompt": "hello", "max_tokens": 2}

    def policies() -> list[int]:
        return [pid for pid in running.children() if any("policy_process" in word for word in words(pid))]

    def decided() -> float:
        found = re.search(r'ballast_decisions_total\{cause="",source="policy"\} (\S+)', running.get("/metrics")[1])
        return float(found.group(1)) if found else 0.0

    def until_policy_decides(more_than: float) -> None:
        end_s = time.monotonic() + GUARD_S
        while decided() <= more_than:
            assert time.monotonic() < end_s
            assert running.post("/v1/completions", asked)[0] == 200

    try:
        until_policy_decides(0)
        (policy,) = policies()
        os.kill(policy, signal.SIGKILL)
        for _ in range(10):
            assert running.post("/v1/completions", asked)[0] == 200
        until_policy_decides(decided())
        assert policies() != [policy]
    finally:
        assert running.stop() == 0


def test_own_ranks_beside_groups_of_another_kind(ranks_file):
    """They want token ids, whoever else is there."""
    content = yaml.safe_load(Path(ranks_file).read_text())
    file = Path(ranks_file).with_name("mixed.yaml")
    file.write_text(yaml.safe_dump(content | {"groups": {"single": content["groups"]["single"]}}))
    running = Running("--config", str(file))
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
    try:
        end_s = time.monotonic() + GUARD_S
        while not all(group["state"] == "serving" for group in json.loads(running.get("/admin/state")[1])["groups"]):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        for idle in ("pair", "single"):
            ordered(running, f"/admin/groups/{idle}/drain")
            status, body, _ = running.post("/v1/completions", asked)
            assert status == 200 and body["usage"]["completion_tokens"] == 4, body
            ordered(running, f"/admin/groups/{idle}/undrain")
    finally:
        assert running.stop() == 0

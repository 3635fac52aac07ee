"""The service file read again while serving: what changes, what is refused, and that no stream notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from agents.policy_bundle import DESCRIPTION_FILE, WEIGHTS_FILE, write_bundle
from benchmarks.drill_service import words
from envs.decision.observation import OBSERVATION_VERSION
from runtime.reload import Reloader, ReloadRefused
from runtime.service_config import load_service
from tests.runtime.live_service import live
from tests.runtime.scheduling.test_policy_faults import contents
from tests.runtime.test_serve import Running

ASKED = {"model": "Mistral-7B", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
KEY = "a-key-for-tests"
START = {"cluster": "unlike-3", "api_keys_env": "BALLAST_TEST_KEYS", "scheduler": {"deadline_ms": 500}, "gateway": {"choices_max": 4}}


class Service(Running):
    """Started from a file that tests rewrite; asks with its key."""

    def __init__(self, folder) -> None:
        self.file = folder / "service.yaml"
        self.content = dict(START)
        self.write(self.content)
        super().__init__("--config", str(self.file))

    def write(self, content: dict) -> None:
        self.file.write_text(yaml.safe_dump(content))

    def ask(self, method: str, path: str, body: dict | None = None, key: str | None = KEY, kind: str = "application/json"):
        return self.ask_raw(method, path, None if body is None else json.dumps(body).encode(), key, kind)

    def ask_raw(self, method: str, path: str, data: bytes | None, key: str | None = KEY, kind: str = "application/json"):
        headers = {"content-type": kind} | ({"authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def reload(self, **changes):
        """Change the file, have it read; the file goes back to what is in force when that was refused."""
        self.write(self.content | changes)
        status, said = self.ask("POST", "/admin/reload", {})
        if status == 200:
            self.content |= changes
        else:
            self.write(self.content)
        return status, said


@pytest.fixture(scope="module")
def service(tmp_path_factory, kernels):
    os.environ["BALLAST_TEST_KEYS"] = KEY
    folder = tmp_path_factory.mktemp("reload")
    for name, made in (("one", contents()), ("two", contents()), ("old", contents(version=OBSERVATION_VERSION - 1))):
        write_bundle(folder / name, made)
    running = Service(folder)
    yield running
    running.stop()
    del os.environ["BALLAST_TEST_KEYS"]


def test_orders_need_the_key_and_json(service):
    assert service.ask("POST", "/admin/reload", {}, key=None)[0] == 401
    assert service.ask("POST", "/admin/reload", {}, key="wrong")[0] == 401
    assert service.ask("POST", "/admin/reload", {}, kind="text/plain")[0] == 415
    assert service.ask("GET", "/admin/rollout", key=None)[0] == 401
    assert service.ask("GET", "/admin/rollout") == (200, {"stage": "off", "next_step": "set rollout.dir in the service file"})
    status, said = service.ask("POST", "/admin/rollout/promote", {})
    assert status == 404 and "rollout.dir" in said["error"]["message"]
    assert service.ask("POST", "/admin/reload", {"force": 1})[0] == 400


@pytest.mark.parametrize("path", ["/admin/reload", "/admin/rollout/start", "/admin/groups/pair/drain", "/admin/groups/pair/resplit"])
@pytest.mark.parametrize("body", [b"[" * 60000, b'{"reason":' * 6000, b'{"x":' + b"[" * 60000, b"\xff", b'{"reason": "\xff"}', b"[]", b"1"])
def test_an_order_in_any_bytes_is_refused_in_words(service, path, body):
    status, said = service.ask_raw("POST", path, body)
    assert status == 400 and said["error"]["message"]


def test_limits_and_bundle_change_under_a_stream(service):
    """A stream goes on while a limit, then the bundle, then the bundle again, change; each is in force afterwards. It is as long as may
    be, and its reader leaves when the changes are over and it still goes on."""
    pieces, is_over = [], threading.Event()

    def read() -> None:
        request = urllib.request.Request(
            service.url + "/v1/completions", json.dumps(ASKED | {"max_tokens": 8000, "stream": True}).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event
                    pieces.append(event["choices"][0]["text"])
                    assert event["choices"][0]["finish_reason"] is None, "the stream was over before the changes"
                if is_over.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    while not pieces:
        assert reader.is_alive()
        time.sleep(0.01)
    assert service.ask("POST", "/v1/completions", ASKED | {"n": 3})[0] == 200
    assert service.reload(gateway={"choices_max": 2}) == (200, {"changed": ["gateway.choices_max"]})
    assert service.ask("POST", "/v1/completions", ASKED | {"n": 3})[0] == 400
    for name in ("one", "two"):
        status, said = service.reload(bundle=name)
        assert status == 200 and said["changed"] == ["bundle"], said
    assert service.ask("POST", "/v1/completions", ASKED)[0] == 200
    metrics = service.get("/metrics")[1]
    assert 'ballast_policy_state{state="ready"} 1.0' in metrics

    def policy_decided() -> bool:
        return service.ask("POST", "/v1/completions", ASKED)[0] == 200 and 'source="policy"' in service.get("/metrics")[1]

    until(policy_decided)
    seen = len(pieces)
    until(lambda: len(pieces) > seen + 5 or not reader.is_alive())
    assert reader.is_alive()
    is_over.set()
    reader.join(120)


def test_what_is_refused_changes_nothing(service):
    """Each in one line that names the key; the limit set before stays, and requests go on."""
    assert service.reload(gateway={"choices_max": 2})[0] == 200
    for changes, said in (
        ({"port": 9}, None),  # the command line's stands above it: no change
        ({"cluster": "mixed-8"}, "cluster"),
        ({"records": {"dir": "elsewhere"}}, "records"),
        ({"model": {"name": "other"}}, "model_name"),
        ({"host": "127.0.0.2"}, "host"),
        ({"groups": {"pair": {"kind": "openai_http", "url": "http://127.0.0.1:9"}}}, "groups"),
        ({"dispatch": {"limit_multiplier": 2.0}}, "dispatch.limit_multiplier"),
        ({"gateway": {"tokeniser_threads": 3}}, "gateway.tokeniser_threads"),
        ({"rollout": {"dir": "somewhere"}}, "rollout.dir"),
        ({"gateway": {"choises_max": 3}}, "choices_max"),
        ({"scheduler": {"agreement_min": 0.9, "agreement_max": 0.1}}, "agreement"),
        ({"smaller_model": {"url": "127.0.0.1:9", "model": "small"}}, "smaller_model.url"),
        ({"smaller_model": {"url": "http://127.0.0.1:9", "model": "small", "classes": ["chatt"]}}, "chat"),
        ({"smaller_model": {"url": "http://127.0.0.1:9"}}, "smaller_model.model"),
        ({"smaller_model": {"url": "http://127.0.0.1:9", "model": "small", "api_key_env": "BALLAST_TEST_NONE"}}, "BALLAST_TEST_NONE"),
        ({"bundle": "nowhere"}, "nowhere"),
        ({"bundle": "old"}, "observation_version"),
    ):
        status, body = service.reload(**changes)
        if said is None:
            assert (status, body) == (200, {"changed": []})
            continue
        assert status == 409 and said in body["error"]["message"] and "\n" not in body["error"]["message"], (changes, body)
        assert service.ask("POST", "/v1/completions", ASKED)[0] == 200
    service.file.write_text("cluster: [")
    assert service.ask("POST", "/admin/reload", {})[0] == 409
    service.write(service.content)
    assert service.ask("POST", "/v1/completions", ASKED | {"n": 3})[0] == 400


def test_the_smaller_model_comes_changes_and_goes(service):
    for smaller in ({"url": "http://127.0.0.1:9", "model": "one"}, {"url": "http://127.0.0.1:9", "model": "two", "max_in_flight": 3}, None):
        assert service.reload(smaller_model=smaller) == (200, {"changed": ["smaller_model"]})
        told = service.ask("GET", "/admin/state")[1].get("smaller_model")
        assert (told and told["model"]) == (smaller and smaller["model"])
        assert service.ask("POST", "/v1/completions", ASKED)[0] == 200


def test_a_storm_of_signals_is_one_or_two_reloads(service):
    """Each would read the file and the bundle; who asks after them waits for two at most, and gets an answer at once."""
    before = "".join(service.lines).count("reloaded changed")
    for _ in range(200):
        os.kill(service.process.pid, signal.SIGHUP)
        time.sleep(0.001)
    status, _ = service.ask("POST", "/admin/reload", {})
    assert status == 200
    until(lambda: "".join(service.lines).count("reloaded changed") > before)
    assert "".join(service.lines).count("reloaded changed") - before < 150


def test_a_signal_reloads_and_a_bad_file_is_told_in_the_log(service):
    seen = len(service.lines)
    service.write(service.content | {"gateway": {"choices_max": 3}})
    service.process.send_signal(signal.SIGHUP)
    until(lambda: any("reloaded changed=gateway.choices_max" in line for line in service.lines[seen:]))
    assert service.ask("POST", "/v1/completions", ASKED | {"n": 3})[0] == 200
    service.content |= {"gateway": {"choices_max": 3}}
    service.write(service.content | {"nonsense": 1})
    service.process.send_signal(signal.SIGHUP)
    until(lambda: any("reload refused" in line and "nonsense" in line for line in service.lines))
    assert service.ask("POST", "/v1/completions", ASKED)[0] == 200
    service.write(service.content)


def policies(service: Service) -> list[int]:
    return [pid for pid in service.children() if any("policy_process" in word for word in words(pid))]


def replace_files(folder: Path, bias: float) -> None:
    """Another policy's files under the same names."""
    made = contents()
    made.weights["out.bias"][:] = bias
    other = write_bundle(folder.parent / f"other-{bias}", made)
    for name in (WEIGHTS_FILE, DESCRIPTION_FILE):
        (folder / name).write_bytes((other / name).read_bytes())


def test_a_bundle_replaced_under_its_path_comes_in_by_a_reload_alone(service):
    """Half written it is refused by name, and the old one decides on. Whole, it comes in although the file names the same folder. Replaced
    once more, the policy's process is killed: what it would load now nobody asked for, so it is refused, and the heuristic answers until a
    reload takes it in."""
    folder = service.file.parent / "three"
    write_bundle(folder, contents())
    assert service.reload(bundle="three") == (200, {"changed": ["bundle"]})
    assert service.reload(bundle="three") == (200, {"changed": []})
    good = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(good[: len(good) // 2])
    status, said = service.reload(bundle="three")
    assert status == 409 and "three: policy.safetensors" in said["error"]["message"], said
    assert 'ballast_policy_state{state="ready"} 1.0' in service.get("/metrics")[1]
    replace_files(folder, 1.0)
    before = policies(service)
    assert service.reload(bundle="three") == (200, {"changed": ["bundle"]})
    until(lambda: len(policies(service)) == 1 and policies(service) != before)
    replace_files(folder, 2.0)
    os.kill(policies(service)[0], signal.SIGKILL)
    until(lambda: any("policy bundle refused" in line and "its files changed" in line for line in service.lines))
    assert service.ask("POST", "/v1/completions", ASKED)[0] == 200
    assert service.reload(bundle="three") == (200, {"changed": ["bundle"]})
    assert 'ballast_policy_state{state="ready"} 1.0' in service.get("/metrics")[1]


def test_a_control_policy_replaced_under_its_path_comes_in_too(tmp_path, kernels):
    """Half written it is refused by the key's and the folder's name."""
    made = contents(most=64)
    write_bundle(tmp_path / "joint", replace(made, schema=replace(made.schema, decision_kind="joint")))
    with live(tmp_path, rebalance_bundle="joint", control={"tick_s": 3600.0}) as running:
        decider = running.service.control.deciders["rebalance"]
        until(lambda: decider.guard.client.state == "ready")
        reloader = Reloader(running.service, running.app.state.generation, lambda: load_service(tmp_path / "service.yaml"))

        def reload() -> list[str]:
            return asyncio.run_coroutine_threadsafe(reloader.reload(), running.loop).result(60.0)

        assert reload() == []
        weights = tmp_path / "joint" / WEIGHTS_FILE
        whole, before = weights.read_bytes(), decider.guard
        weights.write_bytes(whole[:100])
        with pytest.raises(ReloadRefused, match=r"rebalance_bundle: joint: policy\.safetensors"):
            reload()
        assert decider.guard is before and before.client.state == "ready"
        weights.write_bytes(whole)
        (tmp_path / "joint" / DESCRIPTION_FILE).write_text((tmp_path / "joint" / DESCRIPTION_FILE).read_text() + "\n")
        assert reload() == ["rebalance_bundle"]
        assert decider.guard is not before and decider.guard.client.state == "ready"


def until(condition, limit_s: float = 90.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it never came to pass"
        time.sleep(0.05)

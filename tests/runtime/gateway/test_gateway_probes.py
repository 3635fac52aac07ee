"""Liveness, readiness, models, version, metrics, the published description; and that no prompt holds the event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_dispatcher import CONTEXT, OWN, SMALL, ScriptedDispatcher, Service, WordCodec, says, serving, wait_until

from runtime.calls import Call, Refusal
from runtime.gateway.app import make_app
from runtime.gateway.interface import GroupStatus, ServedModel
from runtime.gateway.settings import GatewaySettings

CHAT = {"model": OWN, "messages": [{"role": "user", "content": "Hi"}]}


def metrics_of(service: Service) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, sorted labels) → value of everything on the page, which must be valid."""
    response = httpx.get(service.url + "/metrics", timeout=60.0)
    assert response.status_code == 200
    families = text_string_to_metric_families(response.text)
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples}


def test_models(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    own = {"id": OWN, "object": "model", "created": 0, "owned_by": "ballast", "max_model_len": CONTEXT}
    assert own in listed["data"]
    assert client.get(f"/v1/models/{OWN}").json() == own
    assert client.get("/v1/models/own%2Fmodel").json() == own


def test_liveness_and_version(client):
    assert client.get("/livez").json() == {"alive": True}
    assert set(client.get("/version").json()) == {"version"}
    assert client.head("/livez").status_code == 200


@pytest.mark.fault("K22")
@pytest.mark.parametrize("path", ["/ready", "/readyz", "/health"])
def test_readiness_is_the_dispatchers_word(client, service, path):
    """200 with the dead group listed while another can serve; 503 when none can; liveness stays apart."""
    response = client.get(path)
    assert response.status_code == 200
    assert response.json()["groups"][1] == {
        "name": "b", "model_id": OWN, "is_serving": False, "state": "dead", "detail": "killed", "running": 0, "waiting": 0
    }  # fmt: skip
    service.dispatcher.is_ready_answer = False
    response = client.get(path)
    assert response.status_code == 503
    assert response.json()["ready"] is False
    assert response.headers["retry-after"] == "1"
    assert client.get("/livez").status_code == 200


@pytest.mark.fault("K22")
def test_a_wedged_or_failing_dispatcher_is_not_ready(client, service, monkeypatch):
    """No answer within ready_wait_s (2 s; K22 asks for 3 s; a busy machine is allowed for) is a no, and so is an exception."""
    service.dispatcher.is_ready_answer = 60.0
    began_s = time.perf_counter()
    assert client.get("/ready").status_code == 503
    assert 1.9 < time.perf_counter() - began_s < 30.0

    async def fails() -> bool:
        raise RuntimeError("no")

    monkeypatch.setattr(service.dispatcher, "is_ready", fails)
    assert client.get("/ready").status_code == 503


def test_draining_takes_nothing_in_and_lets_streams_end(service, client):
    """/ready says no, new requests 503 with Retry-After, what runs goes on to its end."""

    async def slow(call: Call):
        async for piece in says(call, ("a",) * 10, 0.05):
            yield piece

    service.dispatcher.script = slow
    try:
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            service.app.state.generation.is_draining = True
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert "retry-after" in refused.headers
            assert client.get("/ready").status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
    finally:
        service.app.state.generation.is_draining = False


def test_metrics_count_what_happened():
    """Names and labels of vLLM beside our own; values that follow from what was asked."""

    async def some(call: Call):
        if call.user == "refused":
            raise Refusal("queue_full", "full")
        async for piece in says(call):
            yield piece

    with serving(ScriptedDispatcher(script=some)) as service:
        for body in (
            CHAT,
            CHAT | {"stream": True},
            CHAT | {"max_tokens": 1},
            CHAT | {"user": "refused"},
            CHAT | {"n": -1},
            CHAT | {"model": "x"},
        ):
            httpx.post(service.url + "/v1/chat/completions", json=body, timeout=60.0)
        httpx.post(service.url + "/v1/completions", json={"model": SMALL, "prompt": "x", "service_class": "code"}, timeout=60.0)
        wait_until(lambda: service.metrics.in_flight == 0)  # the answer is here a moment before its request is counted out
        found = metrics_of(service)
    model = (("engine", "gateway"), ("model_name", OWN))
    assert found["vllm:prompt_tokens_total", model] == 9
    assert found["vllm:generation_tokens_total", model] == 7
    assert found["vllm:request_success_total", (("engine", "gateway"), ("finished_reason", "stop"), ("model_name", OWN))] == 2
    assert found["vllm:request_success_total", (("engine", "gateway"), ("finished_reason", "length"), ("model_name", OWN))] == 1
    assert found["vllm:time_to_first_token_seconds_count", model] == 3
    assert found["vllm:e2e_request_latency_seconds_count", model] == 3
    assert found["vllm:inter_token_latency_seconds_count", model] == 4
    assert found["vllm:time_per_output_token_seconds_count", model] == 4
    assert found["vllm:request_prompt_tokens_sum", model] == 9
    assert found["vllm:num_requests_running", (("engine", "0"), ("model_name", OWN))] == 0
    assert found["vllm:kv_cache_usage_perc", (("engine", "0"), ("model_name", OWN))] == 0.25
    assert found["vllm:gpu_cache_usage_perc", (("engine", "0"), ("model_name", OWN))] == 0.25
    assert found["ballast_group_serving", (("group", "b"), ("model_name", OWN))] == 0
    assert found["ballast_http_requests_total", (("endpoint", "chat"), ("status", "200"))] == 3
    assert found["ballast_refusals_total", (("reason", "queue_full"),)] == 1
    assert found["ballast_refusals_total", (("reason", "invalid"),)] == 1
    assert found["ballast_refusals_total", (("reason", "model_not_found"),)] == 1
    assert found["ballast_ttft_seconds_count", (("model_name", SMALL), ("service_class", "code"))] == 1
    assert found["ballast_requests_in_flight", ()] == 0
    assert found["process_resident_memory_bytes", ()] > 0


def test_old_metric_names_can_be_left_out():
    with serving(ScriptedDispatcher(), GatewaySettings(has_old_metric_names=False)) as service:
        httpx.post(service.url + "/v1/chat/completions", json=CHAT, timeout=60.0)
        names = {name for name, _ in metrics_of(service)}
    assert "vllm:kv_cache_usage_perc" in names
    assert "vllm:gpu_cache_usage_perc" not in names
    assert not any("time_per_output_token" in name for name in names)


def test_callers_cannot_make_labels():
    """Models, users, sessions, request ids and reasons of a caller's choosing add no row."""

    async def odd(call: Call):
        raise Refusal(f"reason-{call.user}", "no")
        yield

    with serving(ScriptedDispatcher(script=odd)) as service, httpx.Client(base_url=service.url, timeout=60.0) as client:
        for number in range(3):
            client.post("/v1/chat/completions", json=CHAT | {"user": f"u{number}", "model": f"m{number}"})
            client.post("/v1/chat/completions", json=CHAT | {"user": f"u{number}"}, headers={"x-request-id": f"r{number}"})
            client.get(f"/nothing/{number}")
        rows = len(metrics_of(service))
        for number in range(3, 50):
            client.post("/v1/chat/completions", json=CHAT | {"user": f"u{number}", "model": f"m{number}"})
            client.post("/v1/chat/completions", json=CHAT | {"user": f"u{number}"}, headers={"x-request-id": f"r{number}"})
            client.get(f"/nothing/{number}")
        assert len(metrics_of(service)) == rows


def test_a_service_without_anything_measured_yet():
    """K13: no groups, no models, no request: a page all the same, and not ready."""

    class Nobody(ScriptedDispatcher):
        def models(self):
            return {}

    with serving(Nobody(is_ready_answer=False, groups=())) as service:
        assert metrics_of(service)["ballast_requests_in_flight", ()] == 0
        assert httpx.get(service.url + "/v1/models", timeout=60.0).json() == {"object": "list", "data": []}
        assert httpx.get(service.url + "/ready", timeout=60.0).json() == {
            "ready": False,
            "groups": [],
            "reason": "no group can make a token",
        }
        assert httpx.post(service.url + "/v1/chat/completions", json=CHAT, timeout=60.0).status_code == 404


def test_the_description_names_every_endpoint(client):
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/ready", "/metrics"} <= set(document["paths"])
    assert "temperature" in document["components"]["schemas"]["ChatBody"]["properties"]


class SlowCodec(WordCodec):
    """Takes as long as the test likes, as a real one does for a very long prompt, without holding the interpreter."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = 0
        self.was_told: list[bool] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.begun += 1
        self.was_told.append(self.go_on.wait(20.0))  # the loop, if it were held, could not tell
        return super().encode(text)


def test_a_long_prompt_does_not_hold_the_loop():
    """While two prompts are made to tokens, the loop answers others without waiting for them."""
    codec = SlowCodec()
    app = make_app(ScriptedDispatcher(), load_text=lambda path: codec)

    async def drive() -> None:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                long = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(2)]
                while codec.begun < 2:
                    await asyncio.sleep(0.005)
                for _ in range(10):
                    assert (await client.get("/livez")).status_code == 200
                codec.go_on.set()
                assert [answer.status_code for answer in await asyncio.gather(*long)] == [200, 200]

    asyncio.run(drive())
    assert codec.was_told == [True, True]


def test_a_real_tokenizer_lets_go_of_the_interpreter(shared):
    """0.4 million characters take a large part of a second; another thread goes on meanwhile. With a tokenizer that held on it
    would stand still for all of it, and have a turn or two."""
    from runtime.torch_tp.tokenizer import load_tokenizer

    folder = shared / "models" / "aidreams260k"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    codec = load_tokenizer(folder)
    text = "Once upon a time there was a girl. " * 12_000
    done = threading.Event()

    def encode() -> None:
        codec.encode(text)
        done.set()

    turns = 0
    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10


def test_tokens_are_bytes_that_make_the_text(shared):
    """A byte-fallback vocabulary: the tokens' bytes put together are the text, also where one is half a character."""
    from runtime.torch_tp.tokenizer import load_tokenizer

    folder = shared / "models" / "aidreams260k"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    codec = load_tokenizer(folder)
    text = "hello wörld 你好\n🙂"
    ids = codec.encode(text, add_special_tokens=False)
    assert b"".join(codec.token_bytes(token) for token in ids).decode() == " " + text
    assert codec.token_bytes(10**9) == b""
    assert codec.token_chars_max * len(ids) >= len(text)


def test_ports_and_hosts():
    """K19: port 0 by default, loopback alone; a port that is taken is an error, not another service's."""
    from runtime.gateway.server import listen

    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert port != 0
        with pytest.raises(OSError):
            listen("127.0.0.1", port)
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", port)) != 0


def test_many_sockets_are_allowed():
    """Where the soft limit is the usual 1,024, the server raises it to what the hard one lets it."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2000));"
        "from runtime.gateway.server import allow_descriptors;"
        "print(allow_descriptors(1000), resource.getrlimit(resource.RLIMIT_NOFILE)[0], allow_descriptors(9000), allow_descriptors(10))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1000", "1000", "2000", "2000"]


def test_settings_are_checked():
    for change in (
        {"api_keys": ("",)},
        {"api_keys": ("ü",)},
        {"api_keys": ("k",) * 65},
        {"body_bytes_max": 0},
        {"requests_max": 0},
        {"request_timeout_s": float("nan")},
        {"ready_wait_s": 0.0},
        {"logprobs_max": 65},
    ):
        with pytest.raises(ValueError, match="GatewaySettings"):
            GatewaySettings(**change)


def test_groups_and_models_say_only_what_is_known():
    assert ServedModel("a").is_foreign
    assert not ServedModel("a", model_path="x").is_foreign
    assert json.dumps(GroupStatus("a", "m", True).kv_used_fraction) == "null"

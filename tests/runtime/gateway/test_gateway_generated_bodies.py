"""Generated request bodies over real HTTP: whatever comes in, no server error, no hang, and every answer in the API's shape.

`BALLAST_BODIES` sets how many are tried by each of the three tests (the published figure is 200,000 in all).
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_dispatcher import FOREIGN, OWN, SMALL, ScriptedDispatcher, Service, serving, wait_until

from runtime.gateway.openai_schemas import ChatBody, CompletionBody

BODIES = int(os.environ.get("BALLAST_BODIES", "800"))
SEARCH = settings(max_examples=BODIES, deadline=None, suppress_health_check=list(HealthCheck))
PATHS = ("/v1/chat/completions", "/v1/completions")

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 70),
    st.sampled_from((2**31, 2**63, -(2**63) - 1, 10**400)),
    st.floats(),
    st.text(),
    st.text(st.characters(codec=None, categories=("Cs", "Cc", "Co", "L", "Zs"))),
    st.sampled_from(("", "\x00", "\ud800", "a" * 3000, OWN, FOREIGN, SMALL, "batch", "text", "user", "NaN")),
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=8), inner, max_size=5)), max_leaves=12
)
MODELS = st.sampled_from((OWN, FOREIGN, SMALL))
ROLES = st.sampled_from(("system", "developer", "user", "assistant", "tool", "function", "king", ""))
PARTS = st.fixed_dictionaries({"type": st.sampled_from(("text", "image_url", ""))}, optional={"text": st.text(), "image_url": ANYTHING})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES, "content": st.one_of(st.text(), st.none(), st.lists(PARTS, max_size=3))},
        optional={"name": st.text(max_size=5), "tool_calls": ANYTHING, "refusal": ANYTHING, "tool_call_id": st.text(max_size=5)},
    ),
    max_size=4,
)
PROMPTS = st.one_of(
    st.text(),
    st.lists(st.text(), max_size=4),
    st.lists(st.integers(-1, 1001), max_size=20),
    st.lists(st.lists(st.integers(0, 999), max_size=5), max_size=4),
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(-1, 600),
    "max_completion_tokens": st.integers(0, 20),
    "min_tokens": st.integers(-1, 20),
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(0.0, 1.1),
    "top_k": st.integers(-2, 50),
    "seed": st.integers(-(2**64), 2**64),
    "n": st.integers(-1, 6),
    "stop": st.one_of(st.text(max_size=5), st.lists(st.text(max_size=5), max_size=9)),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}),
    "echo": st.booleans(),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 25)),
    "top_logprobs": st.integers(-1, 25),
    "priority": st.integers(-120, 120),
    "service_class": st.sampled_from(("chat", "Interactive", "batch ", "gold", "")),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=6), SCALARS, max_size=3),
}
FIELDS = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__} - {"model", "messages", "prompt"})


@st.composite
def likely_bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """(path, body) of a request that is nearly right: known fields, most with values of their kind, some with anything."""
    path = draw(st.sampled_from(PATHS))
    body: dict[str, Any] = {"model": draw(MODELS)}
    body |= {"messages": draw(MESSAGES)} if path.startswith("/v1/chat") else {"prompt": draw(PROMPTS)}
    for name in draw(st.lists(st.sampled_from(sorted(LIKELY)), unique=True, max_size=6)):
        body[name] = draw(LIKELY[name])
    for name in draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=1)):
        body[name] = draw(ANYTHING)
    return path, body


@pytest.fixture(scope="module")
def asked() -> Iterator[Asker]:
    with serving(ScriptedDispatcher()) as service:
        asker = Asker(service)
        yield asker
        asker.connection.close()
        wait_until(lambda: service.metrics.in_flight == 0 and service.dispatcher.open_calls == 0)
        assert service.metrics.refusals["internal_error"] == 0
        assert still_serves(service)


def still_serves(service: Service) -> bool:
    """It still serves."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
    connection.request("POST", PATHS[1], json.dumps({"model": OWN, "prompt": "a"}))
    return connection.getresponse().status == 200


class Asker:
    def __init__(self, service: Service) -> None:
        self.port = service.port
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, path: str, data: bytes) -> None:
        """Raises: AssertionError unless the answer is one of the API's, for less than 1 s of the process's time.

        Not of the clock's: a busy machine stops us for as long as it likes. A true hang ends in the socket's timeout.
        """
        gc.disable()  # hypothesis keeps millions of objects: one sweep of them takes over a second, and is not the gateway's
        began_s = time.process_time()
        self.connection.request("POST", path, data, {"content-type": "application/json"})
        response = self.connection.getresponse()
        answer = response.read()
        took_s = time.process_time() - began_s
        gc.enable()
        assert response.status < 500, answer
        assert took_s < 1.0
        if response.status != 200:
            assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
        elif response.headers["content-type"].startswith("text/event-stream"):
            *blocks, last, empty = answer.decode().split("\n\n")
            assert (last, empty) == ("data: [DONE]", "")
            assert not any("error" in json.loads(block.removeprefix("data: ")) for block in blocks)
        else:
            assert all(choice["finish_reason"] for choice in json.loads(answer)["choices"])


@SEARCH
@given(likely_bodies())
def test_bodies_that_are_nearly_right(asked, request_):
    path, body = request_
    asked.ask(path, json.dumps(body).encode())


@SEARCH
@given(st.sampled_from(PATHS), ANYTHING, st.booleans())
def test_any_json_at_all(asked, path, body, is_ascii):
    asked.ask(path, json.dumps(body, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass"))


@SEARCH
@given(likely_bodies(), st.data())
def test_bodies_with_bytes_changed(asked, request_, data):
    """A right body with a stretch of it replaced by anything: most are no JSON any more."""
    path, body = request_
    sent = json.dumps(body).encode()
    start = data.draw(st.integers(0, len(sent)))
    end = data.draw(st.integers(start, min(len(sent), start + 8)))
    asked.ask(path, sent[:start] + data.draw(st.binary(max_size=8)) + sent[end:])

"""Clients other than the `openai` SDK, unmodified: those that are installed are tried (extra `clients`); and requests as load generators
send them."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from scripted_dispatcher import OWN, Service, says

from runtime.calls import Call

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_litellm(service: Service):
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch its price list
    litellm = pytest.importorskip("litellm", reason="pip install 'ballast[clients]'")
    to = {"api_base": f"{service.url}/v1", "api_key": "none", "num_retries": 0}
    answer = litellm.completion(model=f"openai/{OWN}", messages=MESSAGES, **to)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.usage.total_tokens == 6
    stream = litellm.completion(model=f"openai/{OWN}", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **to)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "Hello world"
    text = litellm.text_completion(model=f"text-completion-openai/{OWN}", prompt="abc", **to)
    assert text.choices[0].text == "Hello world"
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/gpt-9", messages=MESSAGES, **to)


def test_langchain(service: Service):
    langchain = pytest.importorskip("langchain_openai", reason="pip install 'ballast[clients]'")
    to = {"model": OWN, "base_url": f"{service.url}/v1", "api_key": "none"}
    chat = langchain.ChatOpenAI(**to, temperature=0, seed=3, max_tokens=10, stop=["zz"])
    answer = chat.invoke([("system", "s"), ("human", "h"), ("ai", "x"), ("human", "y")])
    assert answer.content == "Hello world"
    assert answer.usage_metadata["output_tokens"] == 3
    assert "".join(chunk.content for chunk in chat.stream("Hi")) == "Hello world"
    assert [answer.content for answer in chat.batch(["a", "b"])] == ["Hello world"] * 2
    assert langchain.OpenAI(**to).invoke("Hi") == "Hello world"


LOAD_BODIES = [
    # vllm bench serve, backends openai and openai-chat
    (
        "/v1/completions",
        {"prompt": "abc", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": None, "ignore_eos": True},
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}], "max_completion_tokens": 5}),
    # GuideLLM
    ("/v1/completions", {"prompt": "abc", "max_tokens": 5, "max_completion_tokens": 5, "stop": None, "ignore_eos": True}),
    # AIPerf with a fixed answer length
    ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 5, "min_tokens": 5, "ignore_eos": True}),
]


@pytest.mark.parametrize(("path", "body"), LOAD_BODIES)
def test_load_generators(client, service, path, body):
    """They count tokens by the usage chunk and time them by chunks with text: five of each were asked for."""

    async def five(call: Call):
        async for piece in says(call, ("t ",) * 9):
            yield piece

    service.dispatcher.script = five
    asked = body | {"model": OWN, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    texts, usage = [], None
    with client.stream("POST", path, json=asked) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line or data == "[DONE]":
                continue
            chunk = json.loads(data)
            usage = chunk["usage"]
            for choice in chunk["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                texts += [text] if text else []
    assert texts == ["t "] * 5
    assert usage["completion_tokens"] == 5


def test_the_published_description_with_schemathesis(service: Service):
    """Requests made of /openapi.json: no server error, and every answer as the document says."""
    schemathesis = pytest.importorskip("schemathesis", reason="pip install 'ballast[clients]'")
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    for found in schema.get_all_operations():
        answers_as_described(found.ok())


def answers_as_described(operation) -> None:
    """Not asked: that whatever fits the types is accepted; roles, contexts and vocabularies are the model's."""
    from schemathesis.specs.openapi import checks

    asked = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def holds(case) -> None:
        response = case.call(timeout=30)
        assert response.status_code < 500
        case.validate_response(response, checks=asked)

    holds()

"""Clients other than the `openai` SDK, unmodified: those that are installed are tried (extra `clients`); load generators where they are on
the PATH; and requests as those send them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from scripted_dispatcher import OWN, Service, says

from runtime.calls import Call

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.filterwarnings("ignore")  # its own
def test_litellm(service: Service):
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch its price list
    litellm = pytest.importorskip("litellm", reason="pip install 'ballast[clients]', then --no-deps litellm")
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
    # GuideLLM before 0.8
    ("/v1/completions", {"prompt": "abc", "max_tokens": 5, "max_completion_tokens": 5, "stop": None, "ignore_eos": True}),
    # GuideLLM 0.8.1, as it was seen on the wire
    ("/v1/completions", {"max_tokens": 5, "ignore_eos": True, "prompt": "1 0 m0 Finish medical want almost away until."}),
    (
        "/v1/chat/completions",
        {
            "max_completion_tokens": 5,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "1 0 m0 Finish medical want almost away until."}]}],
        },
    ),
    # AIPerf 0.13.0 with a fixed answer length, as it was seen on the wire
    ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 5, "ignore_eos": True, "min_tokens": 5}),
    ("/v1/completions", {"prompt": "rance exclaims on thee", "max_tokens": 5, "ignore_eos": True, "min_tokens": 5}),
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


def on_path(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not on the PATH; install it into an environment of its own (docs/http_api.md)")
    return found


@pytest.fixture
def twelve(service) -> Service:
    async def twelve_tokens(call: Call):
        async for piece in says(call, ("t ",) * 12):
            yield piece

    service.dispatcher.script = twelve_tokens
    return service


ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@pytest.mark.parametrize("kind", sorted(ENDPOINTS))
def test_guidellm(twelve, dreams, tmp_path, kind):
    """Ten requests by its own program: none failed, each has twelve tokens by usage, and its times are there."""
    command = [
        on_path("guidellm"), "run", "--backend", f"kind=openai_http,target={twelve.url},model={OWN},request_format={ENDPOINTS[kind]}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=10", "--tokenizer",
        f"kind=huggingface_auto,model={dreams}", "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=12", "--output",
        f"kind=json,path={tmp_path / 'said.json'}", "--disable-progress",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = json.loads((tmp_path / "said.json").read_text())["benchmarks"]
    metrics = found["metrics"]
    assert metrics["request_totals"]["successful"] == 10 and metrics["request_totals"]["errored"] == 0
    assert metrics["output_token_count"]["successful"]["mean"] == 12
    assert metrics["time_to_first_token_ms"]["successful"]["count"] == 10


@pytest.mark.parametrize("kind", sorted(ENDPOINTS))
def test_aiperf(twelve, dreams, tmp_path, kind):
    """Ten requests by its own program: none failed, twelve tokens each by usage."""
    command = [
        on_path("aiperf"), "profile", "-m", OWN, "--url", twelve.url, "--endpoint-type", kind, "--streaming", "--tokenizer", str(dreams),
        "--concurrency", "2", "--request-count", "10", "--synthetic-input-tokens-mean", "32", "--synthetic-input-tokens-stddev", "0",
        "--output-tokens-mean", "12", "--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true", "--extra-inputs", "min_tokens:12",
        "--ui", "none", "--output-artifact-dir", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert said["request_count"]["avg"] == 10 and said["error_summary"] == []
    assert said["usage_completion_tokens"]["avg"] == 12 and said["time_to_first_token"]["avg"] > 0


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

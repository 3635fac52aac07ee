"""The `openai` SDK against the gateway, unmodified: what it parses, what it raises, and that it does not multiply retries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_dispatcher import OWN, Service

from runtime.calls import Call, Piece, Refusal
from tests.conftest import GUARD_S

openai = pytest.importorskip("openai", reason="pip install openai")

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def sdk(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=60.0) as client:
        yield client


def test_models(sdk):
    assert OWN in [model.id for model in sdk.models.list()]
    assert sdk.models.retrieve(OWN).id == OWN
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-9")


def test_chat(sdk):
    answer = sdk.chat.completions.create(model=OWN, messages=MESSAGES, n=2, logprobs=True, top_logprobs=1, seed=1, user="u", stop=["x"])
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "a"
    assert answer.usage.total_tokens == 9
    raw = sdk.chat.completions.with_raw_response.create(model=OWN, messages=MESSAGES, extra_headers={"x-request-id": "mine"})
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse()._request_id == "mine"


def test_chat_stream(sdk):
    stream = sdk.chat.completions.create(model=OWN, messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
    assert chunks[-1].usage.completion_tokens == 3
    with sdk.chat.completions.stream(model=OWN, messages=MESSAGES) as events:
        assert events.get_final_completion().choices[0].message.content == "Hello world"


def test_completions(sdk):
    answer = sdk.completions.create(model=OWN, prompt=["a", "b"], max_tokens=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["aHello ", "bHello "]
    assert answer.choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].text for chunk in sdk.completions.create(model=OWN, prompt=[1, 2], stream=True)) == "Hello world"


def test_fields_of_others_pass_through(sdk, service):
    sdk.chat.completions.create(model=OWN, messages=MESSAGES, extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "priority": 3})
    [call] = service.dispatcher.calls
    assert (call.sampling.top_k, call.sampling.min_p, call.ignore_eos, call.priority) == (5, 0.1, True, 3)


@pytest.mark.parametrize(
    ("reason", "raised"),
    [
        ("queue_full", openai.RateLimitError),
        ("no_capacity", openai.InternalServerError),
        ("too_long", openai.BadRequestError),
        ("model_not_found", openai.NotFoundError),
    ],
)
def test_errors_are_the_sdks_own_and_are_not_retried(sdk, service, reason, raised):
    """The SDK's two retries would come on top of ours: x-should-retry says no, and each request comes once."""

    async def refuses(call: Call):
        raise Refusal(reason, "as scripted", retry_after_s=0.1)
        yield

    service.dispatcher.script = refuses
    for is_stream in (False, True):
        service.dispatcher.calls.clear()
        with pytest.raises(raised) as caught:
            sdk.chat.completions.create(model=OWN, messages=MESSAGES, stream=is_stream)
        assert caught.value.body["message"] == "as scripted"
        assert len(service.dispatcher.calls) == 1


def test_an_error_event_is_raised_in_the_midst_of_a_stream(sdk, service):
    async def breaks(call: Call):
        yield Piece(0, 97, "a")
        raise Refusal("attempts_spent", "no group is left")

    service.dispatcher.script = breaks
    seen = []
    with pytest.raises(openai.APIError, match="no group is left"):
        for chunk in sdk.chat.completions.create(model=OWN, messages=MESSAGES, stream=True):
            seen.append(chunk.choices[0].delta.content)
    assert seen == ["", "a"]


def test_an_async_client_that_leaves(sdk, service):
    """Closing the SDK's stream ends the work."""
    import asyncio

    async def for_ever(call: Call):
        for place in range(10**6):
            await asyncio.sleep(0.001)
            yield Piece(place, 97, "a")

    service.dispatcher.script = for_ever

    async def drive() -> None:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model=OWN, messages=MESSAGES, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content == "a":
                    break
            await stream.close()
            async with asyncio.timeout(GUARD_S):
                while service.dispatcher.open_calls:
                    await asyncio.sleep(0.001)

    asyncio.run(drive())

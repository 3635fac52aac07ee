"""Generated request bodies: right ones, nearly right ones, any JSON at all, right ones with bytes changed, and those of the published
description."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from runtime.gateway.openai_schemas import ChatBody, CompletionBody

PATHS = ("/v1/chat/completions", "/v1/completions")
Asked = tuple[str, bytes]
"""Path and body of a request."""

FIELDS = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__} - {"model", "messages", "prompt"})
ROLES = st.sampled_from(("system", "developer", "user", "assistant", "tool", "function", "king", ""))
PROMPTS = st.one_of(
    st.text(),
    st.lists(st.text(), max_size=4),
    st.lists(st.integers(-1, 1001), max_size=20),
    st.lists(st.lists(st.integers(0, 999), max_size=5), max_size=4),
)


def anything(models: Sequence[str]) -> st.SearchStrategy[Any]:
    """Any JSON, with a liking for numbers at the edges and for words that mean something here."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-3, 70),
        st.sampled_from((2**31, 2**63, -(2**63) - 1, 10**400)),
        st.floats(),
        st.text(),
        st.text(st.characters(codec=None, categories=("Cs", "Cc", "Co", "L", "Zs"))),
        st.sampled_from(("", "\x00", "\ud800", "a" * 3000, *models, "batch", "text", "user", "NaN")),
    )

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=8), inner, max_size=5))

    return st.recursive(scalars, nested, max_leaves=12)


def likely_fields(some: st.SearchStrategy[Any]) -> Mapping[str, st.SearchStrategy[Any]]:
    """Fields with values of their kind, a few of them out of bounds."""
    return {
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
        "chat_template_kwargs": st.dictionaries(st.text(max_size=6), some, max_size=3),
    }


def right_fields() -> Mapping[str, st.SearchStrategy[Any]]:
    """Fields with values that are taken, each for itself."""
    return {
        "max_tokens": st.integers(1, 24),
        "min_tokens": st.integers(0, 2),
        "temperature": st.floats(0.0, 2.0),
        "top_p": st.floats(0.01, 1.0),
        "top_k": st.integers(-1, 2**31 - 1),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.floats(0.01, 100.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "n": st.integers(1, 4),
        "stop": st.one_of(st.text(min_size=1, max_size=128), st.lists(st.text(min_size=1, max_size=5), max_size=8)),
        "stop_token_ids": st.lists(st.integers(0, 400), max_size=4),
        "ignore_eos": st.booleans(),
        "user": st.text(max_size=256),
        "session_id": st.text(max_size=256),
        "priority": st.integers(-100, 100),
        "service_class": st.sampled_from(("chat", "code", "batch")),
        "metadata": st.dictionaries(st.text(), st.text(), max_size=2),
    }


def conversations(some: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts = st.fixed_dictionaries({"type": st.sampled_from(("text", "image_url", ""))}, optional={"text": st.text(), "image_url": some})
    message = st.fixed_dictionaries(
        {"role": ROLES, "content": st.one_of(st.text(), st.none(), st.lists(parts, max_size=3))},
        optional={"name": st.text(max_size=5), "tool_calls": some, "refusal": some, "tool_call_id": st.text(max_size=5)},
    )
    return st.lists(message, max_size=4)


class BodyShapes:
    """The strategies for a service of these models. likely: a request that is nearly right: known fields, most with values of their
    kind, one with anything."""

    def __init__(self, models: Sequence[str]) -> None:
        self._any = anything(models)
        self._models, self._messages, self._likely = st.sampled_from(models), conversations(self._any), likely_fields(self._any)
        self.likely: st.SearchStrategy[Asked] = self._bodies().map(lambda made: (made[0], json.dumps(made[1]).encode()))

    def all(self) -> Mapping[str, st.SearchStrategy[Asked]]:
        return {"right": self.right(), "nearly right": self.likely, "any JSON": self.any_json(), "bytes changed": self.damaged()}

    def right(self) -> st.SearchStrategy[Asked]:
        """Whatever the text, streamed or not: most of these are answered."""
        said = st.fixed_dictionaries({"role": st.sampled_from(("system", "user", "assistant")), "content": st.text(max_size=30)})
        prompt = st.one_of(st.text(min_size=1, max_size=60), st.lists(st.integers(0, 400), min_size=1, max_size=20))
        streamed = st.one_of(st.just({}), st.just({"stream": True}), st.just({"stream": True, "stream_options": {"include_usage": True}}))
        fields = right_fields()

        @st.composite
        def bodies(draw: st.DrawFn) -> Asked:
            path = draw(st.sampled_from(PATHS))
            text = {"messages": draw(st.lists(said, min_size=1, max_size=3))} if "chat" in path else {"prompt": draw(prompt)}
            body = {"model": draw(self._models)} | text | draw(streamed)
            for name in draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=6)):
                body[name] = draw(fields[name])
            return path, json.dumps(body).encode()

        return bodies()

    def any_json(self) -> st.SearchStrategy[Asked]:
        def sent(path: str, body: Any, is_ascii: bool) -> Asked:
            return path, json.dumps(body, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")

        return st.builds(sent, st.sampled_from(PATHS), self._any, st.booleans())

    def damaged(self) -> st.SearchStrategy[Asked]:
        """A nearly right body with a stretch of it replaced by anything: most are no JSON any more."""

        @st.composite
        def changed(draw: st.DrawFn) -> Asked:
            path, data = draw(self.likely)
            start = draw(st.integers(0, len(data)))
            end = draw(st.integers(start, min(len(data), start + 8)))
            return path, data[:start] + draw(st.binary(max_size=8)) + data[end:]

        return changed()

    def _bodies(self) -> st.SearchStrategy[tuple[str, Any]]:
        @st.composite
        def bodies(draw: st.DrawFn) -> tuple[str, Any]:
            path = draw(st.sampled_from(PATHS))
            body: dict[str, Any] = {"model": draw(self._models)}
            body |= {"messages": draw(self._messages)} if path.startswith("/v1/chat") else {"prompt": draw(PROMPTS)}
            for name in draw(st.lists(st.sampled_from(sorted(self._likely)), unique=True, max_size=6)):
                body[name] = draw(self._likely[name])
            for name in draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=1)):
                body[name] = draw(self._any)
            return path, body

        return bodies()


def described(description: Mapping[str, Any]) -> Mapping[str, st.SearchStrategy[Asked]]:
    """By path, what schemathesis makes of an OpenAPI document's request bodies, right and wrong; {} where it is not installed."""
    try:
        import schemathesis
        from schemathesis.generation import GenerationMode
    except ImportError:
        return {}
    schema = schemathesis.openapi.from_dict(dict(description))
    found: dict[str, st.SearchStrategy[Asked]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in PATHS:
            modes = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]
            found[operation.path] = st.one_of(*modes).map(lambda case: (case.path, _sent(case.body)))
    return found


def _sent(body: Any) -> bytes:
    """What is no JSON value (schemathesis leaves bodies out, too) is sent as nothing."""
    try:
        return body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    except TypeError:
        return b""

"""The bodies of the OpenAI API as typed values: decoded, and refused with the field at fault, in one pass and before anything else.

Bodies for models whose text we make ourselves know every field: one that would change the answer and is not carried out is refused, not
dropped. Bodies for foreign servers keep what is unknown here; those servers judge it.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from runtime.gateway.errors import ApiError, invalid

Field = Raw | UnsetType
"""A field whose value is looked at only as bytes: nothing is built of it."""

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
COUNT_LIMIT = 2**31 - 1
Count = Annotated[int, Meta(ge=1, le=COUNT_LIMIT)]
Priority = Annotated[int, Meta(ge=-100, le=100)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """continuous_usage_stats (vLLM's): usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Part(Struct, forbid_unknown_fields=True):
    """What is not text is known by name, so that it is refused as what it is."""

    type: str
    text: str | None = None
    refusal: Field = UNSET
    image_url: Field = UNSET
    input_audio: Field = UNSET
    audio_url: Field = UNSET
    video_url: Field = UNSET
    file: Field = UNSET


class Message(Struct, forbid_unknown_fields=True):
    """refusal, annotations, audio, reasoning_content: what an earlier answer carried beside its text; no part of a prompt."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Field = UNSET
    function_call: Field = UNSET
    refusal: Field = UNSET
    annotations: Field = UNSET
    audio: Field = UNSET
    reasoning_content: Field = UNSET


class Settings(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request may say. None: left to the default."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=COUNT_LIMIT)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=COUNT_LIMIT)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Count | None = None
    best_of: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    priority: Priority | None = None
    service_class: str | None = None
    service_tier: str | None = None
    # without effect on the answer
    metadata: Field = UNSET
    store: Field = UNSET
    prompt_cache_retention: Field = UNSET
    request_id: Field = UNSET
    # would change the answer: refused unless empty
    logit_bias: Field = UNSET
    response_format: Field = UNSET
    guided_json: Field = UNSET
    guided_regex: Field = UNSET
    guided_choice: Field = UNSET
    guided_grammar: Field = UNSET
    structured_outputs: Field = UNSET


class ChatBody(Settings, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=COUNT_LIMIT)] | None = None
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None
    parallel_tool_calls: Field = UNSET
    tools: Field = UNSET
    tool_choice: Field = UNSET
    functions: Field = UNSET
    function_call: Field = UNSET
    modalities: Field = UNSET
    audio: Field = UNSET
    prediction: Field = UNSET
    web_search_options: Field = UNSET
    reasoning_effort: Field = UNSET
    verbosity: Field = UNSET


class CompletionBody(Settings, forbid_unknown_fields=True, kw_only=True):
    """prompt: a text, token ids, or a list of either; what is mixed is refused later, since one type cannot say it."""

    prompt: str | list[str | int | list[int]]
    max_completion_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=COUNT_LIMIT)] | None = None
    echo: bool | None = None
    suffix: Field = UNSET


class ForeignMessage(Struct):
    """A message that another server judges."""

    content: Any = None


class ForeignChatBody(ChatBody, forbid_unknown_fields=False, kw_only=True):
    messages: Annotated[list[ForeignMessage], Meta(min_length=1)]  # type: ignore[assignment]
    chat_template_kwargs: Field = UNSET  # type: ignore[assignment]


class ForeignCompletionBody(CompletionBody, forbid_unknown_fields=False, kw_only=True):
    pass


class ModelName(Struct):
    """Of a body that was refused: who would have judged it."""

    model: str | None = None


EMPTY = (b"null", b"[]", b"{}", b'""', b"false")
NEUTRAL: dict[str, tuple[bytes, ...]] = {
    "logit_bias": EMPTY,
    "guided_json": EMPTY,
    "guided_regex": EMPTY,
    "guided_choice": EMPTY,
    "guided_grammar": EMPTY,
    "structured_outputs": EMPTY,
    "response_format": (*EMPTY, b'{"type":"text"}'),
    "tools": EMPTY,
    "tool_choice": (*EMPTY, b'"none"', b'"auto"'),
    "functions": EMPTY,
    "function_call": (*EMPTY, b'"none"', b'"auto"'),
    "modalities": (*EMPTY, b'["text"]'),
    "audio": EMPTY,
    "prediction": EMPTY,
    "web_search_options": EMPTY,
    "reasoning_effort": (*EMPTY, b'"none"'),
    "verbosity": EMPTY,
    "suffix": EMPTY,
}
"""Fields that are not carried out, and the values under which that makes no difference."""

Body = TypeVar("Body", bound=Struct)
WHERE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
UNKNOWN_FIELD = "Object contains unknown field `"
SHOWN_CHARS_MAX = 64
"""Of a caller's own words in an error."""

_DECODERS: dict[type[Struct], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatBody, CompletionBody, ForeignChatBody, ForeignCompletionBody, ModelName)
}
_ANYTHING = msgspec.json.Decoder()
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
TEXTS = ("messages", "prompt")
BUILT_BYTES_MAX = 4096


def decode(data: bytes, kind: type[Body]) -> Body:
    """The body as `kind`. Raises: ApiError 400 that names the field."""
    try:
        body: Body = _DECODERS[kind].decode(data)
    except msgspec.ValidationError as error:
        raise _of_field(str(error), kind) from error
    except RecursionError as error:
        raise invalid("The body of your request is nested too deeply.") from error
    except (ValueError, OverflowError) as error:  # msgspec's own errors and those of text that is no UTF-8 are ValueErrors
        raise invalid(f"We could not parse the JSON body of your request: {error}. The API expects a JSON object in UTF-8.") from error
    return body


def named_model(data: bytes) -> str | None:
    """The model that a refused body asks for, where it says so."""
    try:
        return decode(data, ModelName).model
    except ApiError:
        return None


def as_mapping(data: bytes, is_foreign: bool) -> dict[str, Any]:
    """A body that decoded already, as it came: what it says besides, for whoever is sent it, and the text too where that is foreign.

    A long field stays bytes (`Raw`): 4 MiB of brackets would become 100 MiB of lists. Raises: ApiError 400 for what only looked well while
    skipped.
    """
    try:
        body: dict[str, Any] = {}
        for name, value in _FIELDS.decode(data).items():
            if name in TEXTS:
                if is_foreign:
                    body[name] = _ANYTHING.decode(value)
            else:
                body[name] = _ANYTHING.decode(value) if memoryview(value).nbytes <= BUILT_BYTES_MAX else value.copy()
    except (ValueError, OverflowError, RecursionError) as error:
        raise invalid(f"We could not parse the JSON body of your request: {error or 'nested too deeply'}.") from error
    return body


def refuse_unsupported(body: Settings) -> None:
    """Raises: ApiError 400 for a field that would change the answer and is not carried out here."""
    for name in body.__struct_fields__:
        allowed = NEUTRAL.get(name)
        if allowed is None:
            continue
        value = getattr(body, name)
        if value is not UNSET and b"".join(bytes(value)[:256].split()) not in allowed:
            raise ApiError(400, f"'{name}' is not supported by this model.", param=name, code="unsupported", reason="unsupported")


def _of_unknown(said: str, kind: type[Struct]) -> ApiError:
    """said: FIELD` or FIELD` - at `$.PATH`, where FIELD is the caller's word and as long as they like: no pattern is run over it."""
    field, at, path = said.rpartition("` - at `$")
    name, path = (field, path) if at else (said.removesuffix("`"), "")
    name = name[:SHOWN_CHARS_MAX]
    place = path.removesuffix("`").lstrip(".")[:SHOWN_CHARS_MAX]
    near = [] if place else difflib.get_close_matches(name, kind.__struct_fields__, 1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return invalid(f"Unrecognized request argument supplied: {name}.{hint}", f"{place}.{name}" if place else name)


def _of_field(said: str, kind: type[Struct]) -> ApiError:
    if said.startswith(UNKNOWN_FIELD):
        return _of_unknown(said[len(UNKNOWN_FIELD) :], kind)
    where = WHERE.search(said[-400:])
    name = where[1] if where else None
    missing = re.match(r"^Object missing required field `(\w+)`", said)
    if missing:
        name = f"{name}.{missing[1]}" if name else missing[1]
        return invalid(f"Missing required parameter: '{name}'.", name)
    if name:
        return invalid(f"Invalid value for '{name}': {said.rpartition(' - at ')[0] or said}.", name)
    return invalid(f"The body of your request is not what the API expects: {said}.")

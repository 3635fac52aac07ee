"""From a decoded body to calls: defaults, limits against the model's context, one call per answer asked for."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from envs.domain.requests import CLASS_INDEX, LABEL_ALIASES, SERVICE_CLASSES, class_of_label
from runtime.calls import Call
from runtime.gateway import openai_schemas as schemas
from runtime.gateway.asked_prompts import (
    Prompt,
    foreign_chat,
    foreign_prompt,
    own_prompts,
    prompts_in,
    template_message,
    template_variables,
)
from runtime.gateway.errors import ApiError, invalid, model_not_found
from runtime.gateway.interface import ServedModel
from runtime.gateway.prompt_text import ModelText, PromptTexts
from runtime.gateway.request_headers import RequestHeaders
from runtime.gateway.settings import GatewaySettings
from runtime.torch_tp.requests import SEED_LIMIT, SamplingSettings

COMPLETION_TOKENS_DEFAULT = 16
"""The API's own default of /v1/completions."""
MEANT_HERE = frozenset(("priority", "service_class", "service_tier", "session_id"))
"""Fields that mean something to this service alone, or something else elsewhere."""
OURS_TO_DO = MEANT_HERE | {"n", "best_of", "stream", "stream_options", "echo", "prompt"}
"""Fields that the gateway carries out, and those above: not part of what a foreign backend is sent."""
SERVICE_TIERS = ("auto", "default", "flex", "priority", "scale")


class Received(msgspec.Struct, frozen=True):
    """A request as it came. own_id: ours, which no other has. arrival_s: on the monotonic clock."""

    data: bytes
    headers: RequestHeaders
    own_id: str
    arrival_s: float


class Asked(msgspec.Struct, frozen=True):
    """A request that was understood. calls: prompts in order, the n answers of each in a row: a call's place is its choice's index."""

    kind: str
    request_id: str
    answer_id: str
    created_s: int
    model: str
    text: ModelText | None
    prompts: Sequence[Prompt]
    answers_per_prompt: int
    calls: Sequence[Call]
    is_stream: bool
    includes_usage: bool
    has_running_usage: bool

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.answers_per_prompt]


class RequestIds:
    """Ids that no other process and no other request has."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count()

    def next(self) -> str:
        return f"{self._prefix}{next(self._numbers):08x}"


class CallMaker:
    """Understands requests for the models that are served."""

    def __init__(self, settings: GatewaySettings, models: Callable[[], Mapping[str, ServedModel]], texts: PromptTexts) -> None:
        self.settings, self._models, self._texts = settings, models, texts

    async def chat(self, received: Received) -> Asked:
        """Raises: ApiError for whatever the caller must change."""
        body, model = self._decoded(received.data, schemas.ChatBody, schemas.ForeignChatBody)
        if len(body.messages) > self.settings.messages_max:
            raise invalid(f"'messages' has {len(body.messages)} entries; at most {self.settings.messages_max} are taken.", "messages")
        wanted = self._logprobs(body.top_logprobs or 0, "top_logprobs", model) if body.logprobs else None
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        raw = schemas.as_mapping(received.data, model.is_foreign)
        text = None
        if model.is_foreign:
            prompt = foreign_chat(raw["messages"])
        else:
            text = await self._texts.of(model)
            messages = [template_message(message, place) for place, message in enumerate(body.messages)]
            ids = await self._texts.run(text.ids_of_chat, messages, template_variables(body.chat_template_kwargs))
            prompt = Prompt(ids, len(ids))
        return self._asked("chat", body, model, text, [prompt], wanted, raw, received)

    async def completion(self, received: Received) -> Asked:
        """Raises: ApiError for whatever the caller must change."""
        body, model = self._decoded(received.data, schemas.CompletionBody, schemas.ForeignCompletionBody)
        sources = prompts_in(body.prompt)
        if len(sources) * (body.n or 1) > self.settings.choices_max:
            raise invalid(f"{len(sources)} prompts × n={body.n or 1} is more than {self.settings.choices_max} answers.", "prompt")
        wanted = None if body.logprobs is None else self._logprobs(body.logprobs, "logprobs", model)
        if body.echo and wanted is not None:
            raise ApiError(
                400, "'echo' together with 'logprobs' is not supported: logprobs of a prompt are not computed.", param="echo",
                code="unsupported", reason="unsupported",
            )  # fmt: skip
        raw = schemas.as_mapping(received.data, model.is_foreign)
        if model.is_foreign:
            text = None
            prompts = [foreign_prompt(source, bool(body.echo)) for source in sources]
        else:
            text = await self._texts.of(model)
            prompts = await self._texts.run(own_prompts, text, sources, bool(body.echo))
        return self._asked("completion", body, model, text, prompts, wanted, raw, received)

    def _decoded(self, data: bytes, own: type[Any], foreign: type[Any]) -> tuple[Any, ServedModel]:
        """The body by the rules of whoever makes its model's text."""
        models = self._models()
        try:
            body = schemas.decode(data, own)
        except ApiError:
            name = schemas.named_model(data)
            if name and name not in models:
                raise model_not_found(name[:256]) from None
            model = models.get(name or "")
            if model is None or not model.is_foreign:
                raise
            return schemas.decode(data, foreign), model
        model = models.get(body.model)
        if model is None:
            raise model_not_found(body.model)
        if not model.is_foreign:
            schemas.refuse_unsupported(body)
        return body, model

    def _logprobs(self, wanted: int, param: str, model: ServedModel) -> int:
        if wanted > self.settings.logprobs_max:
            raise invalid(f"'{param}' must be at most {self.settings.logprobs_max}, got {wanted}.", param)
        if model.is_foreign:
            raise ApiError(
                400, "Logprobs are not passed on for this model: another server makes its text.", param="logprobs", code="unsupported",
                reason="unsupported",
            )  # fmt: skip
        return wanted

    def _asked(
        self,
        kind: str,
        body: Any,
        model: ServedModel,
        text: ModelText | None,
        prompts: Sequence[Prompt],
        logprobs: int | None,
        raw: dict[str, Any],
        received: Received,
    ) -> Asked:
        n = self._answers_per_prompt(body, len(prompts))
        options = body.stream_options
        if options is not None and not body.stream:
            raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        request_id = received.headers.request_id or received.own_id
        common = self._common(body, received) | {"model": model.model_id, "kind": kind, "logprobs": logprobs}
        common["stop_ids"] = _stop_ids(body.stop_token_ids, text)
        samplings = [_sampling(body, answer) for answer in range(n)]
        passed_on = {name: value for name, value in raw.items() if name not in OURS_TO_DO}
        calls: list[Call] = []
        for prompt in prompts:
            max_tokens = self._max_tokens(kind, prompt.tokens, body, model)
            sent = passed_on if kind == "chat" else passed_on | {"prompt": prompt.as_sent}
            for sampling in samplings:
                calls.append(
                    Call(
                        call_id=f"{request_id}-{received.own_id}.{len(calls)}",
                        prompt_ids=prompt.ids,
                        prompt_tokens=prompt.tokens,
                        max_tokens=max_tokens,
                        sampling=sampling,
                        body=sent,
                        **common,
                    )
                )
        return Asked(
            kind=kind,
            request_id=request_id,
            answer_id=("chatcmpl-" if kind == "chat" else "cmpl-") + received.own_id,
            created_s=int(time.time()),
            model=model.model_id,
            text=text,
            prompts=prompts,
            answers_per_prompt=n,
            calls=calls,
            is_stream=bool(body.stream),
            includes_usage=options is not None and bool(options.include_usage),
            has_running_usage=options is not None and bool(options.continuous_usage_stats),
        )

    def _common(self, body: schemas.Settings, received: Received) -> dict[str, Any]:
        """Fields that all calls of a request share, whatever their prompts."""
        headers = received.headers
        class_index = _class_index(body, headers)
        timeout_s = min(headers.timeout_s or self.settings.request_timeout_s, self.settings.request_timeout_s)
        return {
            "stop_strings": self._stops(body.stop),
            "class_index": class_index,
            "priority": _priority(body, headers, class_index),
            "session": self._name(body.session_id or body.prompt_cache_key or headers.text(b"x-session-id"), "session_id"),
            "user": self._name(body.user or body.safety_identifier or headers.text(b"x-user-id"), "user"),
            "deadline_s": received.arrival_s + timeout_s,
            "ignore_eos": bool(body.ignore_eos),
            "min_tokens": body.min_tokens or 0,
        }

    def _answers_per_prompt(self, body: schemas.Settings, prompts: int) -> int:
        n = body.n or 1
        if prompts * n > self.settings.choices_max:
            raise invalid(f"'n' must be at most {self.settings.choices_max // prompts}, got {n}.", "n")
        if body.best_of is not None and body.best_of != n:
            raise ApiError(
                400, f"'best_of' other than 'n' is not supported, got best_of={body.best_of} and n={n}.", param="best_of",
                code="unsupported", reason="unsupported",
            )  # fmt: skip
        return n

    def _max_tokens(self, kind: str, prompt_tokens: int, body: Any, model: ServedModel) -> int:
        """How long an answer may be. Raises: ApiError 400 naming the limit where prompt and answer together cannot be held (K10)."""
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        wanted = limit or (COMPLETION_TOKENS_DEFAULT if kind == "completion" else self.settings.output_tokens_default)
        if model.tokens_max is not None:
            # a foreign prompt's tokens are a guess, and refuse nothing
            room = model.tokens_max if model.is_foreign else model.tokens_max - prompt_tokens
            if limit is None or model.is_foreign:
                wanted = max(1, min(wanted, room))
            if wanted > room:
                raise _too_long(kind, model.tokens_max, prompt_tokens, wanted)
        if (body.min_tokens or 0) > wanted:
            raise invalid(f"'min_tokens' ({body.min_tokens}) is more than the answer may have ({wanted}).", "min_tokens")
        return wanted

    def _stops(self, stop: str | list[str] | None) -> tuple[str, ...]:
        stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        if len(stops) > self.settings.stop_strings_max:
            raise invalid(f"'stop' has {len(stops)} strings; at most {self.settings.stop_strings_max} are taken.", "stop")
        for text in stops:
            if not 0 < len(text) <= self.settings.stop_chars_max:
                raise invalid(f"A stop string must have 1 to {self.settings.stop_chars_max} characters, got {len(text)}.", "stop")
        return stops

    def _name(self, value: str | None, param: str) -> str | None:
        if value is not None and len(value) > self.settings.name_chars_max:
            raise invalid(f"'{param}' must have at most {self.settings.name_chars_max} characters, got {len(value)}.", param)
        return value or None


def _too_long(kind: str, tokens_max: int, prompt_tokens: int, wanted: int) -> ApiError:
    where = "messages" if kind == "chat" else "prompt"
    return ApiError(
        400,
        f"This model's maximum context length is {tokens_max} tokens. However, you requested {prompt_tokens + wanted} tokens "
        f"({prompt_tokens} in the {where}, {wanted} in the completion). Please reduce the length of the {where} or completion.",
        param=where,
        code="context_length_exceeded",
        reason="too_long",
    )


def _stop_ids(ids: list[int] | None, text: ModelText | None) -> tuple[int, ...]:
    if ids and (min(ids) < 0 or max(ids) >= (text.vocabulary if text else 2**31)):
        raise invalid("'stop_token_ids' has ids beyond the vocabulary.", "stop_token_ids")
    return tuple(ids or ())


def _sampling(body: schemas.Settings, answer: int) -> SamplingSettings:
    """answer: its place among the n of one prompt; each has draws of its own. The API's default temperature is 1."""
    return SamplingSettings(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=max(1.0 if body.top_p is None else body.top_p, 1e-9),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=None if body.seed is None else (body.seed + answer) % SEED_LIMIT,
    )


def _class_index(body: schemas.Settings, headers: RequestHeaders) -> int:
    """By field, then header, then service tier; else the first class. Raises: ApiError 400 for a name that is none."""
    label = body.service_class or headers.text(b"x-service-class")
    if body.service_tier is not None and body.service_tier not in SERVICE_TIERS:
        raise invalid(f"'service_tier' must be one of {', '.join(SERVICE_TIERS)}.", "service_tier")
    if not label:
        return CLASS_INDEX["batch"] if body.service_tier == "flex" else 0
    index = class_of_label(label[:64])
    if index is None:
        known = ", ".join((*CLASS_INDEX, *LABEL_ALIASES))
        raise invalid(f"Service class '{label[:64]}' is unknown; known: {known}.", "service_class")
    return index


def _priority(body: schemas.Settings, headers: RequestHeaders, class_index: int) -> int:
    """By field, then header; else the class's own, one more for the tier `priority`."""
    from_header = headers.priority
    if body.priority is not None:
        return body.priority
    if from_header is not None:
        return from_header
    return SERVICE_CLASSES[class_index].priority + (body.service_tier == "priority")

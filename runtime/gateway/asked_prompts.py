"""The prompts of a request: texts, token ids or messages, as the model's tokenizer takes them or as a foreign server is sent them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from runtime.gateway import openai_schemas as schemas
from runtime.gateway.errors import ApiError, invalid
from runtime.gateway.prompt_text import ModelText

FOREIGN_CHARS_PER_TOKEN = 4
"""A guess for models whose tokenizer is not ours; it only weighs a call, it refuses none."""
TEMPLATE_VARIABLES_RESERVED = frozenset(
    ("messages", "add_generation_prompt", "self", "bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now")
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids (empty where the tokenizer is not ours), tokens (exact or estimated), how a foreign server is sent it, and
    its text where the answer shall begin with it."""

    ids: tuple[int, ...]
    tokens: int
    as_sent: Any = None
    echoed: str = ""


def prompts_in(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    """The prompts of a completion request: one, or a list of them. Raises: ApiError 400 when there is none, or a mixture."""
    if isinstance(prompt, str):
        return (prompt,)
    kinds = set(map(type, prompt))
    if len(kinds) != 1:
        raise invalid("'prompt' must be a text, token ids, or a list of texts or of lists of token ids.", "prompt")
    return (prompt,) if kinds == {int} else prompt


def own_prompts(text: ModelText, sources: Sequence[str | list[int]], is_echoed: bool) -> list[Prompt]:
    """Runs in a tokenizer's thread. Raises: ApiError 400 for an empty prompt or an id beyond the vocabulary."""
    prompts = []
    for source in sources:
        if isinstance(source, str):
            ids, echoed = text.ids_of_text(source), source if is_echoed else ""
        else:
            ids = tuple(source)
            if ids and not (min(ids) >= 0 and max(ids) < text.vocabulary):
                raise invalid(f"Token ids of 'prompt' must be within 0 to {text.vocabulary - 1}.", "prompt")
            fits = text.tokens_max is None or len(ids) <= text.tokens_max
            echoed = text.text_of(ids) if is_echoed and fits else ""
        if not ids:
            raise invalid("'prompt' has no tokens.", "prompt")
        prompts.append(Prompt(ids, len(ids), source, echoed))
    return prompts


def foreign_prompt(source: str | list[int], is_echoed: bool) -> Prompt:
    if isinstance(source, str):
        return Prompt((), len(source) // FOREIGN_CHARS_PER_TOKEN + 1, source, source if is_echoed else "")
    if is_echoed:
        raise ApiError(
            400, "'echo' of token ids is not supported for this model: its tokenizer is elsewhere.", param="echo", code="unsupported",
            reason="unsupported",
        )  # fmt: skip
    return Prompt((), len(source), source)


def template_message(message: schemas.Message, place: int) -> dict[str, Any]:
    """A message as chat templates expect it. Raises: ApiError 400 for content that is no text."""
    where = f"messages[{place}]"
    for name in ("tool_calls", "function_call"):
        value = getattr(message, name)
        if value is not UNSET and bytes(value) not in schemas.EMPTY:
            raise ApiError(
                400, f"'{name}' is not supported by this model.", param=f"{where}.{name}", code="unsupported", reason="unsupported"
            )
    content = message.content
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type != "text":
                raise ApiError(
                    400, f"Only parts of type 'text' are understood by this model, got '{part.type[:64]}'.",
                    param=f"{where}.content[{number}].type", code="unsupported", reason="unsupported",
                )  # fmt: skip
            if part.text is None:
                raise invalid("A part of type 'text' needs 'text'.", f"{where}.content[{number}].text")
        content = "\n".join(part.text or "" for part in content)
    # `developer` is the API's newer word for what templates know as `system`
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    variables = dict(given or {})
    for name in variables:
        if name in TEMPLATE_VARIABLES_RESERVED or not name.isidentifier() or len(variables) > 32:
            raise invalid(f"'{name[:64]}' cannot be set for a chat template.", "chat_template_kwargs")
    return variables


def _chars_in(messages: Sequence[Any]) -> int:
    """Characters of text in messages that another server judges."""
    chars = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            chars += len(content)
        elif isinstance(content, list):
            chars += sum(len(part["text"]) for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return chars


def foreign_chat(messages: Sequence[Any]) -> Prompt:
    """What is sent are the messages themselves."""
    return Prompt((), _chars_in(messages) // FOREIGN_CHARS_PER_TOKEN + 1)

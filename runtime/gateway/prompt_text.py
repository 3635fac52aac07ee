"""Prompts to token ids and tokens to text, in threads of its own: a tokenizer lets go of the interpreter and never holds the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from runtime.gateway.errors import ApiError, invalid
from runtime.gateway.interface import ServedModel

T = TypeVar("T")


class TextCodec(Protocol):
    """What is used of runtime.torch_tp.tokenizer.Tokenizer."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def token_chars_max(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str: ...


class ModelText:
    """One model's text. All but `token` may take long and belongs into a thread."""

    def __init__(self, codec: TextCodec, tokens_max: int | None) -> None:
        self._codec = codec
        # A text longer than this has too many tokens whatever they are: it is refused unread.
        self._chars_max = None if tokens_max is None else tokens_max * codec.token_chars_max
        self.tokens_max = tokens_max
        self.vocabulary = codec.vocabulary
        self._tokens: dict[int, tuple[str, bytes]] = {}  # at most the vocabulary

    def ids_of_text(self, text: str) -> tuple[int, ...]:
        """Raises: ApiError 400 for a text that cannot fit."""
        self._refuse_too_long(len(text), "prompt")
        return tuple(self._codec.encode(text))

    def ids_of_chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> tuple[int, ...]:
        """Raises: ApiError 400 for a conversation that cannot fit, or that the model's template refuses."""
        from runtime.torch_tp.chat_template import ChatTemplateError  # loaded by the codec's; a gateway before foreign servers has none

        self._refuse_too_long(sum(len(message.get("content") or "") for message in messages), "messages")
        try:
            text = self._codec.chat_text(messages, **variables)
        except ChatTemplateError as error:
            raise invalid(str(error), "messages") from error
        self._refuse_too_long(len(text), "messages")
        return tuple(self._codec.encode(text, add_special_tokens=False))

    def text_of(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids)

    def token(self, token_id: int) -> tuple[str, bytes]:
        """(text, bytes) of one token, as logprobs show it; kept, so that each costs once."""
        known = self._tokens.get(token_id)
        if known is None:
            data = self._codec.token_bytes(token_id)
            known = self._tokens[token_id] = (data.decode("utf-8", "replace"), data)
        return known

    def _refuse_too_long(self, chars: int, param: str) -> None:
        if self._chars_max is not None and chars > self._chars_max:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.tokens_max} tokens; your {param} of {chars} characters cannot fit.",
                param=param,
                code="context_length_exceeded",
                reason="too_long",
            )


class PromptTexts:
    """The texts of all models, each tokenizer loaded once."""

    def __init__(self, load: Callable[[str], TextCodec], threads: int) -> None:
        self._load = load
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
        self._texts: dict[tuple[str, int | None], asyncio.Future[ModelText]] = {}

    async def of(self, model: ServedModel) -> ModelText:
        """The text of a model that is ours. Raises: CheckpointError where its tokenizer cannot be read."""
        assert model.model_path is not None
        key = (model.model_path, model.tokens_max)
        known = self._texts.get(key)
        if known is None:
            loop = asyncio.get_running_loop()
            known = self._texts[key] = asyncio.ensure_future(loop.run_in_executor(self._pool, self._read, *key))
            known.add_done_callback(lambda done: self._texts.pop(key) if done.cancelled() or done.exception() else None)
        # shielded: one caller that leaves does not take the tokenizer from the others
        return known.result() if known.done() else await asyncio.shield(known)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work(*arguments)`, done in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, path: str, tokens_max: int | None) -> ModelText:
        return ModelText(self._load(path), tokens_max)

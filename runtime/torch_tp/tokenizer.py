"""Text to token ids and back, as the checkpoint's `tokenizer.json` says; text comes back piece by piece for streaming."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from runtime.torch_tp.chat_template import ChatTemplate, ChatTemplateError
from runtime.torch_tp.config import CheckpointError, read_json
from runtime.torch_tp.model_folder import model_folder

INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""
CONTEXT_TOKENS_MAX = 64

PRINTABLE_BYTES = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTE_OF_SIGN: dict[str, int] = {chr(byte): byte for byte in PRINTABLE_BYTES} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE_BYTES)
}
"""How byte-level vocabularies write a byte: printable Latin-1 as itself, the others from U+0100 on (GPT-2, `bytes_to_unicode`)."""
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A checkpoint's tokenizer with its special tokens and chat template."""

    def __init__(self, fast: FastTokenizer, settings: Mapping[str, Any]) -> None:
        self._fast = fast
        self.special_tokens: dict[str, str] = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = settings.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                self.special_tokens[name] = text
        template = settings.get("chat_template")
        if isinstance(template, list):  # several by name; the one for plain chat is called "default"
            template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        self._template = ChatTemplate(template, self.special_tokens) if isinstance(template, str) else None

    @property
    def vocabulary(self) -> int:
        """Token ids are below this; the model's own vocabulary may be padded beyond it."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Id of one whole token, e.g. "<|im_end|>"."""
        return self._fast.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` puts a start token in front where the checkpoint wants one.

        As a batch of one: only the batch calls let go of the interpreter, and a long prompt takes seconds.
        """
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these tokens; bytes that are no UTF-8 come out as U+FFFD. Ids beyond the vocabulary are nothing."""
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def token_chars_max(self) -> int:
        """Characters of the longest token: a text of more than this × n characters has more than n tokens."""
        return max((len(piece) for piece in self._fast.get_vocab(with_added_tokens=True)), default=1)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; they need not be whole characters."""
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added_ids:
            return piece.encode()
        if self._is_byte_level:
            return bytes(BYTE_OF_SIGN[sign] for sign in piece) if all(sign in BYTE_OF_SIGN for sign in piece) else piece.encode()
        fallback = BYTE_PIECE.fullmatch(piece)
        return bytes([int(fallback[1], 16)]) if fallback else piece.replace("▁", " ").encode()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._fast.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self._fast.decoder)

    def stream_decoder(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt that the checkpoint's template makes of a conversation. Raises ChatTemplateError where it cannot."""
        if self._template is None:
            raise ChatTemplateError("this checkpoint has no chat template; send a plain prompt")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of `chat_text`; the template writes special tokens itself, so none are added."""
        return self.encode(self.chat_text(messages, add_generation_prompt=add_generation_prompt, **variables), add_special_tokens=False)


class StreamDecoder:
    """Text of a growing token sequence, in pieces that never end inside a character.

    The pieces and `finish` together are what `Tokenizer.decode` makes of all tokens. Decoding looks at the tokens since the last
    certain point and a little before it, since a decoder may treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._given = 0
        """Characters of the decoded `_ids` that were handed out (or belong to the context)."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often all of it, sometimes none."""
        self._ids.append(token_id)
        text = self._text()
        certain = text.rstrip(INCOMPLETE)
        piece = certain[self._given :]
        self._given = max(self._given, len(certain))
        if len(self._ids) > CONTEXT_TOKENS_MAX and len(certain) == len(text):
            self._forget()
        return piece

    def finish(self) -> str:
        """The rest, with U+FFFD for bytes that never became a character."""
        piece = self._text()[self._given :]
        self._ids, self._given = [], 0
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def _forget(self) -> None:
        """Keep the last half as context, if it starts at the start of a character."""
        kept = self._ids[-CONTEXT_TOKENS_MAX // 2 :]
        text = self._tokenizer.decode(kept, skip_special_tokens=self._skip)
        if INCOMPLETE not in text:
            self._ids, self._given = kept, len(text)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, a `.gguf` file or a known name. Raises CheckpointError in one line."""
    folder = model_folder(path)
    file = folder / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(f"{folder}: no tokenizer.json; save the tokenizer with transformers' fast tokenizer to make one")
    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exception
        raise CheckpointError(f"{file}: not a readable tokenizer ({' '.join(str(error).split())})") from error
    fast.no_padding()
    fast.no_truncation()
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    if (folder / "special_tokens_map.json").exists():
        settings = read_json(folder / "special_tokens_map.json") | settings
    template = folder / "chat_template.jinja"
    if template.exists():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    return Tokenizer(fast, settings)

"""Tokens and text of an emulated group: no model made them, and they say so. The same call gets the same answer everywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from envs.decision.length_estimator import LengthEstimator
from runtime.calls import Call

NOTICE = "(emulated)"
WORDS = ("lorem", "ipsum", "dolor", "sit", "amet", "tempor", "magna", "aliqua", "veniam", "quis", "nostrud", "labore", "ullamco", "laboris")
VOCABULARY = len(WORDS) + 1  # token 0 is the notice


class SyntheticText(Sequence[int]):
    """The answer's tokens; a function of prompt and seed alone, so that another group goes on with the same ones."""

    def __init__(self, call: Call, lengths: LengthEstimator) -> None:
        asked = repr(call.prompt_ids) if call.prompt_ids else json.dumps(call.body, sort_keys=True, default=str)
        self._key = hashlib.blake2b(f"{asked}|{call.sampling.seed}".encode(), digest_size=16).digest()
        uniform = int.from_bytes(self._key[:6], "big") / 2**48
        drawn = int(lengths.sample_remaining(call.class_index, 0, uniform))
        self.tokens = call.max_tokens if call.ignore_eos else min(call.max_tokens, max(drawn, call.min_tokens, 1))
        self.finish_reason = "length" if self.tokens == call.max_tokens else "stop"

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if index == 0:
            return 0
        digest = hashlib.blake2b(index.to_bytes(8, "big"), key=self._key, digest_size=4).digest()
        return 1 + int.from_bytes(digest, "big") % len(WORDS)


class SyntheticDecoder:
    """Tokens to text, a word each; `TokenText` of `runtime.torch_tp.stop_strings`."""

    def __init__(self) -> None:
        self._is_first = True

    def push(self, token: int) -> str:
        word = WORDS[token - 1] if token else NOTICE
        lead, self._is_first = ("" if self._is_first else " "), False
        return lead + word

    def finish(self) -> str:
        return ""

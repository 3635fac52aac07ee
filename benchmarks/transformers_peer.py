"""Hugging Face transformers in a process of its own, so that its threads and its memory are not the engine's.

The child (`python -m benchmarks.transformers_peer DIRECTORY`) answers lines of JSON with lines of JSON. Greedy, float32, no end token.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Generated:
    """tokens: per prompt. ttft_s: call to first token; decode_s: first to last token."""

    tokens: tuple[tuple[int, ...], ...]
    ttft_s: float
    decode_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        return sum(len(ids) - 1 for ids in self.tokens) / self.decode_s


class TransformersPeer:
    """The parent's end. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transformers_peer", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> TransformersPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, threads: int) -> Generated:
        """Prompts of one length. Raises: RuntimeError when the child has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"prompts": [list(ids) for ids in prompts], "tokens": tokens, "threads": threads}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"transformers' process ended with exit code {self._process.wait()}; its error is above")
        answer = json.loads(line)
        return Generated(tuple(tuple(ids) for ids in answer["tokens"]), answer["ttft_s"], answer["decode_s"])


class _Stamps:
    """A streamer that only notes when tokens come; the first call brings the prompt."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def put(self, value: Any) -> None:
        self.at_s.append(time.perf_counter())

    def end(self) -> None:
        return None


def serve(folder: str) -> None:
    """The child's loop, until its input ends."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for line in sys.stdin:
        asked = json.loads(line)
        torch.set_num_threads(asked["threads"])
        ids, stamps = torch.tensor(asked["prompts"]), _Stamps()
        begin_s = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=asked["tokens"],
            do_sample=False,
            pad_token_id=0,
            streamer=stamps,
        )
        first_s, last_s = stamps.at_s[1], stamps.at_s[-1]
        answer = {"tokens": out[:, ids.shape[1] :].tolist(), "ttft_s": first_s - begin_s, "decode_s": last_s - first_s}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])

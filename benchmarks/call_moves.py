"""How long a running call stands still when it goes on in another group: its KV copied while it runs on, or computed again there.

`python -m benchmarks.call_moves` starts two groups of two ranks with unlike splits, lets a greedy call run in the one and go on in the
other, by turns with its KV and without, and compares every text with that of the same call undisturbed. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from benchmarks.conditions import MachineLoad
from benchmarks.drill import SMALL
from runtime.backends.group_messages import HostSettings
from runtime.backends.interface import Begun
from runtime.backends.torch_tp import TorchTpBackend
from runtime.calls import Call, Piece
from runtime.scheduling.call_migration import FEW_TOKENS, PARTS_MAX
from runtime.torch_tp.config import read_config
from runtime.torch_tp.model_folder import model_folder
from runtime.torch_tp.requests import SamplingSettings

SPEEDS = ((2.0, 1.0), (1.0, 1.0))
ANSWER_TOKENS = {True: 1000, False: 96}  # of a small model: one that makes a token in a fraction of a millisecond
MOVED_AFTER = 16


def with_context(folder: Path, tokens: int, into: Path) -> Path:
    """The model, taking so many tokens: rotary embedding knows no end, and here only time matters."""
    if read_config(folder).context_tokens >= tokens:
        return folder
    shutil.copytree(folder, into, dirs_exist_ok=True)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))
    return into


class Round:
    """One call over the two groups; times in s."""

    def __init__(self, backends: tuple[TorchTpBackend, TorchTpBackend], prompt: tuple[int, ...], answer: int, name: str) -> None:
        self._source, self._target = backends
        self.call = Call(
            name, "m", "completion", prompt, len(prompt), answer, SamplingSettings(), (), None, 0, 0, None, None,
            time.monotonic() + 600.0, ignore_eos=True,
        )  # fmt: skip
        self.tokens: list[int] = []
        self.gaps_s: list[float] = []
        self.copy_s = self.pause_s = self.copied = 0.0
        self._last_s = 0.0

    def _note(self, piece: Piece) -> None:
        assert piece.token is not None
        now_s = time.monotonic()
        if self._last_s:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        self.tokens.append(piece.token)

    async def run(self, moves: bool, copies: bool) -> None:
        copying: asyncio.Task[None] | None = None
        async with aclosing(self._source.submit(self.call)) as pieces:
            async for piece in pieces:
                self._note(piece)
                if piece.finish_reason is not None and moves:
                    raise RuntimeError("the call ended before its KV was there; let it make more tokens (--answer)")
                if piece.finish_reason is not None:
                    return
                if moves and len(self.tokens) >= MOVED_AFTER:
                    copying = copying or asyncio.create_task(self._copy() if copies else asyncio.sleep(0.0))
                    if copying.done():
                        copying.result()
                        break
        left_s = self._last_s
        await self._rest(self._target.submit(self.call, Begun(tuple(self.tokens), "", len(self.tokens))), left_s)

    async def _rest(self, pieces: AsyncIterator[Piece], left_s: float) -> None:
        async for piece in pieces:
            if not self.pause_s:
                self.pause_s, self._last_s = time.monotonic() - left_s, 0.0
            self._note(piece)

    async def _copy(self) -> None:
        began_s, copied = time.monotonic(), 0
        for _ in range(PARTS_MAX):
            part = await self._source.give_kv(self.call.call_id, copied)
            await self._target.take_kv(part)
            copied = part.tokens
            if len(self.call.prompt_ids) + len(self.tokens) - copied <= FEW_TOKENS:
                break
        self.copy_s, self.copied = time.monotonic() - began_s, copied


async def measure(folder: Path, context: int, answer: int, rounds: int, seed: int) -> dict[str, object]:
    rng, vocabulary = random.Random(seed), read_config(folder).vocabulary
    made = [
        TorchTpBackend(f"g{g}", g, HostSettings(str(folder), tuple({"speed": speed} for speed in speeds), 4096, 8, 32))
        for g, speeds in enumerate(SPEEDS)
    ]
    backends = made[0], made[1]
    found: dict[bool, list[Round]] = {True: [], False: []}
    try:
        await asyncio.gather(*(backend.start() for backend in backends))
        for number in range(-1, rounds):  # the first one is nobody's
            for copies in (True, False):
                prompt = tuple(rng.randrange(3, vocabulary) for _ in range(context - MOVED_AFTER))
                moved, whole = (Round(backends, prompt, answer, f"{name}-{number}-{copies}") for name in ("moved", "whole"))
                await moved.run(moves=True, copies=copies)
                await whole.run(moves=False, copies=False)
                if moved.tokens != whole.tokens:
                    raise RuntimeError(f"round {number}, copies={copies}: another text than the undisturbed call's")
                if number >= 0:
                    found[copies].append(moved)
    finally:
        await asyncio.gather(*(backend.close() for backend in backends))
    every = found[True] + found[False]
    return {
        "context_tokens": context,
        "rounds": rounds,
        "pause_copied_s": _three(round_.pause_s for round_ in found[True]),
        "pause_computed_again_s": _three(round_.pause_s for round_ in found[False]),
        "copy_beside_s": _three(round_.copy_s for round_ in found[True]),
        "copied_tokens": _three(round_.copied for round_ in found[True]),
        "gap_s": round(statistics.fmean(gap for round_ in every for gap in round_.gaps_s), 5),
    }


def _three(values) -> list[float]:
    """Median, least, most."""
    found = sorted(values)
    return [round(value, 4) for value in (statistics.median(found), found[0], found[-1])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.call_moves", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="small", help="small (the shared checkpoint), smollm2, or a path (default %(default)s)")
    parser.add_argument("--context", type=int, default=400, help="tokens that the call has when it is moved (default %(default)s)")
    parser.add_argument("--answer", type=int, help="tokens that it makes in all (default 96, small: 1000)")
    parser.add_argument("--rounds", type=int, default=7, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default %(default)s)")
    options = parser.parse_args()
    folder, load = SMALL if options.model == "small" else model_folder(options.model), MachineLoad()
    answer = options.answer or ANSWER_TOKENS[options.model == "small"]
    with tempfile.TemporaryDirectory() as into, load.watched():
        chosen = with_context(folder, options.context + answer, Path(into) / folder.name)
        figures = asyncio.run(measure(chosen, options.context, answer, options.rounds, options.seed))
    print(json.dumps({"model": options.model, **figures, "machine_busy": round(load.median, 2)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

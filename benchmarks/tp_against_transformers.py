"""Decoding and prefill of the engine on two ranks against transformers' `generate`, the same weights and prompts, turn about."""

from __future__ import annotations

import statistics
from collections import defaultdict

from benchmarks.conditions import MachineLoad, spread
from benchmarks.prompts import TextPieces
from benchmarks.reporting import Bar, at_least
from benchmarks.tp_recorder import RecordedEngine, decode_tokens_per_s
from benchmarks.tp_settings import BenchSettings
from benchmarks.transformers_peer import TransformersPeer
from runtime.torch_tp.model_folder import model_folder
from runtime.torch_tp.supervisor import RankSettings

THREADS = (1, 2)
DECODE = {1: (48, 1.3), 8: (40, 1.6)}
"""Batch → (tokens of an answer, wanted ratio)."""

PROMPT_TOKENS = 32
PREFILL_TOKENS, PREFILL_WANTED = 512, 1.3


def measure(settings: BenchSettings) -> list[Bar]:
    """Three bars: decoding at batch 1 and 8, and the first token of a prompt of 512 tokens."""
    folder = model_folder(settings.model)
    prompts = TextPieces(folder)
    theirs: dict[tuple[int, int], list[float]] = defaultdict(list)  # (batch, threads); batch 0 is the prefill, in seconds
    ours: dict[int, list[float]] = defaultdict(list)
    whole: list[float] = []  # seconds of transformers' answers at the largest batch, prompts included, by ours
    alike = asked = 0
    load = MachineLoad()
    with TransformersPeer(folder) as peer, RecordedEngine.begin(settings.model, [RankSettings(), RankSettings()]) as engine:
        _warm_up(peer, engine, prompts)
        for number in range(settings.rounds):
            with load.watched():
                for batch, (tokens, _) in DECODE.items():
                    pieces = prompts.take(batch, PROMPT_TOKENS)
                    count = settings.scaled(tokens, 24)
                    for threads in THREADS:
                        generated = peer.generate(pieces, count, threads)
                        theirs[batch, threads].append(generated.decode_tokens_per_s)
                    answers, records = engine.answer_all(pieces, count)
                    ours[batch].append(decode_tokens_per_s(records, batch))
                    whole_s = records[-1].result.ended_s - records[0].result.began_s
                    asked += batch
                    alike += sum(answer.tokens == ids for answer, ids in zip(answers, generated.tokens, strict=True))
                whole.append((generated.ttft_s + generated.decode_s) / whole_s)
                for piece in prompts.take(3, PREFILL_TOKENS):
                    for threads in THREADS:
                        theirs[0, threads].append(peer.generate([piece], 1, threads).ttft_s)
                    ours[0].append(engine.answer_all([piece], 1)[0][0].report.ttft_s)
            print(f"round {number + 1}: " + _round_text(ours, theirs), flush=True)
    print(f"{alike} of {asked} greedy answers are the same token for token; machine CPU {load.median:.0%}; whole answers at batch {batch}, "
          f"prompts included, took transformers (2 threads) {spread(whole)} times our time")  # fmt: skip
    return _bars(ours, theirs, settings.rounds)


def _warm_up(peer: TransformersPeer, engine: RecordedEngine, prompts: TextPieces) -> None:
    for threads in THREADS:
        peer.generate(prompts.take(8, PROMPT_TOKENS), 4, threads)
    for batch in DECODE:
        engine.answer_all(prompts.take(batch, PROMPT_TOKENS), 12)
    for _ in range(2):
        engine.answer_all(prompts.take(1, PREFILL_TOKENS), 1)


def _round_text(ours: dict[int, list[float]], theirs: dict[tuple[int, int], list[float]]) -> str:
    decode = ", ".join(
        f"batch {batch} {ours[batch][-1]:.1f} against {'/'.join(f'{theirs[batch, threads][-1]:.1f}' for threads in THREADS)} tokens/s"
        for batch in DECODE
    )
    return f"{decode}, prefill {ours[0][-1]:.3f} against {'/'.join(f'{theirs[0, threads][-1]:.3f}' for threads in THREADS)} s"


def _bars(ours: dict[int, list[float]], theirs: dict[tuple[int, int], list[float]], rounds: int) -> list[Bar]:
    bars = []
    for batch, (_, wanted) in DECODE.items():
        best = max((theirs[batch, threads] for threads in THREADS), key=statistics.median)
        print(f"decode batch {batch}: {spread(ours[batch], 1)} tokens/s against {spread(best, 1)}")
        ratio = statistics.median(ours[batch]) / statistics.median(best)
        bars.append(at_least(f"decode tokens/s against transformers, 2 ranks, batch {batch}", ratio, wanted, rounds))
    fastest = min((theirs[0, threads] for threads in THREADS), key=statistics.median)
    print(f"prefill of {PREFILL_TOKENS}: {spread(ours[0], 3)} s against {spread(fastest, 3)}")
    ratio = statistics.median(fastest) / statistics.median(ours[0])
    return [*bars, at_least("prefill of 512 tokens against transformers, 2 ranks", ratio, PREFILL_WANTED, len(ours[0]))]

"""How long tokens stand still when a rank is killed or frozen, without what it takes to compute the lost KV again."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable

from benchmarks.conditions import spread
from benchmarks.prompts import prompts_of
from benchmarks.reporting import Bar, at_most
from benchmarks.tp_recorder import RecordedEngine, StepRecord, requests_for
from benchmarks.tp_settings import BenchSettings
from runtime.torch_tp.supervisor import RankSettings

RANKS = 3
BATCH, PROMPT_TOKENS, ANSWER_TOKENS = 4, 16, 200
STRIKES = (("kill", signal.SIGKILL, 0.150), ("freeze", signal.SIGSTOP, 0.600))
BACK_DEADLINE_S = 120.0


def measure(settings: BenchSettings) -> list[Bar]:
    """Two bars, seconds from the signal to the next token: of a killed and of a frozen rank, turn about."""
    gaps_s: dict[str, list[float]] = {name: [] for name, _, _ in STRIKES}
    with RecordedEngine.begin(settings.model, [RankSettings() for _ in range(RANKS)]) as engine:
        engine.answer_all(prompts_of(BATCH, PROMPT_TOKENS, engine.config.vocabulary), 8)
        for number in range(settings.rounds):
            for index, (name, what, _) in enumerate(STRIKES):
                gaps_s[name].append(_strike(engine, (number + index) % RANKS, what))
            print(f"round {number + 1}: " + ", ".join(f"{name} {1e3 * gaps[-1]:.0f} ms" for name, gaps in gaps_s.items()), flush=True)
    bars = []
    for name, _, wanted_s in STRIKES:
        print(f"{name} to next token: {spread(gaps_s[name], 3)} s")
        median_s = statistics.median(gaps_s[name])
        bars.append(at_most(f"{name} of a rank to next token, s, without re-prefill", median_s, wanted_s, settings.rounds))
    return bars


def _strike(engine: RecordedEngine, worker: int, what: signal.Signals) -> float:
    """Hurt a rank while requests decode; returns when the rank is back in the group."""
    recorder = engine.recorder
    epoch, begun = recorder.epoch, len(recorder.records)
    prompts = prompts_of(BATCH, PROMPT_TOKENS, engine.config.vocabulary)
    streams = [engine.submit(request) for request in requests_for(prompts, ANSWER_TOKENS)]
    for stream in streams:
        for _ in zip(range(12), stream, strict=False):
            pass
    struck_s = time.monotonic()
    engine.signal_rank(worker, what)
    _until(lambda: recorder.changes[-1].epoch > epoch, "the group to be rebuilt")
    rebuilt_s = next(change.rebuilt_s for change in recorder.changes if change.epoch > epoch)

    def since() -> list[StepRecord]:
        return [record for record in recorder.records[begun:] if record.result.began_s >= rebuilt_s]

    _until(lambda: any(record.is_decode for record in since()), "a decode step after it")
    after = since()
    for stream in streams:
        stream.cancel()
    _until(lambda: len(recorder.members) == RANKS and not engine.load().running, "the rank to be back")
    return _gap_s(after, struck_s)


def _gap_s(after: list[StepRecord], struck_s: float) -> float:
    """Signal to the next token, had the survivors still had all KV: up to the first token after the rebuilding, less the passes that
    computed KV again, plus one decode pass."""
    first_token = next(index for index, record in enumerate(after) if record.tokens)
    recomputing_s = sum(record.wall_s for record in after[: first_token + 1] if not record.is_decode)
    decode_s = next(record.pass_s for record in after if record.is_decode)
    return after[first_token].result.ended_s - struck_s - recomputing_s + decode_s


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + BACK_DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {BACK_DEADLINE_S:g} s for {what}")
        time.sleep(0.002)

"""What an uneven split gains over an even one on unlike ranks, and what changing the split costs while requests run.

The unlike ranks are EMULATED: every rank is slowed down, the slower ones more, so that both cores stay half idle and sleeps end in time
(`runtime.torch_tp.emulation`); rounds in which the machine was busier than that allows are void.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.conditions import MachineLoad, spread
from benchmarks.prompts import prompts_of
from benchmarks.reporting import Bar, at_least, at_most
from benchmarks.tp_recorder import RecordedEngine, StepRecord, decode_tokens_per_s, requests_for
from benchmarks.tp_settings import BenchSettings
from envs.domain.snapshot import FloatArray
from runtime.torch_tp.answer_stream import AnswerStream
from runtime.torch_tp.profiler import OPERATIONS, Cuts, balanced_cuts, width_shares
from runtime.torch_tp.supervisor import RankSettings

BASE_FACTOR = 2.0
"""How much slower than this host's core the fastest rank is made."""

PAIRS = (((1.0, 0.5), 0.90, 32), ((1.0, 0.25), 0.80, 24))
"""(speeds, wanted share of the ideal speed-up, tokens of an answer)."""

BATCH, PROMPT_TOKENS = 4, 16
ENDLESS_TOKENS = 800
EVEN, CALIBRATION = (1.0, 1.0), (3.0, 1.0)
CORRECTIONS = 5
"""Plans by measured speeds, one after the other, until the uneven split stands: a rank's speed is that at its width, since a layer has
costs that no cut divides. What `corrects_split` does while it serves."""


# --- the calibrated model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepModel:
    """Time of a decode pass by the widths of the ranks: sum over operations of the slowest rank's time, plus what no cut changes.

    base_s, width_s: per operation, of a device of this host's speed: busy time at width 0, and of the whole width. rest_s:
    communication and host. factors: of the ranks.
    """

    base_s: FloatArray
    width_s: FloatArray
    rest_s: float
    factors: FloatArray

    @classmethod
    def fit(cls, runs: Sequence[tuple[FloatArray, FloatArray, float]], factors: Sequence[float]) -> StepModel:
        """runs: of each plan (shares, busy seconds per pass: both (ranks, operations); seconds per pass)."""
        slowness = np.asarray(factors, dtype=np.float64)
        base_s, width_s = np.zeros(len(OPERATIONS)), np.zeros(len(OPERATIONS))
        for operation in range(len(OPERATIONS)):
            shares = np.concatenate([run[0][:, operation] for run in runs])
            busy_s = np.concatenate([run[1][:, operation] / slowness for run in runs])
            (base, width), *_ = np.linalg.lstsq(np.stack([np.ones_like(shares), shares], axis=1), busy_s, rcond=None)
            base_s[operation], width_s[operation] = max(base, 0.0), width
        rest_s = float(np.mean([pass_s - busy_s.max(axis=0).sum() for _, busy_s, pass_s in runs]))
        return cls(base_s, width_s, rest_s, slowness)

    def pass_s(self, shares: FloatArray) -> float:
        """shares: (ranks, operations). A rank of no width in an operation has nothing to do there."""
        busy_s = self.factors[:, None] * (self.base_s + self.width_s * shares)
        return float(np.where(shares > 0, busy_s, 0.0).max(axis=0).sum()) + self.rest_s

    def exact_shares(self) -> FloatArray:
        """Widths, in any fraction, at which all ranks with work end at once: the best for each operation."""
        shares = np.zeros((len(self.factors), len(OPERATIONS)))
        for operation in range(len(OPERATIONS)):
            base, width = self.base_s[operation], self.width_s[operation]
            low, high = 0.0, float(self.factors.max() * (base + width))
            for _ in range(60):  # the time by which the ranks together can do the whole width
                middle = (low + high) / 2
                done = np.maximum(middle / self.factors - base, 0.0) / width
                low, high = (low, middle) if done.sum() >= 1.0 else (middle, high)
            shares[:, operation] = np.maximum(high / self.factors - base, 0.0) / width
        return shares

    def ideal_gain(self, even: FloatArray) -> float:
        return self.pass_s(even) / self.pass_s(self.exact_shares())


def run_of(records: Sequence[StepRecord]) -> tuple[FloatArray, FloatArray, float]:
    """What `StepModel.fit` wants to know of a plan, from the decode steps under it."""
    decoding = [record for record in records if record.is_decode and len(record.command.slices) == BATCH]
    busy_s = np.median([record.busy_s / record.result.passes for record in decoding], axis=0)
    return width_shares(decoding[0].plan), busy_s, statistics.median(record.pass_s for record in decoding)


# --- even against uneven ----------------------------------------------------------------------------------------------------


def measure(settings: BenchSettings) -> list[Bar]:
    """Share of the ideal speed-up, for each pair of speeds."""
    return [_measure_pair(settings, speeds, wanted, tokens) for speeds, wanted, tokens in PAIRS]


def _measure_pair(settings: BenchSettings, speeds: tuple[float, ...], wanted: float, tokens: int) -> Bar:
    factors = [BASE_FACTOR * max(speeds) / speed for speed in speeds]
    ranks = [RankSettings(speed=speed, slow_factor=factor) for speed, factor in zip(speeds, factors, strict=True)]
    rates: dict[str, list[float]] = defaultdict(list)
    records: dict[str, list[StepRecord]] = defaultdict(list)
    load = MachineLoad()
    tokens = settings.scaled(tokens, 24)  # shorter ones end before the batch is full
    name = " : ".join(f"{speed:g}" for speed in speeds)
    with RecordedEngine.begin(settings.model, ranks) as engine:
        prompts = prompts_of(BATCH, PROMPT_TOKENS, engine.config.vocabulary)
        engine.answer_all(prompts, 4)
        engine.recorder.held_cuts = _corrected(engine, prompts, tokens)
        for number in range(settings.rounds):
            for kind, shares in (("calibration", CALIBRATION), ("even", EVEN), ("uneven", None)):
                engine.set_plan(shares)
                with load.watched():
                    _, steps = engine.answer_all(prompts, tokens)
                rates[kind].append(decode_tokens_per_s(steps, BATCH))
                records[kind] += steps
            gain = rates["uneven"][-1] / rates["even"][-1]
            print(f"round {number + 1}, speeds {name}: even {rates['even'][-1]:.1f}, uneven {rates['uneven'][-1]:.1f} tokens/s, "
                  f"{gain:.2f} times, machine CPU {load.fractions[-1]:.0%}", flush=True)  # fmt: skip
        even = run_of(records["even"])
        model = StepModel.fit([even, run_of(records["calibration"])], factors)
        uneven_shares = width_shares(records["uneven"][-1].plan)
    gain = statistics.median(b / a for a, b in zip(rates["even"], rates["uneven"], strict=True))
    ideal = model.ideal_gain(even[0])
    whole = sum(speeds) / (2 * min(speeds))
    is_void = load.is_void_for_emulation
    print(
        f"EMULATED speeds {name} (factors {_listed(factors)}): even {spread(rates['even'], 1)}, uneven {spread(rates['uneven'], 1)} "
        f"tokens/s, {gain:.2f} times; ideal {ideal:.2f} in the calibrated model, {whole:.2f} if a step were nothing but work that can be "
        f"divided ({gain / whole:.0%} of that); first rank's shares {_listed(uneven_shares[0])}, exact {_listed(model.exact_shares()[0])}; "
        f"machine CPU {load.median:.0%}{': VOID, too busy for an emulation' if is_void else ''}",
        flush=True,
    )
    bar = at_least(f"uneven / even split, emulated speeds {name}, share of the ideal gain", gain / ideal, wanted, settings.rounds)
    return Bar(f"{bar.name}: VOID", bar.value, bar.wanted, False, bar.n) if is_void else bar


def _corrected(engine: RecordedEngine, prompts: Sequence[Sequence[int]], tokens: int) -> Cuts:
    """The uneven split that the engine arrives at from the even one."""
    engine.set_plan(EVEN)
    for _ in range(CORRECTIONS):
        engine.answer_all(prompts, tokens)
        engine.set_plan(None)
    return balanced_cuts(width_shares(engine.supervisor.plan))


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers)


# --- changing the split -----------------------------------------------------------------------------------------------------


SLIDES = ((7.0, 2.0), (2.0, 7.0))
"""Far apart, so that KV heads change hands; the second one first has to move the requests that began two plans ago."""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """One change of plan. pause_s: of all its switches, at the controller; slowest_pass_s: of the decode passes beside it."""

    took_s: float
    pause_s: float
    slowest_pass_s: float
    kv_bytes: int
    weight_bytes: int

    def __str__(self) -> str:
        times = (self.took_s, self.pause_s, self.slowest_pass_s)
        took, pause, slowest = (f"{1e3 * seconds:.1f} ms" for seconds in times)
        return f"change in {took}, paused {pause}, slowest pass beside it {slowest}, KV moved {self.kv_bytes / 1e6:.2f} MB"


def measure_slides(settings: BenchSettings) -> list[Bar]:
    """Two bars: the pause of a change of plan that moves KV in decode passes, and the weight bytes that all changes moved."""
    changes: list[PlanChange] = []
    pauses: list[float] = []
    with RecordedEngine.begin(settings.model, [RankSettings(), RankSettings()]) as engine:
        prompts = prompts_of(BATCH, PROMPT_TOKENS, engine.config.vocabulary)
        engine.answer_all(prompts, 4)
        for number in range(settings.rounds):
            begun = len(engine.recorder.records)
            streams = [engine.submit(request) for request in requests_for(prompts, ENDLESS_TOKENS)]
            _read(streams, settings.scaled(32, 16))
            calm = [record.pass_s for record in engine.recorder.records[begun:] if record.is_decode]
            found = [_change(engine, shares) for shares in SLIDES]
            _read(streams, 4)
            for stream in streams:
                stream.cancel()
            changes += found
            pauses.append(found[-1].pause_s / statistics.median(calm))
            print(f"round {number + 1}: decode pass {1e3 * statistics.median(calm):.1f} ms; {'; '.join(map(str, found))}", flush=True)
    weight_bytes = sum(change.weight_bytes for change in changes)
    print(f"pause of a change that moves KV: {spread(pauses)} decode passes; weight bytes moved {weight_bytes}")
    return [
        at_most("pause of a re-split, in decode steps", statistics.median(pauses), 1.0, len(pauses)),
        at_most("weight bytes moved by a re-split", float(weight_bytes), 0.0, len(changes)),
    ]


def _change(engine: RecordedEngine, shares: Sequence[float]) -> PlanChange:
    recorder = engine.recorder
    switches, prepared, records = len(recorder.switches), len(recorder.prepared), len(recorder.records)
    began_s = time.monotonic()
    engine.set_plan(shares)
    took_s = time.monotonic() - began_s
    beside = [record.pass_s for record in recorder.records[records:] if record.is_decode]
    return PlanChange(
        took_s,
        sum(wall_s for _, wall_s in recorder.switches[switches:]),
        max(beside, default=0.0),
        sum(item.kv_bytes for item in recorder.prepared[prepared:]) + sum(item.kv_bytes for item, _ in recorder.switches[switches:]),
        sum(item.weight_bytes for item in recorder.prepared[prepared:]),
    )


def _read(streams: Sequence[AnswerStream], tokens: int) -> None:
    for stream in streams:
        for _ in zip(range(tokens), stream, strict=False):
            pass

"""What an uneven split gains over an even one on unlike ranks, and what changing the split costs while requests run.

The unlike ranks are EMULATED: every rank is slowed down, the slower ones more, so that both cores stay half idle and sleeps end in time
(`runtime.torch_tp.emulation`); rounds in which the machine was busier than that allows are void.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.conditions import MachineLoad, spread
from benchmarks.prompts import prompts_of
from benchmarks.reporting import Bar, at_least, at_most
from benchmarks.tp_recorder import RecordedEngine, StepRecord, decode_tokens_per_s, requests_for
from benchmarks.tp_settings import BenchSettings
from envs.domain.snapshot import FloatArray
from runtime.torch_tp.profiler import OPERATIONS, width_shares
from runtime.torch_tp.supervisor import RankSettings

BASE_FACTOR = 2.0
"""How much slower than this host's core the fastest rank is made."""

PAIRS = (((1.0, 0.5), 0.90, 24), ((1.0, 0.25), 0.80, 16))
"""(speeds, wanted share of the ideal speed-up, tokens of an answer)."""

BATCH, PROMPT_TOKENS = 4, 16
EVEN, CALIBRATION = (1.0, 1.0), (3.0, 1.0)


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
        """shares: (ranks, operations)."""
        return float((self.factors[:, None] * (self.base_s + self.width_s * shares)).max(axis=0).sum()) + self.rest_s

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
    decoding = [record for record in records if record.is_decode]
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
    tokens = settings.scaled(tokens, 6)
    name = " : ".join(f"{speed:g}" for speed in speeds)
    with RecordedEngine.begin(settings.model, ranks) as engine:
        prompts = prompts_of(BATCH, PROMPT_TOKENS, engine.config.vocabulary)
        engine.answer_all(prompts, 4)
        for number in range(settings.rounds):
            for kind, shares in (("calibration", CALIBRATION), ("even", EVEN), ("uneven", None)):
                engine.set_plan(shares)
                with load.watched():
                    _, steps = engine.answer_all(prompts, tokens)
                rates[kind].append(decode_tokens_per_s(steps))
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
    print(
        f"EMULATED speeds {name} (factors {', '.join(f'{f:g}' for f in factors)}): even {spread(rates['even'], 1)}, uneven "
        f"{spread(rates['uneven'], 1)} tokens/s, {gain:.2f} times; ideal {ideal:.2f} in the calibrated model, {whole:.2f} if a step were "
        f"nothing but work that can be divided ({gain / whole:.0%} of that); first rank's shares "
        f"{', '.join(f'{share:.3f}' for share in uneven_shares[0])}, exact {', '.join(f'{share:.3f}' for share in model.exact_shares()[0])}; "
        f"machine CPU {load.median:.0%}" + (": VOID, too busy for an emulation" if load.is_void_for_emulation else "")
    )
    bar = at_least(f"uneven against even split, speeds {name}, share of the ideal speed-up (emulated)", gain / ideal, wanted, settings.rounds)
    return bar if not load.is_void_for_emulation else Bar(f"{bar.name}: VOID", bar.value, bar.wanted, False, bar.n)


# --- changing the split -----------------------------------------------------------------------------------------------------


SLIDES = ((2.0, 1.0), (1.0, 2.0))


def measure_slides(settings: BenchSettings) -> list[Bar]:
    """Two bars: the pause of a change of plan in decode passes, and the weight bytes that it moved."""
    pauses: list[float] = []
    with RecordedEngine.begin(settings.model, [RankSettings(), RankSettings()]) as engine:
        prompts = prompts_of(BATCH, PROMPT_TOKENS, engine.config.vocabulary)
        engine.answer_all(prompts, 4)
        recorder = engine.recorder
        for number in range(settings.rounds):
            # requests outlive the change, so from the second on the KV of running ones moves as well
            switches, prepared, records = len(recorder.switches), len(recorder.prepared), len(recorder.records)
            streams = [engine.submit(request) for request in requests_for(prompts, settings.scaled(400, 200))]
            for stream in streams:
                for _ in zip(range(8), stream, strict=False):
                    pass
            for shares in SLIDES:
                engine.set_plan(shares)
            for stream in streams:
                stream.cancel()
            pass_s = statistics.median(record.pass_s for record in recorder.records[records:] if record.is_decode)
            walls_s = [wall_s for _, wall_s in recorder.switches[switches:]]
            pauses += [wall_s / pass_s for wall_s in walls_s]
            moved = sum(item.kv_bytes for item in recorder.prepared[prepared:])
            print(f"round {number + 1}: {len(SLIDES)} changes of plan, switches {', '.join(f'{1e3 * wall_s:.1f}' for wall_s in walls_s)} ms, "
                  f"decode pass {1e3 * pass_s:.1f} ms, KV copied ahead {moved / 1e6:.2f} MB", flush=True)  # fmt: skip
        weight_bytes = sum(item.weight_bytes for item in recorder.prepared)
        changes = len(pauses)
    print(f"pause of a switch {spread(pauses)} decode passes over {changes} switches; weight bytes moved {weight_bytes}")
    return [
        at_most("pause of a re-split, in decode steps", statistics.median(pauses), 1.0, changes),
        at_most("weight bytes moved by a re-split", float(weight_bytes), 0.0, changes),
    ]

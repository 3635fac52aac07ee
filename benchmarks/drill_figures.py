"""What a drill found: answers lost or wrong, how soon faults were noticed and tokens came again, and what was felt in other groups."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.drill_clients import Answer
from benchmarks.drill_faults import KINDS, FaultKind
from benchmarks.reporting import Bar, at_most

ELSEWHERE_TIMES = 1.2


@dataclass(slots=True)
class Strike:
    """One fault, or a moment of calm (kind None) in which nothing was done. Times on the monotonic clock, None where it never came."""

    kind: FaultKind | None
    group: str
    struck_s: float
    noticed_s: float | None = None
    whole_s: float | None = None


@dataclass(slots=True)
class Found:
    """All of a run. served_by: by request, the group that ended it and how many attempts it took."""

    answers: Sequence[Answer]
    strikes: Sequence[Strike]
    served_by: Mapping[str, tuple[str, int]]

    def verdicts(self) -> Counter[str]:
        return Counter(answer.verdict for answer in self.answers)

    def noticed_s(self, kind: str) -> list[float]:
        """Strike to notice, of each that was noticed."""
        return [s.noticed_s - s.struck_s for s in self._of(kind) if s.noticed_s is not None]

    def missed(self, kind: str) -> int:
        return sum(s.noticed_s is None for s in self._of(kind))

    def back_s(self, kind: str) -> list[float]:
        """Strike until no rank was missing any more."""
        return [s.whole_s - s.struck_s for s in self._of(kind) if s.whole_s is not None]

    def next_token_s(self, kind: str) -> list[float]:
        """Notice to next token: of a group's first stream that goes on, for faults within it; of each stream, where it was lost whole."""
        found = []
        for strike in self._of(kind):
            if strike.noticed_s is not None and (ends := self._goes_on_s(strike)):
                waits = [max(0.0, end - strike.noticed_s) for end in ends]
                found += waits if KINDS[kind].takes_group else [min(waits)]
        return found

    def stood_still_s(self, kind: str) -> list[float]:
        """Strike to next token of the stream that waited longest."""
        return [max(ends) - strike.struck_s for strike in self._of(kind) if (ends := self._goes_on_s(strike))]

    def elsewhere_s(self, is_calm: bool) -> list[float]:
        """How long each request took that was under way in another group when a fault struck (or in calm: when nothing did)."""
        hurt = [strike for strike in self.strikes if strike.kind is not None]
        found = {}
        for strike in self.strikes:
            if (strike.kind is None) is is_calm:
                for answer in self._under_way(strike.struck_s):
                    group, attempts = self._served(answer)
                    is_hurt = any(_overlap(answer, other) for other in hurt if other.group == group)
                    if attempts == 1 and group != strike.group and not is_hurt:
                        found[answer.name] = answer.took_s
        return list(found.values())

    def _of(self, kind: str) -> list[Strike]:
        return [strike for strike in self.strikes if strike.kind is not None and strike.kind.name == kind]

    def _under_way(self, at_s: float) -> list[Answer]:
        return [answer for answer in self.answers if answer.is_under_way(at_s) and answer.verdict != "lost"]

    def _served(self, answer: Answer) -> tuple[str, int]:
        return self.served_by.get(answer.name, ("", 0))

    def _goes_on_s(self, strike: Strike) -> list[float]:
        """When each stream that the fault hit went on."""
        assert strike.kind is not None
        noticed_s = strike.struck_s if strike.noticed_s is None else strike.noticed_s
        ends = []
        for answer in self._under_way(strike.struck_s):
            group, attempts = self._served(answer)
            is_hit = attempts > 1 if strike.kind.takes_group else attempts == 1 and group == strike.group
            if answer.is_stream and is_hit and (gap := answer.standstill(strike.struck_s, noticed_s)) is not None:
                ends.append(gap[1])
        return ends


def _overlap(answer: Answer, strike: Strike) -> bool:
    """Whether a request was under way while its own group was hurt."""
    return answer.ended_s >= strike.struck_s and (strike.whole_s is None or answer.began_s <= strike.whole_s)


def p99(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.99)) if values else 0.0


def table(found: Found) -> str:
    """Seconds: median and worst of each kind of fault."""
    heads = [f"{head:>17s}" for head in ("noticed after", "next token after", "stood still", "whole after")]
    lines = [f"{'fault':13s} struck unseen {' '.join(heads)}"]
    for kind in KINDS:
        struck = sum(s.kind is not None and s.kind.name == kind for s in found.strikes)
        missed = "-" if KINDS[kind].rule is None else str(found.missed(kind))
        columns = [found.noticed_s(kind), found.next_token_s(kind), found.stood_still_s(kind), found.back_s(kind)]
        cells = [f"{statistics.median(values):.3f} / {max(values):.3f}" if values else "-" for values in columns]
        lines.append(f"{kind:13s} {struck:6d} {missed:>6s} {' '.join(f'{cell:>17s}' for cell in cells)}")
    return "\n".join(lines)


def bars(found: Found, left: Sequence[str]) -> list[Bar]:
    verdicts, count = found.verdicts(), len(found.answers)
    away = sum(strike.kind is not None and strike.whole_s is None for strike in found.strikes)
    made = [
        at_most("requests lost", verdicts["lost"], 0, count),
        at_most("answers with tokens doubled or missing", verdicts["tokens"], 0, count),
        at_most("answers changed beyond ties", verdicts["changed"], 0, count),
        at_most("groups that did not come back", away, 0, len(found.strikes)),
        at_most("processes, segments or ports left at the end", len(left), 0, 1),
    ]
    for name, kind in KINDS.items():
        noticed, after = found.noticed_s(name), found.next_token_s(name)
        if kind.rule is None or not noticed:
            continue
        made.append(at_most(f"{name}: faults not noticed", found.missed(name), 0, len(noticed) + found.missed(name)))
        made.append(at_most(f"{name}: noticed after s, worst", max(noticed), kind.rule.noticed_limit_s, len(noticed)))
        if after:
            value, how = (p99(after), "p99") if kind.takes_group else (statistics.median(after), "median")
            made.append(at_most(f"{name}: next token after notice s, {how}", value, kind.rule.next_token_s, len(after)))
    calm, hurt = found.elsewhere_s(True), found.elsewhere_s(False)
    if calm and hurt:
        count = min(len(calm), len(hurt))
        made.append(at_most("requests elsewhere: p99 of their time / in calm", p99(hurt) / p99(calm), ELSEWHERE_TIMES, count))
    return made

"""The last line of every benchmark: one JSON object with its bars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure that an issue asks for: `ok` tells whether `value` reaches `wanted`; n repetitions."""

    name: str
    value: float
    wanted: float
    ok: bool
    n: int


def at_least(name: str, value: float, wanted: float, n: int) -> Bar:
    return Bar(name, round(value, 3), wanted, value >= wanted, n)


def at_most(name: str, value: float, wanted: float, n: int) -> Bar:
    return Bar(name, round(value, 3), wanted, value <= wanted, n)


def print_bars(bars: Sequence[Bar], **more: object) -> None:
    """Print the JSON line."""
    print(json.dumps({"bars": [asdict(bar) for bar in bars], **more}))

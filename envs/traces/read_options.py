"""The choices a caller may make when a trace is read. Nothing here is guessed from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from envs.domain.suggestions import unknown_name
from envs.traces.arrivals import ArrivalProcess
from envs.traces.trace_row import TraceError

TIME_UNITS_S: dict[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Choices for one reading.

    arrival: made-up arrival process; replaces the file's arrivals (for agent sessions: places the session starts).
    spread_ticks_s: spread the requests of one stamp uniformly over this many seconds (Mooncake's tick is 3 s).
    seed: of everything drawn while reading. service_class: label of every row, instead of the file's or format's.
    keep_zero_output: keep rows without output as one token, instead of leaving them out.
    duration_s, window_start_s, rate_scale: part of a workload of parameters (ServeGen, BLIS) to draw.
    count_tokens: tokens of a text, for formats that hold text. default_output_tokens: where the file has no length.
    columns, time_unit: names and unit of the generic format; columns maps arrival, prompt, output (and session,
    service_class, priority, output_limit) to column names; time_unit is s, ms, us, ns or "stamp".
    year: of log lines whose stamps carry none.
    """

    arrival: ArrivalProcess | None = None
    spread_ticks_s: float | None = None
    seed: int = 0
    service_class: str | None = None
    keep_zero_output: bool = False
    duration_s: float | None = None
    window_start_s: float = 0.0
    rate_scale: float = 1.0
    count_tokens: Callable[[str], int] | None = None
    default_output_tokens: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    time_unit: str = "s"
    year: int = 2000

    def __post_init__(self) -> None:
        for name in ("spread_ticks_s", "duration_s", "rate_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise TraceError(f"{name}={value} must be positive")
        if self.default_output_tokens is not None and self.default_output_tokens < 1:
            raise TraceError(f"default_output_tokens={self.default_output_tokens} must be at least 1")
        if self.time_unit not in TIME_UNITS_S and self.time_unit != "stamp":
            raise TraceError(unknown_name("time unit", self.time_unit, [*TIME_UNITS_S, "stamp"]))


def options_from(choices: Mapping[str, object]) -> ReadOptions:
    """Return `ReadOptions(**choices)`; an unknown name gives a TraceError that lists the known ones."""
    known = [item.name for item in fields(ReadOptions)]
    for name in choices:
        if name not in known:
            raise TraceError(unknown_name("reading option", name, known))
    return ReadOptions(**choices)  # type: ignore[arg-type]

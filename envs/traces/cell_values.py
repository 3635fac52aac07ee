"""Turning one cell of a file into tokens, seconds or nanoseconds, with an error that names file, line and value."""

from __future__ import annotations

import math
from typing import Any

from envs.traces.read_options import ReadOptions
from envs.traces.timestamps import stamp_ns
from envs.traces.trace_file import TraceFile

TOKENS_MAX = 2**31 - 1


def token_count(value: Any, file: TraceFile, line: int, column: str) -> int:
    """Whole tokens; 0 and negative values pass here and are left out, counted, by the caller of the reader."""
    try:
        number = value if type(value) is int else int(value) if isinstance(value, str) else _whole(value)
    except ValueError:
        try:
            number = _whole(float(value))  # "12.0"
        except ValueError:
            raise file.error(f"{column}={value!r} is no whole number of tokens", line) from None
    except TypeError:
        raise file.error(f"{column}={value!r} is no whole number of tokens", line) from None
    if not -TOKENS_MAX <= number <= TOKENS_MAX:
        raise file.error(f"{column}={value!r} is beyond {TOKENS_MAX} tokens", line)
    return number


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if not math.isfinite(value) or value != int(value):
        raise ValueError
    return int(value)


def seconds(value: Any, factor: float, file: TraceFile, line: int, column: str, options: ReadOptions) -> float:
    """`value` x `factor` in seconds. An absent value is an error, unless a made-up arrival process was asked for."""
    if value is None or value == "":
        if options.arrival is not None:
            return 0.0
        raise file.error(f"{column} is absent; give every row its arrival, or ask for a made-up arrival process (--rate)", line)
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        raise file.error(f"{column}={value!r} is no number", line) from None
    if not math.isfinite(number):
        raise file.error(f"{column}={value!r} is not finite", line)
    # Division is exact where multiplication by 0.001 is not: 3052 ms is 3.052 s.
    return number * factor if factor >= 1 else number / round(1 / factor)


def epoch_ns(value: Any, file: TraceFile, line: int, column: str, options: ReadOptions) -> int:
    """Nanoseconds since 1970 of a calendar stamp (text) or of epoch seconds (number)."""
    if value is None or value == "":
        return int(seconds(value, 1.0, file, line, column, options))
    if isinstance(value, str):
        try:
            return stamp_ns(value)
        except ValueError as fault:
            raise file.error(f"{column}: {fault}", line) from None
    return round(seconds(value, 1.0, file, line, column, options) * 1e9)


def required(record: dict[str, Any], key: str, wanted: tuple[str, ...], file: TraceFile, line: int) -> Any:
    """`record[key]`, or an error with the names wanted and found."""
    try:
        return record[key]
    except KeyError:
        raise file.error(
            f"key {key} missing; columns wanted: {', '.join(wanted)}; columns found: {', '.join(map(str, record)) or 'none'}",
            line,
        ) from None

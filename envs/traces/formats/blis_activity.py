"""When a client of an inference-sim (BLIS) workload sends, and how much of its rate: lifecycle, diurnal, spike, drain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

US = 1e-6


def rate_level(entry: dict[str, Any]) -> Callable[[float], float]:
    """Rate over time, 0 to 1, from lifecycle windows, diurnal, spike and drain; several of them multiply."""
    windows = [(w["start_us"] * US, w["end_us"] * US) for w in (entry.get("lifecycle") or {}).get("windows", [])]
    diurnal, spike, drain = entry.get("diurnal"), entry.get("spike"), entry.get("drain")

    def level(time_s: float) -> float:
        value = 1.0
        if windows:
            value *= any(start <= time_s < end for start, end in windows)
        if diurnal:  # a sine through peak and trough whose ratio is the given one, relative to the peak
            trough = 1.0 / float(diurnal["peak_to_trough_ratio"])
            phase = math.cos(2 * math.pi * (time_s / 3600.0 - float(diurnal["peak_hour"])) / 24.0)
            value *= trough + (1.0 - trough) * (1.0 + phase) / 2.0
        if spike:
            value *= spike["start_time_us"] * US <= time_s < (spike["start_time_us"] + spike["duration_us"]) * US
        if drain:
            value *= min(1.0, max(0.0, 1.0 - (time_s - drain["start_time_us"] * US) / (drain["ramp_duration_us"] * US)))
        return value

    return level


def silent_after_s(entry: dict[str, Any]) -> float:
    """Time after which the client is silent for good; infinite for most."""
    ends = [max((float(w["end_us"]) for w in entry["lifecycle"]["windows"]), default=math.inf)] if entry.get("lifecycle") else []
    ends += [float(e["start_time_us"]) + float(e["duration_us"]) for e in [entry.get("spike")] if e]
    ends += [float(e["start_time_us"]) + float(e["ramp_duration_us"]) for e in [entry.get("drain")] if e]
    return min(ends, default=math.inf) * US

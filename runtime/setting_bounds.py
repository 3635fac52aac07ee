"""Bounds of settings that are plain numbers: one rule for what a service file may say and for what a program may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envs.scenario.scenario_error import shown

Bounds = tuple[float, float]


def check_bounds(settings: Any, bounds: Mapping[str, Bounds]) -> None:
    """Each field named within its bounds, both included; NaN is within none. Raises: ValueError naming field, value and bounds."""
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if not least <= value <= most:
            raise ValueError(f"{type(settings).__name__}: {name}={shown(value, 24)} must be within {least:.12g} to {most:.12g}")


DEVICE = r"cpu|cuda(:\d{1,3})?"
"""Where a rank may compute, as a regular expression."""

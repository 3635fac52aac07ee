"""The one error of this package: a scenario file that cannot be used, told in one line."""

from __future__ import annotations


class ScenarioError(ValueError):
    """One line naming the file, the place in it, what stands there and what to do."""


def shown(value: object, limit: int = 60) -> str:
    """`value` on one line, shortened: file content must not flood a terminal or a log."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."

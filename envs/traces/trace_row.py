"""One request of a trace, what a reader reports beside its rows, and the one error of this package."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


class TraceError(ValueError):
    """A trace cannot be read, drawn or written; the message is one line: file, line, value, what to do."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `arrival_s` counts from the first row of a file with calendar stamps, else from the file's own zero.

    service_class, priority, session: None where the file says nothing. prefix_blocks: ids of the prompt's blocks of
    `block_tokens` tokens each, global within the file. output_limit_tokens: what the caller allowed, if known.
    extra: further columns of the file, values as JSON would hold them.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    service_class: str | None = None
    priority: int | None = None
    session: str | None = None
    prefix_blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    output_limit_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ReadReport:
    """What was read and what was not. Filled while the rows are consumed; final once they are exhausted."""

    source: str
    format: str
    default_class: str = "chat"
    synthetic: bool = False
    rows: int = 0
    rows_out_of_order: int = 0
    kept_as_one_token: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def rows_left_out(self) -> int:
        return sum(self.left_out.values())

    def note(self, text: str) -> None:
        """Add a remark once."""
        if text not in self.notes:
            self.notes.append(text)

    def lines(self) -> list[str]:
        """The report as text: counts, reasons, remarks."""
        out = [f"{self.source}: format {self.format}, {self.rows} rows read, {self.rows_left_out} left out"]
        out += [f"  left out: {count} x {reason}" for reason, count in sorted(self.left_out.items())]
        if self.kept_as_one_token:
            out.append(f"  kept: {self.kept_as_one_token} rows without output count as one output token")
        if self.rows_out_of_order:
            out.append(f"  {self.rows_out_of_order} rows arrive before an earlier row; a table sorts them, ties keep file order")
        return out + [f"  note: {text}" for text in self.notes]

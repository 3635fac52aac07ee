"""One wording for "this name is unknown": what came, the nearest known name, all known names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NAME_CHARS_MAX = 128
"""Of a name that is told again: what a caller sends must not flood a log."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return e.g. `router "least_wrk" unknown; did you mean "least_work_left"? known: ...`."""
    names = sorted(known)
    name = (name if name.isprintable() else repr(name)[1:-1])[:NAME_CHARS_MAX]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f'; did you mean "{close[0]}"?' if close else ";"
    return f'{kind} "{name}" unknown{hint} known: {", ".join(names)}'

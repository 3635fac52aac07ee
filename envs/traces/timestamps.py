"""Calendar stamps to integer nanoseconds. Nothing is rounded on the way, and a stamp without an offset is UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache

_MINUTE = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d")
_TAIL = re.compile(r"(?:[.,](\d+))?\s*(?:(Z|z|UTC)|([+-])(\d\d):?(\d\d)?)?")
NS_PER_S = 1_000_000_000


@lru_cache(maxsize=4096)
def _minute_ns(text: str) -> int:
    """Nanoseconds since 1970 of `YYYY-MM-DD HH:MM`, read as UTC."""
    if not _MINUTE.fullmatch(text):
        raise ValueError(f"stamp {text!r} does not begin with YYYY-MM-DD HH:MM")
    try:
        moment = datetime(int(text[:4]), int(text[5:7]), int(text[8:10]), int(text[11:13]), int(text[14:16]), tzinfo=UTC)
    except ValueError as fault:
        raise ValueError(f"stamp {text!r} is no moment ({fault})") from None
    return int(moment.timestamp()) * NS_PER_S


def stamp_ns(text: str) -> int:
    """Nanoseconds since 1970 of e.g. `2023-11-16 18:15:46.6805900`, `...T12:00:00.269Z`, `... 02:00:03+02:00`.

    Any number of fraction digits, none included; digits past the ninth are cut. Raises ValueError.
    """
    minute_ns = _minute_ns(text[:16])
    if text[16:17] != ":" or not text[17:19].isdigit() or int(text[17:19]) > 60:
        raise ValueError(f"stamp {text!r} has no seconds; expected YYYY-MM-DD HH:MM:SS[.fraction][offset]")
    whole_ns = minute_ns + int(text[17:19]) * NS_PER_S
    tail = text[19:]
    if tail[:1] == "." and tail[1:].isdigit():  # the common case: a fraction and no offset
        return whole_ns + int(tail[1:10].ljust(9, "0"))
    match = _TAIL.fullmatch(tail)
    if match is None:
        raise ValueError(f"stamp {text!r} ends in {tail!r}; expected [.fraction][Z or +hh:mm]")
    fraction, _, sign, hours, minutes = match.groups()
    if fraction:
        whole_ns += int(fraction[:9].ljust(9, "0"))
    if sign:
        offset_s = int(hours) * 3600 + int(minutes or 0) * 60
        whole_ns += (-offset_s if sign == "+" else offset_s) * NS_PER_S
    return whole_ns

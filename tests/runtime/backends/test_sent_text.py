"""Whether a text begins with another is seen without either: what was kept of them is a few bytes."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from runtime.backends.sent_text import BLOCK_CHARS, SentText

TEXTS = st.text(max_size=4 * BLOCK_CHARS)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 4 * BLOCK_CHARS), max_size=12), rest=TEXTS)
def test_however_it_is_told_it_is_the_same_text(text, cuts, rest):
    told, whole, at = SentText(), SentText(text + rest), 0
    for cut in sorted([*cuts, len(text)]):
        told.add(text[at:cut])
        at = max(at, cut)
        assert told.is_beginning_of(whole)
    assert told.chars == len(text) and told.is_beginning_of(SentText(text)) and SentText(text).is_beginning_of(told)
    assert told.is_beginning_of(told.copy()) and not SentText(text + rest + "x").is_beginning_of(whole)


@given(text=st.text(min_size=1, max_size=3 * BLOCK_CHARS), at=st.integers(0), tail=TEXTS)
def test_another_text_is_found_out_by_the_end_of_the_block_and_at_its_own_end(text, at, tail):
    at %= len(text)
    other = text[:at] + ("a" if text[at] != "a" else "b") + text[at + 1 :]
    assert not SentText(other).is_beginning_of(SentText(text))
    block_end = (at // BLOCK_CHARS + 1) * BLOCK_CHARS
    whole = SentText(text + tail)
    assert not SentText((other + tail)[:block_end]).is_beginning_of(whole) or block_end > len(text + tail)


def test_a_long_answer_takes_little():
    """10,000 tokens of five characters: under 4 KB, where a list of the texts takes half a megabyte."""
    sent = SentText()
    tracemalloc.start()
    try:
        for number in range(10_000):
            sent.add(f" t{number % 1000:03d}")
        assert sent.chars == 50_000 and tracemalloc.get_traced_memory()[0] < 4096
    finally:
        tracemalloc.stop()

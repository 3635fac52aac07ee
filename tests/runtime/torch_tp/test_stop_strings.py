"""What may be shown of an answer while stop strings could still come true."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.torch_tp.stop_strings import AnswerText, StopStrings

letters = st.text(alphabet="ab.", min_size=0, max_size=30)
stops = st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=3)


def slow(text: str, strings: list[str]) -> tuple[str, str | None]:
    """Letter by letter: the first moment at which the text ends in a stop string; of several, the longest."""
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=letters, strings=stops, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_shown_text_is_that_of_the_slow_way_for_any_pieces(text, strings, cuts):
    places = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    filter_ = StopStrings(strings)
    shown = [filter_.push(piece) for piece in pieces]
    expected, matched = slow(text, strings)
    end = filter_.finish()
    assert filter_.matched == matched
    assert "".join(shown) + end == expected
    if matched is not None:
        assert end == ""


@given(text=letters, strings=stops)
def test_nothing_shown_could_still_belong_to_a_stop_string(text, strings):
    """At every moment: what is held back is the longest end of the text that begins a stop string, so nothing of one was shown
    and nothing is held back longer than needed."""
    filter_ = StopStrings(strings)
    so_far, shown = "", ""
    for letter in text:
        shown += filter_.push(letter)
        so_far += letter
        if filter_.matched is not None:
            return
        held = so_far[len(shown) :]
        starts = [k for k in range(1, len(so_far) + 1) if any(len(s) > k and s.startswith(so_far[-k:]) for s in strings)]
        assert len(held) == max(starts, default=0)


class Letters:
    """Tokens are letters; token 9 is the first half of one that token 8 completes."""

    def __init__(self) -> None:
        self.half = False

    def push(self, token: int) -> str:
        if token == 9:
            self.half = True
            return ""
        whole, self.half = ("é" if self.half else chr(ord("a") + token)), False
        return whole

    def finish(self) -> str:
        return "\ufffd" if self.half else ""


def test_answer_text_stops_and_flushes():
    text = AnswerText(Letters(), ["bc"])
    assert [text.push(token) for token in (0, 1, 0, 1, 2, 0)] == ["a", "", "ba", "", "", ""]
    assert text.matched == "bc" and text.finish() == ""
    text = AnswerText(Letters(), ["bc"])
    assert [text.push(token) for token in (9, 8, 1, 9)] == ["", "é", "", ""]
    assert text.finish() == "b\ufffd"


def test_text_of_a_too_short_answer_is_not_searched():
    text = AnswerText(Letters(), ["bc"])
    assert [text.push(token, can_stop=False) for token in (1, 2)] == ["b", "c"]
    assert text.matched is None
    assert text.push(1) + text.push(2) == "" and text.matched == "bc"


def test_stop_strings_without_a_tokenizer_are_an_error():
    with pytest.raises(ValueError, match="need a tokenizer"):
        AnswerText(None, ["x"])
    assert AnswerText(None, []).push(3) == ""

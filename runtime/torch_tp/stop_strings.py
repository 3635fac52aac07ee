"""Text of an answer as it may be shown: nothing that is, or could still become, part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenText(Protocol):
    """Incremental detokeniser: text that is complete with this token, and what is left at the end."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


class StopStrings:
    """Looks for the first of `strings` to be complete, whatever the pieces the text comes in.

    Of several, the one that ends first counts; of those ending together, the longest. Text from its start on is never shown.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise ValueError("StopStrings: an empty stop string would stop at once; leave it out")
        self._strings = tuple(strings)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take in more text; returns what may be shown now. After a match: nothing more."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(place + len(s), place, s) for s in self._strings if (place := self._held.find(s)) >= 0]
        if found:
            _, place, self.matched = min(found)
            shown, self._held = self._held[:place], ""
            return shown
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """No more text comes: what was held back turned out to be no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(len(s) > length and s.startswith(end) for s in self._strings):
                return length
        return 0


class AnswerText:
    """From tokens to text that may be shown, with stop strings."""

    def __init__(self, decoder: TokenText | None, stop_strings: Sequence[str]) -> None:
        """decoder None: an answer without text, for callers that want ids alone; it cannot have stop strings."""
        if decoder is None and stop_strings:
            raise ValueError(f"AnswerText: stop_strings={list(stop_strings)} need a tokenizer, and the engine was started without one")
        self._decoder = decoder
        self._stops = StopStrings(stop_strings)

    @property
    def matched(self) -> str | None:
        return self._stops.matched

    def push(self, token: int, can_stop: bool = True) -> str:
        """Text that may be shown with this token. can_stop False: the answer is too short yet, its text is not searched."""
        if self._decoder is None:
            return ""
        text = self._decoder.push(token)
        return self._stops.push(text) if can_stop else text

    def follow(self, tokens: Sequence[int]) -> None:
        """The answer begins with these, whose text was shown elsewhere; what was held back there is shown with the next."""
        for token in tokens:
            self.push(token)

    def finish(self) -> str:
        """Text left when the answer ends otherwise than by a stop string."""
        if self._decoder is None or self.matched is not None:
            return ""
        shown = self._stops.push(self._decoder.finish())
        return shown if self.matched is not None else shown + self._stops.finish()

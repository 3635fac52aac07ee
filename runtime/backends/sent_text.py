"""What a caller has of an answer's text, kept as its length and a checksum per block: whether another server tells the same again can be
seen without holding the text, of which a thousand open streams have more every second."""

from __future__ import annotations

from array import array
from zlib import crc32

BLOCK_CHARS = 128


class SentText:
    """Grows by `add`. chars: so far. `sums`: of the text up to the end of each whole block."""

    __slots__ = ("_sum", "chars", "sums")

    def __init__(self, text: str = "") -> None:
        self.chars = 0
        self.sums = array("I")
        self._sum = 0
        self.add(text)

    def add(self, text: str) -> None:
        while text:
            part = text[: BLOCK_CHARS - self.chars % BLOCK_CHARS]
            self._sum = crc32(part.encode("utf-8", "surrogatepass"), self._sum)
            self.chars += len(part)
            if self.chars % BLOCK_CHARS == 0:
                self.sums.append(self._sum)
            text = text[len(part) :]

    def copy(self) -> SentText:
        other = SentText()
        other.chars, other.sums, other._sum = self.chars, self.sums[:], self._sum
        return other

    def is_beginning_of(self, whole: SentText) -> bool:
        """Whether `whole` can begin with this, as far as the blocks tell; at its full length, whether they are the same."""
        if self.chars >= whole.chars:
            return self.chars == whole.chars and self._sum == whole._sum and self.sums == whole.sums
        return self.sums == whole.sums[: len(self.sums)]

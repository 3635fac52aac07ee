"""Opening trace files: gzip, zstd or plain, as numbered lines, CSV records or JSON objects, never whole in memory."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from envs.traces.trace_row import TraceError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_HEAD_CHARACTERS = 1 << 16
_WANTED_NOTHING_FOUND = "columns wanted: those of a format, e.g. TIMESTAMP, ContextTokens, GeneratedTokens; columns found: none"
_ARRAY_GAP = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class TraceHead:
    """What a file opens with: its first characters, CSV column names, and first JSON value, where they exist."""

    text: str
    columns: tuple[str, ...]
    first: Any

    @property
    def keys(self) -> frozenset[str]:
        """Names found: keys of the first JSON object, else the CSV columns."""
        return frozenset(self.first) if isinstance(self.first, dict) else frozenset(self.columns)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One file on disk. All errors of opening and decoding come out as TraceError with the file's name."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def error(self, text: str, line: int | None = None) -> TraceError:
        where = f"{self.path}" if line is None else f"{self.path}, line {line}"
        return TraceError(f"{where}: {text}")

    def check_readable(self) -> None:
        if not self.path.exists():
            raise self.error(f"no such file; {_WANTED_NOTHING_FOUND}; check the path")
        if not self.path.is_file():
            raise self.error(f"is a folder, not a file; {_WANTED_NOTHING_FOUND}; name the file inside (folders: ServeGen and Weka only)")
        if self.path.stat().st_size == 0:
            raise self.error(f"is empty (0 bytes); {_WANTED_NOTHING_FOUND}; give a trace with at least one row")

    @contextlib.contextmanager
    def text(self) -> Iterator[IO[str]]:
        """Open decompressed text; decoding faults inside the block become TraceError."""
        self.check_readable()
        try:
            with self.path.open("rb") as raw:
                magic = raw.read(4)
                raw.seek(0)
                with self._plain(raw, magic) as plain, io.TextIOWrapper(plain, "utf-8-sig", newline="") as text:
                    yield text
        except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
            raise self.error(f"compressed data is damaged or cut short ({fault}); fetch the file again") from fault
        except UnicodeDecodeError as fault:
            raise self.error(f"is not UTF-8 text (byte {fault.object[fault.start]:#x}); convert it first") from fault
        except csv.Error as fault:
            raise self.error(f"is no valid CSV ({fault})") from fault
        except PermissionError as fault:
            raise self.error("may not be read; check its permissions") from fault

    def _plain(self, raw: IO[bytes], magic: bytes) -> Any:
        if magic.startswith(GZIP_MAGIC):
            return gzip.GzipFile(fileobj=raw)
        if magic == ZSTD_MAGIC:
            import zstandard  # only needed for .zst files

            return _ZstdBytes(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
        return io.BufferedReader(raw) if isinstance(raw, io.RawIOBase) else raw

    def head(self) -> TraceHead:
        """Look at the first 64 Ki characters."""
        with self.text() as text:
            start = text.read(_HEAD_CHARACTERS)
        if not start.strip():
            raise self.error(f"holds nothing but blank lines; {_WANTED_NOTHING_FOUND}; give a trace with at least one row")
        stripped = start.lstrip()
        first: Any = None
        if stripped[0] in "{[":
            first = _first_json(stripped)
        columns: tuple[str, ...] = ()
        if first is None:
            columns = tuple(cell.strip() for cell in next(csv.reader([stripped.splitlines()[0]]), []))
        return TraceHead(start, columns, first)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (line number from 1, text without line end) of lines that are not blank."""
        for number, line, _ in self._ended_lines():
            yield number, line

    def _ended_lines(self) -> Iterator[tuple[int, str, bool]]:
        """The same, each with whether its line end is there."""
        with self.text() as text:
            for number, raw in enumerate(text, start=1):
                line = raw.strip()
                if line:
                    yield number, line, raw[-1] in "\r\n"

    def json_objects(self, on_torn: Callable[[], None] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (line number, object) of a JSONL file, or (element number, object) of one JSON array.

        on_torn: called for a last line that its writer did not finish (no line end, no JSON), which is left out; without it that is an
        error like any other broken line.
        """
        with self.text() as text:
            start = text.read(1024).lstrip()
        if start.startswith("["):
            yield from self._array_objects()
            return
        for number, line, is_ended in self._ended_lines():
            try:
                value = json.loads(line)
            except ValueError as fault:
                if on_torn is not None and not is_ended:
                    on_torn()
                    return
                raise self.error(f"is no valid JSON ({fault}); every line must be one object", number) from fault
            if not isinstance(value, dict):
                raise self.error(f"holds a {type(value).__name__}, expected a JSON object", number)
            yield number, value

    def _array_objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Elements of one JSON array, decoded piece by piece so that a large array never lies in memory whole."""
        decoder = json.JSONDecoder()
        with self.text() as text:
            buffer, place, number = text.read(1 << 20), 0, 0
            place = buffer.index("[") + 1
            while True:
                place = _ARRAY_GAP.match(buffer, place).end()  # type: ignore[union-attr]
                if buffer.startswith("]", place):
                    return
                try:
                    value, end = decoder.raw_decode(buffer, place)
                except ValueError as fault:
                    more = text.read(max(1 << 20, len(buffer) - place))
                    if not more:
                        raise self.error(f"element {number + 1} of the JSON array cannot be read ({fault})") from fault
                    buffer, place = buffer[place:] + more, 0
                    continue
                number += 1
                if not isinstance(value, dict):
                    raise self.error(f"element {number} of the JSON array is a {type(value).__name__}, expected an object")
                yield number, value
                place = end

    def csv_records(self, wanted: tuple[str, ...], optional: tuple[str, ...] = ()) -> Iterator[tuple[int, list[str | None]]]:
        """Yield (line number, cells in the order wanted + optional); an absent optional column gives None.

        Columns are found by name. Raises TraceError naming wanted and found when one of `wanted` is absent.
        """
        with self.text() as text:
            reader = csv.reader(text)
            header = [cell.strip() for cell in next(reader, [])]
            missing = [name for name in wanted if name not in header]
            if missing:
                raise self.error(columns_message(missing, wanted, header))
            places = [header.index(name) if name in header else -1 for name in (*wanted, *optional)]
            width = len(header)
            is_plain = places == list(range(width))  # the file's own order: no copying
            for cells in reader:
                if len(cells) != width:
                    if not cells:
                        continue
                    raise self.error(f"has {len(cells)} cells, the header has {width}", reader.line_num)
                if is_plain:
                    yield reader.line_num, cells  # type: ignore[misc]
                else:
                    yield reader.line_num, [cells[place] if place >= 0 else None for place in places]


class _ZstdBytes(io.BufferedReader):
    """A zstd reader as buffered bytes; a damaged frame raises EOFError like gzip does."""

    def __init__(self, reader: Any) -> None:
        super().__init__(_RaisesEof(reader), 1 << 17)


class _RaisesEof(io.RawIOBase):
    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        try:
            data = self._reader.read(len(buffer))
        except zstandard.ZstdError as fault:
            raise EOFError(str(fault)) from fault
        buffer[: len(data)] = data
        return len(data)


def _first_json(text: str) -> Any:
    """First JSON object of JSONL, of an array, or a whole document; a dict, or None when there is none in sight."""
    body = text[1:].lstrip() if text.startswith("[") else text
    try:
        value, _ = json.JSONDecoder().raw_decode(body)
    except ValueError:
        # A first object longer than the head: its own top-level names still tell the format.
        return _visible_keys(body)
    return value if isinstance(value, dict) else None


def _visible_keys(text: str) -> dict[str, Any] | None:
    """Top-level names of a JSON object of which only the beginning is in sight, values None."""
    keys: dict[str, Any] = {}
    depth, position, decoder = 0, 0, json.JSONDecoder()
    while position < len(text):
        character = text[position]
        if character == '"':
            try:
                value, position = decoder.raw_decode(text, position)
            except ValueError:
                break
            if depth == 1 and text[position:].lstrip().startswith(":"):
                keys[value] = None
            continue
        depth += (character in "{[") - (character in "}]")
        position += 1
    return keys or None


def columns_message(missing: list[str], wanted: tuple[str, ...], found: list[str] | tuple[str, ...]) -> str:
    """One line: which column is missing, the columns wanted and the columns found."""
    return f"column {', '.join(missing)} missing; columns wanted: {', '.join(wanted)}; columns found: {', '.join(found) or 'none'}"

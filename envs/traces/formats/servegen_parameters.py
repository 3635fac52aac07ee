"""ServeGen's parameter files (a folder or a tar of one): rate windows and length histograms per client.

Source: alibaba/ServeGen, `chunk-<client>-trace.csv` and `chunk-<client>-dataset.json`.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.traces.trace_file import TraceFile

RATE_WINDOW_S = 600.0
LENGTH_WINDOW_S = 21_600.0
PROMPT_FIELDS = ("input_tokens", "text_tokens", "image_tokens", "audio_tokens", "video_tokens")
_MEMBER = re.compile(r"chunk-(\w+)-(trace\.csv|dataset\.json)$")


@dataclass(frozen=True, slots=True)
class RateWindow:
    """One client's traffic over RATE_WINDOW_S: process is gamma or weibull, shape its shape."""

    start_s: float
    rate_per_s: float
    process: str
    shape: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values (tokens) and their probabilities, shape (n,) each."""

    values: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]

    def draw(self, size: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        return rng.choice(self.values, size=size, p=self.probabilities)


@dataclass(slots=True)
class ClientParameters:
    """Windows with traffic, and the raw length strings by window start."""

    name: str
    windows: list[RateWindow] = field(default_factory=list)
    lengths: dict[float, dict[str, str]] = field(default_factory=dict)

    def lengths_at(self, time_s: float) -> dict[str, str] | None:
        """The length fields of the latest window at or before `time_s`, else the first one; None without any."""
        if not self.lengths:
            return None
        before = [start for start in self.lengths if start <= time_s]
        return self.lengths[max(before) if before else min(self.lengths)]


def is_servegen(path: Path) -> bool:
    """A folder with rate files in it, or a tar of one, told by its members."""
    if path.is_dir():
        return next(path.rglob("chunk-*-trace.csv"), None) is not None
    if not path.is_file() or not any(suffix in (".tar", ".tgz") for suffix in path.suffixes[-2:]):
        return False
    return tarfile.is_tarfile(path)


def _members(file: TraceFile) -> Iterator[tuple[str, str, bytes]]:
    """Yield (client, kind, content) without unpacking anything to disk."""
    if file.path.is_dir():
        for path in sorted(file.path.rglob("chunk-*")):
            if match := _MEMBER.search(path.name):
                yield match[1], match[2], path.read_bytes()
        return
    try:
        with tarfile.open(file.path) as archive:
            for member in archive:
                match = _MEMBER.search(member.name)
                content = archive.extractfile(member) if match and member.isfile() else None
                if match and content is not None:
                    yield match[1], match[2], content.read()
    except (tarfile.TarError, EOFError, OSError) as fault:
        raise file.error(f"the archive cannot be read ({fault}); fetch it again") from fault


def _windows(content: bytes, name: str, start_s: float, end_s: float, file: TraceFile) -> list[RateWindow]:
    windows = []
    for line, cells in enumerate(csv.reader(io.StringIO(content.decode("utf-8-sig"))), start=1):
        if not cells:
            continue
        try:
            window_s, rate = float(cells[0]), float(cells[1])
            if not cells[3] or rate <= 0 or window_s + RATE_WINDOW_S <= start_s or window_s >= end_s:
                continue
            windows.append(RateWindow(window_s, rate, cells[3].lower(), float(cells[4])))
        except (ValueError, IndexError) as fault:
            raise file.error(f"chunk-{name}-trace.csv, line {line}: {fault}; expected start, rate, CV, pattern, shape, scale") from fault
    return windows


def _lengths(content: bytes, name: str, start_s: float, end_s: float, file: TraceFile) -> dict[float, dict[str, str]]:
    try:
        document: dict[str, Any] = json.loads(content)
        starts = sorted(float(key) for key in document)
        keep = [s for s in starts if start_s - LENGTH_WINDOW_S < s < end_s] or starts[:1]
        kept = {float(key): value for key, value in document.items() if float(key) in keep}
    except (ValueError, AttributeError) as fault:
        raise file.error(f"chunk-{name}-dataset.json: {fault}; expected windows of length histograms") from fault
    return {start: value for start, value in kept.items() if value.get("output_tokens") not in (None, "", "{}")}


def load_clients(file: TraceFile, start_s: float, end_s: float) -> list[ClientParameters]:
    """Clients by name with what is needed for [start_s, end_s); raises TraceError when there is no rate file."""
    clients: dict[str, ClientParameters] = {}
    for name, kind, content in _members(file):
        client = clients.setdefault(name, ClientParameters(name))
        if kind == "trace.csv":
            client.windows = _windows(content, name, start_s, end_s, file)
        else:
            client.lengths = _lengths(content, name, start_s, end_s, file)
    if not clients:
        raise file.error("holds no chunk-<client>-trace.csv; give the folder or archive of ServeGen's parameters")
    return sorted(clients.values(), key=lambda client: (len(client.name), client.name))


def histogram_of(text: str, file: TraceFile) -> Histogram:
    """Parse `{17: 0.01, ...}`, a Python dict as text. Literals only: nothing is evaluated."""
    try:
        table = ast.literal_eval(text)
        values = np.array(list(table), dtype=np.float64)
        weights = np.array(list(table.values()), dtype=np.float64)
    except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError) as fault:
        raise file.error(f"length histogram {text[:40]!r}... is no dict of numbers ({fault})") from fault
    if not (weights.size and np.all(weights >= 0) and np.isfinite(weights).all() and weights.sum() > 0):
        raise file.error(f"length histogram {text[:40]!r}... has no positive probabilities")
    return Histogram(values, weights / weights.sum())

"""vLLM server logs: "Received request" and "Generated response" lines, and JSON usage records, in one file.

Source: vllm/entrypoints/logger.py. Stamps of log lines carry no year: `options.year` supplies it. The prompt's length is
that of the logged prompt_token_ids, so the server must log them whole (no --max-log-len); the answer's is that of
output_token_ids, or the usage record of the same id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from envs.traces.cell_values import epoch_ns, token_count
from envs.traces.formats.reader import Reader
from envs.traces.read_options import ReadOptions
from envs.traces.timestamps import NS_PER_S, stamp_ns
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

WANTED = ("Received request", "Generated response or a JSON record with usage")
PENDING_MAX = 200_000
_STAMP = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_EVENT = re.compile(r"(Received request|Generated response) ([^\s:(]+)")
_TOKEN_IDS = re.compile(r"(?<!output_)(?:prompt_)?token_ids: \[([\d, ]*)\]")
_OUTPUT_IDS = re.compile(r"output_token_ids: [\[(]([\d, ]*)[\])]")
_LIMIT = re.compile(r"max_tokens=(\d+)")


@dataclass(slots=True)
class _Received:
    arrival_ns: int
    prompt_tokens: int | None
    limit: int | None


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match's group: prompts are logged before the fields, and may hold anything."""
    found = pattern.findall(text)
    return found[-1] if found else None


def _ids(listed: str | None) -> int | None:
    if listed is None:
        return None
    return listed.count(",") + 1 if listed.strip() else 0


def _line_ns(text: str, options: ReadOptions, file: TraceFile, line: int) -> int:
    match = _STAMP.search(text)
    if match is None:
        raise file.error("a request line without a MM-DD HH:MM:SS stamp; keep vLLM's log prefix", line)
    year, month, day, clock = match.groups()
    return stamp_ns(f"{year or options.year:0>4}-{month}-{day} {clock.replace(',', '.')}")


def _base_id(request_id: str) -> str:
    """vLLM adds "-0" to the id for the first choice of a completion; the answer carries the id without it."""
    return request_id.removesuffix("-0")


def _usage(text: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(record, usage) of a JSON line that has token usage, else None."""
    start = text.find("{")
    if start < 0 or '"usage"' not in text:
        return None
    try:
        record = json.loads(text[start:])
    except ValueError:
        return None
    usage = record.get("usage") if isinstance(record, dict) else None
    return (record, usage) if isinstance(usage, dict) else None


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield requests in the order of their answers; a table sorts them by arrival. Requests without an answer or without
    a length are left out, counted. At most PENDING_MAX requests may wait for their answer at once."""
    pending: dict[str, _Received] = {}
    zero_ns: int | None = None
    for line, text in file.lines():
        event = _EVENT.search(text)
        found = _usage(text)
        if found is not None:
            row = _usage_row(*found, pending, file, line, options)
        elif event is None or "(streaming delta)" in text:
            continue
        elif event[1] == "Received request":
            now_ns = _line_ns(text, options, file, line)
            zero_ns = now_ns if zero_ns is None else zero_ns
            limit = _last(_LIMIT, text)
            pending[_base_id(event[2])] = _Received(now_ns, _ids(_last(_TOKEN_IDS, text)), int(limit) if limit else None)
            if len(pending) > PENDING_MAX:
                raise file.error(f"more than {PENDING_MAX} requests without an answer; log outputs (--enable-log-outputs)", line)
            continue
        else:
            known, output = pending.pop(_base_id(event[2]), None), _ids(_last(_OUTPUT_IDS, text))
            if known is None or known.prompt_tokens is None or output is None:
                report.left_out["answer whose request or token ids are not in the log"] += 1
                continue
            row = (known.arrival_ns, known.prompt_tokens, output, known.limit)
        zero_ns = row[0] if zero_ns is None else zero_ns
        yield TraceRow((row[0] - zero_ns) / NS_PER_S, row[1], row[2], output_limit_tokens=row[3])
    if pending:
        report.left_out["request without an answer in the log"] += len(pending)


def _usage_row(
    record: dict[str, Any],
    usage: dict[str, Any],
    pending: dict[str, _Received],
    file: TraceFile,
    line: int,
    options: ReadOptions,
) -> tuple[int, int, int, int | None]:
    """(arrival ns, prompt, output, limit) of a usage record; the arrival is the logged request's where that is known."""
    known = pending.pop(_base_id(str(record.get("id", record.get("request_id", "")))), None)
    stamp = record.get("timestamp", record.get("created"))
    return (
        known.arrival_ns if known else epoch_ns(stamp, file, line, "timestamp or created", options),
        token_count(usage.get("prompt_tokens"), file, line, "prompt_tokens"),
        token_count(usage.get("completion_tokens"), file, line, "completion_tokens"),
        known.limit if known else None,
    )


def _recognise(head: TraceHead) -> bool:
    if isinstance(head.first, dict):
        return "usage" in head.keys
    return "Received request " in head.text or ("INFO" in head.text and "vllm" in head.text.lower())


READER = Reader("vllm-log", "log stamps or epoch seconds", WANTED, read, _recognise)

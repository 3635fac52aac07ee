"""AIBrix workloads (JSONL, milliseconds, several requests a line). Source: vllm-project/aibrix benchmarks/generator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envs.traces.cell_values import seconds, token_count
from envs.traces.formats.reader import Reader
from envs.traces.formats.text_tokens import text_tokens
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("timestamp", "requests")
PROMPT_NAMES = ("Prompt Length", "prompt_length")
OUTPUT_NAMES = ("Output Length", "output_length")


def _length(request: dict[str, Any], names: tuple[str, ...], file: TraceFile, line: int) -> int | None:
    for name in names:
        if request.get(name) is not None:
            return token_count(request[name], file, line, name)
    return None


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield the requests of every line, which share its stamp and keep their order."""
    for line, record in file.json_objects():
        arrival_s = seconds(record.get("timestamp"), 1e-3, file, line, "timestamp", options)
        requests = record.get("requests")
        if not isinstance(requests, list):
            raise file.error(f"key requests holds no list; columns wanted: {', '.join(COLUMNS)}; columns found: {', '.join(record)}", line)
        for request in requests:
            if not isinstance(request, dict):
                raise file.error(f"a request is a {type(request).__name__}, expected an object", line)
            prompt = _length(request, PROMPT_NAMES, file, line)
            if prompt is None:
                prompt = text_tokens(str(request.get("prompt", "")), options, file, line)
            output = _length(request, OUTPUT_NAMES, file, line)
            if output is None:
                output = options.default_output_tokens
            if output is None:
                raise file.error("Output Length is absent; give one, or choose --default-output-tokens", line)
            session = request.get("session_id")
            yield TraceRow(arrival_s, prompt, output, session=None if session is None else str(session))


def _recognise(head: TraceHead) -> bool:
    return isinstance(head.first, dict) and {"timestamp", "requests"} <= head.keys


READER = Reader("aibrix", "milliseconds", COLUMNS, read, _recognise)

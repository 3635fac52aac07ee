"""vLLM `bench serve` data sets without arrivals: sharegpt (JSON array) and custom (JSONL). Source: vllm-project/vllm.

Both hold text: the caller chooses how tokens are counted and which arrival process to lay over the rows. vLLM shuffles
custom data with a fixed seed; here the file's order stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from envs.traces.cell_values import required, token_count
from envs.traces.formats.reader import Reader
from envs.traces.formats.text_tokens import text_tokens
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow


def read_sharegpt(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield the first exchange of each conversation, as vLLM does; conversations of one message are left out, counted."""
    for line, record in file.json_objects():
        turns = required(record, "conversations", ("conversations",), file, line)
        if not isinstance(turns, list) or len(turns) < 2:
            report.left_out["conversation with fewer than two messages"] += 1
            continue
        first, second = (str(turn.get("value", "")) if isinstance(turn, dict) else "" for turn in turns[:2])
        yield TraceRow(0.0, text_tokens(first, options, file, line), text_tokens(second, options, file, line))


def read_custom(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield one row a line; `output_tokens` is what the caller allows, and what is generated."""
    for line, record in file.json_objects():
        prompt = required(record, "prompt", ("prompt", "output_tokens"), file, line)
        output = record.get("output_tokens", options.default_output_tokens)
        if output is None:
            raise file.error("output_tokens is absent; give one, or choose --default-output-tokens", line)
        limit = token_count(output, file, line, "output_tokens")
        yield TraceRow(0.0, text_tokens(str(prompt), options, file, line), limit, output_limit_tokens=limit)


def _is_custom(head: TraceHead) -> bool:
    return isinstance(head.first, dict) and isinstance(head.first.get("prompt"), str) and head.keys <= {"prompt", "output_tokens"}


SHAREGPT_READER = Reader(
    "vllm-sharegpt",
    "no times",
    ("conversations",),
    read_sharegpt,
    lambda head: isinstance(head.first, dict) and "conversations" in head.keys,
    needs_arrival=True,
)
CUSTOM_READER = Reader("vllm-custom", "no times", ("prompt", "output_tokens"), read_custom, _is_custom, needs_arrival=True)

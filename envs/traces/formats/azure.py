"""Azure LLM inference traces 2023, 2024 and LMM 2025 (CSV): calendar stamps of 0 to 9 fraction digits, any offset.

Source: Azure/AzurePublicDataset. inference-perf's trace replay uses the same header.
"""

from __future__ import annotations

from collections.abc import Iterator

from envs.traces.cell_values import epoch_ns, token_count
from envs.traces.formats.reader import Reader, has_columns
from envs.traces.read_options import ReadOptions
from envs.traces.timestamps import NS_PER_S
from envs.traces.trace_file import TraceFile
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows in file order; arrival counts from the first row of the file."""
    if "code" in file.name.lower():
        report.default_class = "code"
        report.note('class "code" because the file name says so; the columns of both Azure services are the same')
    zero_ns: int | None = None
    for line, (stamp, prompt, output, images) in file.csv_records(COLUMNS, ("NumImages",)):
        now_ns = epoch_ns(stamp, file, line, "TIMESTAMP", options)
        prompt_tokens = token_count(prompt, file, line, "ContextTokens")
        output_tokens = token_count(output, file, line, "GeneratedTokens")
        if zero_ns is None:
            zero_ns = now_ns
        arrival_s = (now_ns - zero_ns) / NS_PER_S
        if images is None:
            yield TraceRow(arrival_s, prompt_tokens, output_tokens)
        else:
            yield TraceRow(arrival_s, prompt_tokens, output_tokens, extra={"images": token_count(images, file, line, "NumImages")})


READER = Reader("azure", "calendar stamps", COLUMNS, read, has_columns(*COLUMNS))

"""Lengths of texts. There is no tokenizer here: the caller chooses how a text is counted, or the file is refused."""

from __future__ import annotations

from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile


def text_tokens(text: str, options: ReadOptions, file: TraceFile, line: int) -> int:
    """Tokens of `text` by `options.count_tokens`; TraceError when the caller chose no counting."""
    if options.count_tokens is None:
        raise file.error("holds text without token counts; choose how to count, e.g. --characters-per-token 4", line)
    return options.count_tokens(text)

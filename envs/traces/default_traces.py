"""Finding the three named traces: an operator's folder, what was fetched, the project's neighbour folder, else the twin."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from envs.domain.suggestions import unknown_name
from envs.traces import load_trace
from envs.traces.synthetic_twin import synthesize
from envs.traces.trace_row import TraceError
from envs.traces.trace_table import TraceTable
from envs.traces.twin_parameters import MOONCAKE_TICK_S

logger = logging.getLogger(__name__)

PROJECT_ROOT = Path(__file__).resolve().parents[2]
FILES: dict[str, tuple[str, ...]] = {
    "azure-conv": ("AzureLLMInferenceTrace_conv.csv", "azure2023/AzureLLMInferenceTrace_conv.csv"),
    "azure-code": (
        "AzureLLMInferenceTrace_code.csv",
        "azure2023/AzureLLMInferenceTrace_code.csv",
        "azure2023/AzureLLMInferenceTrace_code.first2of3.csv",
    ),
    "mooncake": (
        "conversation_trace.jsonl",
        "mooncake/conversation_trace.jsonl",
        "mooncake/conversation_trace.jsonl.gz",
        "mooncake/conversation_trace.first2of3.jsonl.gz",
    ),
}
"""Names a trace may have inside a searched folder, whole files before parts of them."""


def search_folders() -> tuple[Path, ...]:
    """$BALLAST_TRACES, then replay_logs/cache (where `fetch` writes), then ../shared/traces beside the project."""
    named = os.environ.get("BALLAST_TRACES")
    folders = (Path(named),) if named else ()
    return (*folders, PROJECT_ROOT / "replay_logs" / "cache", PROJECT_ROOT.parent / "shared" / "traces")


def find_trace(name: str, search: Sequence[str | Path] | None = None) -> Path | None:
    """The file of a named trace, or None. Raises TraceError for an unknown name or a $BALLAST_TRACES that is no folder."""
    if name not in FILES:
        raise TraceError(unknown_name("trace", name, FILES))
    named = os.environ.get("BALLAST_TRACES")
    if search is None and named and not Path(named).is_dir():
        raise TraceError(f"BALLAST_TRACES={named} is no folder; set it to the folder that holds the traces, or unset it")
    for folder in search_folders() if search is None else map(Path, search):
        for file in FILES[name]:
            if (folder / file).is_file():
                return folder / file
    return None


def default_trace(
    name: str,
    search: Sequence[str | Path] | None = None,
    *,
    rng: np.random.Generator | None = None,
    duration_s: float = 3600.0,
    spread_ticks: bool = True,
) -> TraceTable:
    """The measured trace where it is found, else its synthetic twin; `source` and `synthetic` of the table, and one log
    line, say which.

    search: folders instead of `search_folders()`. rng, duration_s: of the twin only. spread_ticks: spread Mooncake's 3 s
    ticks, measured or made up, since a tick is an artefact of the recording. Raises TraceError.
    """
    path = find_trace(name, search)
    if path is not None:
        is_ticked = name == "mooncake" and spread_ticks
        table = load_trace(path, spread_ticks_s=MOONCAKE_TICK_S) if is_ticked else load_trace(path)
        logger.info("trace name=%s source=%s requests=%d synthetic=%s", name, path, len(table), table.synthetic)
        return table
    table = synthesize(name, duration_s, rng=rng, spread_ticks=spread_ticks)
    logger.info("trace name=%s source=twin requests=%d synthetic=True reason=file_not_found", name, len(table))
    return table

"""Fetching public trace files by name, with a deadline, a size bound and a checksum."""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envs.domain.suggestions import unknown_name
from envs.traces.atomic_write import whole_file
from envs.traces.trace_row import TraceError

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PublicFile:
    """`sha256` is the full digest, or the known beginning of it (then a match proves less, and `fetch` says so)."""

    name: str
    url: str
    file_name: str
    sha256: str
    bytes_max: int
    licence: str


_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/"
_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/"

PUBLIC_FILES: dict[str, PublicFile] = {
    file.name: file
    for file in (
        PublicFile(
            "azure2023-conv",
            _AZURE + "AzureLLMInferenceTrace_conv.csv",
            "AzureLLMInferenceTrace_conv.csv",
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
            8 << 20,
            "CC-BY-4.0; cite Patel et al., Splitwise, ISCA 2024",
        ),
        PublicFile(
            "azure2023-code",
            _AZURE + "AzureLLMInferenceTrace_code.csv",
            "AzureLLMInferenceTrace_code.csv",
            "54e9a6d2",
            8 << 20,
            "CC-BY-4.0; cite Patel et al., Splitwise, ISCA 2024",
        ),
        PublicFile(
            "mooncake-conversation",
            _MOONCAKE + "conversation_trace.jsonl",
            "conversation_trace.jsonl",
            "b8cbb061",
            64 << 20,
            "Apache-2.0; cite Qin et al., Mooncake, FAST 2025",
        ),
    )
}


def public_file(name: str) -> PublicFile:
    """The entry of a name; raises TraceError listing the known ones."""
    if name not in PUBLIC_FILES:
        raise TraceError(unknown_name("public trace", name, PUBLIC_FILES))
    return PUBLIC_FILES[name]


def fetch(
    file: PublicFile, folder: Path, deadline_s: float = 60.0, overwrite: bool = False, now_s: Callable[[], float] = time.monotonic
) -> tuple[Path, str]:
    """Download `file` into `folder`; returns its path and one line on what the checksum proves.

    Raises TraceError, and leaves nothing behind, when the network, the deadline (seconds, over all), the size bound or
    the checksum says no.
    """
    end_s = now_s() + deadline_s
    digest = hashlib.sha256()
    got_bytes = 0
    path = folder / file.file_name
    with whole_file(path, overwrite) as out:
        try:
            with urllib.request.urlopen(file.url, timeout=max(0.1, min(10.0, deadline_s))) as answer:
                while chunk := answer.read(_CHUNK_BYTES):
                    got_bytes += len(chunk)
                    if now_s() > end_s:
                        raise TraceError(f"fetch {file.name}: not done within {deadline_s:g} s; raise --deadline-s or try later")
                    if got_bytes > file.bytes_max:
                        raise TraceError(f"fetch {file.name}: {file.url} is over {file.bytes_max} bytes, not the known file; stopped")
                    digest.update(chunk)
                    out.write(chunk)
        except (urllib.error.URLError, OSError, http.client.HTTPException) as fault:
            reason = f"HTTP {fault.code}" if isinstance(fault, urllib.error.HTTPError) else getattr(fault, "reason", fault)
            raise TraceError(f"fetch {file.name}: {file.url} cannot be reached ({reason}); without a network use synthesize") from fault
        found = digest.hexdigest()
        if not found.startswith(file.sha256):
            raise TraceError(f"fetch {file.name}: sha256 {found} is not the expected {file.sha256}; the file changed at its source")
    if len(file.sha256) == 64:
        return path, f"sha256 {found} as expected"
    return path, f"sha256 {found}; only its beginning {file.sha256} is known here and agrees, so the whole file is not verified"

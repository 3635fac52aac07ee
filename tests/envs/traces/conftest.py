"""Where the shared files lie, and small files of our own that show the same faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared measurements: $BALLAST_SHARED, else `shared` beside the project."""
    named = os.environ.get("BALLAST_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[4] / "shared"
    if not folder.is_dir():
        pytest.skip("no shared folder: set BALLAST_SHARED, or put it beside the project")
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write text under a name in a fresh folder."""

    def write_text(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode())
        return path

    return write_text

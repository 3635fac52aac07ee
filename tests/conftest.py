"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of measured data beside the project; tests that need it are skipped where it is absent."""
    stated = os.environ.get("BALLAST_SHARED")
    folder = Path(stated) if stated else PROJECT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no measured data at {folder}; set BALLAST_SHARED to the folder that holds it")
    return folder

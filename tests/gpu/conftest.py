"""GPU tests: `python -m pytest tests/gpu`. Each is skipped with a reason where there is no CUDA device.

All need one device only. Models, oracles and ranks-as-threads are those of the engine's CPU tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ENGINE_TESTS = Path(__file__).resolve().parents[1] / "runtime" / "torch_tp"
sys.path.insert(0, str(ENGINE_TESTS))

from tests.runtime.conftest import dreams, nursery  # noqa: E402, F401  (fixtures)


def why_no_gpu() -> str | None:
    """None where a CUDA device can be used."""
    if not torch.backends.cuda.is_built():
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that all ranks share. Full float32, so that tolerances are those of the CPU tests."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda:0")


@pytest.fixture(scope="session")
def grouped(tmp_path_factory: pytest.TempPathFactory):
    """(checkpoint, transformers' model): a Qwen3 of 3 layers with 6 query heads on 2 KV heads, cuts run through groups."""
    from small_models import small_model, written

    from runtime.torch_tp.checkpoint import open_checkpoint

    model = small_model("qwen3", num_hidden_layers=3, head_dim=8, hidden_size=32, intermediate_size=40)
    return open_checkpoint(written(model, tmp_path_factory.mktemp("gpu-model"))), model

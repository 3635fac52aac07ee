"""Checkpoint files: complete or absent, exact, and data only."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from agents.checkpoints import (
    CheckpointError,
    load_module,
    load_optimizer,
    module_tensors,
    optimizer_tensors,
    read_checkpoint,
    write_checkpoint,
)


def test_arrays_and_state_come_back_exactly(tmp_path):
    tensors = {
        "a/x": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "a/scalar": np.array(2.5, np.float32),
        "b": np.zeros(0, np.int64),
    }
    state = {"big": 2**100, "list": [1.5, None, "text"], "nested": {"x": 0.1}}
    write_checkpoint(tmp_path / "c", tensors, state)
    checkpoint = read_checkpoint(tmp_path / "c")
    assert checkpoint.state == state
    for name, array in tensors.items():
        assert checkpoint.tensors[name].dtype == array.dtype and checkpoint.tensors[name].shape == array.shape
        assert np.array_equal(checkpoint.tensors[name], array)
    assert set(checkpoint.part("a")) == {"x", "scalar"}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "c", {"x": np.ones(3)}, {"step": 1})

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path / "c", {"x": np.zeros(3)}, {"step": 2})
    assert read_checkpoint(tmp_path / "c").state == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_state_must_be_strict_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_checkpoint(tmp_path / "c", {}, {"score": float("nan")})


@pytest.mark.fault("K08")
@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d[:40], lambda d: b"", lambda d: b"\x80\x04" + d, lambda d: b"PK\x03\x04" + d]
)
def test_damaged_files_are_refused(tmp_path, damage):
    write_checkpoint(tmp_path / "c", {"x": np.ones(3)}, {})
    (tmp_path / "c").write_bytes(damage((tmp_path / "c").read_bytes()))
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read_checkpoint(tmp_path / "c")


def test_missing_file_and_foreign_weights_are_told_apart(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "absent")
    save_file({"x": np.ones(2)}, str(tmp_path / "weights"))
    with pytest.raises(CheckpointError, match="no training state"):
        read_checkpoint(tmp_path / "weights")


def test_optimizer_goes_on_as_if_never_interrupted(tmp_path):
    """Ten steps in one go against five, save, load, five."""

    def build():
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        return module, torch.optim.Adam(module.parameters(), lr=0.1)

    def steps(module, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            (module(torch.full((1, 3), float(number))) ** 2).sum().backward()
            optimizer.step()

    whole, whole_optimizer = build()
    steps(whole, whole_optimizer, range(10))
    first, first_optimizer = build()
    steps(first, first_optimizer, range(5))
    write_checkpoint(tmp_path / "c", module_tensors(first, "m") | optimizer_tensors(first_optimizer, "o"), {})
    second, second_optimizer = build()
    checkpoint = read_checkpoint(tmp_path / "c")
    load_module(second, checkpoint.part("m"))
    load_optimizer(second_optimizer, checkpoint.part("o"))
    steps(second, second_optimizer, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_weights_of_another_shape_are_refused():
    with pytest.raises(CheckpointError, match="does not fit"):
        load_module(torch.nn.Linear(3, 2), {"weight": np.zeros((2, 4), np.float32), "bias": np.zeros(2, np.float32)})

"""Training checkpoints: one safetensors file with a JSON state in its header, replaced in one step. No pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as dump_safetensors

from agents.whole_files import replace_file

CHECKPOINT_VERSION = 1


class CheckpointError(ValueError):
    """The file is not a complete checkpoint of this program."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """`tensors`: arrays by name. `state`: plain JSON values."""

    tensors: dict[str, np.ndarray]
    state: dict[str, Any]

    def part(self, prefix: str) -> dict[str, np.ndarray]:
        """Tensors whose name starts with `prefix/`, without the prefix."""
        start = f"{prefix}/"
        return {name[len(start) :]: array for name, array in self.tensors.items() if name.startswith(start)}


def write_checkpoint(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> None:
    """Replace `path` in one step: a kill at any moment leaves the old file or the new one, both complete."""
    text = json.dumps({"version": CHECKPOINT_VERSION, "state": dict(state)}, allow_nan=False)
    # np.array keeps zero-dimensional arrays so; ascontiguousarray would give them a dimension.
    data = dump_safetensors({name: np.array(array, order="C") for name, array in tensors.items()}, metadata={"checkpoint": text})
    replace_file(path, data)


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Raises: FileNotFoundError; CheckpointError when the file is damaged or of another version."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint ({' '.join(str(error).split())})") from error
    try:
        header = json.loads(metadata["checkpoint"])
        version, state = header["version"], header["state"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds weights but no training state; it is not a checkpoint of this program") from error
    if version != CHECKPOINT_VERSION:
        raise CheckpointError(f"{path} has checkpoint version {version}; this program reads {CHECKPOINT_VERSION}: start the run again")
    return Checkpoint(tensors, state)


def module_tensors(module: torch.nn.Module, prefix: str) -> dict[str, np.ndarray]:
    """Weights and buffers as arrays named `prefix/...`."""
    return {f"{prefix}/{name}": tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}


def load_module(module: torch.nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises: CheckpointError when names or shapes differ from the module's."""
    try:
        module.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"checkpoint does not fit the network: {' '.join(str(error).split())[:300]}") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, np.ndarray]:
    """Adam's moments and step counts as arrays named `prefix/<parameter>/<moment>`."""
    moments = optimizer.state_dict()["state"]
    return {f"{prefix}/{index}/{name}": value.detach().cpu().numpy() for index, entry in moments.items() for name, value in entry.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, arrays: Mapping[str, np.ndarray]) -> None:
    """Put moments back; learning rates and groups stay the optimizer's own."""
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, array in arrays.items():
        index, moment = name.split("/")
        moments.setdefault(int(index), {})[moment] = torch.from_numpy(array.copy())
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})

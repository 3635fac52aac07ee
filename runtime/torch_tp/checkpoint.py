"""A model on disk: its config and its weights as views on memory-mapped files, whatever form it was published in."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.torch_tp.config import CheckpointError, ModelConfig, read_config, read_json
from runtime.torch_tp.model_cache import cached_folder
from runtime.torch_tp.model_folder import find_model, model_folder
from runtime.torch_tp.safetensors_writer import write_float32

__all__ = ["Checkpoint", "CheckpointError", "find_model", "float32_copy", "model_folder", "open_checkpoint"]

INDEX = "model.safetensors.index.json"
FLOAT32_VERSION = 2
"""Raise when what `float32_copy` writes changes."""

DTYPES = ("F32", "F16", "BF16", "F64")


class WeightFile:
    """One safetensors file. Its tensors are views of the mapped file, so that a weight exists once per host and any slice of it is free;
    the mapping is private (copy on write), so that nothing written by mistake reaches the disk.

    entries: (shape, dtype as the file calls it) by tensor name.
    """

    def __init__(self, path: Path) -> None:
        """Raises: CheckpointError, in one line, for whatever is wrong with the file."""
        try:
            self._file = safe_open(path, "pt")
            slices = {name: self._file.get_slice(name) for name in self._file.offset_keys()}
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        except SafetensorError as error:
            raise CheckpointError(f"{path}: not a safetensors file, damaged or cut short ({error}); fetch it again") from error
        self.entries = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
        for name, (_, dtype) in self.entries.items():
            if dtype not in DTYPES:
                raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype!r}, which is not supported; known: {', '.join(DTYPES)}")

    def tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


class Checkpoint:
    """Config and tensors of one model; all names are those of Hugging Face's Llama."""

    def __init__(self, path: Path, config: ModelConfig, files: dict[str, WeightFile]) -> None:
        self.path, self.config = path, config
        self._files = files
        for name, shape in expected_shapes(config).items():
            if name not in files:
                raise CheckpointError(f"{path}: tensor {name!r} is missing; the file does not belong to this config, or is incomplete")
            found = files[name].entries[name][0]
            if found != shape:
                raise CheckpointError(f"{path}: tensor {name!r} has shape {found}, config.json implies {shape}")

    @property
    def is_float32(self) -> bool:
        """Whether every weight that the forward pass reads is stored as float32."""
        return all(self._files[name].entries[name][1] == "F32" for name in expected_shapes(self.config))

    def tensor(self, name: str) -> Tensor:
        """A view on the mapped file; slices of it cost nothing. Treat it as read-only."""
        if name not in self._files:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return self._files[name].tensor(name)

    @property
    def output_head(self) -> Tensor:
        """(vocabulary, hidden): the matrix that turns hidden states into logits."""
        return self.tensor("model.embed_tokens.weight" if self.config.tied else "lm_head.weight")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory (one safetensors file or shards) or a `.gguf` file, or a name that `find_model` knows.

    Raises: CheckpointError with one line for anything that is missing, damaged or not supported. Never unpickles.
    """
    folder = model_folder(path)
    config = read_config(folder)
    return Checkpoint(folder, config, _weight_files(folder))


@lru_cache(maxsize=2)
def float32_copy(checkpoint: Checkpoint) -> Checkpoint:
    """The same model in float32, written once to the cache: CPUs without 16-bit arithmetic compute in float32 anyway, and a
    mapped file is shared by all ranks where a copy in memory would not be. A float32 checkpoint is returned as it is."""
    if checkpoint.is_float32:
        return checkpoint

    def make(folder: Path) -> None:
        shapes = expected_shapes(checkpoint.config)
        write_float32(folder / "model.safetensors", shapes, ((name, checkpoint.tensor(name).float().numpy()) for name in shapes))
        (folder / "config.json").write_bytes((checkpoint.path / "config.json").read_bytes())

    source = checkpoint.path / (INDEX if (checkpoint.path / INDEX).exists() else "model.safetensors")
    folder = cached_folder(source, f"float32-{FLOAT32_VERSION}", make)
    return Checkpoint(checkpoint.path, checkpoint.config, _weight_files(folder))


def _weight_files(folder: Path) -> dict[str, WeightFile]:
    """Tensor name → the file that holds it."""
    if (folder / INDEX).exists():
        return _sharded(folder, read_json(folder / INDEX))
    single = folder / "model.safetensors"
    if single.exists():
        file = WeightFile(single)
        return dict.fromkeys(file.entries, file)
    unsafe = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if unsafe:
        raise CheckpointError(f"{folder}: only {unsafe[0]} found, a pickle, which can run code; convert it to model.safetensors")
    raise CheckpointError(f"{folder}: no model.safetensors and no {INDEX}")


def _sharded(folder: Path, index: dict[str, Any]) -> dict[str, WeightFile]:
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) and Path(place).name == place for place in places.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map must map tensor names to file names beside it")
    files = {place: WeightFile(folder / place) for place in sorted(set(places.values()))}
    for name, place in places.items():
        if name not in files[place].entries:
            raise CheckpointError(f"{folder / INDEX}: says {name!r} is in {place}, which does not hold it")
    return {name: files[place] for name, place in places.items()}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the forward pass reads, with its shape."""
    hidden, query, kv = config.hidden, config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocabulary, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for part, rows in (("q", query), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
        if config.output_bias:
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for part, shape in (("gate", (config.mlp_width, hidden)), ("up", (config.mlp_width, hidden)), ("down", (hidden, config.mlp_width))):
            shapes[f"{prefix}mlp.{part}_proj.weight"] = shape
            if config.mlp_bias:
                shapes[f"{prefix}mlp.{part}_proj.bias"] = shape[:1]
    return shapes

"""GGUF files, dequantised once into a Hugging Face directory in the cache, which all ranks then map."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runtime.torch_tp.config import CheckpointError
from runtime.torch_tp.model_cache import WAIT_FOR_OTHER_S, cached_folder
from runtime.torch_tp.parent_death import die_with_parent
from runtime.torch_tp.safetensors_writer import write_float32

logger = logging.getLogger(__name__)

CONVERSION_VERSION = 2
"""Raise when what is written changes: older cache entries are then left alone and not read."""

ARCHITECTURES: dict[str, str] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
LAYER_TENSORS: dict[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_DIVISORS = "rope_freqs.weight"
MODEL_TENSORS: dict[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def converted(path: Path) -> Path:
    """The cached directory made from this file, converted first if need be. Raises CheckpointError for what cannot be read."""
    return cached_folder(path, CONVERSION_VERSION, lambda folder: _convert_apart(path, folder))


def _convert_apart(path: Path, folder: Path) -> None:
    """`convert` in a process of its own: it takes several times the model's size, which a gateway or a rank must not keep."""
    command = [sys.executable, "-m", "runtime.torch_tp.gguf_file", str(path.resolve()), str(folder.resolve()), str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_FOR_OTHER_S, check=False, cwd=tempfile.gettempdir())
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{path}: not converted within {WAIT_FOR_OTHER_S:.0f} s") from error
    if done.returncode == 2:
        raise CheckpointError(done.stderr.strip())
    if done.returncode != 0:
        raise CheckpointError(f"{path}: its conversion ended with code {done.returncode}: {' '.join(done.stderr.split())[-300:]}")
    for line in done.stderr.splitlines():
        logger.warning("converted path=%s: %s", path, line)


def convert(path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (float32) and the tokenizer of a GGUF file into `folder`."""
    from gguf import GGUFReader  # here: only a conversion needs it

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({type(error).__name__}: {error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(fields, {tensor.name: _shape(tensor) for tensor in reader.tensors}, path)
    for tensor in reader.tensors:
        if tensor.name == ROPE_DIVISORS:  # Llama 3.1 and later: the stretched frequencies, already worked out
            config["rope_parameters"] = {"rope_theta": config["rope_theta"], "frequency_divisors": tensor.data.astype(float).tolist()}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    _write_tokenizer(fields, path, folder)
    _write_weights(reader, config, path, folder / "model.safetensors")


def _write_tokenizer(fields: dict[str, Any], path: Path, folder: Path) -> None:
    from runtime.torch_tp.gguf_tokenizer import gguf_tokenizer

    try:
        tokenizer, settings = gguf_tokenizer(fields)
    except CheckpointError as error:  # the weights are of use without it; loading the tokenizer says what is missing
        logger.warning("no tokenizer path=%s reason=%s", path, error)
        return
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1), encoding="utf-8")


def hf_config(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], path: Path) -> dict[str, Any]:
    """`config.json` content from GGUF metadata."""
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{path}: architecture {architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}")

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"{architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{path}: metadata {architecture}.{name} is missing")
        if isinstance(value, list):  # one per layer
            if len(set(value)) != 1:
                raise CheckpointError(f"{path}: {architecture}.{name} differs from layer to layer ({value}), which is not supported")
            return value[0]
        return value

    heads, hidden = int(field("attention.head_count")), int(field("embedding_length"))
    config: dict[str, Any] = {
        "model_name": path.stem,
        "model_type": ARCHITECTURES[architecture],
        "hidden_size": hidden,
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field("attention.head_count_kv", heads)),
        "head_dim": int(field("attention.key_length", hidden // heads)),
        "intermediate_size": int(field("feed_forward_length")),
        "vocab_size": shapes["token_embd.weight"][0] if "token_embd.weight" in shapes else int(field("vocab_size")),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(field("context_length")),
        "rope_theta": float(field("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in shapes,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
    scaling = _rope_scaling(fields, architecture, path)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _rope_scaling(fields: dict[str, Any], architecture: str, path: Path) -> dict[str, Any] | None:
    kind = fields.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{path}: rope scaling {kind!r} is not supported in GGUF; known: linear, yarn")
    scaling = {"rope_type": kind, "factor": float(fields.get(f"{architecture}.rope.scaling.factor", 1.0))}
    original = fields.get(f"{architecture}.rope.scaling.original_context_length")
    return scaling | ({"original_max_position_embeddings": int(original)} if original else {})


def _shape(tensor: Any) -> tuple[int, ...]:
    """Outermost first; GGUF counts the other way."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _write_weights(reader: Any, config: dict[str, Any], path: Path, target: Path) -> None:
    from gguf.quants import dequantize

    named = {_hf_name(tensor.name, path): tensor for tensor in reader.tensors if tensor.name != ROPE_DIVISORS}
    shapes = {name: _shape(tensor) for name, tensor in named.items()}

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in named.items():
            try:
                array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shapes[name])
            except (NotImplementedError, ValueError) as error:
                raise CheckpointError(
                    f"{path}: tensor {tensor.name!r} of type {tensor.tensor_type.name} cannot be read ({error})"
                ) from error
            yield name, _unpermuted(name, array, config)

    write_float32(target, shapes, arrays())


def _hf_name(name: str, path: Path) -> str:
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    raise CheckpointError(f"{path}: tensor {name!r} is not part of the supported architectures")


def _unpermuted(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """llama.cpp stores Llama's q and k rows in interleaved rotary order; Hugging Face's order is halves (Qwen's already is)."""
    if config["model_type"] != "llama" or (".q_proj." not in name and ".k_proj." not in name):
        return array
    heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def main(arguments: list[str]) -> int:
    """`python -m runtime.torch_tp.gguf_file FILE.gguf EMPTY_DIRECTORY PARENT`; 2 and one line on stderr for what cannot be read."""
    die_with_parent(int(arguments[2]))
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

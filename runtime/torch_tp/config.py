"""What a checkpoint's `config.json` (or GGUF metadata) says about a model, checked and in one form for all families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.domain.specs import ModelSpec
from envs.domain.suggestions import unknown_name


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line: what came, what was expected, what to do."""


FAMILIES: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3")
"""Supported `model_type`s. Mistral only without a sliding window, in which case it is a Llama."""

ROPE_KINDS: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary embedding: base `theta` and how it is stretched; fields beyond `factor` only matter to the kinds that read them.

    `original_tokens` is the context the model was trained with before stretching.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_tokens: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    frequency_divisors: tuple[float, ...] = ()
    """Per pair of numbers, on top of `kind`; GGUF files carry Llama 3.1's scaling this way."""

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise CheckpointError(unknown_name("rope scaling", self.kind, ROPE_KINDS))
        if self.theta <= 0 or self.factor < 1:
            raise CheckpointError(f"rope theta={self.theta} must be positive and factor={self.factor} at least 1")
        if self.kind != "default" and self.kind != "linear" and self.original_tokens < 1:
            raise CheckpointError(f"rope scaling {self.kind!r} needs original_max_position_embeddings, got {self.original_tokens}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder of the Llama and Qwen families. Widths in numbers, `head_dim` numbers per head."""

    name: str
    family: str
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int
    rms_eps: float
    rope: RopeSettings
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    context_tokens: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        self.to_spec()  # positive sizes, heads that divide
        if self.head_dim % 2:
            raise CheckpointError(f"{self.name}: head_dim={self.head_dim} is odd; rotary embedding needs pairs")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    def to_spec(self, dtype: str = "fp32") -> ModelSpec:
        """The planner's view; `dtype` (of weights and KV) is a name of `envs.domain.specs.NUMBER_BYTES`."""
        try:
            return ModelSpec(
                self.name,
                self.layers,
                self.hidden,
                self.query_heads,
                self.kv_heads,
                self.head_dim,
                self.mlp_width,
                self.vocabulary,
                weight_dtype=dtype,
                kv_dtype=dtype,
                tied_embeddings=self.tied,
                context_tokens=self.context_tokens,
            )
        except ValueError as error:
            raise CheckpointError(str(error)) from error


def read_config(folder: Path) -> ModelConfig:
    """`config.json` (and `generation_config.json`, for further end tokens) of a Hugging Face directory."""
    content = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return config_of(content, str(content.get("model_name", folder.name)), read_json(generation) if generation.exists() else {})


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; give a Hugging Face model directory or a .gguf file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def config_of(content: dict[str, Any], name: str, generation: dict[str, Any] | None = None) -> ModelConfig:
    """The config of one of the known families; anything that would change the arithmetic and is not supported is refused."""
    reader = _Reader(content, name)
    family = content.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"{name}: " + unknown_name("model_type", str(family), FAMILIES))
    _refuse_unsupported(content, name, family)
    query_heads = reader.whole("num_attention_heads")
    hidden = reader.whole("hidden_size")
    # Llama's `attention_bias` also puts one on the output projection; Qwen2 always has QKV biases and none there; Qwen3 follows the flag
    attention_bias = bool(content.get("attention_bias", False))
    ids = (generation or {}).get("eos_token_id", content.get("eos_token_id"))
    return ModelConfig(
        name=name,
        family=family,
        hidden=hidden,
        layers=reader.whole("num_hidden_layers"),
        query_heads=query_heads,
        kv_heads=reader.whole("num_key_value_heads", query_heads),
        head_dim=reader.whole("head_dim", hidden // query_heads if query_heads else None),
        mlp_width=reader.whole("intermediate_size"),
        vocabulary=reader.whole("vocab_size"),
        rms_eps=reader.number("rms_norm_eps", 1e-6),
        rope=_rope(content, name),
        tied=bool(content.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(content.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        context_tokens=reader.whole("max_position_embeddings", 2048),
        eos_ids=tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),),
        bos_id=content.get("bos_token_id"),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    content: dict[str, Any]
    name: str

    def whole(self, field: str, default: int | None = None) -> int:
        value = self.content.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.name}: {field}={value!r} in config.json must be a whole number of at least 1")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.content.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self.name}: {field}={value!r} in config.json must be a positive number")
        return float(value)


def _refuse_unsupported(content: dict[str, Any], name: str, family: str) -> None:
    if content.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{name}: hidden_act={content['hidden_act']!r} is not supported; known: silu")
    if content.get("quantization_config"):
        raise CheckpointError(f"{name}: quantised safetensors are not supported; use the unquantised model or a .gguf file")
    window, layers = content.get("sliding_window"), set(content.get("layer_types") or ())
    uses_window = family == "mistral" or content.get("use_sliding_window", False)
    if (window and uses_window) or layers - {"full_attention"}:
        raise CheckpointError(f"{name}: sliding-window attention (sliding_window={window}) is not supported; only full attention is")


def _rope(content: dict[str, Any], name: str) -> RopeSettings:
    """`rope_parameters` of newer files, else `rope_theta` and `rope_scaling` of older ones."""
    stated = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(stated, dict):
        raise CheckpointError(f"{name}: rope_scaling={stated!r} in config.json must be an object")
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = float(stated.get("rope_theta", content.get("rope_theta", 10000.0)))
    context = int(content.get("max_position_embeddings", 2048))
    original = stated.get("original_max_position_embeddings", content.get("original_max_position_embeddings", context))
    if stated.get("partial_rotary_factor", content.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{name}: partial rotary embedding is not supported")
    optional = {
        field: float(stated[field])
        for field in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor")
        if stated.get(field) is not None
    }
    factor = float(stated.get("factor") or 1.0)
    return RopeSettings(
        theta,
        kind,
        factor,
        int(original or context),
        truncate=bool(stated.get("truncate", True)),
        frequency_divisors=tuple(stated.get("frequency_divisors", ())),
        **optional,
    )

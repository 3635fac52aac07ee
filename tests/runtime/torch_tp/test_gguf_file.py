"""GGUF files: every quantisation by its published layout, and whole models against transformers with the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_ranks import Ranks
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType
from gguf.quants import quantize
from small_models import oracle_logits, random_ids, small_model

from envs.decision.layer_cuts import layer_plans
from runtime.torch_tp.checkpoint import CheckpointError, open_checkpoint
from runtime.torch_tp.gguf_file import LAYER_TENSORS, MODEL_TENSORS

DIMS = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BALLAST_CACHE", str(tmp_path / "cache"))


# --- what the bytes mean, written out from the layouts in ggml-common.h ----------------------------------------------------------


def halves_of(block: np.ndarray, *offsets: int) -> list[float]:
    return [float(block[offset : offset + 2].view(np.float16)[0]) for offset in offsets]


def decoded(kind: Kind, block: np.ndarray) -> list[float]:
    """Weights of one block, number by number."""
    if kind == Kind.Q8_0:
        (scale,) = halves_of(block, 0)
        return [scale * int(value) for value in block[2:].view(np.int8)]
    if kind == Kind.Q4_0:
        (scale,) = halves_of(block, 0)
        return [scale * (int(byte) & 15) - 8 * scale for byte in block[2:]] + [scale * (int(byte) >> 4) - 8 * scale for byte in block[2:]]
    if kind == Kind.Q4_1:
        scale, least = halves_of(block, 0, 2)
        return [scale * (int(byte) & 15) + least for byte in block[4:]] + [scale * (int(byte) >> 4) + least for byte in block[4:]]
    assert kind == Kind.Q4_K  # 8 runs of 32, each with a 6-bit scale and minimum packed in 12 bytes
    scale, least = halves_of(block, 0, 2)
    packed, codes = [int(byte) for byte in block[4:16]], [int(byte) for byte in block[16:]]
    out: list[float] = []
    for run in range(8):
        if run < 4:
            six, minimum = packed[run] & 63, packed[run + 4] & 63
        else:
            six = (packed[run + 4] & 15) | ((packed[run - 4] >> 6) << 4)
            minimum = (packed[run + 4] >> 4) | ((packed[run] >> 6) << 4)
        part = codes[32 * (run // 2) : 32 * (run // 2) + 32]
        out += [scale * six * ((code >> 4) if run % 2 else (code & 15)) - least * minimum for code in part]
    return out


BLOCKS = {Kind.Q8_0: (32, 34), Kind.Q4_0: (32, 18), Kind.Q4_1: (32, 20), Kind.Q4_K: (256, 144)}


def encoded(kind: Kind, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(raw rows, the float32 numbers they stand for). Q4_K has no encoder in the package: its codes are random, its scales small."""
    if kind in (Kind.F16, Kind.F32):
        stored = weights.astype(np.float16 if kind == Kind.F16 else np.float32)
        return stored, stored.astype(np.float32)
    numbers, size = BLOCKS[kind]
    if kind == Kind.Q4_K:
        rng = np.random.default_rng(int(abs(weights).sum() * 1000) % 2**32)
        raw = rng.integers(0, 256, (weights.shape[0], weights.shape[1] // numbers * size), dtype=np.uint8)
        for start in range(0, raw.shape[1], size):
            raw[:, start : start + 4] = np.array([3e-4, 2e-3], dtype=np.float16).view(np.uint8)
    else:
        raw = quantize(weights, kind)
    rows = [[number for block in row.reshape(-1, size) for number in decoded(kind, block)] for row in raw]
    return raw, np.array(rows, dtype=np.float32)


def write_gguf(path: Path, model, kind: Kind, *, metadata=lambda writer: None, leave_out: str = "", rope_divisors=None):
    """A GGUF file of a transformers model, as llama.cpp's converter lays it out; the model's own weights become what was written."""
    config, family = model.config, model.config.model_type
    writer = GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
    metadata(writer)
    names = {name: hf for name, hf in MODEL_TENSORS.items()}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in LAYER_TENSORS.items():
            for part in ("weight", "bias"):
                names[f"blk.{layer}.{ours}.{part}"] = f"model.layers.{layer}.{theirs}.{part}"
    parameters = dict(model.named_parameters())
    for name, hf in names.items():
        if hf not in parameters or name == leave_out:
            continue
        weights = parameters[hf].detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(hf.split(".")[-2])
        is_permuted = family == "llama" and heads is not None
        if is_permuted:  # convert_hf_to_gguf.py, LlamaModel.permute
            weights = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
        own_kind = kind if weights.ndim == 2 else Kind.F32
        raw, numbers = encoded(own_kind, np.ascontiguousarray(weights))
        writer.add_tensor(name, raw, raw_dtype=own_kind)
        if is_permuted:
            numbers = numbers.reshape(heads, numbers.shape[0] // heads // 2, 2, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
        parameters[hf].data = torch.from_numpy(np.ascontiguousarray(numbers))
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", Kind.Q8_0),
        ("llama", Kind.Q4_1),
        ("llama", Kind.Q4_K),
        ("llama", Kind.F16),
        ("llama", Kind.F32),
        ("qwen2", Kind.Q4_0),
        ("qwen3", Kind.Q8_0),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_model_from_gguf_equals_transformers(family, kind, tmp_path):
    """Every tensor equals the numbers of the layout to the last bit but one, and two unlike ranks give transformers' logits."""
    model = small_model(family, **DIMS, **({"head_dim": 32} if family == "qwen3" else {}))
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, kind))
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(checkpoint.tensor(name).numpy(), parameter.detach().numpy(), rtol=3e-7, atol=1e-7)
    ids = random_ids(9, 64)
    ranks = Ranks(checkpoint, 2)
    ranks.use_plan(layer_plans(checkpoint.config.to_spec(), [3.0, 5.0], mlp_block=32, version=1))
    ranks.allocate(0, 1, 16)
    torch.testing.assert_close(ranks.logits_of(0, 1, ids, [6, 1]), oracle_logits(model, ids), atol=1e-4, rtol=0)


def test_tied_embedding_and_divided_frequencies(tmp_path):
    """No output matrix means tied. Llama 3.1's stretched frequencies come as divisors: the same text as its own rope settings give."""
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = small_model("llama", **DIMS, tie_word_embeddings=True, rope_parameters=scaling | {"original_max_position_embeddings": 32})
    plain = small_model("llama", **DIMS)
    divisors = (plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 2
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, Kind.F32, rope_divisors=divisors))
    assert checkpoint.config.tied
    ids = random_ids(20, 64)
    ranks = Ranks(checkpoint, 1)
    ranks.use_plan(layer_plans(checkpoint.config.to_spec(), [1.0], mlp_block=32, version=1))
    ranks.allocate(0, 1, 32)
    torch.testing.assert_close(ranks.logits_of(0, 1, ids, []), oracle_logits(model, ids), atol=1e-4, rtol=0)


def test_conversion_happens_once(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", small_model("llama", **DIMS), Kind.Q8_0)
    first = open_checkpoint(path)
    stamp = (first.path / "model.safetensors").stat().st_mtime_ns
    assert open_checkpoint(path).path == first.path
    assert (first.path / "model.safetensors").stat().st_mtime_ns == stamp
    assert first.config.name == "model"


def _architecture(path: Path) -> None:
    writer = GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _scaled(path: Path) -> None:
    write_gguf(path, small_model("llama", **DIMS), Kind.F16, metadata=lambda w: w.add_string("llama.rope.scaling.type", "longrope"))


BAD = {
    "text": (lambda path: path.write_bytes(b"hello world, this is no model"), "not a readable GGUF file"),
    "empty": (lambda path: path.write_bytes(b""), "not a readable GGUF file"),
    "cut short": (
        lambda path: (write_gguf(path, small_model("llama", **DIMS), Kind.F16), path.write_bytes(path.read_bytes()[:20_000])),
        "not a readable GGUF file",
    ),
    "architecture": (_architecture, "architecture 'mamba' is not supported; known: llama, qwen2, qwen3"),
    "tensor missing": (
        lambda path: write_gguf(path, small_model("llama", **DIMS), Kind.F16, leave_out="blk.1.ffn_up.weight"),
        "'model.layers.1.mlp.up_proj.weight' is missing",
    ),
    "rope scaling": (_scaled, "rope scaling 'longrope' is not supported"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gets_one_clear_line(tmp_path, case):
    spoil, said = BAD[case]
    path = tmp_path / "model.gguf"
    spoil(path)
    with pytest.raises(CheckpointError, match=said) as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_is_not_supported_does_not_hide_the_weights(tmp_path, caplog):
    def metadata(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(["a", "b"])
        writer.add_token_types([TokenType.NORMAL, TokenType.NORMAL])

    path = write_gguf(tmp_path / "model.gguf", small_model("llama", **DIMS), Kind.F16, metadata=metadata)
    assert open_checkpoint(path).config.layers == 2
    assert "no tokenizer" in caplog.text and "rwkv" in caplog.text

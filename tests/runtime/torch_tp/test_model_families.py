"""Logits of every supported family and option against transformers, float32, on small random models."""

from __future__ import annotations

import pytest
import torch
from fake_ranks import Ranks
from small_models import DEFAULTS, loaded, oracle_logits, random_ids, small_model, written

from envs.decision.layer_cuts import layer_plans
from runtime.torch_tp.checkpoint import open_checkpoint
from runtime.torch_tp.model import Slice

TOLERANCE = 1e-4
"""The bar of the project; float32 sums in another order differ by about 1e-5 here."""

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many KV heads": ("llama", {"num_key_value_heads": 6}),
    "llama, head_dim of its own": ("llama", {"head_dim": 12}),
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "llama yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.2,
            }
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, attention bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, tmp_path):
    """Alone and over three unlike ranks, in one piece (torch) and token by token (kernels)."""
    family, settings = VARIANTS[variant]
    model = small_model(family, **settings)
    checkpoint = open_checkpoint(written(model, tmp_path))
    ids = random_ids(40, DEFAULTS["vocab_size"])
    expected = oracle_logits(model, ids)
    assert expected.std() > 0.3  # a model that says nothing would agree with anything
    for version, shares in enumerate(([1.0], [3.0, 0.0, 2.0]), start=1):
        ranks = Ranks(checkpoint, len(shares))
        ranks.use_plan(layer_plans(checkpoint.config.to_spec(), shares, mlp_block=4, version=version))
        for slot, chunks in enumerate(([], [1, 1, 20, *[1] * 12])):
            ranks.allocate(slot, version, 64)
            got = ranks.logits_of(slot, version, ids, chunks)
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_dynamic_rope_stretches_as_transformers_does(tmp_path):
    """Past the trained length the base grows with the length reached: the whole prompt at once, then token by token."""
    settings = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}, "max_position_embeddings": 16}
    model = small_model("llama", **settings)
    checkpoint = open_checkpoint(written(model, tmp_path))
    for count in (12, 30):
        ids = random_ids(count, DEFAULTS["vocab_size"])
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([ids]), max_new_tokens=10, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        ranks = Ranks(checkpoint, 1)
        ranks.use_plan(layer_plans(checkpoint.config.to_spec(), [1.0], mlp_block=4, version=1))
        ranks.allocate(0, 1, 64)
        piece, start = ids, 0
        for logits, token in zip(expected.logits, expected.sequences[0, count:].tolist(), strict=True):
            got = ranks.forward([Slice(0, 1, piece, start)])
            torch.testing.assert_close(got, logits, atol=TOLERANCE, rtol=0)
            piece, start = [token], start + len(piece)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_computed_with_in_float32(dtype, tmp_path):
    """transformers, told to compute in float32, is the oracle; the float32 copy is written once and found again."""
    folder = written(small_model("llama").to(dtype), tmp_path / "model")
    model = loaded(folder)
    ids = random_ids(20, DEFAULTS["vocab_size"])
    for _ in range(2):
        checkpoint = open_checkpoint(folder)
        ranks = Ranks(checkpoint, 2)
        ranks.use_plan(layer_plans(checkpoint.config.to_spec(), [1.0, 2.0], mlp_block=4, version=1))
        ranks.allocate(0, 1, 32)
        torch.testing.assert_close(ranks.logits_of(0, 1, ids, [5, 1]), oracle_logits(model, ids), atol=TOLERANCE, rtol=0)
        assert all(part.loaded_bytes == 0 for part in ranks.models)


def test_sharded_checkpoint_equals_whole(tmp_path):
    model = small_model("llama", tie_word_embeddings=True)
    folder = written(model, tmp_path, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids = random_ids(10, DEFAULTS["vocab_size"])
    ranks = Ranks(open_checkpoint(folder), 2)
    ranks.use_plan(layer_plans(ranks.models[0].config.to_spec(), [1.0, 1.0], mlp_block=4, version=1))
    ranks.allocate(0, 1, 32)
    torch.testing.assert_close(ranks.logits_of(0, 1, ids, []), oracle_logits(model, ids), atol=TOLERANCE, rtol=0)


def test_half_precision_on_a_cpu_is_torch_throughout(tmp_path):
    """bfloat16 asked for: no kernel and no float32 copy; as near to the float32 model as transformers' own bfloat16 is."""
    folder = written(small_model("qwen3", head_dim=16).to(torch.bfloat16), tmp_path)
    checkpoint, exact = open_checkpoint(folder), loaded(folder)
    ids = random_ids(20, DEFAULTS["vocab_size"])
    expected = oracle_logits(exact, ids)
    own_error = (oracle_logits(loaded(folder, torch.bfloat16), ids).float() - expected).abs().max()
    ranks = Ranks(checkpoint, 2, dtype=torch.bfloat16)
    ranks.use_plan(layer_plans(checkpoint.config.to_spec(), [1.0, 2.0], mlp_block=4, version=1))
    ranks.allocate(0, 1, 32)
    got = ranks.logits_of(0, 1, ids, [11, 1, 1])
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 3 * own_error

"""Small random models, written by transformers so that every file is what a real one looks like, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def small_model(family: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Random weights large enough that attention is far from uniform, and random norms and biases, so that leaving one out shows."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(DEFAULTS | settings))).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def written(model: PreTrainedModel, folder: Path, **how: Any) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """(tokens, vocabulary) of one sequence in one go."""
    return model(torch.tensor([ids])).logits[0]


def random_ids(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

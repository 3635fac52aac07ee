"""Rotary position embedding: the cosines and signed sines of every position, stretched as the checkpoint asks."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from runtime.torch_tp.config import ModelConfig, RopeSettings


class RopeTable:
    """Rows of (cos, signed sin) by position, made once for `tokens` positions.

    The sine carries the sign of the half-split rotation, so that rotating is x * cos + roll(x, head_dim / 2) * sin.
    "dynamic" scaling depends on the length a sequence has reached: past the trained length each step gets rows made for its own
    length, as transformers does, so such text depends on the chunks it was prefilled in.
    """

    def __init__(self, config: ModelConfig, tokens: int, device: torch.device) -> None:
        self._rope, self._dim, self._device = config.rope, config.head_dim, device
        self.tokens = min(tokens, config.rope.original_tokens) if config.rope.kind == "dynamic" else tokens
        self.cos, self.sin = self._rows(torch.arange(self.tokens), None)

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions [start, end) for a sequence that is `end` long; float32, each (end - start, head_dim)."""
        if end <= self.tokens:
            return self.cos[start:end], self.sin[start:end]
        return self._rows(torch.arange(start, end), end)

    def _rows(self, positions: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        frequencies, scale = inverse_frequencies(self._rope, self._dim, length)
        angles = torch.outer(positions.float(), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        both = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)
        return both[0].to(self._device), both[1].to(self._device)


@lru_cache(maxsize=4)
def rope_table(config: ModelConfig, tokens: int, device: torch.device) -> RopeTable:
    """Shared by all models of a process that ask alike."""
    return RopeTable(config, tokens, device)


def inverse_frequencies(rope: RopeSettings, dim: int, length: int | None = None) -> tuple[Tensor, float]:
    """Radians per position, float32 of shape (dim / 2,), and the factor on cosines and sines.

    length: tokens of the sequence, read by "dynamic" only. Source: transformers 5 `modeling_rope_utils`; YaRN is arXiv 2309.00071.
    """
    theta = rope.theta
    if rope.kind == "dynamic" and length is not None and length > rope.original_tokens:
        theta *= (rope.factor * length / rope.original_tokens - (rope.factor - 1)) ** (dim / (dim - 2))
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if rope.frequency_divisors:
        plain = plain / torch.tensor(rope.frequency_divisors)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(rope: RopeSettings, plain: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    is_long = wavelength > rope.original_tokens / rope.low_freq_factor
    is_short = wavelength < rope.original_tokens / rope.high_freq_factor
    blend = (rope.original_tokens / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    slowed = torch.where(is_long, plain / rope.factor, plain)
    return torch.where(is_long | is_short, slowed, (1 - blend) * slowed / rope.factor + blend * slowed)


def _yarn(rope: RopeSettings, plain: Tensor, dim: int) -> Tensor:
    def turning_dim(rotations: float) -> float:
        return dim * math.log(rope.original_tokens / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turning_dim(rope.beta_fast), turning_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001), 0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_attention_factor(rope: RopeSettings) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    return scale(rope.mscale) / scale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else scale(1.0)

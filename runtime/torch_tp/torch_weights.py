"""Matrices as torch tensors, by range: views of the mapped file on a CPU, copies of what a rank needs on a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.torch_tp.checkpoint import Checkpoint
from runtime.torch_tp.shares import Interval, RankShare


@dataclass(frozen=True, slots=True)
class AttentionMatrices:
    """One layer's matrices for one range of heads. `front`: queries missing before the first KV head's group is full."""

    projections: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    output: Tensor
    heads: int
    kv_heads: int
    front: int


@dataclass(frozen=True, slots=True)
class MlpMatrices:
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None


class TorchWeights:
    """What steps multiply with. Matrices of a range are made once (`prepare`) and kept while a live plan uses them.

    On a device each tensor of the file has one resident range: a range inside it is a view, and one beyond it is met by reading
    the missing part only. `loaded_bytes` counts what was read to the device: a slide inside what is resident adds nothing.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._device, self._dtype = device, dtype
        self._is_mapped = device.type == "cpu" and checkpoint.is_float32 and dtype == torch.float32
        self.loaded_bytes = 0
        self._resident: dict[str, tuple[Interval, Tensor]] = {}
        self._attention: dict[tuple[int, Interval, Interval], AttentionMatrices] = {}
        self._mlp: dict[tuple[int, Interval], MlpMatrices] = {}
        prefixes = [f"model.layers.{layer}." for layer in range(self._config.layers)]
        self.input_norms = [self._whole(prefix + "input_layernorm.weight") for prefix in prefixes]
        self.post_norms = [self._whole(prefix + "post_attention_layernorm.weight") for prefix in prefixes]
        self.head_norms = [
            [self._whole(f"{prefix}self_attn.{part}_norm.weight") for part in "qk"] if self._config.qk_norm else [] for prefix in prefixes
        ]
        self.last_norm = self._whole("model.norm.weight")
        # added to the sum of all ranks, once
        self.output_biases = [self._whole(prefix + "self_attn.o_proj.bias") if self._config.output_bias else None for prefix in prefixes]
        self.down_biases = [self._whole(prefix + "mlp.down_proj.bias") if self._config.mlp_bias else None for prefix in prefixes]

    def prepare(self, share: RankShare) -> None:
        """Have everything of a share on the device, so that no step waits for it. On a CPU views are made when first used."""
        if self._is_mapped:
            return
        for layer in range(self._config.layers):
            self.attention(layer, share)
            self.mlp(layer, share.mlp[layer])
        self.head(share.vocabulary)

    def keep_only(self, shares: Iterable[RankShare]) -> None:
        """Forget ranges that no live plan uses. What is resident on a device stays, for a slide back."""
        shares = list(shares)
        attention = {(layer, heads, share.kv[layer]) for share in shares for layer, heads in enumerate(share.query)}
        mlp = {(layer, columns) for share in shares for layer, columns in enumerate(share.mlp)}
        self._attention = {key: value for key, value in self._attention.items() if key in attention}
        self._mlp = {key: value for key, value in self._mlp.items() if key in mlp}

    def head(self, vocabulary: Interval) -> Tensor:
        """(own vocabulary rows, hidden)."""
        return self._range("output head", self._checkpoint.output_head, 0, vocabulary)

    def attention(self, layer: int, share: RankShare) -> AttentionMatrices:
        heads, kv = share.query[layer], share.kv[layer]
        found = self._attention.get((layer, heads, kv))
        if found is None:
            found = self._attention[layer, heads, kv] = self._make_attention(layer, heads, kv)
        return found

    def mlp(self, layer: int, columns: Interval) -> MlpMatrices:
        found = self._mlp.get((layer, columns))
        if found is None:
            prefix, has_bias = f"model.layers.{layer}.mlp.", self._config.mlp_bias
            gate, up = (self._rows(f"{prefix}{part}_proj.weight", columns) for part in ("gate", "up"))
            biases = [self._rows(f"{prefix}{part}_proj.bias", columns) if has_bias else None for part in ("gate", "up")]
            down = self._columns(f"{prefix}down_proj.weight", columns)
            found = self._mlp[layer, columns] = MlpMatrices(gate, up, down, *biases)
        return found

    def _make_attention(self, layer: int, heads: Interval, kv: Interval) -> AttentionMatrices:
        prefix, dim = f"model.layers.{layer}.self_attn.", self._config.head_dim
        ranges = [("q", heads.scaled(dim)), ("k", kv.scaled(dim)), ("v", kv.scaled(dim))]
        query, key, value = (self._rows(f"{prefix}{part}_proj.weight", rows) for part, rows in ranges)
        biases = [self._rows(f"{prefix}{part}_proj.bias", rows) if self._config.qkv_bias else None for part, rows in ranges]
        output = self._columns(f"{prefix}o_proj.weight", ranges[0][1])
        front = heads.start - kv.start * self._config.group if heads.width else 0
        return AttentionMatrices((query, key, value), (biases[0], biases[1], biases[2]), output, heads.width, kv.width, front)

    def _whole(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name).to(device=self._device, dtype=self._dtype)

    def _rows(self, name: str, rows: Interval) -> Tensor:
        return self._range(name, self._checkpoint.tensor(name), 0, rows)

    def _columns(self, name: str, columns: Interval) -> Tensor:
        return self._range(name, self._checkpoint.tensor(name), 1, columns)

    def _range(self, name: str, source: Tensor, axis: int, wanted: Interval) -> Tensor:
        """`source` narrowed to `wanted` along `axis`."""
        if self._is_mapped:
            return source.narrow(axis, wanted.start, wanted.width)
        held, tensor = self._resident.get(name, (Interval(wanted.start, wanted.start), None))
        if tensor is None or not held.covers(wanted):
            hull = Interval(min(held.start, wanted.start), max(held.end, wanted.end)) if held.width else wanted
            pieces = [self._read(source, axis, hull.start, held.start), tensor, self._read(source, axis, held.end, hull.end)]
            tensor = torch.cat([piece for piece in pieces if piece is not None], dim=axis)
            held, _ = self._resident[name] = hull, tensor
        return tensor.narrow(axis, wanted.start - held.start, wanted.width)

    def _read(self, source: Tensor, axis: int, start: int, end: int) -> Tensor:
        piece = source.narrow(axis, start, max(0, end - start)).to(device=self._device, dtype=self._dtype)
        self.loaded_bytes += piece.nbytes
        return piece

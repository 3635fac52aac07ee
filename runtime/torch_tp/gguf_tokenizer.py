"""The tokenizer that a GGUF file's metadata describes, as `tokenizer.json` and `tokenizer_config.json` content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from envs.domain.suggestions import unknown_name
from runtime.torch_tp.config import CheckpointError

CONTROL, USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type` values: never part of text; matched whole in text."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"\p{N}" + _REST
SPLITS: dict[str, str] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": "digits",
    "gpt-2": "gpt2",
    "default": "gpt2",
}
"""`tokenizer.ggml.pre` → how text is cut before merging, as llama.cpp's table of pre-tokenizers has it."""


def gguf_tokenizer(fields: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """(tokenizer, tokenizer_config.json content). Raises CheckpointError for a kind that is not supported."""
    kind, tokens = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.tokens")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders or not tokens:
        raise CheckpointError("GGUF " + unknown_name("tokenizer", str(kind), tuple(builders)))
    tokenizer = builders[kind](fields, tokens)
    types = fields.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    added = [(token, t) for token, t in zip(tokens, types, strict=True) if t in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, t in added if t == CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, t in added if t == USER_DEFINED])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": fields.get("tokenizer.chat_template")}
    for name in ("bos", "eos", "unknown"):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None and 0 <= index < len(tokens):
            config["unk_token" if name == "unknown" else f"{name}_token"] = tokens[index]
    # older files say nothing; llama.cpp then adds the start token to a sentencepiece vocabulary only
    if fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and "bos_token" in config:
        bos = config["bos_token"]
        tokenizer.post_processor = _with_start(bos, tokens.index(bos), is_byte_level=kind == "gpt2")
    return tokenizer, config


def _with_start(bos: str, index: int, is_byte_level: bool) -> processors.PostProcessor:
    start = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, index)])
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), start]) if is_byte_level else start


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """GPT-2 style: text as bytes, each spelled by a printable letter."""
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise CheckpointError("GGUF " + unknown_name("pre-tokenizer", str(pre), tuple(SPLITS)))
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges") or ()]
    split = SPLITS[pre]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=split == _LLAMA3))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt2", "digits"))
    if split == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif split == "gpt2":
        tokenizer.pre_tokenizer = plain
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"), plain])
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Llama 2 style: spaces as "▁", unknown text as bytes, merges implied by the pieces' scores."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = fields.get("tokenizer.ggml.scores") or [-float(index) for index in range(len(tokens))]
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(BPE(vocabulary, implied_merges(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    tail = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        tail.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(tail)
    return tokenizer


def implied_merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every cut of a piece into two pieces, best score first: what sentencepiece's BPE would have merged."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(found)]

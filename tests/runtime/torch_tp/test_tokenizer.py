"""Text to ids and back: the tokenizer of a directory, of GGUF metadata, and text given out piece by piece."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import Regex as TokenizersRegex
from tokenizers.models import BPE

from runtime.torch_tp.config import CheckpointError
from runtime.torch_tp.gguf_tokenizer import SPLITS, gguf_tokenizer
from runtime.torch_tp.tokenizer import CONTEXT_TOKENS_MAX, load_tokenizer
from runtime.torch_tp.tokenizer import Tokenizer as OurTokenizer

TEXTS = (
    "Gravity is a fundamental concept in physics.",
    "  two  spaces, a tab\tand\n\nnew lines ",
    "It's 1984 or 2024: we'll see 3.14159",
    "ünïcödé 你好世界 Ελληνικά русский عربى",
    "🎉👨‍👩‍👧 \u200d ﬁ é e\u0301",
    "def f(x):\n    return x**2  # done",
    "",
)


def trained_byte_level(pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level BPE of a few hundred merges, made by the tokenizers package itself."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rng = random.Random(5)
    tokenizer.train_from_iterator([" ".join(rng.sample(TEXTS, 3)) for _ in range(200)], trainer)
    return tokenizer


def fields_of(tokenizer: Tokenizer, **fields: object) -> dict[str, object]:
    """GGUF metadata of a byte-level tokenizer, as llama.cpp's converter writes it."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **fields,
    }


PRE_TOKENIZERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                TokenizersRegex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_metadata_gives_the_same_ids(pre):
    """The tokenizer that was trained and the one rebuilt from its metadata agree on every text; text comes back whole."""
    original = trained_byte_level(PRE_TOKENIZERS[pre])
    rebuilt, settings_ = gguf_tokenizer(fields_of(original, **{"tokenizer.ggml.pre": pre}))
    assert settings_["bos_token"] == "<s>" and settings_["eos_token"] == "</s>"
    for text in TEXTS:
        if pre == "qwen2" and "\u0301" in text:
            continue  # Qwen normalises to composed letters, which the trained tokenizer here does not
        assert rebuilt.encode(text).ids == original.encode(text).ids, text
        assert rebuilt.decode(rebuilt.encode(text).ids) == text
    assert rebuilt.encode("a</s>b").ids[1] == 1  # control tokens are matched whole


def test_digits_stand_alone_in_smollm_and_in_threes_in_llama3():
    original = trained_byte_level(PRE_TOKENIZERS["gpt-2"])
    for pre, expected in (("smollm", ["2", "0", "2", "4"]), ("llama-bpe", ["202", "4"])):
        rebuilt, _ = gguf_tokenizer(fields_of(original, **{"tokenizer.ggml.pre": pre}))
        assert [piece for piece, _ in rebuilt.pre_tokenizer.pre_tokenize_str("2024")] == expected


def test_start_token_is_added_where_the_file_says_so():
    original = trained_byte_level(PRE_TOKENIZERS["gpt-2"])
    with_start, _ = gguf_tokenizer(fields_of(original, **{"tokenizer.ggml.add_bos_token": True}))
    assert with_start.encode("it").ids[0] == 0
    assert with_start.encode("it", add_special_tokens=False).ids == original.encode("it").ids


def test_sentencepiece_metadata_gives_the_same_ids(aidreams):
    """Merges recovered from scores agree with those the tokenizer.json of the same model states; unknown text falls back to bytes."""
    original = Tokenizer.from_file(str(aidreams / "tokenizer.json"))
    model = json.loads((aidreams / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    ranks = {
        "".join(pair if isinstance(pair, list) else pair.split(" ")): rank for rank, pair in reversed(list(enumerate(model["merges"])))
    }
    rebuilt, _ = gguf_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(ranks.get(token, 1e6)) for token in tokens],
            "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(tokens) - 3)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    for text in ("I sense a gentle hum of probability unfolding.", *TEXTS):
        assert rebuilt.encode(text).ids == original.encode(text, add_special_tokens=False).ids, text
        if not text.startswith(" "):
            assert rebuilt.decode(rebuilt.encode(text).ids) == text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}, 'tokenizer "rwkv" unknown; known: gpt2, llama'),
        ({}, "tokenizer"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "viking"},
            'pre-tokenizer "viking" unknown',
        ),
    ],
)
def test_kinds_that_are_not_supported_are_named(fields, said):
    with pytest.raises(CheckpointError, match=said):
        gguf_tokenizer(fields)


def test_known_splits_are_those_of_the_tests():
    assert {"gpt-2", "smollm", "qwen2", "llama-bpe"} <= set(SPLITS)


# --- directories -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = trained_byte_level(PRE_TOKENIZERS["smollm"])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.enable_truncation(4)  # a file may carry a training setting; a prompt must never be cut in silence
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings_ = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": "{{ eos_token }}"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return folder


def test_directory(byte_level):
    tokenizer = load_tokenizer(byte_level)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.token_id("<|im_end|>") == tokenizer.vocabulary - 1 and tokenizer.token_id("nothing") is None
    ids = [tokenizer.token_id("<s>"), *tokenizer.encode("it"), tokenizer.token_id("<|im_end|>")]
    assert tokenizer.decode(ids) == "it"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>it<|im_end|>"
    assert tokenizer.decode([10**6]) == ""  # a padded vocabulary has rows that no token names


def test_chat_template_of_a_directory(byte_level, tmp_path):
    """From the list of named ones, and from the file of its own, which wins."""
    assert load_tokenizer(byte_level).chat_text([]) == "</s>"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((byte_level / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "it"}])
    assert ids == [*tokenizer.encode("it"), tokenizer.token_id("<|im_end|>")]


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no tokenizer.json"), ("{", "not a readable tokenizer"), ('{"version": "1.0"}', "not a readable tokenizer")],
)
def test_a_bad_tokenizer_gets_one_clear_line(tmp_path, content, said):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=said) as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_smollm2_chat(smollm2):
    """The template and special tokens of the model card; digits one by one; ids of the special tokens as its own vocabulary has them."""
    tokenizer = load_tokenizer(smollm2)
    text = tokenizer.chat_text([{"role": "user", "content": "Is 42 even?"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nIs 42 even?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Is 42 even?"}])
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.decode([index]) for index in tokenizer.encode("42")] == ["4", "2"]


@pytest.fixture(scope="module")
def dreamer(aidreams) -> OurTokenizer:
    return load_tokenizer(aidreams)


# --- streaming -----------------------------------------------------------------------------------------------------------------------


def streamed(tokenizer: OurTokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.stream_decoder()
    return [*(decoder.push(index) for index in ids), decoder.finish()]


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 603), max_size=3 * CONTEXT_TOKENS_MAX))
def test_pieces_are_the_whole_text(byte_level, ids):
    """Any tokens, broken bytes among them: the pieces joined are what decoding all at once gives, and none ends inside a character."""
    tokenizer = load_tokenizer(byte_level)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=80))
def test_pieces_of_byte_fallback_text(dreamer, text):
    """A sentencepiece tokenizer drops the first space of what it decodes; the pieces must not lose a space at every seam."""
    tokenizer = dreamer
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_text_comes_as_soon_as_it_is_certain(byte_level):
    """Plain words wait for nothing; an emoji of four byte tokens comes with its last one."""
    tokenizer = load_tokenizer(byte_level)
    words = tokenizer.encode("Gravity is a concept")
    assert streamed(tokenizer, words)[:-1] == [tokenizer.decode([index]) for index in words]
    alone = [tokenizer.token_id(letter) for letter in "ðŁĲ¢"]  # the four bytes of a turtle
    assert streamed(tokenizer, alone) == ["", "", "", "🐢", ""]
    assert streamed(tokenizer, alone[:3]) == ["", "", "", "\ufffd"]

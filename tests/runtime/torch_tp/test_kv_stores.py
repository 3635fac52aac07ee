"""Slots and pages behind one interface: the same calls, the same keys back, the same refusals, and attention as written out in full."""

from __future__ import annotations

import os
import threading
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.torch_tp import kv_slots
from runtime.torch_tp.communicators.segment_names import segment_name
from runtime.torch_tp.config import config_of
from runtime.torch_tp.kv_carrier import KvCarrier
from runtime.torch_tp.kv_file import KvFile
from runtime.torch_tp.kv_pages import PAGE_TOKENS, PagedKv
from runtime.torch_tp.kv_slots import SlotKv
from runtime.torch_tp.kv_store import KvFull, Span
from runtime.torch_tp.orders import CarryOrder
from runtime.torch_tp.shares import Interval

CONFIG = config_of(
    {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "intermediate_size": 8,
        "vocab_size": 8,
    },
    "kv",
)
WIDE, NARROW = (Interval(0, 3), Interval(1, 4)), (Interval(2, 4), Interval(2, 2))
"""KV heads per layer of two plans; the second holds none in layer 1."""


def store(kind: type, tokens_max: int = 200, slots_max: int = 6):
    made = kind(CONFIG, tokens_max=tokens_max, slots_max=slots_max, device=torch.device("cpu"), dtype=torch.float32)
    made.add_plan(1, WIDE)
    made.add_plan(2, NARROW)
    return made


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[SlotKv, PagedKv], ids=["slots", "pages"])
def kv(request):
    return store(request.param)


class WrittenOut:
    """What a store should hold: one number per layer, head and token, in plain dictionaries."""

    def __init__(self) -> None:
        self.slots: dict[int, dict] = {}

    def allocate(self, slot, version, tokens_max):
        heads = {1: WIDE, 2: NARROW}[version]
        self.slots[slot] = {"heads": heads, "max": tokens_max, "length": 0, "values": {}}


@settings(max_examples=30, deadline=None)
@given(data=st.data(), kind=st.sampled_from([SlotKv, PagedKv]))
def test_any_sequence_of_calls(data, kind):
    """Random allocate, import, export, copy, truncate, grow, move, release; every export equals the written-out twin."""
    kv, twin, seeds = store(kind), WrittenOut(), count()
    for _ in range(data.draw(st.integers(1, 25), label="calls")):
        free, used = sorted(set(range(5)) - set(twin.slots)), sorted(twin.slots)
        calls = ["allocate"] * bool(free) + ["import", "copy", "truncate", "grow", "move", "release", "export"] * bool(used)
        call = data.draw(st.sampled_from(calls))
        slot = data.draw(st.sampled_from(free if call == "allocate" else used), label="slot")
        if call == "allocate":
            version, tokens_max = data.draw(st.sampled_from([1, 2])), data.draw(st.integers(1, 40))
            if tokens_max > kv.tokens_free:
                with pytest.raises(KvFull):
                    kv.allocate(slot, version, tokens_max)
                continue
            kv.allocate(slot, version, tokens_max)
            twin.allocate(slot, version, tokens_max)
            continue
        state = twin.slots[slot]
        if call == "import":
            start = data.draw(st.integers(0, state["length"]))
            tokens = data.draw(st.integers(0, state["max"] - start))
            for layer, own in enumerate(state["heads"]):
                values = numbers(2, own.width, tokens, CONFIG.head_dim, seed=next(seeds))
                kv.import_(slot, layer, own, start, values)
                for head in range(own.width):
                    for token in range(tokens):
                        state["values"][layer, own.start + head, start + token] = values[:, head, token]
            state["length"] = max(state["length"], start + tokens)
        elif call == "copy":
            source = data.draw(st.sampled_from(used), label="source")
            tokens = data.draw(st.integers(0, min(twin.slots[source]["length"], state["max"])))
            kv.copy_prefix(source, slot, tokens)
            for key, values in list(twin.slots[source]["values"].items()):
                if key[2] < tokens and state["heads"][key[0]].start <= key[1] < state["heads"][key[0]].end:
                    state["values"][key] = values
            for layer, own in enumerate(state["heads"]):  # heads that the source lacks are undefined from here on
                have = twin.slots[source]["heads"][layer]
                for head in range(own.start, own.end):
                    if not have.start <= head < have.end:
                        for token in range(tokens):
                            kv.import_(slot, layer, Interval(head, head + 1), token, torch.zeros(2, 1, 1, CONFIG.head_dim))
                            state["values"][layer, head, token] = torch.zeros(2, CONFIG.head_dim)
            kv.truncate(slot, tokens) if kv.length(slot) > tokens else None
            state["length"] = tokens
        elif call == "truncate":
            state["length"] = data.draw(st.integers(0, state["length"]))
            kv.truncate(slot, state["length"])
        elif call == "grow":
            wanted = data.draw(st.integers(1, 60))
            if wanted - state["max"] > kv.tokens_free:
                with pytest.raises(KvFull):
                    kv.grow(slot, wanted)
            else:
                kv.grow(slot, wanted)
                state["max"] = max(state["max"], wanted)
        elif call == "move":
            target = data.draw(st.integers(0, 4), label="target")
            kv.move(slot, target)
            twin.slots[target] = twin.slots[slot]
            if target != slot:
                del twin.slots[slot]
        elif call == "release":
            kv.release(slot)
            del twin.slots[slot]
        assert kv.tokens_free == 200 - sum(entry["max"] for entry in twin.slots.values())
        for number, entry in twin.slots.items():
            assert kv.length(number) == entry["length"]
            for layer, own in enumerate(entry["heads"]):
                held = kv.export(number, layer, own, 0, entry["length"])
                for head in range(own.width):
                    for token in range(entry["length"]):
                        expected = entry["values"][layer, own.start + head, token]
                        assert torch.equal(held[:, head, token], expected)
    for slot in list(twin.slots):
        kv.release(slot)
    assert kv.tokens_free == 200
    if kind is PagedKv:  # every page came back, once
        kept = store(PagedKv)
        assert sorted(kv._free) == sorted(kept._free)


def test_attention_equals_the_formula(kv):
    """softmax(q k / sqrt(d)) v over what each token may see, head by head in plain loops; chunks and single tokens in one batch."""
    group, dim = CONFIG.group, CONFIG.head_dim
    for slot, held in ((0, 5), (1, PAGE_TOKENS), (2, 0)):
        kv.allocate(slot, 1, 40)
        for layer in range(2):
            kv.import_(slot, layer, WIDE[layer], 0, numbers(2, 3, held, dim, seed=10 * slot + layer))
    spans = (Span(0, 0, 1, 5), Span(1, 1, 3, PAGE_TOKENS), Span(2, 4, 2, 0))
    query, key, value = (numbers(6, 3, group, dim, seed=50), numbers(6, 3, dim, seed=51), numbers(6, 3, dim, seed=52))
    kv.begin(spans)
    for layer in range(2):
        out = torch.empty_like(query)
        kv.attend(layer, spans, query, key, value, out)
        for span in spans:
            old = numbers(2, 3, span.start, dim, seed=10 * span.slot + layer)
            rows = slice(span.row, span.row + span.tokens)
            keys = torch.cat([old[0], key[rows].transpose(0, 1)], dim=1)
            values = torch.cat([old[1], value[rows].transpose(0, 1)], dim=1)
            for token in range(span.tokens):
                for head in range(3):
                    for member in range(group):
                        seen = span.start + token + 1
                        scores = keys[head, :seen] @ query[span.row + token, head, member] / dim**0.5
                        expected = scores.softmax(0) @ values[head, :seen]
                        torch.testing.assert_close(out[span.row + token, head, member], expected, atol=1e-5, rtol=0)
    kv.commit(spans)
    assert [kv.length(slot) for slot in range(3)] == [6, PAGE_TOKENS + 3, 2]
    held = kv.export(2, 1, Interval(2, 4), 0, 2)
    assert torch.equal(held, torch.stack([key[4:, 1:], value[4:, 1:]]).transpose(1, 2))


@pytest.mark.parametrize("start", [0, 1, 200])
def test_blocks_of_attention_equal_torch(start, monkeypatch):
    """A chunk longer than a block, and blocks cut small by the bound on scores, against one masked call in torch."""
    monkeypatch.setattr(kv_slots, "BLOCK_TOKENS", 32)
    query, keys, values = numbers(70, 2, 3, 8), numbers(2, start + 70, 8, seed=1), numbers(2, start + 70, 8, seed=2)
    for scores_max in (2**20, 2000):
        monkeypatch.setattr(kv_slots, "SCORES_MAX", scores_max)
        blocks, whole = torch.empty_like(query), torch.empty_like(query)
        kv_slots.attend_in_blocks(query, keys, values, start, blocks)
        kv_slots.attend_by_torch(query, keys, values, start, whole)
        torch.testing.assert_close(blocks, whole, atol=1e-5, rtol=0)


def test_growth_keeps_what_is_held(kv):
    kv.allocate(0, 1, 5)
    values = numbers(2, 3, 5, CONFIG.head_dim)
    kv.import_(0, 0, WIDE[0], 0, values)
    kv.grow(0, 50)
    kv.grow(0, 10)  # never shrinks
    assert kv.tokens_free == 150
    assert torch.equal(kv.export(0, 0, WIDE[0], 0, 5), values)
    kv.import_(0, 0, WIDE[0], 49, numbers(2, 3, 1, CONFIG.head_dim))
    assert kv.length(0) == 50


def test_room_is_counted_in_tokens_whatever_the_heads(kv):
    """A rank with few heads refuses at the same moment as one with many, or ranks would disagree about who runs."""
    kv.allocate(0, 1, 150)
    with pytest.raises(KvFull, match="50 are free"):
        kv.allocate(1, 2, 51)
    kv.allocate(1, 2, 50)
    assert kv.tokens_free == 0
    kv.release(0)
    kv.release(0)  # a free slot stays free
    for slot in range(2, 7):
        kv.allocate(slot, 2, 1)
    with pytest.raises(KvFull, match="all 6 slots"):
        kv.allocate(9, 2, 1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda kv: kv.allocate(0, 1, 4), "slot 0 is in use"),
        (lambda kv: kv.allocate(1, 7, 4), r"plan version 7 is not live; live: \[1, 2\]"),
        (lambda kv: kv.allocate(1, 1, 0), "at least 1"),
        (lambda kv: kv.length(3), r"slot 3 is not allocated; allocated: \[0\]"),
        (lambda kv: kv.truncate(0, 3), "holds 2 tokens"),
        (lambda kv: kv.export(0, 0, Interval(0, 4), 0, 1), r"holds KV heads \[0, 3\), asked for \[0, 4\)"),
        (lambda kv: kv.export(0, 0, Interval(0, 1), 1, 3), r"holds 2 tokens, asked for \[1, 3\)"),
        (lambda kv: kv.import_(0, 0, Interval(0, 1), 9, torch.zeros(2, 1, 2, 4)), "room for 10 tokens"),
        (lambda kv: kv.copy_prefix(0, 0, 3), "cannot copy 3 tokens"),
        (lambda kv: kv.begin([Span(0, 0, 1, 4)]), "holds 2 tokens"),
        (lambda kv: kv.begin([Span(0, 0, 9, 2)]), "at most 10"),
        (lambda kv: kv.drop_plan(1), r"used by slots \[0\]"),
    ],
)
def test_refusals_say_what_is_wrong(kv, call, said):
    kv.allocate(0, 1, 10)
    kv.import_(0, 0, Interval(0, 0), 0, torch.zeros(2, 0, 2, 4))  # a rank that holds no head still knows the length
    with pytest.raises(ValueError, match=said):
        call(kv)


def test_pages_of_two_plans_share_one_pool():
    """A second plan with more heads makes the pool larger once; one with fewer heads takes nothing."""
    kv = PagedKv(CONFIG, tokens_max=64, slots_max=2, device=torch.device("cpu"), dtype=torch.float32)
    kv.add_plan(1, NARROW)
    pages = (64 // PAGE_TOKENS + 2) * 2
    assert kv.pages_free == pages
    kv.add_plan(2, WIDE)
    assert kv.pages_free == (64 // PAGE_TOKENS + 2) * 6
    kv.add_plan(3, NARROW)
    assert kv.pages_free == (64 // PAGE_TOKENS + 2) * 6
    kv.allocate(0, 2, 33)
    assert kv.pages_free == (64 // PAGE_TOKENS + 2) * 6 - 3 * 6


# --- carried through a file -------------------------------------------------------------------------------------------------


@pytest.fixture()
def file():
    made = KvFile(segment_name(os.getpid(), 1, "kv-test"), CONFIG.layers, CONFIG.kv_heads, 40, CONFIG.head_dim, "float32")
    made.create()
    yield made
    made.remove()


def carry(kv, order, generation_of=lambda slot: 0):
    return KvCarrier(threading.Lock(), generation_of).begin(kv, order)()


@pytest.mark.parametrize("giver", [SlotKv, PagedKv], ids=["from slots", "from pages"])
@pytest.mark.parametrize("taker", [SlotKv, PagedKv], ids=["to slots", "to pages"])
def test_a_slot_goes_through_a_file_in_parts(file, giver, taker):
    """Two ranks of a store write their heads (one of them both have), one of the other reads its own, the rest of them later: what comes
    out is what `export` of the givers says."""
    sides = [store(giver), store(giver)]
    sides[1].add_plan(3, (Interval(2, 4), Interval(0, 2)))
    values = numbers(CONFIG.layers, 2, CONFIG.kv_heads, 37, CONFIG.head_dim)
    for version, kv in ((1, sides[0]), (3, sides[1])):
        kv.allocate(4, version, 40)
        for layer, held in enumerate(kv.heads(4)):
            kv.import_(4, layer, held, 0, values[layer, :, held.start : held.end])
    goal = store(taker)
    goal.allocate(2, 2, 40)
    for start, end in ((0, 20), (20, 37)):
        for kv in sides:
            given = carry(kv, CarryOrder(file, 4, start, end, True, 10.0))
            assert not given.error and given.kv_bytes == sum(own.width for own in kv.heads(4)) * (end - start) * 2 * CONFIG.head_dim * 4
        taken = carry(goal, CarryOrder(file, 2, start, end, False, 10.0))
        assert not taken.error and goal.length(2) == end
    for layer, held in enumerate(NARROW):
        assert torch.equal(goal.export(2, layer, held, 0, 37), values[layer, :, held.start : held.end])


def test_a_carrier_says_what_went_wrong_and_stops(file, kv):
    """A slot given up meanwhile, one that holds less, a deadline, a file that is gone: an error in words, never an exception."""
    kv.allocate(0, 1, 40)
    kv.import_(0, 0, WIDE[0], 0, numbers(2, 3, 30, 4))
    generations = count()
    order = CarryOrder(file, 0, 0, 30, True, 10.0)
    assert "given up" in carry(kv, order, lambda slot: next(generations)).error
    assert "holds 30 tokens" in carry(kv, CarryOrder(file, 0, 0, 31, True, 10.0)).error
    assert "not carried within" in carry(kv, CarryOrder(file, 0, 0, 30, True, 0.0)).error
    assert "not allocated" in carry(kv, CarryOrder(file, 5, 0, 30, False, 10.0)).error
    file.remove()
    assert "No such file" in carry(kv, order).error
    with pytest.raises(ValueError, match="segment_name"):
        KvFile("passwd", 1, 1, 1, 1, "float32")

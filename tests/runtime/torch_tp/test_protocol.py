"""Frames and bodies: what is packed comes back, and what is none of ours is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.domain.plans import LayerPlans, SplitPlan
from runtime.frames import CHECK, FRAME_BYTES_MAX, HEAD, framed
from runtime.torch_tp.orders import Configuration, Failure, Hello, Prepared, PrepareOrder, StepDone, StepOrder, SwitchOrder
from runtime.torch_tp.protocol import (
    FrameReader,
    Kind,
    Message,
    ProtocolError,
    encode,
    tokens_match,
    unpack,
)
from runtime.torch_tp.requests import SamplingSettings, TokenLogprobs
from runtime.torch_tp.slot_records import SlotRecord
from runtime.torch_tp.steps import NewSlot, SliceCommand, SlotGrowth, SlotTokens, StepCommand

PLAN = LayerPlans(3, (SplitPlan((2, 0, 1), (3, 1, 0), (5, 5, 0), mlp_block=4, version=3), SplitPlan((1, 1, 1), (4, 0, 0), (5, 5, 0), 4, 3)))
RECORD = SlotRecord(NewSlot(1, "größe", 3, 64, 2**62, SamplingSettings(temperature=1.0), prompt=(1, 2), logprobs=0), 17)
HELLO = {"protocol_version": 1, "token": "secret", "worker": 2, "pid": 4711, "node": "node-a"}
BODIES = [
    Hello(**HELLO),
    Configuration((0, 2, 5), ((0, 2), (5,)), "auto", "10.0.0.1", 4000, ("a", "b"), 30.0, (PLAN,), True, joined=(5,), slots=(RECORD,)),
    PrepareOrder(PLAN, (1, 2), 3),
    PrepareOrder(None),
    Prepared((1,), 0, 12345, 0.25),
    SwitchOrder(True, (), PLAN),
    StepDone((SlotTokens(0, (1, 2), (TokenLogprobs(-0.5, ((1, -0.5),)),) * 2),), 0.1, 0.0, 0.2, 0.01, (0.05, 0.04, 0.01)),
    StepOrder(StepCommand(9, (SliceCommand(1, "a", 3, (5, 6), 2, True),), new_slots=(RECORD.new,), growths=(SlotGrowth(1, 80),)), True),
    Failure(5, False, "ValueError: x"),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_bodies_come_back_equal(body):
    (message,) = FrameReader().feed(encode(Message(Kind.STEP, 7, 3, 99, body)))
    assert (message.kind, message.epoch, message.plan_version, message.step) == (Kind.STEP, 7, 3, 99)
    assert unpack(type(body), message.body) == body


@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.binary(max_size=200)), max_size=6), st.lists(st.integers(1, 40), max_size=60))
def test_frames_survive_any_cutting(messages, cuts):
    stream = b"".join(encode(Message(kind, 1, 2, 3, body)) for kind, body in messages)
    reader, seen, start = FrameReader(), [], 0
    for cut in [*cuts, len(stream)]:
        seen += [(message.kind, message.body) for message in reader.feed(stream[start : start + cut])]
        start += cut
    assert seen == messages


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(FRAME_BYTES_MAX + 1, (FRAME_BYTES_MAX + 1) ^ CHECK),
        (FRAME_BYTES_MAX - 1).to_bytes(4, "big") + encode(Message(Kind.DIE)),  # would swallow what follows
        b"\x00" + encode(Message(Kind.DIE)),
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 80,
        framed(b"\xc1\xc1\xc1"),  # a byte that msgpack never uses
        framed(b"\x05"),  # a number, no message
        framed(bytes([0x95, 99, 0, 0, 0, 0xC0])),  # kind 99
    ],
    ids=["length", "lone length", "a byte", "http", "bytes", "shape", "kind"],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(data))


@pytest.mark.parametrize(
    "data", [None, 5, [1, "a"], {"protocol_version": 1, "token": "a"}, HELLO | {"worker": "two"}, HELLO | {"node": None}]
)
def test_a_body_of_another_shape_is_refused(data):
    with pytest.raises(ProtocolError, match="Hello"):
        unpack(Hello, data)


def test_an_invariant_of_a_plan_is_checked_on_arrival():
    (message,) = FrameReader().feed(encode(Message(Kind.STEP, body=PLAN)))
    wire = message.body
    wire["layers"][0]["query_heads"] = [-1, 2, 2]
    with pytest.raises(ProtocolError, match="widths >= 0"):
        unpack(LayerPlans, wire)


def test_a_body_too_large_for_a_frame_is_refused_where_it_is_made():
    with pytest.raises(ProtocolError, match="by the communicator"):
        encode(Message(Kind.STEP, body=bytes(FRAME_BYTES_MAX)))


def test_objects_have_no_wire_form():
    with pytest.raises(TypeError, match="no wire form"):
        encode(Message(Kind.STEP, body=object()))


def test_tokens_are_compared_whole():
    assert tokens_match("abc", "abc")
    assert not tokens_match("abc", "abcd") and not tokens_match("", "abc")

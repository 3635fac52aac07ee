"""When half batches are tried."""

from __future__ import annotations

from runtime.torch_tp.link_cost import LinkCost
from runtime.torch_tp.overlap import pays_in_halves
from runtime.torch_tp.steps import SliceCommand, StepCommand


def command(slices: int, tokens: int = 1) -> StepCommand:
    return StepCommand(1, tuple(SliceCommand(slot, str(slot), 1, (1,) * tokens, 0, True) for slot in range(slices)))


def test_bytes_must_outweigh_the_start():
    """0.1 ms to start, 1 ns a byte: halves from 200,000 bytes, which are 50 rows of 4,000 bytes."""
    link = LinkCost(1e-4, 1e-9)
    assert not pays_in_halves(command(49), 4000.0, link)
    assert not pays_in_halves(command(50), 4000.0, link)
    assert pays_in_halves(command(51), 4000.0, link)
    assert pays_in_halves(command(2, tokens=26), 4000.0, link)


def test_one_sequence_has_no_halves_and_an_unknown_link_is_not_gambled_on():
    assert not pays_in_halves(command(1, tokens=500), 4000.0, LinkCost(0.0, 1e-9))
    assert not pays_in_halves(command(100), 4000.0, None)

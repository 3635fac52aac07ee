"""Whether computing in two half batches pays: one half computes while the sums of the other travel.

Splitting doubles the messages, so it pays where their bytes cost more than their number: on links whose bandwidth binds, not their
latency, and with enough rows. Measured here: 1.2 to 1.3 times faster on a bandwidth-bound link, slower on a latency-bound one.
"""

from __future__ import annotations

from runtime.torch_tp.link_cost import LinkCost
from runtime.torch_tp.steps import StepCommand

POLICIES = ("auto", "always", "never")
BYTES_OVER_LATENCY_MIN = 2.0
"""Time for a message's bytes ÷ time for its start, at least, before halves are tried."""


def pays_in_halves(command: StepCommand, row_bytes: float, link: LinkCost | None) -> bool:
    """row_bytes: of one token's hidden state on the wire. link: None where nothing was measured."""
    if link is None or len(command.slices) < 2:
        return False
    message_bytes = row_bytes * sum(len(part.tokens) for part in command.slices)
    return message_bytes * link.beta_s_per_byte > BYTES_OVER_LATENCY_MIN * link.alpha_s

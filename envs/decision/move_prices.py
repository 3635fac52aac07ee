"""What it costs to let a running request go on in another group: its KV copied, or computed again there. Declared prices, which the
simulator pays, and what the service has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.domain.plans import TpGroup
from envs.group_kernel import layout as L
from envs.perf_model.step_time import step_parts

MEASURED_BYTES_MIN = 1 << 16
"""Less tells no rate."""
AGAIN_FACTOR_BOUNDS = (0.05, 50.0)


def copy_s(group: TpGroup, kv_tokens: int, transfers: int = 0) -> float:
    """Seconds to copy the KV of `kv_tokens` out of `group`; `transfers` that are under way share the link."""
    link = group.outer_link
    return link.alpha_s + kv_tokens * group.model.kv_bytes_per_token * link.beta_s_per_byte * (1 + transfers)


def recompute_s(state: L.KernelState, target: int, kv_tokens: int) -> float:
    """Seconds in which group `target` would prefill `kv_tokens` tokens by itself, by the schedulers' own model (predicted side of
    `state`)."""
    plan = int(state.group_int[target, L.GI_PLAN])
    tokens, pairs = [0, 0], [0.0, 0.0]
    tokens[plan], pairs[plan] = kv_tokens, 0.5 * kv_tokens * kv_tokens
    model = (state.predicted_rank_cost, state.predicted_group_cost, state.plain_residual, state.plain_slow)
    return float(sum(step_parts(target, *model, *tokens, *pairs, 0, 0, 0, 0, 1)[:4]))


@dataclass(slots=True)
class CopyPrice:
    """What copying KV beside the steps has cost so far, as moving averages; the priors stand until something was measured.

    pause_s: in which those concerned stand still at its end; bytes_per_s: of copying; drag: share of copying time by which the steps
    beside it get longer.
    """

    pause_s: float = 0.005
    bytes_per_s: float = 2e8
    drag: float = 0.25
    weight: float = 0.3

    def learn_pause(self, seconds: float) -> None:
        self.pause_s += self.weight * (seconds - self.pause_s)

    def learn_copy(self, kv_bytes: float, seconds: float) -> None:
        if kv_bytes >= MEASURED_BYTES_MIN and seconds > 0:
            self.bytes_per_s += self.weight * (kv_bytes / seconds - self.bytes_per_s)

    def cost_s(self, kv_bytes: float, pauses: int = 1) -> float:
        """Seconds of serving that a change costs."""
        return pauses * self.pause_s + self.drag * kv_bytes / self.bytes_per_s


class CallMovePrices:
    """What moving a running call costs: as declared at first, then as the last such moves did. Prices are seconds: the pause of the call,
    and what copying takes from the steps beside it."""

    def __init__(self, groups: Sequence[TpGroup], weight: float = 0.3) -> None:
        self._groups, self._weight = tuple(groups), weight
        links = [group.outer_link for group in groups]
        self._copies = [CopyPrice(link.alpha_s, 1.0 / max(link.beta_s_per_byte, 1e-15), weight=weight) for link in links]
        self._again_factor = np.ones(len(groups))  # by target: pause of a call that was computed again ÷ predicted

    def copied_s(self, source: int, kv_tokens: int) -> float:
        return self._copies[source].cost_s(self._bytes(source, kv_tokens))

    def again_s(self, state: L.KernelState, target: int, kv_tokens: int) -> float:
        return recompute_s(state, target, kv_tokens) * float(self._again_factor[target])

    def was_copied(self, source: int, kv_tokens: int, seconds: float) -> None:
        """Copying the KV of so many tokens out of `source`, and into the target, took so long."""
        self._copies[source].learn_copy(self._bytes(source, kv_tokens), seconds)

    def copied_call_paused(self, source: int, seconds: float) -> None:
        self._copies[source].learn_pause(seconds)

    def computed_call_paused(self, target: int, expected_s: float, seconds: float) -> None:
        """A call that was computed again, for which `again_s` said `expected_s`, made no token for so long."""
        factor = self._again_factor[target]
        seen = factor * seconds / max(expected_s, 1e-6)
        self._again_factor[target] = np.clip(factor + self._weight * (seen - factor), *AGAIN_FACTOR_BOUNDS)

    def _bytes(self, source: int, kv_tokens: int) -> float:
        return kv_tokens * self._groups[source].model.kv_bytes_per_token

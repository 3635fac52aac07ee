"""What the controller asks of all ranks in one step and what they answer. Plain values, no torch.

A worker carries out a StepCommand in the order of its fields: releases, new_slots, growths, prefix_copies, then a forward pass over
`slices`. The rows with `wants_sample` then get their next token. With decode_steps = k > 1 it goes on by itself: k - 1 further passes
over the same slots, each with the token just chosen at the next position; it stops early, alike on every rank, after a pass in which some
slot chose one of its stop ids. Every pass gives each such slot one token, so all slots come back with the same number, 1 to k.
`slices` may be empty (a command that only frees KV). A slice may start below what its slot holds: the rest is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.torch_tp.requests import SamplingSettings, TokenLogprobs

BROKEN_TOKEN = -1
"""In place of a token id: the model's logits for this row were not finite. The ranks then end a run of several passes."""


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A KV slot is taken into use (all its rank-side state is replaced).

    tokens_max: tokens to make room for; may grow later. keeps_tokens: 0 = allocate; n > 0 = the slot is already allocated (a finished
    request's KV, under the same plan_version): truncate to its first n tokens, then grow it to tokens_max where it holds less.
    seed: with the position it decides every draw. prompt, output: token ids known so far, for penalties; empty where
    `sampling.counts_tokens` is False. stop_ids: end a run of several decode steps; banned at positions below stop_from
    (absolute index of a token in prompt + answer), which is 0 where there is no min_tokens. logprobs: as in GenerationRequest.
    """

    slot: int
    request_id: str
    plan_version: int
    tokens_max: int
    seed: int
    sampling: SamplingSettings
    keeps_tokens: int = 0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop_from: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SlotGrowth:
    """`slot` keeps what it holds and gets room for `tokens_max` tokens."""

    slot: int
    tokens_max: int


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """The KV of the first `tokens` tokens of `source` is copied to `target`; both have the same plan version."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SliceCommand:
    """One sequence's part of a step: `tokens` go to positions start, start + 1, … of `slot`.

    tokens are always spelled out, also the one that the ranks chose themselves a step ago: a command needs no memory of the last
    one. wants_sample: the token after the last position is to be chosen; its position is start + len(tokens).
    """

    slot: int
    request_id: str
    plan_version: int
    tokens: tuple[int, ...]
    start: int
    wants_sample: bool


@dataclass(frozen=True, slots=True)
class StepCommand:
    """One message to every rank; see the module's text for the order in which it is carried out.

    decode_steps > 1 only where every slice is one token long and wants a sample.
    """

    step: int
    slices: tuple[SliceCommand, ...]
    decode_steps: int = 1
    new_slots: tuple[NewSlot, ...] = ()
    releases: tuple[int, ...] = ()
    growths: tuple[SlotGrowth, ...] = ()
    prefix_copies: tuple[PrefixCopy, ...] = ()

    def __post_init__(self) -> None:
        if self.decode_steps < 1:
            raise ValueError(f"StepCommand {self.step}: decode_steps={self.decode_steps} must be at least 1")
        if self.decode_steps > 1 and any(len(part.tokens) != 1 or not part.wants_sample for part in self.slices):
            raise ValueError(f"StepCommand {self.step}: decode_steps={self.decode_steps} needs slices of one token that want a sample")

    @property
    def sampled_slots(self) -> tuple[int, ...]:
        """Slots that get tokens, in the order of the slices: the row order of logits and of StepResult.tokens."""
        return tuple(part.slot for part in self.slices if part.wants_sample)

    def tokens_by_slot(self, result: StepResult) -> dict[int, SlotTokens]:
        """Raises: ValueError when the result does not fit this command; the ranks are then not to be believed."""
        tokens_of = {item.slot: item for item in result.tokens}
        counts = {len(item.tokens) for item in result.tokens}
        expected = self.sampled_slots
        if set(tokens_of) != set(expected) or len(counts) > 1 or not counts <= set(range(1, self.decode_steps + 1)):
            raise ValueError(
                f"step {self.step}: tokens for slots {sorted(tokens_of)}, counts {sorted(counts)}; "
                f"expected slots {sorted(expected)} with equally many, 1 to {self.decode_steps}"
            )
        return tokens_of


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """Tokens that one slot got in a step, first to last; logprobs: one per token where asked for, else empty."""

    slot: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RankTimings:
    """Where one rank's step went, in s: computing, waiting for memory, waiting for other ranks, everything else."""

    rank: int
    compute_s: float
    memory_stall_s: float
    communication_s: float
    host_s: float

    def __add__(self, other: RankTimings) -> RankTimings:
        """Of the same rank."""
        return RankTimings(
            self.rank,
            self.compute_s + other.compute_s,
            self.memory_stall_s + other.memory_stall_s,
            self.communication_s + other.communication_s,
            self.host_s + other.host_s,
        )

    @property
    def busy_s(self) -> float:
        """Time that the other ranks may have had to wait for this one."""
        return self.compute_s + self.memory_stall_s

    @property
    def total_s(self) -> float:
        """The whole step, by the rank's own clock."""
        return self.compute_s + self.memory_stall_s + self.communication_s + self.host_s


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a StepCommand. began_s, ended_s: the controller's monotonic clock when it was sent and when the last answer came.

    tokens: in the order of `StepCommand.sampled_slots`, each with the same number of tokens, 1 to decode_steps.
    timings: one per live rank, summed over the passes of the step.
    """

    step: int
    tokens: tuple[SlotTokens, ...]
    timings: tuple[RankTimings, ...] = ()
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def passes(self) -> int:
        """Forward passes that were run."""
        return max((len(slot.tokens) for slot in self.tokens), default=1)

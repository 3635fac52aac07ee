"""Ranks in plain Python: they carry out step commands on slots that hold token ids in place of KV.

The next token is a function of every id that a slot holds, so that KV that is lost, doubled, copied wrongly or out of order changes
the text from there on. `expected_answer` says what an undisturbed run gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.torch_tp.requests import GenerationRequest
from runtime.torch_tp.steps import NewSlot, SlotTokens, StepCommand, StepResult

VOCABULARY = 50
EOS = 49


def next_token(ids: list[int], banned: tuple[int, ...] = ()) -> int:
    """The toy model's choice after `ids`."""
    before = hash(tuple(ids))  # of integers: the same in every process
    tokens = (hash((before, salt)) % VOCABULARY for salt in range(1000))
    return next(token for token in tokens if token not in banned)


def expected_answer(request: GenerationRequest, eos_ids: tuple[int, ...] = (EOS,)) -> list[int]:
    """The answer of an undisturbed run."""
    stop_ids = set(request.stop_ids) | (set() if request.ignore_eos else set(eos_ids))
    ids = list(request.prompt)
    for made in range(request.max_tokens):
        banned = tuple(stop_ids) if made < request.min_tokens else ()
        ids.append(next_token(ids, banned))
        if ids[-1] in stop_ids:
            break
    return ids[len(request.prompt) :]


@dataclass
class _Slot:
    new: NewSlot
    tokens_max: int
    held: list[int] = field(default_factory=list)


class ToyRanks:
    """All ranks as one. Raises AssertionError for a command that no rank could carry out."""

    def __init__(self, slots_max: int, kv_tokens_max: int) -> None:
        self.slots_max = slots_max
        self.kv_tokens_max = kv_tokens_max
        self.slots: dict[int, _Slot] = {}
        self.passes = 0
        self.prefill_tokens = 0
        self.copied_tokens = 0

    def lose(self, slots: set[int] | None = None) -> None:
        self.slots = {} if slots is None else {slot: held for slot, held in self.slots.items() if slot not in slots}

    def run(self, command: StepCommand, began_s: float = 0.0, ended_s: float = 1.0) -> StepResult:
        self._order(command)
        sampled: dict[int, list[int]] = {slot: [] for slot in command.sampled_slots}
        for part in command.slices:
            slot = self.slots[part.slot]
            assert slot.new.request_id == part.request_id and slot.new.plan_version == part.plan_version
            assert part.start <= len(slot.held), f"slot {part.slot}: a hole between {len(slot.held)} and {part.start}"
            slot.held = slot.held[: part.start] + list(part.tokens)
            self.prefill_tokens += len(part.tokens)
            self._check_room(slot)
        for turn in range(command.decode_steps):
            if turn:
                for index in sampled:
                    self.slots[index].held.append(sampled[index][-1])
                    self._check_room(self.slots[index])
            self.passes += 1
            has_stopped = False
            for index, tokens in sampled.items():
                slot = self.slots[index]
                banned = slot.new.stop_ids if len(slot.held) < slot.new.stop_from else ()
                tokens.append(next_token(slot.held, banned))
                has_stopped |= tokens[-1] in slot.new.stop_ids
            if has_stopped:
                break
        tokens = tuple(SlotTokens(index, tuple(tokens)) for index, tokens in sampled.items())
        return StepResult(command.step, tokens, (), began_s, ended_s)

    def _order(self, command: StepCommand) -> None:
        for index in command.releases:
            del self.slots[index]
        for new in command.new_slots:
            if new.keeps_tokens:
                old = self.slots[new.slot]
                assert old.new.plan_version == new.plan_version and len(old.held) >= new.keeps_tokens
                self.slots[new.slot] = _Slot(new, max(old.tokens_max, new.tokens_max), old.held[: new.keeps_tokens])
            else:
                assert new.slot not in self.slots, f"slot {new.slot} is taken"
                assert 0 <= new.slot < self.slots_max
                self.slots[new.slot] = _Slot(new, new.tokens_max)
        for growth in command.growths:
            assert growth.tokens_max >= self.slots[growth.slot].tokens_max
            self.slots[growth.slot].tokens_max = growth.tokens_max
        for copy in command.prefix_copies:
            source, target = self.slots[copy.source], self.slots[copy.target]
            assert source.new.plan_version == target.new.plan_version and len(source.held) >= copy.tokens and not target.held
            target.held = source.held[: copy.tokens]
            self.copied_tokens += copy.tokens
            self._check_room(target)
        reserved = sum(slot.tokens_max for slot in self.slots.values())
        assert reserved <= self.kv_tokens_max, f"{reserved} KV tokens reserved of {self.kv_tokens_max}"

    def _check_room(self, slot: _Slot) -> None:
        assert len(slot.held) <= slot.tokens_max, f"slot {slot.new.slot}: {len(slot.held)} tokens in room for {slot.tokens_max}"

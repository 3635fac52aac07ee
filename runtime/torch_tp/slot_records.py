"""What the ranks know of every slot, kept by the controller from the commands it sent, so that a rank that joins can be told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from runtime.torch_tp.steps import NewSlot, StepCommand, StepResult


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A slot in use. new: as if it were taken now (its plan, room and answer so far); tokens: whose KV it holds."""

    new: NewSlot
    tokens: int


class SlotRecords:
    """Follows the steps that were carried out."""

    def __init__(self) -> None:
        self._records: dict[int, SlotRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def all(self) -> tuple[SlotRecord, ...]:
        return tuple(self._records.values())

    def of_plan(self, plan_version: int) -> tuple[int, ...]:
        """Slots whose KV lies by this plan."""
        return tuple(slot for slot, record in self._records.items() if record.new.plan_version == plan_version)

    def tokens_of_plan(self, plan_version: int) -> int:
        """Tokens whose KV lies by this plan."""
        return sum(record.tokens for record in self._records.values() if record.new.plan_version == plan_version)

    def clear(self) -> None:
        self._records.clear()

    def moved(self, slots: Iterable[int], plan_version: int) -> None:
        """The KV of these slots lies by another plan from now on."""
        for slot in slots:
            record = self._records[slot]
            self._records[slot] = replace(record, new=replace(record.new, plan_version=plan_version))

    def filled(self, slot: int, tokens: int) -> None:
        """A slot was given KV otherwise than by a step."""
        if slot in self._records:
            self._records[slot] = replace(self._records[slot], tokens=tokens)

    def apply(self, command: StepCommand, result: StepResult) -> None:
        """A step was carried out, in the order that `steps` states."""
        for slot in command.releases:
            self._records.pop(slot, None)
        for new in command.new_slots:
            self._records[new.slot] = SlotRecord(new, new.keeps_tokens)
        for growth in command.growths:
            record = self._records[growth.slot]
            room = max(growth.tokens_max, record.new.tokens_max)
            self._records[growth.slot] = replace(record, new=replace(record.new, tokens_max=room))
        for copy in command.prefix_copies:
            self._records[copy.target] = replace(self._records[copy.target], tokens=copy.tokens)
        for part in command.slices:
            held = part.start + len(part.tokens) + result.passes - 1
            self._records[part.slot] = replace(self._records[part.slot], tokens=held)
        for got in result.tokens:
            record = self._records[got.slot]
            if record.new.sampling.counts_tokens:
                answer = record.new.output + got.tokens
                self._records[got.slot] = replace(record, new=replace(record.new, output=answer))

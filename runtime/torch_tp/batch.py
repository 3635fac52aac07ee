"""Who waits, who runs, and who gives way: one batch over the pool of slots, and what it computes next.

Nothing here knows of answers and events; a request is in the batch from `enter` to `leave`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence

from envs.decision.length_estimator import LengthEstimator
from runtime.torch_tp.batcher_settings import BatcherSettings
from runtime.torch_tp.resident import Resident
from runtime.torch_tp.slot_pool import SlotPool, Taken
from runtime.torch_tp.step_budget import StepBudget
from runtime.torch_tp.step_pace import StepPace
from runtime.torch_tp.steps import SliceCommand

PASSING_MAX = 8  # so many of the queue are tried while its first does not fit


class Batch:
    """waiting: by key; running: by slot; plan_version: of requests that start from now on."""

    def __init__(self, settings: BatcherSettings, pace: StepPace, lengths: LengthEstimator, plan_version: int) -> None:
        self.settings, self.lengths, self.plan_version = settings, lengths, plan_version
        self.pool = SlotPool(settings.slots_max, settings.kv_tokens_max, settings.block_tokens)
        self.waiting: list[Resident] = []
        self.running: dict[int, Resident] = {}
        self.prefix_hit_tokens = 0
        self.preemptions = 0
        self.entered = 0
        self.left = 0
        self._budget = StepBudget(settings, pace)
        self._calm_steps = 0  # steps since the batch last changed
        self._tried_after = (0, 0, 0)  # what had happened when others last tried to pass the first of the queue

    def enter(self, resident: Resident) -> None:
        self.entered += 1
        self._enqueue(resident)

    def _enqueue(self, resident: Resident) -> None:
        insort(self.waiting, resident, key=lambda s: s.key)

    def leave(self, resident: Resident, *, retain: bool) -> None:
        """The request is over; its slot is kept for reuse or freed."""
        self.left += 1
        self._calm_steps = 0
        slot = resident.slot
        if slot is None:
            self.waiting.remove(resident)
            return
        del self.running[slot]
        if retain and self.settings.retains_prefixes and resident.computed >= self.settings.block_tokens:
            self.pool.retain(slot, resident.ids, resident.computed)
        else:
            self.pool.evict(slot)
        resident.slot = None

    def lose(self, slots: Iterable[int] | None, now_s: float | None) -> None:
        """The ranks do not hold these slots any more (None: any): their requests wait again."""
        for slot in self.pool.lost(slots):
            resident = self.running.pop(slot, None)
            if resident is not None:
                resident.recoveries += 1
                self._begin_again(resident, now_s)
        self._calm_steps = 0

    def move(self, slots: Iterable[int], version: int) -> None:
        """The KV of these slots lies by another plan from now on."""
        for slot in self.pool.moved(slots, version):
            if slot in self.running:
                self.running[slot].plan_version = version

    def check(self) -> None:
        """Raise AssertionError unless slots, KV tokens and requests are conserved."""
        self.pool.check(self.running)
        waiting = {resident.request_id for resident in self.waiting}
        running = {resident.request_id for resident in self.running.values()}
        assert len(waiting) == len(self.waiting) and not waiting & running, "a request waits twice, or waits and runs"
        assert self.entered == self.left + len(waiting) + len(running), "a request ended twice or never"
        assert self.waiting == sorted(self.waiting, key=lambda s: s.key), "the queue is out of order"
        for slot, resident in self.running.items():
            assert resident.slot == slot and 0 <= resident.computed < len(resident.ids), f"slot {slot}: KV beyond the ids"
            assert resident.computed <= self.pool.ledger.reserved(slot), f"slot {slot}: more KV than was reserved"
            assert resident.plan_version == self.pool.version_of(slot), f"slot {slot}: two plan versions"

    # --- admission ----------------------------------------------------------------------------------------------------------

    def admit(self, now_s: float) -> None:
        """Let waiting requests in by their keys. While the first does not fit, later ones may pass it, unless it starves; then only those
        above normal priority may, into what is kept for them."""
        while self.waiting:
            head = self.waiting[0]
            if self._try_admit(head, now_s) or self._displace_for(head, now_s):
                continue
            self._admit_urgent(now_s)
            changes = (self.entered, self.left, self.preemptions)  # room comes with one of these
            if now_s - head.queued_s < self.settings.starve_after_s and changes != self._tried_after:
                for resident in self.waiting[1 : 1 + PASSING_MAX]:
                    self._try_admit(resident, now_s)
                self._tried_after = changes
            return

    def _admit_urgent(self, now_s: float) -> None:
        """Fill what is kept for requests above normal priority: nobody else could have it, whoever waits before them."""
        for resident in [s for s in self.waiting if s.is_urgent][:PASSING_MAX]:
            running = [s for s in self.running.values() if s.is_urgent]
            tokens = sum(self._reserved(s) for s in running) + self._tokens_to_reserve(resident)
            if len(running) < self.settings.kept_slots and tokens <= self.settings.kept_kv_tokens:
                self._try_admit(resident, now_s)

    def _try_admit(self, resident: Resident, now_s: float) -> bool:
        if not self._batch_has_room(resident):
            return False
        taken = self.pool.take(resident.ids, self.plan_version, self._tokens_to_reserve(resident))
        if taken is not None:
            self._start(resident, taken, now_s)
        return taken is not None

    def _batch_has_room(self, resident: Resident, displaced: Sequence[Resident] = ()) -> bool:
        """One more row must leave every step inside the TPOT limits, and what is kept to those above normal priority.

        displaced: running requests that would go.
        """
        rows = len(self.running) - len(displaced) + 1
        if rows == 1:
            return True
        if not self._leaves_what_is_kept(resident, self._tokens_to_reserve(resident), displaced):
            return False
        rows_max = min(self._budget.rows(self.running.values()), self._budget.rows([resident]))
        return rows <= rows_max + resident.is_urgent

    def _leaves_what_is_kept(self, resident: Resident, tokens: int, displaced: Sequence[Resident] = ()) -> bool:
        """Whether a request with a slot of `tokens` leaves slots and KV that are kept to those above normal priority, or is one of them.
        Alone it may have everything: a request that needs the whole pool is served, too."""
        others = [s for s in self.running.values() if s is not resident and s not in displaced]
        if resident.is_urgent or not others:
            return True
        normal = [s for s in others if not s.is_urgent]
        settings = self.settings
        held = sum(self._reserved(s) for s in normal)
        return len(normal) < settings.slots_max - settings.kept_slots and held + tokens <= settings.kv_tokens_max - settings.kept_kv_tokens

    def _reserved(self, resident: Resident) -> int:
        """Tokens that its slot has room for."""
        assert resident.slot is not None
        return self.pool.ledger.reserved(resident.slot)

    def _tokens_to_reserve(self, resident: Resident) -> int:
        """Room for what it has and what its class is expected to add; for one displaced before, all it may ever need."""
        whole = resident.request.tokens_needed
        if resident.preemptions:
            return whole
        expected = math.ceil(self.lengths.expected_remaining(resident.request.class_index, resident.output_tokens))
        portion = self.settings.growth_tokens
        return min(whole, len(resident.ids) + -(-expected // portion) * portion)

    def _start(self, resident: Resident, taken: Taken, now_s: float) -> None:
        self.waiting.remove(resident)
        self.running[taken.slot] = resident
        resident.start(taken.slot, self.plan_version, taken.held, now_s)
        self.prefix_hit_tokens += taken.held
        self.pool.fill(resident.new_slot(self.pool.ledger.reserved(taken.slot), taken.keeps))
        self._calm_steps = 0

    # --- making room --------------------------------------------------------------------------------------------------------

    def _may_displace(self, victim: Resident, for_: Resident) -> bool:
        return victim.key > for_.claim and victim.preemptions < self.settings.preemptions_max and victim.slot not in self.pool.pinned

    def _victims(self, for_: Resident) -> list[Resident]:
        """Running requests that `for_` may displace, the latest first."""
        return sorted((s for s in self.running.values() if self._may_displace(s, for_)), key=lambda s: s.key, reverse=True)

    def _displace_for(self, head: Resident, now_s: float) -> bool:
        """Let the first of the queue in at the cost of later ones: at once those of lower priority, any once it starves."""
        starves = now_s - head.queued_s >= self.settings.starve_after_s
        victims = [s for s in self._victims(head) if starves or s.request.priority < head.request.priority]
        if not victims:
            return False
        wanted = self._tokens_to_reserve(head)
        chosen: list[Resident] = []
        gained = 0
        for victim in victims:
            chosen.append(victim)
            gained += self._reserved(victim)
            if self.pool.could_fit(wanted - gained) and self._batch_has_room(head, displaced=chosen):
                break
        else:
            return False
        for victim in chosen:
            self._preempt(victim, now_s)
        return self._try_admit(head, now_s)

    def _preempt(self, resident: Resident, now_s: float) -> None:
        """Take a running request off; it keeps its place in the queue and is computed again from its ids."""
        assert resident.slot is not None
        slot = resident.slot
        del self.running[slot]
        self.pool.evict(slot)
        resident.preemptions += 1
        self.preemptions += 1
        self._begin_again(resident, now_s)

    def _begin_again(self, resident: Resident, now_s: float | None) -> None:
        resident.begin_again(now_s)
        self._enqueue(resident)
        self._calm_steps = 0

    def _secure(self, resident: Resident, tokens: int, now_s: float) -> bool:
        """Room for `tokens` in the request's slot: from the pool, from retained slots, from later requests, or not at all.

        A request that finds no room goes back to the queue itself; let in again, it gets all it may need, so it comes here once.
        """
        slot = resident.slot
        assert slot is not None
        if tokens <= self.pool.ledger.reserved(slot):
            return True
        wanted = min(resident.request.tokens_needed, tokens + self.settings.growth_tokens)
        if self._grow(resident, wanted) or self._grow(resident, tokens):
            return True
        for victim in self._victims(resident):
            self._preempt(victim, now_s)
            if self._grow(resident, tokens):
                return True
        if slot not in self.pool.pinned:
            self._preempt(resident, now_s)
        return False

    def _grow(self, resident: Resident, tokens: int) -> bool:
        assert resident.slot is not None
        return self._leaves_what_is_kept(resident, tokens) and self.pool.grow(resident.slot, tokens)

    # --- one step -----------------------------------------------------------------------------------------------------------

    def next_slices(self, now_s: float) -> tuple[list[SliceCommand], int]:
        """Slices of the next step by key, and how many passes it may run. Half of a chunk is for the first prompt above normal priority."""
        order = sorted(self.running.values(), key=lambda s: s.key)
        decoding = [s for s in order if s.pending == 1]
        is_calm = len(decoding) == len(order)  # no prompt to compute
        chunk = 0 if is_calm else self._budget.chunk_tokens(order, self.waiting, now_s)
        passes = self._budget.passes(decoding, self._calm_steps) if is_calm else 1
        urgent = next((s for s in order if s.is_urgent and s.pending > 1), None)
        kept = 0 if urgent is None else min(urgent.pending, -(-chunk // 2))
        chunk -= kept
        slices: list[SliceCommand] = []
        for resident in order:
            if resident.slot is None:  # displaced while room was made for an earlier one
                continue
            if resident is urgent:
                chunk += kept
            is_decoding = resident.pending == 1
            count = 1 if is_decoding else min(resident.pending, chunk)
            if count < 1 or not self._secure(resident, resident.computed + count + passes - 1, now_s):
                continue
            chunk -= 0 if is_decoding else count
            slices.append(resident.slice(count))
        self._calm_steps += 1
        return slices, passes

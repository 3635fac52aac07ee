"""What a rank computes: carries out step commands on its model, keeps its slots and plans, and times itself.

The process around it (socket, threads, epochs) is in `worker`; the arithmetic is in `model`, the choice of tokens in `sampling`.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from envs.decision.layer_cuts import layer_plans
from envs.domain.plans import LayerPlans
from runtime.torch_tp.checkpoint import open_checkpoint
from runtime.torch_tp.communicators.interface import Communicator, build_communicator
from runtime.torch_tp.communicators.serial import SerialCommunicator
from runtime.torch_tp.emulation import SlowDown
from runtime.torch_tp.kv_carrier import KvCarrier
from runtime.torch_tp.kv_mover import KvMover
from runtime.torch_tp.link_probe import measure_all_reduce
from runtime.torch_tp.liveness import Phase, Slot
from runtime.torch_tp.model import Slice, TpModel
from runtime.torch_tp.orders import (
    Carried,
    CarryOrder,
    Configuration,
    Loaded,
    LoadOrder,
    Prepared,
    PrepareOrder,
    ReduceOrder,
    StepDone,
    StepOrder,
    Switched,
    SwitchOrder,
)
from runtime.torch_tp.requests import SamplingSettings
from runtime.torch_tp.resplit import kv_moves
from runtime.torch_tp.sampling import SampledTokens, SamplingState, sample
from runtime.torch_tp.shares import Interval
from runtime.torch_tp.slot_records import SlotRecord
from runtime.torch_tp.step_clock import StepClock, WatchedCommunicator
from runtime.torch_tp.steps import NewSlot, SliceCommand, SlotTokens, StepCommand

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPEC_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_WARM_UP_SLOT = NewSlot(0, "warm-up", 0, 16, 0, SamplingSettings())


class StepRunner:
    """One rank's model and slots. Used from the worker's main thread; `prepare` from another."""

    def __init__(self, worker: int, order: LoadOrder, slot: Slot) -> None:
        began_s = time.perf_counter()
        torch.set_num_threads(order.threads)
        self._worker = worker
        self._order = order
        self._slot = slot
        self._slow_down = SlowDown(order.slow_factor)
        self._checkpoint = open_checkpoint(order.model)
        self._model: TpModel | None = None
        self._communicator: WatchedCommunicator | None = None
        self._states: dict[int, SamplingState] = {}
        self._plans: dict[int, LayerPlans] = {}
        self._room: dict[int, int] = {}  # tokens_max by slot
        self._generations: dict[int, int] = {}
        self._slot_lock = threading.Lock()
        self._carrier = KvCarrier(self._slot_lock, lambda slot: self._generations.get(slot, 0))
        self._has_buddies = False
        self._buddied: set[int] = set()  # plan versions whose slots keep a neighbour's KV
        self._mover: KvMover | None = None
        self._prepared_plan: LayerPlans | None = None
        self._is_lowest = False
        self._warm_up()
        is_host = order.device == "cpu"
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory_bytes = host_bytes if is_host else torch.cuda.get_device_properties(order.device).total_memory
        self.loaded = Loaded(
            time.perf_counter() - began_s, self._checkpoint.config.to_spec(SPEC_DTYPES[order.dtype]), memory_bytes, is_host
        )

    def _warm_up(self) -> None:
        """Run one token alone, so that no step pays for imports, compilers and the first reading of the weights."""
        if self._order.device == "cpu":
            importlib.import_module("runtime.torch_tp.communicators.shared_memory")
        if self._order.uses_network:
            importlib.import_module("runtime.torch_tp.communicators.gloo")
        spec = self._checkpoint.config.to_spec()
        model = self._new_model(SerialCommunicator(), 0, 16, 1)
        model.use_plan(layer_plans(spec, [1.0]))
        model.kv.allocate(0, 0, 16)
        for tokens, start in (((0, 0, 0), 0), ((0,), 3)):
            logits = model.forward([Slice(0, 0, tokens, start)])
        sample(logits, model.share().vocabulary, model.communicator, [SamplingState(_WARM_UP_SLOT, spec.vocabulary)], [4])

    def _new_model(self, communicator: Communicator, rank: int, kv_tokens_max: int, slots_max: int) -> TpModel:
        return TpModel(
            self._checkpoint,
            communicator,
            device=self._order.device,
            dtype=DTYPES[self._order.dtype],
            rank=rank,
            kv_tokens_max=kv_tokens_max,
            slots_max=slots_max,
        )

    @property
    def model(self) -> TpModel:
        if self._model is None:
            raise RuntimeError("no group yet: a step before CONFIGURE")
        return self._model

    # --- epochs and plans ---------------------------------------------------------------------------------------------------

    def configure(self, epoch: int, order: Configuration, is_current: Callable[[], bool]) -> None:
        """Leave the old group, join the new one, and hold the KV that stays valid. Raises: PeerLost, CollectiveTimeout."""
        if self._communicator is not None:
            self._communicator.close()
        self._slot.enter(Phase.WAITING)  # for the others to come
        inner = build_communicator(
            order.communicator,
            epoch=epoch,
            rank=self._worker,
            members=order.members,
            domains=order.domains,
            store_address=(order.store_host, order.store_port) if order.store_port else None,
            segment_names=order.segment_names,
            deadline_s=order.deadline_s,
            is_alive=is_current,
            torch_device=self._order.device,
            between=order.between,
            wire=order.wire,
        )
        self._slot.enter(Phase.COMPUTING)
        self._communicator = WatchedCommunicator(inner, self._slot)
        rank = order.members.index(self._worker)
        self._is_lowest = rank == 0
        if self._model is None:
            spare = min(self._checkpoint.config.context_tokens, self._order.kv_tokens_max)  # so that one slot at least can move
            self._model = self._new_model(self._communicator, rank, self._order.kv_tokens_max + spare, 2 * self._order.slots_max)
            self._model.on_layer = lambda _: self._slot.tick()
        model = self._model
        model.communicator, model.rank = self._communicator, rank
        self._drop_prepared()
        self._plans = {plan.version: plan for plan in order.plans}
        self._has_buddies = order.has_buddies
        self._buddied = set(order.buddied)
        if order.takes_over:
            self._stand_in(order)
            return
        if order.keeps_kv and self._worker not in order.joined:
            return  # a member before, with the same ranges: only its place among the ranks may have changed
        self._empty(model)
        for plan in order.plans:
            model.use_plan(plan, has_buddies=plan.version in self._buddied)
        for record in order.slots:
            self._take_over(record)

    def _stand_in(self, order: Configuration) -> None:
        """Do the work of a lost member from its KV that this rank kept; every slot goes back to where the last whole step left it."""
        model, known = self.model, {record.new.slot: record for record in order.slots}
        for plan in order.plans:
            model.take_over(plan)
        for slot in set(range(2 * self._order.slots_max)) - set(known):
            model.kv.release(slot)  # taken by the step that was cut short
        for slot, record in known.items():
            model.kv.truncate(slot, record.tokens)
            self._states[slot] = SamplingState(record.new, model.config.vocabulary)

    def _empty(self, model: TpModel) -> None:
        """Give up every slot and plan; the model itself is kept, since building one takes longer than a group."""
        for slot in range(2 * self._order.slots_max):
            model.kv.release(slot)
        for version in model.plan_versions:
            model.drop_plan(version)
        self._states.clear()
        self._room.clear()

    def _take_over(self, record: SlotRecord) -> None:
        """Know a slot that the others filled before this rank joined; it holds none of its heads, only its length."""
        new, kv = record.new, self.model.kv
        kv.allocate(new.slot, new.plan_version, new.tokens_max)
        if record.tokens:
            config = self.model.config
            nothing = torch.empty((2, 0, record.tokens, config.head_dim), dtype=self.model.dtype, device=self.model.device)
            for layer in range(config.layers):
                kv.import_(new.slot, layer, Interval(0, 0), 0, nothing)
        self._room[new.slot] = new.tokens_max
        self._states[new.slot] = SamplingState(new, self.model.config.vocabulary)

    def drop_plan(self, version: int) -> None:
        self.model.drop_plan(version)
        self._plans.pop(version)

    def prepare(self, order: PrepareOrder) -> Callable[[], Prepared]:
        """Note what is to move at this very step; returns the rest of the work, which any thread may do beside further steps."""
        if not order.goes_on:
            self._drop_prepared()
        began_s = time.perf_counter()
        model, mover = self.model, self._mover
        slots: tuple[int, ...] = ()
        if order.goes_on:
            if mover is None:
                raise RuntimeError("nothing was copied ahead that could be brought up to date")
            slots = mover.go_on()
        elif order.moves:
            # of one plan, the oldest: the batcher says so, and a store refuses heads that a slot does not hold
            old, new = next(iter(self._plans.values())), self._plans[order.to_version]
            moves = kv_moves(
                old, new, model.config.to_spec(), old_has_buddies=old.version in self._buddied, new_has_buddies=new.version in self._buddied
            )
            assert self._communicator is not None
            mover = self._mover = KvMover(
                model.kv, self._communicator, moves, model.config.layers, model.config.head_dim, model.dtype, model.device,
                self._slot_lock, lambda slot: self._generations.get(slot, 0),
            )  # fmt: skip
            slots = mover.begin(order.moves, lambda slot: self._order.slots_max + slot, order.to_version, lambda slot: self._room[slot])
        self._prepared_plan = order.plan

        def work() -> Prepared:
            loaded_bytes, received = model.loaded_bytes, 0
            if mover is not None:  # first: the other ranks wait for what it sends
                received = -mover.received_bytes
                mover.copy_ahead()
                received += mover.received_bytes
            if order.plan is not None:
                model.ready_plan(order.plan)
            return Prepared(slots, model.loaded_bytes - loaded_bytes, received, time.perf_counter() - began_s)

        return work

    def switch(self, order: SwitchOrder) -> Switched:
        """Put into force what was prepared, as far as the order says so."""
        began_s = time.perf_counter()
        moved: tuple[int, ...] = ()
        received = 0
        if self._mover is not None:
            received = -self._mover.received_bytes
            moved = self._mover.finish(order.moves)
            received += self._mover.received_bytes
            self._mover = None
        if order.uses_plan:
            if self._prepared_plan is None:
                raise RuntimeError("SWITCH to a plan that was never prepared in this epoch")
            self.model.use_plan(self._prepared_plan, has_buddies=self._has_buddies)
            if self._has_buddies:
                self._buddied.add(self._prepared_plan.version)
            self._plans[self._prepared_plan.version] = self._prepared_plan
        if order.columns is not None:
            self.model.slide_columns(order.columns)
            self._plans[order.columns.version] = order.columns
        self._prepared_plan = None
        return Switched(moved, received, time.perf_counter() - began_s)

    def carry(self, order: CarryOrder) -> Callable[[], Carried]:
        """Note which slot is meant at this very step; returns the work, as `prepare` does."""
        return self._carrier.begin(self.model.kv, order)

    def _drop_prepared(self) -> None:
        if self._mover is not None:
            self._mover.finish(())
            self._mover = None
        self._prepared_plan = None

    def profile(self, order: ReduceOrder) -> list[tuple[int, float, float]]:
        """(bytes, median s, 99th percentile s) of all-reduces; the same on every rank, [] where this rank is alone."""
        assert self._communicator is not None
        if self._communicator.size == 1:
            return []
        self._communicator.clock = None
        measured = measure_all_reduce(self._communicator, order.sizes_bytes, order.repeats)
        return [(entry.size_bytes, entry.time_s_p50, entry.time_s_p99) for entry in measured]

    # --- steps --------------------------------------------------------------------------------------------------------------

    def step(self, order: StepOrder) -> StepDone:
        """Carry out a step command, in the order that `steps` states."""
        began_s = time.perf_counter()
        command = order.command
        self._change_slots(command)
        clock = StepClock(self._slow_down, self._order.device == "cpu")
        stall_s = 0.0
        chosen: dict[int, list[int]] = {slot: [] for slot in command.sampled_slots}
        logprobs: dict[int, list[Any]] = {slot: [] for slot in command.sampled_slots}
        slices: Sequence[SliceCommand] = command.slices
        for _ in range(command.decode_steps if slices else 0):
            sampled = self._forward(slices, clock, order.overlaps)
            stall_s += self.model.memory_stall_s
            for slot, token, item in zip(command.sampled_slots, sampled.tokens, sampled.logprobs, strict=True):
                chosen[slot].append(token)
                if item is not None:
                    logprobs[slot].append(item)
            if sampled.has_stopped or command.decode_steps == 1:
                break
            slices = [replace(part, tokens=(chosen[part.slot][-1],), start=part.start + len(chosen[part.slot])) for part in command.slices]
        told = chosen if self._is_lowest else {}
        tokens = tuple(SlotTokens(slot, tuple(ids), tuple(logprobs[slot])) for slot, ids in told.items())
        # the model's estimate of waiting for memory is part of what it computed; a slower device waits as many times longer
        starved_s = min(stall_s * self._slow_down.factor, clock.compute_s)
        host_s = max(time.perf_counter() - began_s - clock.compute_s - clock.stall_s - clock.communication_s, 0.0)
        return StepDone(
            tokens, clock.compute_s - starved_s, clock.stall_s + starved_s, clock.communication_s, host_s,
            tuple(clock.busy_s),
        )  # fmt: skip

    def _change_slots(self, command: StepCommand) -> None:
        kv = self.model.kv
        with self._slot_lock:  # a mover may be reading slots
            for slot in command.releases:
                kv.release(slot)
                self._states.pop(slot, None)
                self._room.pop(slot, None)
                self._generations[slot] = self._generations.get(slot, 0) + 1
            for new in command.new_slots:
                self._generations[new.slot] = self._generations.get(new.slot, 0) + 1
                if new.keeps_tokens:
                    kv.truncate(new.slot, new.keeps_tokens)
                    self._grow(new.slot, new.tokens_max)
                else:
                    kv.release(new.slot)  # what a batcher that began anew left there
                    kv.allocate(new.slot, new.plan_version, new.tokens_max)
                    self._room[new.slot] = new.tokens_max
                self._states[new.slot] = SamplingState(new, self.model.config.vocabulary)
            for growth in command.growths:
                self._grow(growth.slot, growth.tokens_max)
            for copy in command.prefix_copies:
                kv.copy_prefix(copy.source, copy.target, copy.tokens)

    def _grow(self, slot: int, tokens_max: int) -> None:
        if tokens_max > self._room[slot]:
            self.model.kv.grow(slot, tokens_max)
            self._room[slot] = tokens_max

    def _forward(self, parts: Sequence[SliceCommand], clock: StepClock, overlaps: bool) -> SampledTokens:
        assert self._communicator is not None
        self._communicator.begin_step(clock)
        slices = [Slice(part.slot, part.plan_version, part.tokens, part.start, part.wants_sample) for part in parts]
        logits = self.model.forward(slices, overlap=overlaps)
        sampled = [part for part in parts if part.wants_sample]
        if not sampled:
            return SampledTokens((), (), False)
        return sample(
            logits,
            self.model.share().vocabulary,
            self.model.communicator,
            [self._states[part.slot] for part in sampled],
            [part.start + len(part.tokens) for part in sampled],
        )

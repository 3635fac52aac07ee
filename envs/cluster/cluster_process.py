"""The simulated world in motion: arrivals, decision points, commands, completions, retries, end of run.

The scheduler comes in as an argument: `next_decision` runs the world to its next question, `apply` carries out the
answer. Order at equal times: step ends and completions; then simpy's order (time, priority, order of scheduling), in
which arrivals keep file order; a decision is answered before anything else of its instant happens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from envs.cluster import fault_process
from envs.cluster.event_log import EventLog
from envs.cluster.faults import draw_faults
from envs.cluster.group_set import GroupSet
from envs.cluster.moves import Moves
from envs.cluster.outcome_table import OutcomeTable
from envs.cluster.telemetry import Telemetry
from envs.cluster.world import WorldSpec
from envs.decision import predictor as P
from envs.decision.actions import Decision, DecisionPoint, Scheduler, route_point
from envs.decision.call_outcomes import Outcome
from envs.decision.circuit_breaker import BreakerPanel, ClassBreaker, ProbeLease, State
from envs.decision.class_timeouts import ClassTimeouts
from envs.decision.move_candidates import rebalance_candidates, split_candidates
from envs.decision.overload import OverloadControl
from envs.decision.retry_budget import RetryBudget
from envs.decision.traffic_experience import TrafficExperience
from envs.domain.commands import Command, CommandKind
from envs.domain.requests import SERVICE_CLASSES, OutcomeKind, Request
from envs.domain.snapshot import BoolArray, ClusterSnapshot, IntArray
from envs.group_kernel import layout as L
from envs.group_kernel import reading as R
from envs.group_kernel.advance import join, next_event_s
from envs.group_kernel.jump import cut_jump
from envs.group_kernel.queue import enqueue_row, take_out
from envs.traces.trace_table import TraceTable


@dataclass(slots=True)
class Held:
    """A request outside every group: it waits for a decision. `rows` are its slot rows if it has run before."""

    request: Request
    deadline_s: float
    rows: tuple[np.ndarray, np.ndarray] | None = None
    may_hold: bool = True


class RunStalled(RuntimeError):
    """Neither the clock nor the completions moved for too many events (K09)."""


def tokens_max(trace: TraceTable, default_output_tokens: tuple[int, ...]) -> IntArray:
    """Prompt plus the output set aside for each request, shape (n,): what its row declares, else its class's default; never the
    row's own length, which nobody knows at arrival."""
    declared = trace.output_limit_tokens
    output = np.where(declared > 0, declared, np.array(default_output_tokens, np.int64)[trace.class_index])
    return trace.prompt_tokens + output


class ClusterProcess:
    """One world. Use either `run(schedulers)` or the pair `next_decision` / `apply`.

    decisions: which kinds of decision points to raise; the others keep everything as it is.
    """

    def __init__(self, world: WorldSpec, decisions: tuple[Decision, ...] = ("route",), keep_lines: bool = False) -> None:
        self.world = world
        self.options = world.options
        self.trace = world.trace
        self.decisions = decisions
        self.log = EventLog(keep_lines)
        # an empty cluster needs no simulating, so a trace with a late start costs nothing before its first arrival; a float
        # in any case, or the kernel would be compiled for integers as well
        self.begin_s = float(self.trace.arrival_s[0]) if len(self.trace.arrival_s) else 0.0
        self.env = simpy.Environment(self.begin_s)
        seeds = np.random.SeedSequence(world.seed).spawn(6)
        faults_rng, self._interference_rng, breaker_rng, self.moves_rng, report_rng, class_rng = map(np.random.default_rng, seeds)
        self.groups = GroupSet(world.cluster, world.options, world.trace.prefix_offsets, world.trace.prefix_ids)
        self.groups.set_prefix_block_tokens(world.trace.block_tokens)
        self.state = self.groups.state
        self.state.group_float[:, L.GF_CLOCK_S] = self.begin_s
        self.outcomes = OutcomeTable(world.trace)
        self.telemetry = Telemetry(self.groups, report_rng, len(world.trace))
        self.breakers = BreakerPanel(len(self.groups.groups), now_s=lambda: self.env.now, rng=breaker_rng)
        limits = [world.options.class_timeout_fraction] * len(SERVICE_CLASSES)
        self.class_breaker = ClassBreaker(limits, now_s=lambda: self.env.now, rng=class_rng)
        self.overload = OverloadControl() if world.options.sheds_overload else None
        self._class_leases: dict[int, ProbeLease] = {}
        self.retries = RetryBudget(attempts_max=world.options.attempts_max)
        self._retrying: set[int] = set()
        self._limits = P.class_limits(world.options.limit_multiplier)
        self._timeouts = ClassTimeouts(world.options.limit_multiplier, world.options.class_timeout_limits)
        self.experience = TrafficExperience(world.cluster.model, self.state, world.options.limit_multiplier, world.options.head_start_s)
        self.moves = Moves(self)
        self.ended_requests: list[int] = []  # in order of booking; the environment drains it to pay rewards
        self._leases: dict[int, ProbeLease] = {}
        self._sent_s: dict[int, float] = {}
        self._expected_s: dict[int, tuple[float, float]] = {}  # predicted TTFT and TPOT of requests inside, where predicted
        self.illegal_actions = 0
        self._asking: Held | None = None  # the request of the route decision that waits for its answer
        self._ready: deque[Held] = deque()  # asked again before anything else happens
        self._held: deque[Held] = deque()
        self._ticks: deque[Decision] = deque()
        self._hold_watch_runs = False
        self._hold_alarm = self.env.event()  # rung when a group's next event may have moved forward
        self._next_arrival = 0
        self._done = False
        self._hits = np.zeros(len(self.groups.groups), np.int64)
        trace = self.trace  # columns as plain numbers: reading one from an array costs four times as much
        self._tokens_max: list[int] = tokens_max(trace, world.options.default_output_tokens).tolist()
        self._prompt_tokens: list[int] = trace.prompt_tokens.tolist()
        room_tokens = self.groups.limits.context_tokens - trace.prompt_tokens
        self._target_tokens: list[int] = np.minimum(trace.output_tokens, room_tokens).tolist()  # the context ends every answer
        self._class_index: list[int] = trace.class_index.tolist()
        self._arrival_s: list[float] = trace.arrival_s.tolist()
        faults = world.faults
        if world.fault_rates is not None:
            ranks = [len(group.ranks) for group in self.groups.groups]
            faults = faults + draw_faults(world.fault_rates, ranks, self.span_s, faults_rng, self.begin_s)
        self.faults = faults
        for fault in faults:
            fault.check_place([len(group.ranks) for group in self.groups.groups])
        self.env.process(self._arrivals())
        if self.options.interference_sigma > 0:
            self.env.process(self._interference())
        self.env.process(self._control())
        for fault in faults:
            self.env.process(fault_process.strike(self, fault))

    # -- what callers use

    @property
    def tables(self) -> P.PredictorTables:
        """What the predictor knows beside the snapshot."""
        return self.experience.tables

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.trace.span_s

    @property
    def horizon_s(self) -> float:
        """End of the world at the latest: last arrival plus the drain time."""
        return (float(self.trace.arrival_s[-1]) if len(self.trace.arrival_s) else 0.0) + self.options.drain_s

    @property
    def in_system(self) -> int:
        """Requests that have arrived and not ended."""
        return self._next_arrival - self.outcomes.ended

    @property
    def outside(self) -> int:
        """Requests in the system and in no group: asked about, about to be asked, held, or on their way between groups."""
        return len(self._ready) + len(self._held) + (self._asking is not None) + self.moves.transfers

    def next_decision(self) -> DecisionPoint | None:
        """Run to the next decision point; None when the world has ended."""
        stalled = 0
        while True:
            if self._ready:
                point = self._route_point(self._ready.popleft())
                if not self._is_shed(point):
                    return point
                continue
            if self._ticks:
                point = self._tick_point(self._ticks.popleft())
                if point is not None:
                    return point
                continue
            if self._done:
                return None
            before = (self.env.now, self.outcomes.ended)
            self.env.step()
            stalled = stalled + 1 if before == (self.env.now, self.outcomes.ended) else 0
            if stalled > self.options.stall_events:
                raise RunStalled(f"{self.world.name}: {stalled} events at {self.env.now:.3f} s without progress, seed {self.world.seed}")

    def apply(self, point: DecisionPoint, index: int) -> None:
        """Carry out candidate `index`; an index the mask forbids becomes refuse or keep, and is counted."""
        if not (0 <= index < len(point.commands) and point.mask[index]):
            self.illegal_actions += 1
            index = len(point.commands) - 1 if point.decision == "route" else 0
        command = point.commands[index]
        if point.decision == "route":
            self._apply_route(point, command)
        elif command.kind is not CommandKind.KEEP:
            self.log.note(self.env.now, command.kind.name, command.group_index, command.target_index)
            self.moves.apply(command)

    def run(self, schedulers: dict[Decision, Scheduler]) -> OutcomeTable:
        """Run to the end, each kind of decision answered by its scheduler; kinds without one keep and are not raised."""
        while (point := self.next_decision()) is not None:
            self.apply(point, schedulers[point.decision].choose(point))
        return self.outcomes

    def finish_now(self) -> None:
        """End the world early; requests inside stay UNFINISHED."""
        self.settle()
        self._done = True

    # -- time

    def wait_until(self, time_s: float) -> Generator[Any, Any, None]:
        """simpy process: wait until the clock reads `time_s` or the next float; a timeout alone may fall short by rounding."""
        while self.env.now < time_s:
            yield self.env.timeout(max(time_s - self.env.now, math.ulp(self.env.now)))

    def settle(self) -> None:
        """Bring every group to the present and book what ended meanwhile."""
        self.telemetry.advance_and_read(self.env.now)  # rather than only advance: one compiled entry for both uses
        if self.state.record_count[0]:
            self._book_records()

    def _book_records(self) -> None:
        count = int(self.state.record_count[0])
        self.state.record_count[0] = 0
        ints, floats = self.outcomes.book(self.state.record_int, self.state.record_float, count)
        self.log.note_records(ints, floats)
        for row, times in zip(ints.tolist(), floats[:, : L.RF_PARTS].tolist(), strict=True):
            self._book_one(row, times)
        self.ask_held_again()
        self.experience.refresh_if_due()

    def _book_one(self, ints: list[int], times: list[float]) -> None:
        group_index, kind, request_id = ints[L.RI_GROUP], ints[L.RI_KIND], ints[L.RI_REQUEST]
        self.ended_requests.append(request_id)
        self._finish_attempt(request_id)
        lease, began_s = self._leases.pop(request_id, None), self._sent_s.pop(request_id, None)
        expected_s = self._expected_s.pop(request_id, None)
        has_timed_out: bool | None = None if kind == L.RECORD_TOO_LARGE else True
        if kind == L.RECORD_COMPLETED:
            ttft_s = times[L.RF_FIRST_S] - times[L.RF_ARRIVAL_S]
            has_timed_out = self._timeouts.is_late(ints[L.RI_CLASS], ints[L.RI_PROMPT], ttft_s)
            if expected_s is not None:
                tpot_s = (times[L.RF_FINISH_S] - times[L.RF_FIRST_S]) / max(1, ints[L.RI_GENERATED] - 1)
                self.telemetry.class_experience.observe(times[L.RF_FINISH_S], group_index, ints[L.RI_CLASS], expected_s, (ttft_s, tpot_s))
            self.experience.observe_completion(ints[L.RI_CLASS], ints[L.RI_GENERATED])
            self.breakers.breakers[group_index].record(Outcome.OK, began_s=began_s, lease=lease)
        elif kind == L.RECORD_TIMEOUT:
            self.breakers.breakers[group_index].record(Outcome.FAULT, began_s=began_s, lease=lease, reason="queue timeout")
        else:
            self.breakers.breakers[group_index].record(Outcome.NEUTRAL, lease=lease)
        self._judge_class(request_id, has_timed_out)

    def _finish_attempt(self, request_id: int) -> None:
        is_retry = request_id in self._retrying
        self.retries.finish(is_retry)
        if is_retry:
            self._retrying.discard(request_id)

    def end_request(
        self, request_id: int, kind: OutcomeKind, reason: str, rows: tuple[np.ndarray, np.ndarray] | None = None, is_attempt: bool = True
    ) -> None:
        """End a request without service, now; `rows` if it has run before, `is_attempt` False when its attempt was finished before."""
        self.outcomes.end(request_id, kind, reason, self.env.now, rows)
        if is_attempt:
            self._finish_attempt(request_id)
        self._judge_class(request_id, True if kind is OutcomeKind.FAILED else None)
        self.log.note(self.env.now, f"{kind.name}:{reason}", -1, request_id)
        self.ended_requests.append(request_id)

    def _judge_class(self, request_id: int, has_timed_out: bool | None) -> None:
        """Tell the class breaker how a request ended; None: that says nothing of its class (refused, unservable)."""
        lease = self._class_leases.pop(request_id, None)
        class_index = self._class_index[request_id]
        if has_timed_out is not None:
            self.class_breaker.record(class_index, has_timed_out, began_s=self._arrival_s[request_id], lease=lease)
        elif lease is not None:
            self.class_breaker.breakers[class_index].release(lease)

    # -- processes

    def _arrivals(self) -> Generator[Any, Any, None]:
        for i, arrival_s in enumerate(self._arrival_s):
            yield from self.wait_until(arrival_s)
            self._next_arrival = i + 1
            self.retries.start_request()
            self.telemetry.rate_5s.count(self.env.now)
            self.telemetry.rate_60s.count(self.env.now)
            self.experience.observe_arrival(self._class_index[i], self._prompt_tokens[i])
            if self._is_unservable(i):
                self.end_request(i, OutcomeKind.UNSERVABLE, "unservable")
                continue
            admission = self.class_breaker.admit(self._class_index[i])
            if not admission.is_allowed:
                self.end_request(i, OutcomeKind.REFUSED, "class_refused")
                continue
            if admission.lease is not None:
                self._class_leases[i] = admission.lease
            self._ready.append(Held(self._request(i), arrival_s + self.options.hold_max_s))
        while self.in_system > 0 and self.env.now < self.horizon_s:
            yield self.env.timeout(min(1.0, self.horizon_s - self.env.now) + 1e-9)
            self.settle()
        self._done = True

    def _request(self, i: int, attempts: int = 0) -> Request:
        trace = self.trace
        blocks = tuple(trace.prefix_blocks(i).tolist()) if trace.prefix_ids.size else ()
        return Request(
            i, self._arrival_s[i], self._prompt_tokens[i], self._class_index[i], trace.session_name(i),
            blocks, trace.block_tokens if blocks else 0, attempts,
        )  # fmt: skip

    def _is_unservable(self, i: int) -> bool:
        """The door: prompt plus allowed output against the context and the largest pool (K10)."""
        if self._tokens_max[i] > self.groups.limits.context_tokens:
            return True
        if self._tokens_max[i] <= self.groups.kv_tokens_min:
            return False
        fits = self.fits(i)
        has_ranks = np.array([not h.is_gone for h in self.groups.health])  # a parked group may be started, a lost one comes back
        return not fits[has_ranks].any()

    def fits(self, i: int) -> BoolArray:
        """Which groups' pools, under the plans in force, hold request `i` with all of its allowed output; shape (groups,)."""
        return self.groups.kv_tokens >= self._tokens_max[i]

    def _control(self) -> Generator[Any, Any, None]:
        while True:
            yield self.env.timeout(self.options.control_tick_s)
            self.settle()
            self.telemetry.refresh_slow_columns()
            self.moves.tick()
            self._ticks.extend(kind for kind in ("split", "rebalance") if kind in self.decisions)

    def _interference(self) -> Generator[Any, Any, None]:
        """A hidden multiplier per group that wanders: neighbours, clocks, software. No scheduler sees it, only its effects."""
        sigma = self.options.interference_sigma
        while True:
            self.settle()
            self.groups.interference = np.exp(self._interference_rng.normal(0.0, sigma, len(self.groups.groups)))
            for g, factor in enumerate(self.groups.interference):
                cut_jump(self.state, g, self.env.now)
                self.state.group_cost[g, 7] = factor
            yield self.env.timeout(self.options.interference_period_s)

    def _hold_watch(self) -> Generator[Any, Any, None]:
        """While requests are held: ask again on a completion, a capacity change or at the hold's deadline."""
        while self._held:
            self.settle()  # plans the steps of what was just enqueued
            if not self._held:
                break
            wake_s = min(next_event_s(self.state), min(held.deadline_s for held in self._held))
            self._hold_alarm = self.env.event()
            yield self.env.timeout(max(0.0, wake_s - self.env.now)) | self._hold_alarm
            self.settle()  # a completion asks again
            if any(held.deadline_s <= self.env.now for held in self._held):
                self.ask_held_again()
        self._hold_watch_runs = False

    def ask_held_again(self) -> None:
        """Raise a decision for every held request, in order."""
        while self._held:
            held = self._held.popleft()
            held.may_hold = held.deadline_s > self.env.now
            self._ready.append(held)

    # -- route decisions

    def view(self, with_probes: bool = False) -> ClusterSnapshot:
        """Snapshot of the present; settles first. with_probes: groups that wait for a probe accept, too."""
        self.settle()
        allows = self.breakers.admits() if with_probes else self.breakers.allows()
        return self.telemetry.snapshot(self.env.now, allows, self.breakers.states(), len(self._held), self.groups.limits.hold_limit)

    def _route_point(self, held: Held) -> DecisionPoint:
        view = self.view(with_probes=True)
        if self.trace.prefix_ids.size:
            R.hit_tokens(self.state, held.request.request_id, self._hits)
        self._asking = held
        return route_point(view, self.tables, held.request, self.fits(held.request.request_id), self._hits.copy(), held.may_hold)

    def _is_shed(self, point: DecisionPoint) -> bool:
        """Refuse a newcomer for which there is no time; those that were let in stay."""
        held = self._asking
        if self.overload is None or held is None or held.rows is not None:
            return False
        if self.overload.judge(point, held.request.service.priority) is None:
            return False
        self._asking = None
        self._refuse(held, "overloaded")
        return True

    def _apply_route(self, point: DecisionPoint, command: Command) -> None:
        held = self._asking
        assert held is not None, "apply() answers the point that next_decision() returned"
        self._asking, request = None, held.request
        if command.kind is CommandKind.REFUSE:
            self._refuse(held, "scheduler")
        elif command.kind is CommandKind.HOLD:
            self._held.append(held)
            if not self._hold_watch_runs:
                self._hold_watch_runs = True
                self.env.process(self._hold_watch())
        else:
            self.log.note(self.env.now, "route", command.group_index, request.request_id)
            if not self.enter(held, command.group_index):
                self._refuse(held, "queue_full")
            elif held.rows is None and (expected := point.expected_s(command.group_index)) is not None:
                self._expected_s[request.request_id] = expected

    def _refuse(self, held: Held, reason: str) -> None:
        has_begun = held.rows is not None and not np.isnan(held.rows[1][L.SF_ADMITTED_S])
        kind = OutcomeKind.FAILED if has_begun else OutcomeKind.REFUSED
        self.end_request(held.request.request_id, kind, reason, held.rows)

    def enter(self, held: Held, group_index: int, kv_tokens: int = 0) -> bool:
        """Put a request into a group's queue, `kv_tokens` of its KV with it; False when the group has no slot left."""
        request, now_s = held.request, self.env.now
        if held.rows is None:
            key = P.queue_key(request.arrival_s, request.class_index, self.options.head_start_s)
            slot = join(
                self.state, group_index, now_s, request.request_id, request.class_index, request.prompt_tokens,
                self._target_tokens[request.request_id], request.arrival_s, key,
                self._limits[request.class_index, 2],
            )  # fmt: skip
        else:
            slot = enqueue_row(self.state, group_index, now_s, *held.rows, kv_tokens)
            if slot >= 0:
                cut_jump(self.state, group_index, now_s)
        if slot < 0:
            return False
        self._sent_s[request.request_id] = now_s
        breaker = self.breakers.breakers[group_index]
        if breaker.state is State.HALF_OPEN and (lease := breaker.try_probe()) is not None:
            self._leases[request.request_id] = lease
        if not self._hold_alarm.triggered:
            self._hold_alarm.succeed()
        return True

    # -- requests that leave a group without having ended

    def residents(self, group_index: int, waiting_only: bool = False) -> Iterator[int]:
        """Slot numbers of the requests in a group, waiting ones in queue order first."""
        ints = self.state.group_int[group_index]
        yield from [int(slot) for slot in self.state.waiting[group_index, : ints[L.GI_WAITING]]]
        if not waiting_only:
            yield from [int(slot) for slot in self.state.running[group_index, : ints[L.GI_RUNNING]]]

    def extract(self, group_index: int, slot: int) -> Held:
        """Take a request out of a group, ready to go on elsewhere."""
        rows = (np.empty(L.SLOT_INTS, np.int64), np.empty(L.SLOT_FLOATS))
        is_running = self.state.slot_int[group_index, slot, L.SI_PHASE] != L.PHASE_WAITING
        take_out(self.state, group_index, slot, self.env.now, *rows)
        if is_running:  # the planned steps were timed with it aboard
            cut_jump(self.state, group_index, self.env.now)
        if (lease := self._leases.pop(int(rows[0][L.SI_REQUEST]), None)) is not None:
            self.breakers.breakers[group_index].release(lease)
        self._sent_s.pop(int(rows[0][L.SI_REQUEST]), None)
        self._expected_s.pop(int(rows[0][L.SI_REQUEST]), None)  # it goes on elsewhere: the prediction was of here
        request_id, attempts = int(rows[0][L.SI_REQUEST]), int(rows[0][L.SI_ATTEMPTS])
        return Held(self._request(request_id, attempts), self.env.now + self.options.hold_max_s, rows)

    def put_back(self, held: Held, is_retry: bool) -> None:
        """Ask where an extracted request shall go on; a retry is charged to the budget and to its attempts."""
        assert held.rows is not None
        if is_retry:
            request_id, attempts = held.request.request_id, int(held.rows[0][L.SI_ATTEMPTS])
            self._finish_attempt(request_id)
            if not self.retries.try_start_retry(attempts):
                self.end_request(request_id, OutcomeKind.FAILED, "retries_spent", held.rows, is_attempt=False)
                return
            self._retrying.add(request_id)
            held.rows[0][L.SI_ATTEMPTS] += 1
        self._ready.append(held)

    def put_back_misfits(self, group_index: int) -> None:
        """Ask again about waiting requests that the group's pool holds no longer, where another group's does."""
        for slot in self.residents(group_index, waiting_only=True):
            fits = self.fits(int(self.state.slot_int[group_index, slot, L.SI_REQUEST]))
            if not fits[group_index] and fits.any():
                self.put_back(self.extract(group_index, slot), is_retry=False)

    # -- control decisions

    def _tick_point(self, decision: Decision) -> DecisionPoint | None:
        view = self.view()
        make = split_candidates if decision == "split" else rebalance_candidates
        found = make(view, self.groups.groups, self.groups.plans, self.tables, self.moves.declared_health())
        if len(found.commands) <= 1:
            return None
        return DecisionPoint(decision, view, found.commands, found.mask, self.tables, moves=found.moves)

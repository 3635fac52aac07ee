"""What we have in flight ourselves, group by group, as the rows that snapshots show (`Residents`): known at once, whatever reports say.

One row per call in a numpy table; a group keeps its rows in order, admitted ones first, then waiting ones by queue key.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from envs.domain.requests import Request
from envs.domain.snapshot import Residents
from envs.group_kernel import reading as R
from runtime.backends.interface import CallProgress, GivenBack

ROWS_FIRST = 256


class Flight(msgspec.Struct, eq=False):
    """One attempt under way. row: in the table. is_admitted: as far as known, it holds KV."""

    request: Request
    call_id: str
    group_index: int
    row: int
    key: float
    sent_s: float
    is_admitted: bool = False
    started: int = 0  # tokens of the answer that other attempts made
    recall: Callable[[GivenBack], None] | None = None  # ends the attempt with this, while there is one
    continues_at: Callable[[int], bool] | None = None  # whether a group could go on with it exactly

    def sort_key(self) -> tuple[float, int]:
        return self.key, self.request.request_id


class InFlight:
    """All attempts under way. Every change is O(requests of one group) at worst; `residents` is one gather."""

    def __init__(self, groups: int) -> None:
        self._ints = np.zeros((ROWS_FIRST, R.RESIDENT_INTS), np.int64)
        self._floats = np.zeros((ROWS_FIRST, R.RESIDENT_FLOATS))
        self._free = list(range(ROWS_FIRST - 1, -1, -1))
        self.running: list[list[Flight]] = [[] for _ in range(groups)]
        self.waiting: list[list[Flight]] = [[] for _ in range(groups)]
        self._by_call: dict[tuple[int, str], Flight] = {}
        self._rows: list[np.ndarray | None] = [None] * groups  # of each group in order; None: to be made again

    def add(self, request: Request, call_id: str, group_index: int, key: float, now_s: float, started: int = 0) -> Flight:
        """A call goes to a group: it waits there, with all of its prompt (and answer so far) to compute, until we hear otherwise."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        flight = Flight(request, call_id, group_index, row, key, now_s, started=started)
        ints, floats = self._ints[row], self._floats[row]
        ints[R.V_REQUEST], ints[R.V_CLASS], ints[R.V_PROMPT] = request.request_id, request.class_index, request.prompt_tokens
        ints[R.V_GENERATED], ints[R.V_PREFILL_LEFT], ints[R.V_ADMITTED] = started, request.prompt_tokens + started, 0
        floats[R.V_ARRIVAL_S], floats[R.V_FIRST_S], floats[R.V_KEY] = request.arrival_s, np.nan, key
        bisect.insort(self.waiting[group_index], flight, key=Flight.sort_key)
        self._rows[group_index] = None
        self._by_call[group_index, call_id] = flight
        return flight

    def first_token(self, flight: Flight, now_s: float) -> None:
        """Its first token is here: it is admitted and its prompt computed."""
        self._admit(flight)
        self._ints[flight.row, R.V_PREFILL_LEFT] = 0
        if np.isnan(self._floats[flight.row, R.V_FIRST_S]):
            self._floats[flight.row, R.V_FIRST_S] = now_s

    def tokens(self, flight: Flight, generated: int) -> None:
        """So many tokens of the answer are here."""
        self._ints[flight.row, R.V_GENERATED] = generated

    def remove(self, flight: Flight) -> None:
        """The attempt is over, however it ended."""
        self._by_call.pop((flight.group_index, flight.call_id), None)
        (self.running if flight.is_admitted else self.waiting)[flight.group_index].remove(flight)
        self._rows[flight.group_index] = None
        self._free.append(flight.row)

    def take_progress(self, group_index: int, progress: Sequence[CallProgress]) -> None:
        """What the group reports of the calls it knows; those that it does not know were sent since, and wait."""
        admitted: list[Flight] = []
        self._rows[group_index] = None
        for item in progress:
            flight = self._by_call.get((group_index, item.call_id))
            if flight is None:
                continue
            ints = self._ints[flight.row]
            if flight.is_admitted and not item.is_admitted and item.generated + flight.started < ints[R.V_GENERATED]:
                continue  # said before the tokens came that we have
            if item.generated + flight.started > ints[R.V_GENERATED]:
                ints[R.V_GENERATED] = item.generated + flight.started
            ints[R.V_PREFILL_LEFT] = item.prefill_left
            ints[R.V_ADMITTED] = item.is_admitted
            if item.is_admitted:
                admitted.append(flight)
            if flight.is_admitted and not item.is_admitted:  # preempted: it waits again
                self.running[group_index].remove(flight)
                bisect.insort(self.waiting[group_index], flight, key=Flight.sort_key)
            elif item.is_admitted and not flight.is_admitted:
                self.waiting[group_index].remove(flight)
            flight.is_admitted = item.is_admitted
        known = {flight.row for flight in admitted}
        self.running[group_index] = admitted + [f for f in self.running[group_index] if f.row not in known]

    def guess_admissions(self, group_index: int, running_limit: int) -> None:
        """For groups that report no progress: the head of the queue is taken for admitted as far as the batch has room."""
        waiting, running = self.waiting[group_index], self.running[group_index]
        while waiting and len(running) < running_limit:
            self._admit(waiting[0])

    def residents(self) -> Residents:
        """Rows of all calls in flight, group after group; fresh arrays."""
        orders = [self._rows[g] if self._rows[g] is not None else self._order(g) for g in range(len(self.running))]
        offset = np.zeros(len(orders) + 1, np.int64)
        total = 0
        for g, order in enumerate(orders):
            total += len(order)
            offset[g + 1] = total
        rows = np.concatenate(orders)
        return Residents(offset, self._ints[rows], self._floats[rows])

    def generated(self, flight: Flight) -> int:
        """Tokens of its answer that are here."""
        return int(self._ints[flight.row, R.V_GENERATED])

    def ints_of(self, g: int) -> np.ndarray:
        """Rows (columns `R.V_*`) of the admitted calls of group `g`; a copy."""
        return self._ints[[flight.row for flight in self.running[g]]]

    def _order(self, g: int) -> np.ndarray:
        order = np.array([flight.row for flight in itertools.chain(self.running[g], self.waiting[g])], np.int64)
        self._rows[g] = order
        return order

    def _admit(self, flight: Flight) -> None:
        if not flight.is_admitted:
            flight.is_admitted = True
            self._ints[flight.row, R.V_ADMITTED] = 1
            self.waiting[flight.group_index].remove(flight)
            self.running[flight.group_index].append(flight)
            self._rows[flight.group_index] = None

    def _grow(self) -> None:
        rows = len(self._ints)
        self._ints = np.concatenate([self._ints, np.zeros_like(self._ints)])
        self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)])
        self._free = list(range(2 * rows - 1, rows - 1, -1))

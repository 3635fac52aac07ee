"""The process that runs one TP group's engine: forked by the service's nursery, or `python -m runtime.backends.group_host` (`host_starts`).

Batching, sampling and detokenising happen here, so that they never hold the gateway's event loop. Ends with the gateway.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from runtime.backends import group_messages as M
from runtime.backends.interface import CallProgress, GroupReport, PlanReport, RankTimes, WorkReport
from runtime.calls import Piece
from runtime.frames import FrameCutter, frame
from runtime.request_notes import AnswerTimes
from runtime.torch_tp.answer_stream import AnswerStream
from runtime.torch_tp.engine import Engine, EngineSettings
from runtime.torch_tp.kv_file import KvFile
from runtime.torch_tp.kv_handovers import GivenKv
from runtime.torch_tp.measured import Measured
from runtime.torch_tp.nursery import Nursery
from runtime.torch_tp.parent_death import die_with_parent
from runtime.torch_tp.process_name import name_process
from runtime.torch_tp.requests import GenerationRequest, Refused, TokenEvent
from runtime.torch_tp.supervisor import GroupError, RankSettings

logger = logging.getLogger(__name__)

PROCESS_NAME = "host"
BLOCK_TOKENS = 16
RESPLIT_DEADLINE_S = 60.0
KV_DEADLINE_S = 10.0  # of one part


class GroupHost:
    """Carries out what the gateway process says over one connection."""

    def __init__(self, engine: Engine, settings: M.HostSettings, writer: asyncio.StreamWriter) -> None:
        self._engine, self._settings, self._writer = engine, settings, writer
        self._answers: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, AnswerStream] = {}
        self._orders: set[asyncio.Task[None]] = set()
        self._probes = 0
        self._reported_step = -1
        self._last_steps, self._last_step_s = 0, 0.0

    async def serve(self, reader: asyncio.StreamReader, cutter: FrameCutter) -> None:
        reporting = asyncio.create_task(self._report_while_serving())
        try:
            while data := await reader.read(1 << 16):
                for message in cutter.feed(data):
                    if message[0] == M.STOP:
                        return
                    self._carry_out(message)
        finally:
            reporting.cancel()
            for task in self._answers.values():
                task.cancel()

    def _carry_out(self, message: list[Any]) -> None:
        kind = message[0]
        if kind == M.SUBMIT:
            task = asyncio.create_task(self._answer(message))
            self._answers[message[1]] = task
            task.add_done_callback(lambda done, number=message[1]: self._answers.pop(number, None))
        elif kind == M.CANCEL:
            self._end(message[1])
        elif kind == M.PROBE:
            task = asyncio.create_task(self._probe(message[1]))
            self._answers[-1 - message[1]] = task
            task.add_done_callback(lambda done, number=message[1]: self._answers.pop(-1 - number, None))
        elif kind in (M.RESPLIT, M.GIVE_KV, M.TAKE_KV):
            order = {M.RESPLIT: self._resplit, M.GIVE_KV: self._give_kv, M.TAKE_KV: self._take_kv}[kind]
            task = asyncio.create_task(self._order(message[1], order(*message[2:])))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)
        elif kind == M.STRIKE:  # drills: a signal to one rank
            self._engine.signal_rank(message[1], signal.Signals(message[2]))

    def _say(self, message: list[Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    def _end(self, number: int) -> None:
        """At once, since the call may come back under its id with the next message: a cancelled task takes its time."""
        if (stream := self._streams.get(number)) is not None:
            stream.cancel()  # its last event ends the task
        elif (task := self._answers.get(number)) is not None:
            task.cancel()

    async def _answer(self, message: list[Any]) -> None:
        """Hand on the pieces of one answer; cancelled, the engine's work ends with it."""
        number = message[1]
        try:
            stream = self._streams[number] = self._engine.submit(M.request_of(message))
            async for event in stream:
                if event.finish_reason in ("error", "moved", "deadline", "cancelled"):
                    self._say([M.ENDED, number, "fault", event.detail or event.finish_reason])
                    return
                self._say(M.piece_to_wire(number, piece_of_event(event)))
        except Refused as refused:
            self._say([M.ENDED, number, refused.reason, str(refused)])
        except ValueError as error:
            self._say([M.ENDED, number, "invalid", str(error)])
        except TimeoutError as error:
            self._say([M.ENDED, number, "fault", str(error)])
        finally:
            self._streams.pop(number, None)

    async def _probe(self, number: int) -> None:
        """One token, made for nobody (K22)."""
        self._probes += 1
        is_made = False
        try:
            request = GenerationRequest(f"probe-{self._probes}", (1,), 1, priority=1, ignore_eos=True)
            async for event in self._engine.submit(request):
                is_made = event.token is not None
        except (Refused, ValueError, TimeoutError) as error:
            logger.info("probe failed reason=%s", error)
        self._say([M.PROBED, number, is_made])

    async def _order(self, number: int, work: Coroutine[Any, Any, list[Any]]) -> None:
        """Say what came of an order: why it could not be done, or "" and what it brought."""
        try:
            result, error = await work, ""
        except (GroupError, ValueError, TimeoutError, IndexError) as refused:
            result, error = [], str(refused) or type(refused).__name__
        self._say([M.CARRIED_OUT, number, error, *result])

    async def _resplit(self, heads: list[float], blocks: list[float], rows: list[float]) -> list[Any]:
        """Slide to the split by these widths, one per rank of the group; ranks that are no members now are left out."""
        engine, paused_s = self._engine, self._engine.plan_paused_s
        try:
            members = engine.supervisor.members
            chosen = [[float(widths[rank]) for rank in members] for widths in (heads, blocks, rows)]
            cuts = {"mlp_shares": chosen[1], "vocabulary_shares": chosen[2]}
            version = (await asyncio.to_thread(engine.set_plan, chosen[0], RESPLIT_DEADLINE_S, cuts=cuts)).version
        finally:
            self._say(M.report_to_wire(self._report()))  # so that nobody believes an older one
        return [version, engine.plan_paused_s - paused_s]

    async def _give_kv(self, call_id: str, after: int) -> list[Any]:
        return [asdict(await asyncio.to_thread(self._engine.give_kv, call_id, after, KV_DEADLINE_S))]

    async def _take_kv(self, place: dict[str, Any]) -> list[Any]:
        given = GivenKv(**{**place, "file": KvFile(**place["file"]), "ids": tuple(place["ids"])})
        await asyncio.to_thread(self._engine.take_kv, given, KV_DEADLINE_S)
        return []

    async def _report_while_serving(self) -> None:
        """An engine that has stopped for good takes this process with it: its keeper starts another, and a live one would be asked on."""
        while self._engine.is_serving:
            self._say(M.report_to_wire(self._report()))
            await asyncio.sleep(self._settings.report_period_s)
        logger.error("the engine is gone, and so is its process")
        self._writer.close()  # what was said is sent first; reading ends with it

    def _report(self) -> GroupReport:
        load, measured = self._engine.load(), self._engine.measured()
        steps, step_s = measured.passes - self._last_steps, measured.step_s - self._last_step_s
        self._last_steps, self._last_step_s = measured.passes, measured.step_s
        total = self._settings.kv_tokens_max // BLOCK_TOKENS
        used = -(-load.kv_tokens_running // BLOCK_TOKENS)
        return GroupReport(
            at_s=time.monotonic(),
            running=load.running,
            waiting=load.waiting,
            kv_blocks_free=max(0, total - used),
            kv_blocks_total=total,
            step_s=step_s / steps if steps > 0 and load.running else 0.0,
            rank_times=self._rank_times(),
            progress=tuple(CallProgress(p.request_id, p.generated, p.prefill_left, p.is_running) for p in self._engine.progress()),
            plan=self._plan(),
            work=self._work(measured),
        )

    def _plan(self) -> PlanReport | None:
        """None in the moment in which members change."""
        supervisor = self._engine.supervisor
        plan, members = supervisor.plan, supervisor.members
        if plan.ranks != len(members):
            return None
        place = {rank: index for index, rank in enumerate(members)}
        layers, ranks = plan.layers, range(len(self._settings.ranks))
        heads = tuple(_mean(layer.query_heads[place[r]] for layer in layers) if r in place else 0.0 for r in ranks)
        columns = tuple(_mean(layer.mlp_blocks[place[r]] * layer.mlp_block for layer in layers) if r in place else 0.0 for r in ranks)
        rows = tuple(plan.vocabulary_rows[place[r]] if r in place else 0 for r in ranks)
        return PlanReport(plan.version, heads, columns, rows, tuple(members), self._engine.is_changing_plan)

    def _work(self, measured: Measured) -> WorkReport:
        by_rank = {timing.rank: timing for timing in measured.ranks}
        ranks = [by_rank.get(rank) for rank in range(len(self._settings.ranks))]
        stalls = tuple(0.0 if timing is None else timing.memory_stall_s for timing in ranks)
        return WorkReport(measured.passes, tuple(0.0 if timing is None else timing.compute_s for timing in ranks), stalls)

    def _rank_times(self) -> RankTimes | None:
        """Of the last step, if it has not been told and is of a kind that the model predicts: one pass, or decoding alone."""
        last = self._engine.last_step
        if last is None or last[0].step == self._reported_step or not last[0].slices or not last[2]:
            return None
        command, result, done = last
        lengths = [len(part.tokens) for part in command.slices]
        if result.passes > 1 and max(lengths) > 1:
            return None
        self._reported_step = command.step
        kv = sum(part.start + 1 + result.passes // 2 for part in command.slices if len(part.tokens) == 1)
        pairs = 0.5 * sum(length * length for length in lengths if length > 1)
        ranks = range(len(self._settings.ranks))
        times = [[done[rank].busy_s[k] / result.passes if rank in done else 0.0 for rank in ranks] for k in (0, 1)]
        return RankTimes(sum(lengths), pairs, kv, tuple(times[0]), tuple(times[1]))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def piece_of_event(event: TokenEvent) -> Piece:
    report = event.report
    if report is None:
        return Piece(event.index, event.token, event.text, event.logprobs, event.finish_reason)
    spans_s = np.diff((report.arrival_s, report.admitted_s, report.first_token_s, report.finish_s))
    times = None
    if np.isfinite(spans_s).all():
        times = AnswerTimes(*spans_s.tolist(), report.parts, report.preemptions, report.hit_tokens)
    ends = report.prompt_tokens, report.output_tokens
    return Piece(event.index, event.token, event.text, event.logprobs, event.finish_reason, *ends, times=times)


async def run(descriptor: int, nursery: Nursery | None) -> int:
    connection = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=connection)
    cutter = FrameCutter()
    messages: list[list[Any]] = []
    while not messages:
        data = await reader.read(1 << 16)
        if not data:
            return 0
        messages = list(cutter.feed(data))
    fields = dict(messages[0][1])
    settings = M.HostSettings(**{**fields, "ranks": tuple(fields["ranks"])})
    try:
        engine = await asyncio.to_thread(start_engine, settings, nursery)
    except Exception as error:  # whatever it was, the gateway must know why this group does not stand
        writer.write(frame([M.FAILED, f"{type(error).__name__}: {error}"]))
        await writer.drain()
        return 1
    try:
        config = engine.config
        writer.write(frame([M.UP, {"context_tokens": config.context_tokens, "vocabulary": config.vocabulary, "pid": os.getpid()}]))
        await GroupHost(engine, settings, writer).serve(reader, cutter)
    finally:
        await asyncio.to_thread(engine.close)
    return 0


def start_engine(settings: M.HostSettings, nursery: Nursery | None) -> Engine:
    chosen = EngineSettings(
        kv_tokens_max=settings.kv_tokens_max,
        slots_max=settings.slots_max,
        dtype=settings.dtype,
        communicator=settings.communicator,
        batcher={"queue_limit": settings.queue_limit},
        supervisor=settings.supervisor,
    )
    return Engine.start(settings.model, [RankSettings(**rank) for rank in settings.ranks], chosen, nursery=nursery)


def main(descriptor: int, group: str, nursery: Nursery | None = None) -> int:
    """Serve a group over the connection `descriptor`. nursery: this process's own, to be closed with it; None: the engine starts one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which stops its groups itself
    name_process(f"{PROCESS_NAME} {group}")
    shown = group.replace("%", "%%")  # several hosts share their log
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s %(name)s group={shown} %(message)s", stream=sys.stderr)
    try:
        return asyncio.run(run(descriptor, nursery))
    except KeyboardInterrupt:
        return 130
    finally:
        if nursery is not None:
            nursery.close()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    sys.exit(main(int(sys.argv[1]), sys.argv[3]))

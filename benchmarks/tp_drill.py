"""Kills, freezes and cuts of ranks at random moments under load, and stops of the whole program: what is lost, doubled, changed or left.

`python -m benchmarks.tp_drill --model … --strikes 200` strikes a serving engine again and again; `--stops 100` starts the engine in a
process of its own, ends that process by INT, TERM and KILL at random moments and looks for what is left of it 5 s later. Both print the
seed first and end with one line of JSON. Texts are compared with those of the same engine before the first strike.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.listening_sockets import listening_of, still_listening
from benchmarks.reporting import Bar, at_most, print_bars
from runtime.torch_tp.engine import Engine, EngineSettings
from runtime.torch_tp.requests import GenerationRequest, SamplingSettings, TokenEvent
from runtime.torch_tp.supervisor import GroupError, RankSettings

GAP_OF_A_TIE = 1e-3
"""Where a greedy text differs and the two likeliest tokens were closer than this (in logits), rounding decided."""

LEFT_AFTER_S = 5.0
KINDS = ("kill", "freeze", "cut", "slide")
COMMUNICATORS = ("auto", "tcp")  # of the engines that are stopped, in turns: by shared memory alone no port is opened
PROMPT_IDS = (
    (1, 397, 261),
    (1, 300, 301, 302),
    (1, 450, 264, 312, 266),
    (1, 273),
    (1, 410, 280, 290, 300, 310, 320, 330, 340, 350, 360, 370),
)


@dataclass(frozen=True, slots=True)
class Reference:
    """An undisturbed answer. gaps: logprob of the likeliest token less that of the second, per token; empty where it was drawn."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(slots=True)
class Findings:
    """What went wrong, and how long tokens stood still after a strike that lost a rank (seconds)."""

    answers: int = 0
    lost_requests: int = 0
    lost_or_doubled_tokens: int = 0
    changed_answers: int = 0
    ties: int = 0
    cancelled: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    stood_still_s: list[float] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.details) < 20:
            self.details.append(text)


def requests_of(rng: random.Random, count: int, context_tokens: int, vocabulary: int, tokens_max: int) -> list[GenerationRequest]:
    """Mixed lengths, half greedy, half drawn with penalties; some share a beginning."""
    requests = []
    for number in range(count):
        prompt = list(PROMPT_IDS[number % len(PROMPT_IDS)]) * rng.randint(1, 3) + [
            rng.randrange(3, vocabulary) for _ in range(rng.randint(0, 12))
        ]
        answer = rng.randint(5, min(tokens_max, context_tokens - len(prompt)))
        drawn = SamplingSettings(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=number)
        sampling = SamplingSettings() if number % 2 == 0 else drawn
        requests.append(
            GenerationRequest(
                f"reference-{number}", tuple(prompt), answer, sampling, ignore_eos=True, logprobs=2 if number % 2 == 0 else None
            )
        )
    return requests


def reference_of(engine: Engine, request: GenerationRequest) -> Reference:
    """Raises: RuntimeError when not even the calm engine answers in full."""
    events = list(engine.submit(request))
    tokens = tuple(event.token for event in events if event.token is not None)
    if len(tokens) != request.max_tokens:
        raise RuntimeError(f"{request.request_id}: {len(tokens)} of {request.max_tokens} tokens before any strike: {events[-1]}")
    gaps = tuple(event.logprobs.top[0][1] - event.logprobs.top[1][1] for event in events if event.logprobs is not None)
    return Reference(request, tokens, gaps)


class Drill:
    """Keeps `width` requests in flight on an engine and compares every answer with its reference."""

    def __init__(
        self, engine: Engine, references: Sequence[Reference], rng: random.Random, width: int = 6, deadline_s: float = 600.0
    ) -> None:
        self.findings = Findings()
        self._engine = engine
        self._references = references
        self._rng = rng
        self._width = width
        self._deadline_s = deadline_s
        self._count = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._last_token_s = time.monotonic()
        self._moved = threading.Condition()
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(width)]

    # --- load ---------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Drill:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(self._deadline_s)

    def _ask_on(self) -> None:
        while not self._is_over.is_set():
            with self._lock:
                self._count += 1
                number = self._count
                reference = self._rng.choice(self._references)
                cancel_after = self._rng.randint(1, reference.request.max_tokens) if self._rng.random() < 0.05 else None
            self._ask_once(reference, number, cancel_after)

    def _ask_once(self, reference: Reference, number: int, cancel_after: int | None) -> None:
        asked = reference.request
        request = GenerationRequest(f"drill-{number}", asked.prompt, asked.max_tokens, asked.sampling, ignore_eos=True)
        events: list[TokenEvent] = []
        try:
            stream = self._engine.submit(request)
            for event in stream:
                events.append(event)
                with self._moved:
                    self._last_token_s = time.monotonic()
                    self._moved.notify_all()
                if len(events) == cancel_after:
                    stream.cancel()
        except Exception as error:  # refused, timed out: the request is lost, whatever the reason
            with self._lock:
                self.findings.lost_requests += 1
                self.findings.note(f"{request.request_id}: {type(error).__name__}: {error}")
            return
        with self._lock:
            self._judge(reference, request, events, cancel_after)

    def _judge(self, reference: Reference, request: GenerationRequest, events: list[TokenEvent], cancel_after: int | None) -> None:
        findings = self.findings
        findings.answers += 1
        end = events[-1]
        tokens = tuple(event.token for event in events if event.token is not None)
        places = [event.index for event in events if event.token is not None]
        expected_end = ("cancelled", "length") if cancel_after is not None else ("length",)
        findings.cancelled += end.finish_reason == "cancelled"
        if end.finish_reason not in expected_end:
            findings.lost_requests += 1
            findings.note(f"{request.request_id}: ended by {end.finish_reason}: {end.detail}")
        if places != list(range(len(tokens))) or (end.finish_reason == "length" and len(tokens) != request.max_tokens):
            findings.lost_or_doubled_tokens += 1
            findings.note(f"{request.request_id}: {len(tokens)} tokens at places {places[:5]}… of {request.max_tokens}")
        if tokens != reference.tokens[: len(tokens)]:
            first = next(place for place, (a, b) in enumerate(zip(tokens, reference.tokens, strict=False)) if a != b)
            if reference.gaps and reference.gaps[first] < GAP_OF_A_TIE:
                findings.ties += 1
            else:
                findings.changed_answers += 1
                gap = f"gap {reference.gaps[first]:.6f}" if reference.gaps else "drawn"
                findings.note(f"{request.request_id}: differs from token {first} on ({gap})")

    # --- strikes ------------------------------------------------------------------------------------------------------------

    def strike(self, kind: str, pause_s: float = 0.0) -> None:
        """Hurt a random member, or change the split; a sole survivor is left alone until somebody has come back."""
        time.sleep(pause_s)
        until(lambda: len(self._engine.supervisor.members) > 1 or not self._engine.is_serving, self._deadline_s)
        members = self._engine.supervisor.members
        if not self._engine.is_serving:
            raise RuntimeError("the engine no longer serves")
        self.findings.strikes[kind] += 1
        if kind == "slide":
            try:
                self._engine.set_plan([self._rng.randint(1, 8) for _ in members], self._deadline_s)
            except (GroupError, ValueError) as error:  # a rank was lost meanwhile, or came back
                self.findings.strikes[f"slide not done: {type(error).__name__}"] += 1
            return
        changes = self._engine.measured().rebuilds
        worker = self._rng.choice(members)
        struck_s = time.monotonic()
        if not self._hurt(worker, kind):
            self.findings.strikes[f"{kind} found nobody"] += 1
            return
        until(lambda: self._engine.measured().rebuilds > changes or not self._engine.is_serving, self._deadline_s)
        rebuilt_s = self._engine.changes[-1].rebuilt_s
        with self._moved:
            self._moved.wait_for(lambda: self._last_token_s > rebuilt_s, self._deadline_s)
            self.findings.stood_still_s.append(self._last_token_s - struck_s)

    def _hurt(self, worker: int, kind: str) -> bool:
        if kind == "cut":
            return self._engine.supervisor.sever(worker)
        return self._engine.signal_rank(worker, {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[kind])


def until(condition: Callable[[], bool], deadline_s: float) -> None:
    """Wait for something that other threads or processes bring about. Raises: TimeoutError."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {deadline_s:g} s")
        time.sleep(0.005)


def run_strikes(options: argparse.Namespace) -> list[Bar]:
    rng = random.Random(options.seed)
    ranks = [RankSettings(speed=1.0 / (1 + index % 3)) for index in range(options.ranks)]
    settings = EngineSettings(kv_tokens_max=options.kv_tokens, slots_max=8, with_text=False, wait_deadline_s=600.0)
    with Engine.start(options.model, ranks, settings) as engine:
        config = engine.config
        asked = requests_of(rng, options.references, config.context_tokens, config.vocabulary, options.max_tokens)
        references = [reference_of(engine, request) for request in asked]
        print(f"references: {len(references)} answers, {sum(len(r.tokens) for r in references)} tokens", flush=True)
        with Drill(engine, references, rng) as drill:
            for number in range(options.strikes):
                kind = rng.choice(options.kinds)
                drill.strike(kind, rng.uniform(0.0, options.pause_s))
                if (number + 1) % 10 == 0:
                    f = drill.findings
                    print(
                        f"strike {number + 1}: answers {f.answers}, lost {f.lost_requests}, tokens wrong {f.lost_or_doubled_tokens}, "
                        f"changed {f.changed_answers}, ties {f.ties}, members {engine.supervisor.members}", flush=True,
                    )  # fmt: skip
        engine.check()
        findings = drill.findings
    for detail in findings.details:
        print(detail)
    still = sorted(findings.stood_still_s)
    print(f"strikes {dict(findings.strikes)}, answers {findings.answers}, cancelled {findings.cancelled}, ties {findings.ties}")
    if still:
        print(f"strike to next token: median {statistics.median(still):.3f} s, worst {still[-1]:.3f} s")
    count = options.strikes
    return [
        at_most("requests lost", findings.lost_requests, 0, count),
        at_most("answers with tokens lost or doubled", findings.lost_or_doubled_tokens, 0, count),
        at_most("answers changed beyond ties", findings.changed_answers, 0, count),
    ]


# --- stops ------------------------------------------------------------------------------------------------------------------


def serve_until_stopped(options: argparse.Namespace) -> None:
    """The child of `--stops`: an engine under load for ever."""
    rng = random.Random(options.seed)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    try:
        door = {"listen_host": "127.0.0.1"} if options.serve == "tcp" else None  # for ranks of other hosts
        settings = EngineSettings(
            kv_tokens_max=options.kv_tokens, slots_max=8, with_text=False, communicator=options.serve, supervisor=door
        )
        with Engine.start(options.model, [RankSettings() for _ in range(options.ranks)], settings) as engine:
            config = engine.config
            print("serving", flush=True)
            asked = requests_of(rng, 8, config.context_tokens, config.vocabulary, options.max_tokens)
            while True:
                for stream in [engine.submit(request) for request in asked]:
                    stream.result(120.0)
    except KeyboardInterrupt:
        print("stopped", flush=True)


def _leave(number: int, frame: object) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def marked(mark: str) -> list[int]:
    """Processes whose environment bears the mark, however they came about."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
        except OSError:  # gone, or not ours
            continue
    return found


def segments(pid: int) -> list[str]:
    return [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"ballast-{pid}-")]


def stop_once(options: argparse.Namespace, number: signal.Signals, communicator: str, rng: random.Random) -> tuple[list[str], int]:
    """Start, stop at a random moment (loading or serving), wait; what is left, and how many ports were listened on at the stop."""
    mark = f"BALLAST_DRILL={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    command = [
        sys.executable,
        "-m",
        "benchmarks.tp_drill",
        "--model",
        options.model,
        "--ranks",
        str(options.ranks),
        "--serve",
        communicator,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, name: value}, preexec_fn=_heed
    )
    assert process.stdout is not None
    if rng.random() < 0.3:
        time.sleep(rng.uniform(0.0, options.load_s))
    else:
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 1.0))
    ports = listening_of(marked(mark))
    process.send_signal(number)
    if rng.random() < 0.2 and number == signal.SIGINT:
        time.sleep(rng.uniform(0.0, 0.2))
        process.send_signal(number)  # Ctrl-C twice
    process.wait(60.0)
    process.stdout.close()
    deadline_s = time.monotonic() + LEFT_AFTER_S

    def left() -> list[str]:
        return [f"process {pid}" for pid in marked(mark)] + segments(process.pid) + still_listening(ports)

    while time.monotonic() < deadline_s and left():
        time.sleep(0.05)
    found = left()
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    return found, len(ports)


def _heed() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_stops(options: argparse.Namespace) -> list[Bar]:
    rng = random.Random(options.seed)
    left: list[str] = []
    ports = 0
    for number in range(options.stops):
        how, communicator = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[number % 3], COMMUNICATORS[number % 2]
        found, open_ports = stop_once(options, how, communicator, rng)
        left += found
        ports += open_ports
        print(f"stop {number + 1} {how.name} {communicator}: {open_ports} ports; {', '.join(found) or 'nothing left'}", flush=True)
    if not ports:
        raise RuntimeError("no stopped engine listened on any port: this run says nothing of ports")
    return [at_most(f"processes, segments or ports left {LEFT_AFTER_S:g} s after a stop", len(left), 0, options.stops)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tp_drill", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="directory, .gguf file or known name (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=3, help="worker processes (default %(default)s)")
    parser.add_argument("--strikes", type=int, default=0, help="kills, freezes, cuts and slides under load (default %(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of strikes, drawn alike (default %(default)s)")
    parser.add_argument("--stops", type=int, default=0, help="ends of the whole program (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=100, help="of the longest answer (default %(default)s)")
    parser.add_argument("--references", type=int, default=20, help="different requests (default %(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=1024, help="KV pool, tokens (default %(default)s)")
    parser.add_argument("--pause-s", type=float, default=1.0, help="longest wait before a strike, s (default %(default)s)")
    parser.add_argument(
        "--load-s", type=float, default=8.0, help="latest moment of a stop that comes while loading, s (default %(default)s)"
    )
    parser.add_argument("--serve", metavar="COMMUNICATOR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",")
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"--kinds {sorted(unknown)} unknown; known: {', '.join(KINDS)}")
    if options.serve:
        serve_until_stopped(options)
        return 0
    print(f"seed {options.seed}, model {options.model}, {options.ranks} ranks", flush=True)
    bars = (run_strikes(options) if options.strikes else []) + (run_stops(options) if options.stops else [])
    print_bars(bars, seed=options.seed, model=options.model, ranks=options.ranks)
    return 0 if all(bar.ok for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())

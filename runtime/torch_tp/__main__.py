"""`python -m runtime.torch_tp generate`: one prompt through real ranks, with the plan, where the time went, and a rank lost on request.

Exit codes: 0 done, 1 the answer could not be finished, 2 bad input (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from envs.domain.plans import LayerPlans
from envs.domain.requests import LATENCY_PARTS
from runtime.torch_tp.answer_stream import AnswerStream
from runtime.torch_tp.chat_template import ChatTemplateError
from runtime.torch_tp.config import CheckpointError, read_config
from runtime.torch_tp.engine import Engine, EngineSettings, request_for
from runtime.torch_tp.measured import Measured
from runtime.torch_tp.model_folder import model_folder
from runtime.torch_tp.requests import GenerationRequest, Refused, RequestReport, SamplingSettings, TokenEvent
from runtime.torch_tp.supervisor import GroupChange, GroupError, RankSettings
from runtime.torch_tp.tokenizer import load_tokenizer

EMULATION_NOTE = "emulated: ranks slower than 1 are played on this host by waiting; times say nothing about real devices"


class _OneLineParser(argparse.ArgumentParser):
    """Bad arguments: one line on stderr, exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message}; see --help\n")


class BadInput(ValueError):
    """What the user gave cannot be used; said in one line."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A rank to be hurt once the answer has so many tokens."""

    rank: int
    token: int
    number: signal.Signals


def build_parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="python -m runtime.torch_tp", description="Uneven tensor parallelism over real worker processes.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_OneLineParser, metavar="COMMAND")
    generate = commands.add_parser("generate", help="answer one prompt and show plan, tokens and where the time went")
    generate.add_argument("prompt", help="text to go on from")
    generate.add_argument("--model", default="smollm2", help="directory, .gguf file or known name (default %(default)s)")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template as a user's message")
    _add_ranks(generate.add_argument_group("ranks"))
    _add_sampling(generate.add_argument_group("sampling"))
    _add_strikes(generate.add_argument_group("drills"))
    output = generate.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object at the end instead of text")
    output.add_argument("--log-level", default="WARNING", choices=["DEBUG", "INFO", "WARNING", "ERROR"], help="default %(default)s")
    return parser


def _add_ranks(group: Any) -> None:
    group.add_argument("--ranks", type=int, default=None, help="worker processes (default: as many as --speeds, else 2)")
    group.add_argument("--speeds", default=None, help="relative speed of each rank, e.g. 1,0.5: decides the split (default: all 1)")
    group.add_argument(
        "--emulate", action="store_true", help="also slow ranks down to their --speeds, relative to the fastest (emulation, default off)"
    )
    group.add_argument("--devices", default="cpu", help="device of each rank, or one for all, e.g. cuda:0,cuda:1 (default %(default)s)")
    group.add_argument("--threads", type=int, default=1, help="torch threads per rank (default %(default)s)")
    group.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="default %(default)s")
    group.add_argument("--communicator", default="auto", help="auto, shm, gloo, nccl or hierarchical (default %(default)s)")
    group.add_argument("--kv-tokens", type=int, default=4096, help="KV pool, tokens over all requests (default %(default)s)")


def _add_sampling(group: Any) -> None:
    group.add_argument("--max-tokens", type=int, default=128, help="of the answer (default %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="tokens to choose among, 0 is all (default %(default)s)")
    group.add_argument("--top-p", type=float, default=1.0, help="share of probability to choose from (default %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, help="least probability, share of the likeliest token's (default %(default)s)")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off (default %(default)s)")
    group.add_argument("--presence-penalty", type=float, default=0.0, help="default %(default)s")
    group.add_argument("--frequency-penalty", type=float, default=0.0, help="default %(default)s")
    group.add_argument("--seed", type=int, default=0, help="default %(default)s")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given more than once")
    group.add_argument("--ignore-eos", action="store_true", help="go on over the model's end token")


def _add_strikes(group: Any) -> None:
    group.add_argument("--kill-rank", action="append", default=[], metavar="RANK@TOKEN", help="SIGKILL a rank at that token, e.g. 1@40")
    group.add_argument("--freeze-rank", action="append", default=[], metavar="RANK@TOKEN", help="SIGSTOP a rank at that token")
    group.add_argument(
        "--slide", action="append", default=[], metavar="SHARES@TOKEN", help="change the split at that token, e.g. 1:3@20 (default: never)"
    )
    group.add_argument("--no-revive", action="store_true", help="do not start a lost rank again")


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        with _interrupts_raise():
            return _generate(options)
    except (BadInput, CheckpointError, ChatTemplateError, Refused) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except GroupError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@contextmanager
def _interrupts_raise() -> Iterator[None]:
    """SIGTERM ends the run like Ctrl-C, so that everything is closed in order; a second one does not break into the closing."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- what was asked ---------------------------------------------------------------------------------------------------------


def _numbers(text: str, option: str, separator: str = ",") -> list[float]:
    try:
        numbers = [float(part) for part in text.split(separator)]
    except ValueError:
        raise BadInput(f"{option} {text!r}: expected numbers separated by {separator!r}, e.g. 1{separator}0.5") from None
    if not all(0 <= number < float("inf") for number in numbers) or not any(numbers):
        raise BadInput(f"{option} {text!r}: expected numbers >= 0, not all 0")
    return numbers


def _ranks(options: argparse.Namespace) -> list[RankSettings]:
    speeds = None if options.speeds is None else _numbers(options.speeds, "--speeds")
    count = options.ranks if options.ranks is not None else 2 if speeds is None else len(speeds)
    if not 1 <= count <= 64:
        raise BadInput(f"--ranks {count}: expected 1 to 64")
    speeds = speeds or [1.0] * count
    if len(speeds) != count or min(speeds) <= 0:
        raise BadInput(f"--speeds {options.speeds}: expected {count} numbers above 0, one per rank")
    devices = options.devices.split(",")
    if len(devices) == 1:
        devices *= count
    if len(devices) != count:
        raise BadInput(f"--devices {options.devices}: expected one, or one per rank ({count})")
    factors = [max(speeds) / speed if options.emulate else 1.0 for speed in speeds]
    try:
        return [
            RankSettings(speed=speed, device=device, slow_factor=factor, threads=options.threads)
            for speed, device, factor in zip(speeds, devices, factors, strict=True)
        ]
    except ValueError as error:
        raise BadInput(str(error)) from None


def _strikes(options: argparse.Namespace, ranks: int) -> list[Strike]:
    strikes: list[Strike] = []
    for option, texts, number in (
        ("--kill-rank", options.kill_rank, signal.SIGKILL),
        ("--freeze-rank", options.freeze_rank, signal.SIGSTOP),
    ):
        for text in texts:
            found = re.fullmatch(r"(\d+)@(\d+)", text)
            if found is None or int(found[1]) >= ranks:
                raise BadInput(f"{option} {text!r}: expected RANK@TOKEN with a rank of 0 to {ranks - 1}, e.g. {ranks - 1}@40")
            strikes.append(Strike(int(found[1]), int(found[2]), number))
    return strikes


def _slides(options: argparse.Namespace, ranks: int) -> list[tuple[int, list[float]]]:
    slides: list[tuple[int, list[float]]] = []
    for text in options.slide:
        shares, _, token = text.partition("@")
        if not token.isdigit():
            raise BadInput(f"--slide {text!r}: expected SHARES@TOKEN, e.g. 1:3@20")
        numbers = _numbers(shares, "--slide", ":")
        if len(numbers) != ranks:
            raise BadInput(f"--slide {text!r}: expected {ranks} shares, one per rank")
        slides.append((int(token), numbers))
    return slides


def _settings(options: argparse.Namespace) -> EngineSettings:
    if options.kv_tokens < 1:
        raise BadInput(f"--kv-tokens {options.kv_tokens}: expected at least 1")
    return EngineSettings(
        kv_tokens_max=options.kv_tokens, slots_max=4, dtype=options.dtype, communicator=options.communicator, revives=not options.no_revive
    )


def _sampling(options: argparse.Namespace) -> SamplingSettings:
    try:
        return SamplingSettings(
            options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty, options.presence_penalty,
            options.frequency_penalty, options.seed,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(str(error)) from None


def _request(options: argparse.Namespace) -> GenerationRequest:
    """Made before any process is started, so that bad input is told at once."""
    folder = model_folder(options.model)
    prompt: Any = [{"role": "user", "content": options.prompt}] if options.chat else options.prompt
    try:
        request = request_for(
            load_tokenizer(folder), "cli", prompt, options.max_tokens,
            sampling=_sampling(options), stop_strings=tuple(options.stop), ignore_eos=options.ignore_eos,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(str(error)) from None
    limit = min(read_config(folder).context_tokens, options.kv_tokens)
    if request.tokens_needed > limit:
        raise BadInput(f"{len(request.prompt)} prompt tokens + --max-tokens {options.max_tokens} exceed {limit} (context or --kv-tokens)")
    return request


# --- doing it ---------------------------------------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> int:
    ranks = _ranks(options)
    strikes, slides = _strikes(options, len(ranks)), _slides(options, len(ranks))
    settings = _settings(options)
    request = _request(options)
    changes: list[GroupChange] = []
    say = (lambda text: None) if options.json else _say
    try:
        engine = Engine.start(options.model, ranks, settings, on_change=changes.append)
    except ValueError as error:  # also of CheckpointError
        raise BadInput(str(error)) from None
    with engine:
        say(f"model {engine.config.to_spec().name}, {len(ranks)} rank(s)")
        if any(rank.slow_factor > 1 for rank in ranks):
            say(EMULATION_NOTE)
        say(plan_text(engine.supervisor.plan))
        events = list(_shown(engine, engine.submit(request), strikes, slides, changes, say))
        end, measured, plan = events[-1], engine.measured(), engine.supervisor.plans
        assert end.report is not None
        if options.json:
            print(json.dumps(_as_json(events, measured, changes, plan[-1] if plan else None)))
        else:
            say("")
            say(report_text(end, measured))
            for change in changes[1:]:
                say(change_text(change))
            if plan:
                say(plan_text(plan[-1]))
    if end.finish_reason == "error":
        print(f"error: {end.detail}", file=sys.stderr)
        return 1
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _shown(
    engine: Engine,
    stream: AnswerStream,
    strikes: list[Strike],
    slides: list[tuple[int, list[float]]],
    changes: list[GroupChange],
    say: Any,
) -> Iterator[TokenEvent]:
    """Print text as it comes; strike ranks and slide the split when their tokens are reached."""
    told = len(changes)
    for event in stream:
        if say is _say:
            print(event.text, end="", flush=True)
        yield event
        for strike in [s for s in strikes if s.token <= event.index + 1]:
            strikes.remove(strike)
            engine.signal_rank(strike.rank, strike.number)
            say(f"\n[{strike.number.name} to rank {strike.rank} at token {event.index + 1}]")
        for slide in [s for s in slides if s[0] <= event.index + 1]:
            slides.remove(slide)
            threading.Thread(target=_slide, args=(engine, slide[1], say), daemon=True).start()  # tokens go on meanwhile
        while told < len(changes):
            say(f"\n[{change_text(changes[told])}]")
            told += 1


def _slide(engine: Engine, shares: list[float], say: Any) -> None:
    try:
        plan = engine.set_plan(shares)
        say(f"\n[slid to plan version {plan.version}]")
    except (GroupError, ValueError, TimeoutError) as error:
        say(f"\n[split not changed: {error}]")


# --- showing it -------------------------------------------------------------------------------------------------------------


def plan_text(plan: LayerPlans) -> str:
    """Units of every rank; where layers differ, the mean over layers."""
    count = len(plan.layers)
    lines = [f"plan version {plan.version}: {count} layers over {plan.ranks} rank(s)"]
    lines.append("  rank  query heads  MLP columns  vocabulary rows")
    for rank in range(plan.ranks):
        heads = sum(layer.query_heads[rank] for layer in plan.layers) / count
        columns = sum(layer.mlp_blocks[rank] * layer.mlp_block for layer in plan.layers) / count
        lines.append(f"  {rank:4d}  {heads:11.4g}  {columns:11.5g}  {plan.vocabulary_rows[rank]:15d}")
    return "\n".join(lines)


def change_text(change: GroupChange) -> str:
    lost = ", ".join(f"rank {lost.worker} {lost.kind.name.lower()} ({lost.detail})" for lost in change.lost)
    joined = ", ".join(f"rank {worker} joined" for worker in change.joined)
    what = "; ".join(part for part in (lost, joined) if part) or "rebuilt"
    return f"epoch {change.epoch}: {what}; members now {list(change.members)}"


def report_text(end: TokenEvent, measured: Measured) -> str:
    """Counts, times by part, and each rank's share of a mean step."""
    report = end.report
    assert report is not None
    lines = [
        f"{report.prompt_tokens} prompt + {report.output_tokens} answer tokens, ended by {end.finish_reason}; "
        f"first token {1e3 * report.ttft_s:.1f} ms, then {1e3 * report.tpot_s:.1f} ms per token; "
        f"{report.recoveries} recoveries, {report.recomputed_tokens} tokens computed again, {measured.slides} slides",
        "where the time went (ms): " + _parts_text(report),
        f"mean of {measured.passes} passes in {measured.steps} steps (ms):",
        "  rank   compute  memory stall  communication      host",
    ]
    for timing in measured.ranks:
        means = [1e3 * seconds / max(1, measured.passes) for seconds in asdict(timing).values()][1:]
        lines.append(f"  {timing.rank:4d}  {means[0]:8.3f}  {means[1]:12.3f}  {means[2]:13.3f}  {means[3]:8.3f}")
    return "\n".join(lines)


def _parts_text(report: RequestReport) -> str:
    named = [
        f"{name.removesuffix('_s').replace('_', ' ')} {1e3 * seconds:.1f}"
        for name, seconds in zip(LATENCY_PARTS, report.parts, strict=True)
    ]
    return ", ".join([*named, f"unexplained {1e3 * report.unexplained_s:.1f}", f"sum {1e3 * report.e2e_s:.1f}"])


def _as_json(events: Sequence[TokenEvent], measured: Measured, changes: Sequence[GroupChange], plan: LayerPlans | None) -> dict[str, Any]:
    end = events[-1]
    assert end.report is not None
    parts = dict(zip(LATENCY_PARTS, end.report.parts, strict=True))
    return {
        "text": "".join(event.text for event in events),
        "tokens": [event.token for event in events if event.token is not None],
        "finish_reason": end.finish_reason,
        "detail": end.detail,
        "report": {**{key: value for key, value in asdict(end.report).items() if key != "parts"}, "parts": parts},
        "measured": asdict(measured),
        "changes": [change_text(change) for change in changes[1:]],
        "plan": None if plan is None else {
            "version": plan.version,
            "query_heads": [list(layer.query_heads) for layer in plan.layers],
            "mlp_columns": [[blocks * layer.mlp_block for blocks in layer.mlp_blocks] for layer in plan.layers],
            "vocabulary_rows": list(plan.vocabulary_rows),
        },
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

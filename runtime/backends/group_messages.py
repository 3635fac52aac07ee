"""What the gateway process and a group host say to one another: lists, the first entry says what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from envs.domain.plans import SplitPlan
from runtime.backends.interface import NOTHING, Begun, CallProgress, GroupReport, PlanReport, RankTimes, WorkReport
from runtime.calls import Call, Piece
from runtime.request_notes import AnswerTimes
from runtime.torch_tp.requests import GenerationRequest, SamplingSettings, TokenLogprobs

START, SUBMIT, CANCEL, PROBE, STRIKE, STOP = "start", "submit", "cancel", "probe", "strike", "stop"
RESPLIT, GIVE_KV, TAKE_KV = "resplit", "give_kv", "take_kv"  # orders: number, then what they need
UP, FAILED, PIECE, ENDED, REPORT, PROBED, CARRIED_OUT = "up", "failed", "piece", "ended", "report", "probed", "carried_out"


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a group host starts. ranks: fields of RankSettings each. kv_tokens_max, slots_max, queue_limit, context_tokens: bounds."""

    model: str
    ranks: tuple[dict[str, Any], ...]
    kv_tokens_max: int
    slots_max: int
    queue_limit: int
    dtype: str = "float32"
    communicator: str = "auto"
    report_period_s: float = 0.1
    supervisor: dict[str, Any] | None = None

    def to_wire(self) -> list[Any]:
        return [START, asdict(self)]


def submit(number: int, call: Call, begun: Begun = NOTHING) -> list[Any]:
    """Only what the engine needs: ids, limits, sampling. The seed is named, so that every group draws alike."""
    request = GenerationRequest(call.call_id, call.prompt_ids, call.max_tokens, call.sampling)
    sampling = {**asdict(call.sampling), "seed": request.seed}
    return [
        SUBMIT, number, call.call_id, list(call.prompt_ids), call.max_tokens, sampling, list(call.stop_strings), list(call.stop_ids),
        call.logprobs, call.class_index, call.priority, call.ignore_eos, call.min_tokens, list(begun.tokens), begun.waited_s,
    ]  # fmt: skip


def request_of(message: Sequence[Any]) -> GenerationRequest:
    """Raises: ValueError for a request that could not be."""
    (_, _, call_id, prompt, max_tokens, sampling, stop_strings, stop_ids, logprobs, class_index, priority, ignore_eos, min_tokens,
     answer, waited_s) = message  # fmt: skip
    return GenerationRequest(
        call_id, tuple(prompt), max_tokens, SamplingSettings(**sampling), priority, class_index, tuple(stop_ids), tuple(stop_strings),
        logprobs, None, ignore_eos, min(min_tokens, max_tokens), tuple(answer), waited_s,
    )  # fmt: skip


def piece_to_wire(number: int, piece: Piece) -> list[Any]:
    logprobs = None if piece.logprobs is None else [piece.logprobs.chosen, [list(pair) for pair in piece.logprobs.top]]
    message = [PIECE, number, piece.index, piece.token, piece.text, logprobs, piece.finish_reason, piece.prompt_tokens, piece.output_tokens]
    return message if piece.times is None else [*message, asdict(piece.times)]


def piece_of(message: Sequence[Any]) -> Piece:
    _, _, index, token, text, logprobs, reason, prompt_tokens, output_tokens, *rest = message
    found = None if logprobs is None else TokenLogprobs(logprobs[0], tuple((int(t), float(p)) for t, p in logprobs[1]))
    times = AnswerTimes(**{**rest[0], "parts": tuple(rest[0]["parts"])}) if rest else None
    return Piece(index, token, text, found, reason, prompt_tokens, output_tokens, times=times)


def widths_to_wire(plan: SplitPlan) -> list[list[int]]:
    """Per rank of the group; they count as shares."""
    return [list(plan.query_heads), list(plan.mlp_blocks), list(plan.vocabulary_rows)]


def report_to_wire(report: GroupReport) -> list[Any]:
    return [REPORT, asdict(report)]


def report_of(message: Sequence[Any]) -> GroupReport:
    fields = dict(message[1])
    if fields["rank_times"] is not None:
        times = fields["rank_times"]
        fields["rank_times"] = RankTimes(**{**times, "attention_s": tuple(times["attention_s"]), "mlp_s": tuple(times["mlp_s"])})
    if fields["progress"] is not None:
        fields["progress"] = tuple(CallProgress(**item) for item in fields["progress"])
    if fields["plan"] is not None:
        fields["plan"] = PlanReport(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields["plan"].items()})
    if fields["work"] is not None:
        fields["work"] = WorkReport(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields["work"].items()})
    return GroupReport(**fields)

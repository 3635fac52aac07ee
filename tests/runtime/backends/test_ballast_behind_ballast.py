"""A Ballast as a group of another: read as vLLM would be, by its metrics page; calls, ids and traces go through."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.backends.load_metrics import load_of
from tests.conftest import GUARD_S
from tests.runtime.live_service import Live, live
from tests.runtime.tracing.collector import Collector, attributes, collecting

STREAMS = 5


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module", params=[True, False], ids=["old-names-too", "new-names"])
def pair(request: pytest.FixtureRequest, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Live]]:
    """(the one in front, the one behind)."""
    tracing = {"endpoint": collector.url}
    inner = live(tmp_path_factory.mktemp("inner"), tracing=tracing, gateway={"has_old_metric_names": request.param})
    with inner as behind:
        groups = {name: {"kind": "openai_http", "url": behind.url} for name in ("pair", "solo-l4")}
        with live(tmp_path_factory.mktemp("outer"), tracing=tracing, groups=groups) as front:
            yield front, behind


def rows(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = httpx.get(f"{url}/metrics", timeout=60.0).text
    families = text_string_to_metric_families(page)
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples}


def wait_for(holds: Any, within_s: float = GUARD_S) -> Any:
    end_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.05)
    return found


def test_its_load_is_read_as_vllms(pair):
    """Streams that somebody else has there: the one in front sees as many running, and KV in use; later none."""
    front, behind = pair
    go_on = threading.Event()

    def stream() -> None:
        body = {"model": "m", "prompt": "word " * 200, "max_tokens": 2000, "stream": True, "ignore_eos": True}
        while not go_on.is_set():  # again, where a stall of this machine ended it
            with httpx.stream("POST", f"{behind.url}/v1/completions", json=body, timeout=60.0) as answer:
                for _ in answer.iter_raw():
                    if go_on.is_set():
                        return

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    report = front.service.dispatcher.backends[0].report
    try:
        wait_for(lambda: (found := front.do(report)) is not None and found.running == STREAMS and found.kv_used_fraction > 0.0)
        wait_for(lambda: load_of(httpx.get(f"{behind.url}/metrics", timeout=60.0).text).running == STREAMS)
        page = httpx.get(f"{behind.url}/metrics", timeout=60.0).text
        assert ("vllm:gpu_cache_usage_perc{" in page) == behind.service.config.gateway.has_old_metric_names
    finally:
        go_on.set()
        for thread in threads:
            thread.join(GUARD_S)
    wait_for(lambda: front.do(report).running == 0 and front.do(report).kv_used_fraction == 0.0)


def test_calls_go_through_and_are_counted_on_both_sides(pair, collector):
    front, behind = pair
    before = [rows(side.url) for side in pair]
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True, "ignore_eos": True}
    trace = "0af7651916cd43dd8448eb211c80319c" if behind.service.config.gateway.has_old_metric_names else "1" * 32
    parent = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    answer = httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=parent, timeout=60.0)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    labels = (("engine", "gateway"), ("model_name", "m"))
    for side, old in zip(pair, before, strict=True):
        more = {
            "vllm:generation_tokens_total": 5, "vllm:e2e_request_latency_seconds_count": 1, "vllm:time_to_first_token_seconds_count": 1,
            "vllm:request_generation_tokens_sum": 5,
        }  # fmt: skip

        def counted(url: str = side.url, old: dict = old, more: dict = more) -> bool:
            new = rows(url)
            return {name: new.get((name, labels), 0.0) - old.get((name, labels), 0.0) for name in more} == more

        wait_for(counted)  # the answer is here a moment before the one behind has counted it
    inner = rows(behind.url)
    for part in ("queue", "prefill", "decode", "inference"):
        assert inner[f"vllm:request_{part}_time_seconds_count", labels] >= 1.0, part
    # one trace over both: the one behind hangs under the attempt of the one in front

    def named(beginning: str) -> list:
        """Of this trace: those of streams before it may still be on their way."""
        return [span for span in collector.named(beginning) if span.trace_id.hex() == trace]

    wait_for(lambda: len(named("chat m")) == 2 and len(named("attempt")) == 2)
    first, second = sorted(named("chat m"), key=lambda span: span.parent_span_id.hex() != "b7ad6b7169203331")
    (attempt,) = [span for span in named("attempt") if span.parent_span_id == first.span_id]
    assert first.parent_span_id.hex() == "b7ad6b7169203331" and second.parent_span_id == attempt.span_id
    assert first.trace_id == second.trace_id == attempt.trace_id
    assert attributes(second)["gen_ai.usage.output_tokens"] == 5


def test_ranks_of_the_one_behind_are_told_by_it_alone(pair):
    front, behind = pair
    assert not [labels for name, labels in rows(front.url) if name.startswith("ballast_rank_")]
    told, ranks = rows(behind.url), (("pair", "0"), ("pair", "1"), ("solo-l4", "0"))
    for name in ("split_fraction", "speed_factor", "busy_fraction", "kv_bytes_used", "compute_share", "memory_bytes_per_second"):
        found = {labels for row, labels in told if row == f"ballast_rank_{name}"}
        assert found == {(("group", group), ("rank", rank)) for group, rank in ranks}, name
    shares = [value for (name, labels), value in told.items() if name == "ballast_rank_split_fraction" and ("group", "pair") in labels]
    assert sum(shares) == pytest.approx(1.0)
    groups = {name: value for (name, labels), value in told.items() if ("group", "pair") in labels and name.startswith("ballast_group_")}
    assert 0.0 <= groups["ballast_group_effective_compute_share"] <= 1.0
    assert groups["ballast_group_kv_tokens_limit"] > 1000.0

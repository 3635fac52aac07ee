"""Every reader on a small sample built by hand: recognised by content, units, lengths, sessions, blocks."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from envs.traces import READERS, ArrivalProcess, TraceError, load_trace, open_trace
from envs.traces.formats.blis_lengths import length_distribution
from envs.traces.formats.servegen_parameters import histogram_of
from envs.traces.trace_file import TraceFile

Write = Callable[[str, str], Path]


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


SAMPLES: dict[str, tuple[str, str, list[float], list[int], list[int]]] = {
    # format: (file name, text, arrivals in s, prompts, outputs)
    "azure": (
        "x_code.csv",
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,1,30,4\n2024-10-15T12:00:01.269Z,0,31,5\n",
        [0, 1],
        [30, 31],
        [4, 5],
    ),
    "burstgpt": (
        "x.csv",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,7,1,GPT-4,3,4,7,Conversation log\n19440111.5,,2,GPT-4,5,6,11,API log\n",
        [19440110, 19440111.5],
        [3, 5],
        [4, 6],
    ),
    "mooncake": (
        "x.jsonl",
        lines(
            {"timestamp": 1500, "input_length": 600, "output_length": 2, "hash_ids": [9, 8]},
            {"timestamp": 1500, "input_length": 512, "output_length": 3, "hash_ids": [9]},
        ),
        [1.5, 1.5],
        [600, 512],
        [2, 3],
    ),
    "bailian": (
        "x.jsonl",
        lines(
            *(
                {
                    "chat_id": chat,
                    "parent_chat_id": parent,
                    "timestamp": at,
                    "input_length": 20,
                    "output_length": 2,
                    "type": kind,
                    "turn": 1,
                    "hash_ids": [1, 2],
                }
                for chat, parent, at, kind in [(5, -1, 0.5, "text"), (6, 5, 1.25, "coder"), (7, 6, 2.0, "text")]
            )
        ),
        [0.5, 1.25, 2.0],
        [20, 20, 20],
        [2, 2, 2],
    ),
    "vidur": ("x.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,10,2\n0.5,11,3\n", [0.25, 0.5], [10, 11], [2, 3]),
    "splitwise-sim": (
        "x.csv",
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,2,0,0.5,1,10,2\n1,2,0,0.75,1,11,3\n",
        [0.5, 0.75],
        [10, 11],
        [2, 3],
    ),
    "aiperf": (
        "x.jsonl",
        lines(
            {"timestamp": 1000, "input_length": 10, "output_length": 2, "session_id": "a"},
            {"delay": 250, "input_length": 11, "output_length": 3, "session_id": "a"},
        ),
        [1.0, 1.25],
        [10, 11],
        [2, 3],
    ),
    "guidellm": ("x.csv", "timestamp,input_length,output_length\n1.5,10,2\n2.5,11,3\n", [1.5, 2.5], [10, 11], [2, 3]),
    "llmservingsim": (
        "x.jsonl",
        lines(
            {"input_toks": 10, "output_toks": 2, "arrival_time_ns": 500_000_000},
            {
                "session_id": "s",
                "arrival_time_ns": 10**9,
                "sub_requests": [
                    {"input_toks": 11, "output_toks": 3, "tool_duration_ns": 250_000_000},
                    {"input_toks": 12, "output_toks": 4},
                ],
            },
        ),
        [0.5, 1.0, 1.25],
        [10, 11, 12],
        [2, 3, 4],
    ),
    "aibrix": (
        "x.jsonl",
        lines(
            {
                "timestamp": 500,
                "requests": [{"Prompt Length": 10, "Output Length": 2}, {"prompt_length": 11, "output_length": 3}],
            },
            {"timestamp": 2000, "requests": [{"Prompt Length": 12, "Output Length": 4}]},
        ),
        [0.5, 0.5, 2.0],
        [10, 11, 12],
        [2, 3, 4],
    ),
    "litellm-log": (
        "x.jsonl",
        lines(
            {
                "request_id": "r1",
                "startTime": "2025-03-01T10:00:02.500Z",
                "endTime": "2025-03-01T10:00:04Z",
                "prompt_tokens": 11,
                "completion_tokens": 3,
                "model": "m",
                "session_id": "s1",
            },
            {
                "request_id": "r2",
                "startTime": "2025-03-01T10:00:00Z",
                "endTime": "2025-03-01T10:00:05Z",
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "status": "success",
            },
            {
                "request_id": "r3",
                "startTime": "2025-03-01T10:00:03Z",
                "endTime": "2025-03-01T10:00:05Z",
                "prompt_tokens": 9,
                "completion_tokens": 0,
                "status": "failure",
            },
            {
                "request_id": "r4",
                "startTime": "2025-03-01T10:00:03Z",
                "endTime": "2025-03-01T10:00:05Z",
                "prompt_tokens": 9,
                "completion_tokens": 5,
                "cache_hit": "True",
            },
        ),
        [0.0, 2.5],
        [10, 11],
        [2, 3],
    ),
    "vllm-log": (
        "server.log",
        "INFO 06-12 10:00:00 [api_server.py:1] vLLM API server version 0.9.1\n"
        "INFO 06-12 10:00:01 [logger.py:42] Received request cmpl-a-0: prompt: 'prompt_token_ids: [1] max_tokens=9', params: "
        "SamplingParams(n=1, max_tokens=16, seed=None), prompt_token_ids: [5, 6, 7], lora_request: None.\n"
        "INFO 06-12 10:00:03 [logger.py:42] Received request cmpl-b: prompt: 'y', params: SamplingParams(max_tokens=8), "
        "prompt_token_ids: [1, 2], lora_request: None.\n"
        "INFO 06-12 10:00:04 [logger.py:42] Received request cmpl-c: prompt: 'z', params: SamplingParams(max_tokens=8), "
        "prompt_token_ids: [1, 2], lora_request: None.\n"
        "INFO 06-12 10:00:05 [logger.py:60] Generated response cmpl-b: output: 'Received request q', output_token_ids: [4, 4], "
        "finish_reason: stop\n"
        '{"id": "cmpl-a", "created": 1, "usage": {"prompt_tokens": 3, "completion_tokens": 5}}\n',
        [0.0, 2.0],
        [3, 2],
        [5, 2],
    ),
    "ballast": (
        "x.jsonl",
        lines(
            {"ballast_trace": 1, "source": "hand", "default_class": "batch", "synthetic": True},
            {"arrival_s": 0.1, "prompt_tokens": 10, "output_tokens": 2},
            {"arrival_s": 0.2, "prompt_tokens": 11, "output_tokens": 3, "service_class": "code", "priority": 3},
        ),
        [0.1, 0.2],
        [10, 11],
        [2, 3],
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_is_recognised_and_read(write: Write, name: str):
    file_name, text, arrival_s, prompt, output = SAMPLES[name]
    path = write(file_name, text)
    assert open_trace(path).format == name
    table = load_trace(path)
    assert table.arrival_s.tolist() == pytest.approx(arrival_s, abs=1e-9)
    assert table.prompt_tokens.tolist() == prompt
    assert table.output_tokens.tolist() == output
    assert load_trace(path, name).prompt_tokens.tolist() == prompt


@pytest.mark.parametrize("pack", ["gz", "zst"])
@pytest.mark.parametrize("name", SAMPLES)
def test_compressed_samples_read_the_same(write: Write, tmp_path: Path, name: str, pack: str):
    """Compression is told by the bytes, not the name."""
    file_name, text, arrival_s, prompt, _ = SAMPLES[name]
    data = gzip.compress(text.encode()) if pack == "gz" else zstandard.ZstdCompressor().compress(text.encode())
    path = tmp_path / file_name
    path.write_bytes(data)
    table = load_trace(path)
    assert table.arrival_s.tolist() == pytest.approx(arrival_s, abs=1e-9) and table.prompt_tokens.tolist() == prompt


def test_classes_follow_label_then_format(write: Write):
    """Azure code by file name, Bailian's coder by label, agent sessions by format, a label in our own format by itself."""
    classes = {
        name: load_trace(write(*SAMPLES[name][:2])).class_index.tolist() for name in ("azure", "bailian", "llmservingsim", "ballast")
    }
    assert classes == {"azure": [1, 1], "bailian": [0, 1, 0], "llmservingsim": [0, 1, 1], "ballast": [2, 1]}
    assert load_trace(write(*SAMPLES["azure"][:2]), service_class="batch").class_index.tolist() == [2, 2]


def test_sessions_and_extras(write: Write):
    table = load_trace(write(*SAMPLES["bailian"][:2]))
    assert [table.session_name(i) for i in range(3)] == ["5", "5", "5"] and table.block_tokens == 16
    burst = load_trace(write(*SAMPLES["burstgpt"][:2]))
    assert [burst.session_name(i) for i in range(2)] == ["7", None]
    images = [row.extra for row in open_trace(write(*SAMPLES["azure"][:2]))]
    assert images == [{"images": 1}, {"images": 0}]
    log = load_trace(write(*SAMPLES["vllm-log"][:2]))
    assert log.output_limit_tokens.tolist() == [16, 8]
    assert log.report is not None and log.report.left_out["request without an answer in the log"] == 1
    litellm = load_trace(write(*SAMPLES["litellm-log"][:2]))
    assert litellm.session_name(1) == "s1" and litellm.report is not None and litellm.report.rows_left_out == 2


def test_litellm_array_and_standard_payload(write: Write):
    """The spend endpoint answers one array; the standard payload holds epoch seconds."""
    records = [
        {"startTime": 1741000000.25 + i, "endTime": 1741000002.0 + i, "prompt_tokens": 5 + i, "completion_tokens": 2} for i in range(3)
    ]
    table = load_trace(write("a.json", json.dumps(records, indent=2)))
    assert table.arrival_s.tolist() == pytest.approx([0, 1, 2], abs=1e-6) and table.prompt_tokens.tolist() == [5, 6, 7]
    wrapped = load_trace(write("b.jsonl", lines(*({"standard_logging_object": record} for record in records))))
    assert wrapped.prompt_tokens.tolist() == [5, 6, 7]


def test_large_json_array_is_read_in_pieces(write: Write):
    """Elements that straddle the 1 MiB reading steps come out whole, and a cut array is refused."""
    records = [
        {"startTime": 1e9 + i, "endTime": 1e9 + i + 1, "prompt_tokens": i + 1, "completion_tokens": 1, "pad": "x" * (i % 977)}
        for i in range(6000)
    ]
    text = json.dumps(records)
    assert len(text) > 3 << 20
    assert load_trace(write("a.json", text)).prompt_tokens.tolist() == list(range(1, 6001))
    with pytest.raises(TraceError, match=r"element .* cannot be read"):
        load_trace(write("b.json", text[: len(text) // 2]))


@pytest.mark.parametrize(
    ("name", "text", "choices"),
    [
        ("vidur-lengths", "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n12,3,15,4\n8,2,10,4\n", {}),
        (
            "vllm-sharegpt",
            json.dumps(
                [
                    {"id": "1", "conversations": [{"from": "human", "value": "a" * 48}, {"from": "gpt", "value": "b" * 12}]},
                    {"id": "2", "conversations": [{"from": "human", "value": "x"}]},
                    {"id": "3", "conversations": [{"from": "human", "value": "c" * 32}, {"from": "gpt", "value": "d" * 8}]},
                ]
            ),
            {"count_tokens": lambda text: len(text) // 4},
        ),
        (
            "vllm-custom",
            lines({"prompt": "a" * 48, "output_tokens": 3}, {"prompt": "b" * 32}),
            {"count_tokens": lambda text: len(text) // 4, "default_output_tokens": 2},
        ),
    ],
)
def test_length_only_formats_need_an_arrival_process(write: Write, name: str, text: str, choices: dict[str, object]):
    path = write("x.data", text)
    with pytest.raises(TraceError, match=r"no arrival times .* make them up"):
        load_trace(path, **choices)
    table = load_trace(path, arrival=ArrivalProcess(2.0), **choices)
    assert open_trace(path, arrival=ArrivalProcess(2.0)).format == name
    assert table.prompt_tokens.tolist() == [12, 8] and table.output_tokens.tolist() == [3, 2]
    assert 0 < table.arrival_s[0] < table.arrival_s[1]


def test_text_without_a_counter_is_refused(write: Write):
    path = write("x.jsonl", lines({"prompt": "hello", "output_tokens": 3}))
    with pytest.raises(TraceError, match="--characters-per-token"):
        load_trace(path, arrival=ArrivalProcess(1.0))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_made_up_arrivals_have_the_asked_rate_and_burstiness(write: Write, burstiness: float):
    """Gamma gaps of shape k: mean 1 / rate, CV 1 / sqrt(k). 40,000 gaps: standard error of the mean CV / 200 <= 1 %."""
    text = "num_prefill_tokens,num_decode_tokens\n" + "5,5\n" * 40_000
    table = load_trace(write("x.csv", text), arrival=ArrivalProcess(10.0, burstiness))
    gaps_s = np.diff(table.arrival_s)
    assert gaps_s.mean() == pytest.approx(0.1, rel=0.04)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arxiv_lengths_count_as_batch(write: Write):
    table = load_trace(write("arxiv_x.csv", "num_prefill_tokens,num_decode_tokens\n5,5\n"), arrival=ArrivalProcess(1.0))
    assert table.class_index.tolist() == [2]


FLAT = lines(
    *({"session_id": s, "turn_index": k, "request_arrival_delta_s": at, "input_tokens": 100 + k, "output_tokens": 5}
      for s, k, at in [("a", 0, 0.5), ("a", 1, 7.5), ("b", 0, 0.0)])
)  # fmt: skip


def test_agent_sessions_are_placed_by_the_arrival_process(write: Write, tmp_path: Path):
    """Both forms: no global clock, so they are refused without a process; inside a session the clock is the file's."""
    with pytest.raises(TraceError, match="clock per session only"):
        load_trace(write("f.jsonl", FLAT))
    flat = load_trace(write("f.jsonl", FLAT), arrival=ArrivalProcess(0.001, 1.0))
    a = [flat.arrival_s[i] for i in range(3) if flat.session_name(i) == "a"]
    assert a[1] - a[0] == pytest.approx(7.0) and flat.class_index.tolist() == [1, 1, 1]

    def session(name: str) -> dict[str, object]:
        requests = [
            {"t": 0.0, "type": "s", "in": 130, "out": 4, "hash_ids": [1, 2, 3]},
            {"t": 2.0, "in": 64, "out": 1, "hash_ids": [1]},
        ]
        return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": requests}

    folder = tmp_path / "sessions"
    folder.mkdir()
    (folder / "1.json").write_text(json.dumps(session("p"), indent=1))
    (folder / "2.json").write_text(json.dumps(session("q")))
    for path in (write("s.jsonl", lines(session("p"), session("q"))), folder):
        table = load_trace(path, arrival=ArrivalProcess(0.001))
        assert open_trace(path, arrival=ArrivalProcess(0.001)).format == "weka"
        assert len(table) == 4 and table.block_tokens == 64
        of = {name: [i for i in range(4) if table.session_name(i) == name] for name in "pq"}
        blocks = {name: [table.prefix_blocks(i).tolist() for i in of[name]] for name in "pq"}
        assert [len(b) for b in blocks["p"]] == [3, 1] and blocks["p"][1][0] == blocks["p"][0][0]
        assert not set(blocks["p"][0]) & set(blocks["q"][0]), "local ids of two sessions are different blocks"


def test_named_columns_with_units(write: Write):
    columns = {"arrival": "ts", "prompt": "in", "output": "out"}
    path = write("x.csv", "ts,x,in,out\n1500,a,5,6\n2500,b,7,8\n")
    table = load_trace(path, columns=columns, time_unit="ms")
    assert table.arrival_s.tolist() == [1.5, 2.5] and table.prompt_tokens.tolist() == [5, 7] and table.output_tokens.tolist() == [6, 8]
    rows = lines({"ts": "2025-01-01T00:00:00Z", "in": 5, "out": 6, "u": 9}, {"ts": "2025-01-01T00:00:03Z", "in": 5, "out": 6, "u": 8})
    stamped = load_trace(write("y.jsonl", rows), columns={**columns, "session": "u"}, time_unit="stamp")
    assert stamped.arrival_s.tolist() == [0, 3] and stamped.session_name(1) == "8"
    with pytest.raises(TraceError, match="column inn missing; columns wanted: ts, inn, out; columns found: ts, x, in, out"):
        load_trace(path, columns={**columns, "prompt": "inn"})
    with pytest.raises(TraceError, match='did you mean "arrival"'):
        load_trace(path, columns={**columns, "arival": "ts"})
    with pytest.raises(TraceError, match='did you mean "ms"'):
        load_trace(path, columns=columns, time_unit="mss")


def test_vllm_timed_trace_has_the_callers_unit_and_16_token_blocks(write: Write):
    path = write("t.jsonl", lines({"timestamp": 1500, "input_length": 32, "output_length": 2, "hash_ids": [3, 4]}))
    table = load_trace(path, "vllm-timed", time_unit="ms")
    assert table.arrival_s.tolist() == [1.5] and table.block_tokens == 16
    assert load_trace(path, "vllm-timed").arrival_s.tolist() == [1500.0]


def test_unknown_names_list_the_known(write: Write):
    path = write(*SAMPLES["azure"][:2])
    with pytest.raises(TraceError, match='trace format "azur" unknown; did you mean "azure"'):
        load_trace(path, "azur")
    with pytest.raises(TraceError, match='did you mean "spread_ticks_s"'):
        load_trace(path, spread_tick_s=3.0)
    assert len(READERS) == 22


@pytest.mark.parametrize("value", ["1.5", "x", "", "1e400", "nan", "99999999999"])
def test_a_length_that_is_no_whole_number_is_refused(write: Write, value: str):
    path = write("x.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n2030-01-01 00:00:00,{value},3\n")
    with pytest.raises(TraceError, match="line 2: ContextTokens"):
        load_trace(path)


def servegen_folder(folder: Path) -> Path:
    """Client 0: Gamma, 2 req/s in window 0, silent after; client 1: Weibull, 1 req/s in both windows, no lengths of its own."""
    data = folder / "language" / "tiny"
    data.mkdir(parents=True)
    (data / "chunk-0-trace.csv").write_text("0,2.0,1,Gamma,1.0,0.5\n600,0,0,,0,0\n")
    (data / "chunk-1-trace.csv").write_text("0,1.0,2,Weibull,0.6,0.7\n600,1.0,2,Weibull,0.6,0.7\n")
    lengths = {"0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{7: 1.0}", "reason_ratio": "{0.5: 1.0}"}}
    (data / "chunk-0-dataset.json").write_text(json.dumps(lengths))
    return folder


def test_servegen_rows_are_drawn_from_a_folder_or_a_tar(tmp_path: Path):
    folder = servegen_folder(tmp_path / "sg")
    archive = tmp_path / "sg.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname="sg")
    with pytest.raises(TraceError, match="--duration-s"):
        load_trace(folder)
    table = load_trace(folder, duration_s=1200)
    packed = load_trace(archive, duration_s=1200)
    assert table.arrival_s.tolist() == packed.arrival_s.tolist()
    # 1,800 in window 0 with variance about 1200 + 600 x 2.9, 600 after with 600 x 2.9: five standard deviations.
    first = int((table.arrival_s < 600).sum())
    assert first == pytest.approx(1800, abs=5 * 55) and len(table) - first == pytest.approx(600, abs=5 * 42)
    assert set(table.prompt_tokens.tolist()) == {10, 20} and set(table.output_tokens.tolist()) == {7}
    assert (table.prompt_tokens == 20).mean() == pytest.approx(0.75, abs=0.05)
    assert table.report is not None and any("1 clients have no length file" in note for note in table.report.notes)
    part = load_trace(folder, duration_s=60, window_start_s=700)
    assert part.arrival_s.max() < 60 and {part.session_name(i) for i in range(len(part))} == {"client-1"}


def test_servegen_histograms_are_never_evaluated(tmp_path: Path):
    marker = tmp_path / "marker"
    file = TraceFile(tmp_path / "x.json")
    for text in (f"__import__('pathlib').Path({str(marker)!r}).touch()", "{1: open}", "[1, 2]", "{1: -1.0}", "{" * 5000):
        with pytest.raises(TraceError, match="length histogram"):
            histogram_of(text, file)
    assert not marker.exists()
    histogram = histogram_of("{17: 1, 18: 3}", file)
    assert histogram.values.tolist() == [17, 18] and histogram.probabilities.tolist() == [0.25, 0.75]


def test_servegen_damaged_archive_is_refused(tmp_path: Path):
    archive = tmp_path / "sg.tar.gz"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("chunk-0-trace.csv")
        body = "".join(f"{600 * i},1.{i % 97},1,Gamma,1.{i % 89},0.5\n" for i in range(5000)).encode()
        info.size = len(body)
        tar.addfile(info, io.BytesIO(body))
    archive.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    with pytest.raises(TraceError, match="archive cannot be read"):
        load_trace(archive, duration_s=60)


BLIS = """
version: "2"
aggregate_rate: 10.0
num_requests: 4000
clients:
  - id: a
    slo_class: critical
    rate_fraction: 0.75
    arrival: {process: gamma, cv: 2.0}
    input_distribution: {type: constant, params: {value: 100}}
    output_distribution: {type: gaussian, params: {mean: 50, std_dev: 10, min: 40, max: 60}}
    prefix_group: g
    prefix_length: 40
cohorts:
  - id: b
    population: 5
    slo_class: batch
    rate_fraction: 0.05
    arrival: {process: poisson}
    input_distribution: {type: empirical, params: {"7": 0.5, "9": 0.5}}
    output_distribution: {type: exponential, params: {mean: 20}}
"""


def test_blis_workload_is_drawn(write: Write):
    """3 of 4 requests from client a (100 + 40 prefix tokens, two whole shared blocks), the rest from five cohort clients."""
    path = write("w.yaml", BLIS)
    table = load_trace(path)
    assert open_trace(path).format == "blis" and len(table) == 4000
    is_a = table.prompt_tokens == 140
    assert is_a.mean() == pytest.approx(0.75, abs=0.06)
    assert set(table.prompt_tokens[~is_a].tolist()) == {7, 9}
    assert table.rate_per_s == pytest.approx(10.0, rel=0.12)
    assert table.output_tokens[is_a].min() >= 40 and table.output_tokens[is_a].max() <= 60
    assert table.output_tokens[~is_a].mean() == pytest.approx(20.0, rel=0.15)
    assert set(table.class_index[is_a].tolist()) == {0} and set(table.class_index[~is_a].tolist()) == {2}
    first = int(np.flatnonzero(is_a)[0])
    assert table.prefix_blocks(first).size == 2 and table.block_tokens == 16 and table.prefix_id_count == 2
    gaps_s = np.diff(table.arrival_s[is_a])
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(2.0, rel=0.15)
    assert load_trace(path, seed=1).arrival_s.tolist() != table.arrival_s.tolist()
    assert len(load_trace(path, duration_s=20)) < 400


def test_blis_lifecycle_spike_and_drain(write: Write):
    """A lifecycle of 10 to 20 s ends the workload though 4,000 requests were asked for."""
    windows = "    lifecycle: {windows: [{start_us: 10000000, end_us: 20000000}]}\n"
    text = BLIS.split("cohorts:")[0] + windows
    table = load_trace(write("w.yaml", text))
    assert table.arrival_s.min() >= 10 and table.arrival_s.max() < 20 and 20 < len(table) < 200


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("process: gamma", "process: gama", 'did you mean "gamma"'),
        ("cv: 2.0", "cv: -1", "cv=-1 must be a positive number"),
        ("type: constant", "type: consant", 'did you mean "constant"'),
        ("aggregate_rate: 10.0", "aggregate_rate: 0", "aggregate_rate=0 must be"),
        ("num_requests: 4000", "seed: 1", "neither num_requests nor horizon"),
        ("version:", "servegen_data: {path: x}\nversion:", "servegen_data is not drawn here"),
        ("std_dev: 10, ", "", "gaussian needs finite mean, std_dev"),
        ("clients:", "clients: [", "no valid YAML"),
    ],
)
def test_blis_mistakes_are_named(write: Write, old: str, new: str, message: str):
    with pytest.raises(TraceError, match=message):
        load_trace(write("w.yaml", BLIS.replace(old, new, 1)))


def test_blis_lognormal_means():
    """exp(mu + sigma^2 / 2); a pareto of alpha 3 over xm has mean 1.5 xm."""
    rng = np.random.default_rng(3)
    log = length_distribution({"type": "lognormal", "params": {"mu": 6.0, "sigma": 0.5}}, "x").draw(40_000, rng)
    assert log.mean() == pytest.approx(np.exp(6.125), rel=0.02)
    params = {"alpha": 3.0, "xm": 100.0, "mu": 0.0, "sigma": 0.1, "mix_weight": 1.0}
    pareto = length_distribution({"type": "pareto_lognormal", "params": params}, "x").draw(40_000, rng)
    assert pareto.mean() == pytest.approx(150.0, rel=0.03)

"""The command line: each verb end to end, one-line errors, nothing left behind; fetching against a local server."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.traces import TraceError, load_trace
from envs.traces.__main__ import main
from envs.traces.atomic_write import whole_file
from envs.traces.public_files import PUBLIC_FILES, PublicFile, fetch

Write = Callable[[str, str], Path]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{15 + i // 60:02d}:{i % 60:02d}.6805900,{100 + i},{10 + i % 7}\n" for i in range(300)
)


def test_inspect_prints_the_statistics(write: Write, capsys: pytest.CaptureFixture[str]):
    """300 rows a second apart: span 299 s, 1 req/s, gaps without spread, prompt p50 249.5."""
    path = write("a.csv", AZURE + "2023-11-16 18:20:00.0000000,5,0\n")
    assert main(["inspect", str(path), "--capacity-tokens-per-s", "1000000"]) == 0
    text = capsys.readouterr().out
    for fragment in (
        "requests: 300,",
        "span 299.000 s, rate 1.000 req/s",
        "CV of gaps 0.00",
        "p50 250",
        "1 x output of 0",
        "says nothing",
    ):
        assert fragment in text
    assert main(["inspect", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["arrivals"]["rows"] == 300 and document["prompt_tokens"]["p50"] == 249.5
    assert document["sharing"] is None and sum(document["left_out"].values()) == 1


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_convert_reads_back_exactly(write: Write, tmp_path: Path, suffix: str):
    path, out = write("a.csv", AZURE), tmp_path / f"o.{suffix}"
    assert main(["convert", str(path), str(out)]) == 0
    one, two = load_trace(path), load_trace(out)
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "class_index"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["a.csv", out.name])


def test_converting_the_shared_traces_keeps_everything(shared: Path, tmp_path: Path):
    """Arrivals, lengths, blocks to the bit; a second conversion of the result gives the same table again."""
    source = shared / "traces" / "mooncake" / "conversation_trace.first2of3.jsonl.gz"
    assert main(["convert", str(source), str(tmp_path / "a.jsonl")]) == 0
    one, two = load_trace(source), load_trace(tmp_path / "a.jsonl")
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "prefix_offsets", "prefix_ids"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name


def test_code_class_survives_conversion(write: Write, tmp_path: Path):
    """The class came from the file's name, which the new file does not carry; its head does."""
    assert main(["convert", str(write("x_code.csv", AZURE)), str(tmp_path / "o.jsonl")]) == 0
    assert set(load_trace(tmp_path / "o.jsonl").class_index.tolist()) == {1}


def test_slice_scale_and_mix(write: Write, tmp_path: Path):
    path = write("a.csv", AZURE)
    assert main(["slice", str(path), str(tmp_path / "s.jsonl"), "--start-s", "100", "--end-s", "110"]) == 0
    part = load_trace(tmp_path / "s.jsonl")
    assert part.arrival_s.tolist() == list(range(10)) and part.prompt_tokens.tolist() == list(range(200, 210))
    assert main(["scale", str(tmp_path / "s.jsonl"), str(tmp_path / "f.jsonl"), "--factor", "2"]) == 0
    assert load_trace(tmp_path / "f.jsonl").arrival_s.tolist() == [i / 2 for i in range(10)]
    assert main(["mix", str(tmp_path / "s.jsonl"), str(tmp_path / "f.jsonl"), str(tmp_path / "m.jsonl")]) == 0
    assert len(load_trace(tmp_path / "m.jsonl")) == 20


def test_synthesize_writes_a_marked_twin(tmp_path: Path):
    outs = [tmp_path / name for name in ("a.jsonl.gz", "b.jsonl.gz", "c.jsonl.gz")]
    for out, seed in zip(outs, ("1", "1", "2"), strict=True):
        assert main(["synthesize", "mooncake", str(out), "--duration-s", "60", "--seed", seed]) == 0
    assert outs[0].read_bytes() == outs[1].read_bytes() != outs[2].read_bytes()
    table = load_trace(outs[0])
    assert table.synthetic and table.block_tokens == 512 and table.prefix_ids.size


def test_generic_columns_and_texts(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write("x.csv", "ts,in\n1,2\n")
    assert main(["inspect", str(path), "--columns", "arrival=ts,prompt=in"]) == 2
    assert "no column named for output" in capsys.readouterr().err
    path = write("y.csv", "ts,in,out\n1500,5,6\n")
    out = tmp_path / "o.jsonl"
    assert main(["convert", str(path), str(out), "--columns", "arrival=ts,prompt=in,output=out", "--time-unit", "ms"]) == 0
    assert load_trace(out).arrival_s.tolist() == [1.5]
    texts = write("t.jsonl", json.dumps({"prompt": "abcdefghi", "output_tokens": 3}) + "\n")
    assert main(["convert", str(texts), str(tmp_path / "p.jsonl"), "--rate", "1", "--characters-per-token", "4"]) == 0
    assert load_trace(tmp_path / "p.jsonl").prompt_tokens.tolist() == [3], "nine characters at four a token are three tokens"


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["inspect", "{a}", "--format", "azur"], 'did you mean "azure"'),
        (["inspect", "{a}", "--columns", "arrival"], "'arrival' is not role=name"),
        (["inspect", "{a}", "--time-unit", "h"], "known: ms, ns, s, stamp, us"),
        (["inspect", "{a}", "--class", "chatt"], 'did you mean "chat"'),
        (["inspect", "{a}", "--rate", "0"], "rate_per_s=0.0 must be positive"),
        (["inspect", "{a}", "--rate", "nan"], "rate_per_s=nan must be positive"),
        (["inspect", "{a}", "--limit", "0"], "limit=0"),
        (["inspect", "{a}", "--limit", "301"], "301 requests wanted, 300 there"),
        (["inspect", "{a}", "--seed", "-1"], "--seed -1"),
        (["slice", "{a}", "{out}", "--start-s", "500"], "lies outside the trace"),
        (["slice", "{a}", "{out}", "--start-s", "10.2", "--end-s", "10.4"], "no rows to write"),
        (["scale", "{a}", "{out}", "--factor", "0"], "factor=0.0 must be positive"),
        (["convert", "{a}", "{a}"], "exists already"),
        (["convert", "{a}", "{out}/x/y.jsonl"], "does not exist"),
        (["synthesize", "azure", "{out}"], "synthetic twin"),
        (["synthesize", "mooncake", "{out}", "--duration-s", "-5"], "duration_s=-5.0"),
        (["mix", "{a}", "{out}.none", "{out}"], "no such file"),
        (["fetch", "azure2023-cnv"], 'did you mean "azure2023-conv"'),
        (["fetch", "azure2023-conv", "--deadline-s", "0"], "--deadline-s 0.0 must be positive"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], fragment: str
):
    path = write("a.csv", AZURE)
    code = main([text.format(a=path, out=tmp_path / "out.jsonl") for text in arguments])
    captured = capsys.readouterr()
    assert code == 2 and captured.err.count("\n") == 1 and fragment in captured.err
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"] and path.read_text() == AZURE


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["inspect"], ["scale", "a", "b"], ["inspect", "a", "--rate", "x"]])
def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("verb", ["inspect", "convert", "slice", "scale", "mix", "synthesize", "fetch"])
def test_help_names_units_and_defaults(capsys: pytest.CaptureFixture[str], verb: str):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "default" in text and "second" in text


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), whole_file(path, overwrite=True) as out:
        out.write(b"new")
        _ = 1 / 0
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["x"]


BODY = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" * 4000


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        if self.path == "/cut":
            self.wfile.write(BODY[:1000])
            return
        self.wfile.write(BODY)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


def local_file(server: str, path: str = "/whole", sha256: str = hashlib.sha256(BODY).hexdigest()) -> PublicFile:
    return PublicFile("x", server + path, "x.csv", sha256, 1 << 20, "none")


def test_fetch_checks_the_sum_and_says_what_it_proves(server: str, tmp_path: Path):
    path, proof = fetch(local_file(server), tmp_path)
    assert path.read_bytes() == BODY and proof.endswith("as expected")
    short = local_file(server, sha256=hashlib.sha256(BODY).hexdigest()[:8])
    _, proof = fetch(short, tmp_path, overwrite=True)
    assert "not verified" in proof


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "is not the expected"),
        ({"sha256": "deadbeef"}, "is not the expected"),
        ({"bytes_max": 1000}, "over 1000 bytes"),
        ({"path": "/missing"}, "404"),
        ({"path": "/cut"}, "cannot be reached|is not the expected"),
    ],
)
def test_fetch_refuses_and_leaves_nothing(server: str, tmp_path: Path, change: dict[str, object], message: str):
    file = local_file(server, str(change.pop("path", "/whole")))
    with pytest.raises(TraceError, match=message):
        fetch(replace(file, **change), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fetch_offline_fails_at_once_and_late_answers_meet_the_deadline(server: str, tmp_path: Path):
    start_s = time.monotonic()
    with pytest.raises(TraceError, match=r"cannot be reached.*use synthesize"):
        fetch(replace(local_file(server), url="http://127.0.0.1:9/x"), tmp_path)
    assert time.monotonic() - start_s < 20
    clock = iter([0.0] + [99.0] * 100)
    with pytest.raises(TraceError, match="not done within 5 s"):
        fetch(local_file(server), tmp_path, 5.0, now_s=lambda: next(clock))
    assert list(tmp_path.iterdir()) == []


def test_the_full_sum_of_the_conversation_trace_is_the_shared_one(shared: Path):
    sums = dict(reversed(line.split()) for line in (shared / "traces" / "SHA256SUMS").read_text().splitlines())
    assert PUBLIC_FILES["azure2023-conv"].sha256 == sums["azure2023/AzureLLMInferenceTrace_conv.csv"]

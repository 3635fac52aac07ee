"""The report: its numbers, its strict JSON, and that it needs nothing from outside."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from agents.report import EvaluationResults, comparisons, headline, print_table, table_rows, write_report

WORLDS = 12


def summary(goodput: float, *, empty: bool = False, refused: int = 1) -> dict:
    """One policy in one world; `empty`: no request completed."""
    none = {"p50": None, "p95": None, "p99": None}
    return {
        "goodput": goodput,
        "per_class": {"chat": {"goodput": goodput, "count": 7}, "code": {"goodput": None, "count": 0}},
        "ttft_s": none if empty else {"p50": 0.1, "p95": 0.5, "p99": 2.0},
        "tpot_s": none if empty else {"p50": 0.03, "p95": 0.05, "p99": 0.07},
        "e2e_s": none if empty else {"p50": 4.0, "p95": 9.0, "p99": 12.0},
        "counts": {"COMPLETED": 9 - refused, "REFUSED": refused, "UNFINISHED": 1},
        "parts_mean_s": {} if empty else {"queue_s": 0.2, "decode_compute_s": 1.5},
        "decisions_per_s": None if empty else 1234.0,
        "ttft_quantiles_s": None if empty else list(np.linspace(0.05, 2.5, 101)),
    }


def results(**changes) -> EvaluationResults:
    rng = np.random.default_rng(0)
    worlds = rng.uniform(0.5, 0.9, WORLDS)
    values = dict(
        trace_name="azure <conv> 2023",
        is_synthetic=False,
        world_names=tuple(f"world {i}" for i in range(WORLDS)),
        policies={
            "round_robin": tuple(summary(g - 0.3) for g in worlds),
            "least_work_left": tuple(summary(g) for g in worlds),
            "ppo": tuple(summary(g + 0.02) for g in worlds),
        },
        best_heuristic="least_work_left",
        learned=("ppo",),
        learning_curve=({"decisions": 100.0, "score": 0.5}, {"decisions": 200.0, "score": 0.6}),
    )
    return EvaluationResults(**(values | changes))


def test_rows_by_hand():
    rows = table_rows(results(), np.random.default_rng(0))
    assert [row.name for row in rows] == ["ppo", "least_work_left", "round_robin"]
    expected = float(np.random.default_rng(0).uniform(0.5, 0.9, WORLDS).mean()) + 0.02
    assert rows[0].goodput.estimate == pytest.approx(expected)
    assert rows[0].per_class == {"chat": pytest.approx(expected), "code": None}
    assert rows[0].counts == {"COMPLETED": 96, "REFUSED": 12, "UNFINISHED": 12}
    assert rows[0].percentiles_s["ttft_s"]["p99"] == pytest.approx(2.0)


def test_headline_gives_mean_and_interquartile_mean_against_the_best_heuristic():
    """The policy is better by exactly .02 in every world: an interval of no width at +2.0 points, better in all."""
    sentence = headline(results(), comparisons(results(), np.random.default_rng(0)))
    assert len(sentence) == 1
    assert "+2.0 [+2.0, +2.0] points of goodput, mean over 12 worlds" in sentence[0]
    assert "(better); interquartile mean +2.0" in sentence[0] and "better in 100 % of worlds" in sentence[0]


def test_worse_policy_is_called_worse():
    worse = results(learned=("round_robin",))
    assert "(worse)" in headline(worse, comparisons(worse, np.random.default_rng(0)))[0]


def test_page_is_self_contained_and_complete(tmp_path):
    page = write_report(results(), tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)", page), "a reference outside the page"
    assert "<script" not in page and "@import" not in page and not re.search(r"url\((?!#)", page)
    assert "azure &lt;conv&gt; 2023" in page and "<conv>" not in page
    assert "Synthetic" not in page
    for text in ("round_robin", "TTFT p99 s", "E2E p50 s", "chat %", "refused", "+2.0 [+2.0, +2.0]"):
        assert text in page, text


def test_synthetic_trace_is_said_at_the_top(tmp_path):
    page = write_report(results(is_synthetic=True), tmp_path / "report.html").read_text()
    assert '<p class="banner">Synthetic trace' in page


def test_shortened_run_is_said_at_the_top(tmp_path):
    page = write_report(results(is_shortened=True), tmp_path / "report.html").read_text()
    assert '<p class="banner">Shortened run' in page and "Synthetic trace" not in page
    assert "Shortened" not in write_report(results(), tmp_path / "report.html").read_text()
    output = io.StringIO()
    print_table(results(is_shortened=True), Console(file=output, width=120))
    assert "SHORTENED run" in output.getvalue()


def test_same_results_give_the_same_page(tmp_path):
    first, second = (write_report(results(), tmp_path / name, np.random.default_rng(1)).read_bytes() for name in ("a", "b"))
    assert first == second


@pytest.mark.fault("K13")
def test_nothing_measured_gives_dashes(tmp_path):
    empty = results(policies={"least_work_left": tuple(summary(0.0, empty=True) for _ in range(WORLDS))}, learned=(), learning_curve=())
    page = write_report(empty, tmp_path / "report.html").read_text()
    assert "<td>–</td>" in page and "nan" not in page.lower().replace("nanoseconds", "")
    assert page.count("<svg") == 1
    assert "No learned policy was evaluated." in page


@pytest.mark.fault("K12")
def test_counts_of_outcomes_stand_beside_the_percentiles(tmp_path):
    """A policy that refuses eight of nine must show it in its own row."""
    refusing = results(policies={"a": tuple(summary(0.1, refused=8) for _ in range(WORLDS))}, best_heuristic="a", learned=())
    page = write_report(refusing, tmp_path / "report.html").read_text()
    assert "<td>96</td><td>120</td><td>unfinished 12</td>" in page


@pytest.mark.fault("K13")
def test_json_is_strict_and_comes_back():
    original = results()
    assert EvaluationResults.from_json(original.to_json()) == original
    with pytest.raises(ValueError, match="not JSON compliant"):
        results(provenance={"x": float("nan")}).to_json()
    with pytest.raises(ValueError, match="must be an object of"):
        EvaluationResults.from_json(json.dumps({"unknown": 1}))
    with pytest.raises(ValueError, match="incomplete"):
        EvaluationResults.from_json("{}")


def test_inconsistent_results_are_refused():
    with pytest.raises(ValueError, match="'ppo' has 1 worlds, there are 12"):
        results(policies={"least_work_left": tuple(summary(0.5) for _ in range(WORLDS)), "ppo": (summary(0.5),)})
    with pytest.raises(ValueError, match="'gone' has no results"):
        results(best_heuristic="gone")


def test_terminal_table_shows_every_policy():
    output = io.StringIO()
    print_table(results(), Console(file=output, width=260))
    text = output.getvalue()
    for part in ("ppo", "round_robin", "least_work_left", "TTFT p99 s", "+2.0 [+2.0, +2.0]"):
        assert part in text


def many_policies() -> EvaluationResults:
    """Twenty-five policies with names as long as the real ones."""
    names = [f"rebalance:virtual_usage_{i}" for i in range(24)] + ["least_work_left"]
    policies = {name: tuple(summary(0.9 - 0.01 * i) for _ in range(WORLDS)) for i, name in enumerate(names)}
    return results(policies=policies, learned=(), learning_curve=())


@pytest.mark.parametrize("width", [60, 80, 100, 140, 260])
def test_terminal_table_fits_any_width_and_cuts_no_number(width):
    """Every line fits; every policy's goodput, TTFT p99 and failures stand there whole, however many tables that takes."""
    output = io.StringIO()
    print_table(many_policies(), Console(file=output, width=width))
    lines = output.getvalue().splitlines()
    assert max(len(line) for line in lines[1:]) <= width
    assert "…" not in output.getvalue()
    ours = [line for line in lines if "rebalance:virtual_usage_7 " in line]
    joined = " ".join(ours)
    assert "83.0 [83.0, 83.0]" in joined
    assert re.search(r"\b2\b", joined), "TTFT p99 of 2 s"
    assert re.search(r"\b12\b", joined), "refused, and unfinished"


def test_terminal_table_is_two_tables_at_eighty_columns():
    output = io.StringIO()
    print_table(many_policies(), Console(file=output, width=80))
    assert sum(line.startswith("┏") for line in output.getvalue().splitlines()) == 2


def test_terminal_table_says_how_many_requests_and_who_is_the_reference():
    output = io.StringIO()
    print_table(results(is_synthetic=True), Console(file=output, width=80))
    assert "12 worlds, 120 requests for each policy, SYNTHETIC trace" in output.getvalue()
    assert "least_work_left *" in output.getvalue()


def test_capability_profiles_are_shown_with_ranks_and_affinity(tmp_path):
    row = {"cluster": "c", "kind": "group", "name": "pair <a>", "vector": [0.5] * 9 + [1.25], "prefill_rank": 2, "decode_rank": 1}
    shown = results(capability=(row | {"affinity": {"chat": -0.4}},))
    page = write_report(shown, tmp_path / "report.html").read_text()
    assert "<h2>Devices and groups</h2>" in page and "group pair &lt;a&gt;" in page
    assert all(text in page for text in ("flop_per_s", "step_time", "+1.25", "suits chat", "-0.40"))
    assert EvaluationResults.from_json(shown.to_json()) == shown
    assert "Devices and groups" not in write_report(results(), tmp_path / "other.html").read_text()

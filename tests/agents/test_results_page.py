"""Publishing runs: numbers that can be recomputed, a command with every row, and what is synthetic or shortened says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_report import WORLDS, results, summary

from agents.evaluation_file import EvaluationFile
from agents.provenance import command_line
from agents.report import EvaluationResults
from agents.results import main
from agents.results_page import BEGIN, END, README_HEADER, PublishedRun, ResultsPageError, with_rows, with_sections

COMMAND = "python train.py --experiment mine"
OLD_ROW = "| old traffic | a 50.00 % | none | – | `python train.py --experiment old` |"
README = f"# Project\n\n{BEGIN}. -->\n{README_HEADER}\n{OLD_ROW}\n{END}\n\nAfter.\n"


def run(**changes) -> PublishedRun:
    values = dict(
        command=COMMAND,
        provenance={"commit": "abc123", "seed": 4},
        notes=("load 1.0 = trace x 2",),
        validation={"least_work_left": 0.72, "round_robin": 0.70, "what_if": 0.9, "split keep": 0.71},
    )
    return PublishedRun("runs/mine", results(**(values | changes)))


def cells(page: str, name: str) -> list[str]:
    """Cells of the first table line whose first cell is `name`."""
    return next([cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith(f"| {name} |"))


def test_difference_and_percentiles_by_hand():
    """ppo is .02 better in every world: +2.00 with no width, IQM the same; TPOT in ms; 12 worlds x 1 refused, 1 unfinished."""
    page = with_sections(None, [run()])
    assert cells(page, "ppo") == ["ppo", "least_work_left", "+2.00 [+2.00, +2.00]", "+2.00 [+2.00, +2.00]", "100"]
    row = cells(page, "least_work_left")
    assert row[3:] == ["–", "0.10 / 0.50 / 2.00", "30 / 50 / 70", "4.00 / 9.00 / 12.00", "12", "unfinished 12"]
    assert "| policy | goodput % | chat % | code % | TTFT p50 / p95 / p99 s | TPOT p50 / p95 / p99 ms |" in page
    assert "points behind it there: round_robin 2.00)" in page, "what_if and control decisions are not runners-up"
    assert "- commit abc123, seed 4" in page and "- load 1.0 = trace x 2" in page


def test_difference_to_the_counterpart_stands_beside_that_to_the_best_router():
    """A learned splitter is .30 + .02 above `round_robin`, .02 above the best router."""
    page = with_sections(None, [run(counterparts={"ppo": "round_robin"})])
    assert "| ppo | least_work_left | +2.00 [+2.00, +2.00] |" in page
    assert "| ppo | round_robin | +32.00 [+32.00, +32.00] |" in page


def test_every_section_and_row_names_its_command():
    assert f"Command: `{COMMAND}`" in with_sections(None, [run()])
    row = next(line for line in with_rows(README, [run()]).splitlines() if "azure" in line)
    assert row.endswith(f"| `{COMMAND}` |")
    with pytest.raises(ResultsPageError, match="name no command"):
        run(command="")


@pytest.mark.parametrize(("change", "words"), [({"is_synthetic": True}, "SYNTHETIC"), ({"is_shortened": True}, "shortened run")])
def test_synthetic_and_shortened_are_said(change, words):
    for page in (with_sections(None, [run(**change)]), with_rows(README, [run(**change)])):
        assert words in page
    for page in (with_sections(None, [run()]).removeprefix("# Results"), with_rows(README, [run()])):
        assert words not in page


def test_rerun_replaces_its_own_row_and_leaves_the_others():
    """Publishing twice is publishing once; another command's row and section stay, unless only these are asked for."""
    other = PublishedRun("runs/other", results(command="python train.py --experiment other"))
    rows, page = with_rows(README, [run(), other]), with_sections(None, [run(), other])
    assert with_rows(rows, [run()]).count("\n| ") == rows.count("\n| ") == 4  # header and three
    again = with_sections(page, [run()])
    assert again == page
    assert sorted(again.splitlines()) == sorted(with_sections(page, [other]).splitlines())
    only = with_rows(rows, [run()], keep=False)
    assert "other" not in only and "old" not in only and COMMAND in only
    assert "--experiment other" not in with_sections(page, [run()], keep=False)


def test_text_around_the_table_is_kept():
    page = with_rows(README, [run()])
    assert page.startswith("# Project\n\n") and page.endswith(f"{END}\n\nAfter.\n")
    assert with_sections("# Mine\n\nOwn words.\n", [run()]).startswith("# Mine\n\nOwn words.\n\n## azure")
    with pytest.raises(ResultsPageError, match="no lines"):
        with_rows("# Project\n", [run()])


def test_a_policy_that_completed_nothing_has_dashes():
    empty = tuple(summary(0.0, empty=True) for _ in range(WORLDS))
    page = with_sections(None, [run(policies={"least_work_left": empty}, learned=(), learning_curve=())])
    assert "| – / – / – | – / – / – | – / – / – |" in page and "No learned policy was evaluated." in page


def test_command_line_publishes_no_folders():
    flags = {"--experiment": "/home/me/my exp.yaml", "--agent": None, "--all": True, "--bundle": ["route=/tmp/a/route", "split=runs/b"]}
    text = command_line("python train.py", flags)
    assert text == "python train.py --experiment 'my exp.yaml' --all --bundle route=route --bundle split=runs/b"


@pytest.fixture
def pages(tmp_path) -> list[str]:
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    return ["--page", str(tmp_path / "results.md"), "--readme", str(tmp_path / "README.md")]


def test_command_reads_runs_and_evaluation_files(tmp_path, pages, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(run().results.to_json())
    evaluated = json.loads(results(command="python -m agents.evaluate --experiment mine").to_json())
    EvaluationFile("mine", evaluated, (), {}).write(tmp_path / "evaluation.json")
    assert main([str(tmp_path / "run"), str(tmp_path / "evaluation.json"), *pages]) == 0
    assert capsys.readouterr().out.count("published") == 2
    page = (tmp_path / "results.md").read_text()
    assert page.count("\n## ") == 2 and str(tmp_path) not in page
    assert (tmp_path / "README.md").read_text().count("azure") == 2


def test_a_run_that_recorded_no_command_takes_one_by_hand(tmp_path, pages, capsys):
    """Results of before: published with --command, refused without; a recorded command is not overruled."""
    (tmp_path / "results.json").write_text(results().to_json())
    assert main([str(tmp_path), *pages]) == 2 and "say it with --command" in capsys.readouterr().err
    assert main([str(tmp_path), "--command", COMMAND, *pages]) == 0
    assert f"Command: `{COMMAND}`" in (tmp_path / "results.md").read_text()
    (tmp_path / "results.json").write_text(run().results.to_json())
    assert main([str(tmp_path), "--command", "other", *pages]) == 2 and "leave --command out" in capsys.readouterr().err
    assert main([str(tmp_path), str(tmp_path), "--command", "x", *pages]) == 2


def test_bad_input_is_one_line_and_writes_nothing(tmp_path, pages, capsys):
    good, unfinished = tmp_path / "run", tmp_path / "unfinished"
    good.mkdir()
    unfinished.mkdir()
    (good / "results.json").write_text(run().results.to_json())
    edited = tmp_path / "edited.json"
    EvaluationFile("mine", json.loads(run().results.to_json()), (), {}).write(edited)
    edited.write_text(edited.read_text().replace("abc123", "abc124"))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "results.json").write_text("{")
    for paths, said in (
        ([unfinished], "the run is not finished"),
        ([tmp_path / "gone"], "neither a run's directory nor an evaluation file"),
        ([good, good], "both made by"),
        ([edited], "differs from its digest"),
        ([damaged], "results.json"),
    ):
        assert main([*map(str, paths), *pages]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err
    assert not (tmp_path / "results.md").exists() and (tmp_path / "README.md").read_text() == README


def test_published_pages_of_the_project_have_a_command_everywhere():
    """The README and docs/results.md as committed: every row and section can be replaced by its command."""
    project = Path(__file__).resolve().parents[2]
    readme, page = (project / "README.md").read_text(encoding="utf-8"), (project / "docs/results.md").read_text(encoding="utf-8")
    table = readme[readme.index(BEGIN) : readme.index(END)].splitlines()[3:]
    commands = [line.rsplit("`", 2)[1] for line in table]
    assert commands and page.count("\n## ") == page.count("\nCommand: `python ") == len(commands)
    assert all(f"Command: `{command}`" in page for command in commands)


def test_old_results_without_the_newer_fields_still_load():
    values = json.loads(results().to_json())
    for name in ("command", "is_shortened", "validation", "counterparts"):
        del values[name]
    assert EvaluationResults.from_json(json.dumps(values)).command == ""

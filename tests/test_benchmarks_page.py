"""One command measures the benchmarks and writes their page, which holds what they printed, where and when."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import all as benchmarks
import pytest
from all import BENCHMARKS, Benchmark, Result, main, measure, page

ROOT = Path(__file__).resolve().parent.parent
FAST = Benchmark(name="tables", question="How long is nothing?", page="engine.md")  # a module that only imports rich
RESULT = Result(
    command="python benchmarks/tables.py",
    output="| a |\n| --- |\n| 1 |",
    began="2026-11-22 20:00",
    seconds=1.4,
    load=0.7,
    machine="a machine",
    versions="Python 3.11",
)


def test_the_page_has_machine_versions_and_for_each_benchmark_command_date_seconds_load_and_output() -> None:
    assert page([(FAST, RESULT)]).partition("\n\n* ")[2] == (
        "a machine; Python 3.11\n\n## How long is nothing?\n\n```bash\npython benchmarks/tables.py\n```\n\n"
        "2026-11-22 20:00 UTC, 1 s, load 0.7 before. Long form: [engine.md](engine.md)\n\n| a |\n| --- |\n| 1 |\n"
    )


def test_a_result_of_another_machine_says_so_in_its_section() -> None:
    text = page([(FAST, RESULT), (FAST, replace(RESULT, machine="another"))])
    assert text.count("load 0.7 before. another; Python 3.11. Long form") == 1
    assert "* a machine; Python 3.11\n* another; Python 3.11\n" in text


def test_the_page_names_what_is_not_measured_yet() -> None:
    assert "Python 3.11\n* not measured yet: plan, learner\n\n## " in page([(FAST, RESULT)], ["plan", "learner"])


def test_a_second_call_measures_only_what_is_missing_or_was_measured_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--out", str(tmp_path), "--page", str(tmp_path / "page.md")]
    main(options, [FAST])
    assert re.match(r"1/1 tables …\n1/1 tables: \d+ s\n", capsys.readouterr().out)
    main(options, [FAST])
    assert capsys.readouterr().out.startswith("1/1 tables: measured on 20")
    stored = json.loads((tmp_path / "tables.json").read_text())
    (tmp_path / "tables.json").write_text(json.dumps({**stored, "machine": "another"}))
    main(options, [FAST])
    assert "1/1 tables …" in capsys.readouterr().out
    assert benchmarks.machine() in (tmp_path / "page.md").read_text()


def test_a_benchmark_that_fails_ends_the_call_with_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"python benchmarks/absent.py failed:(.|\n)*absent.py"):
        measure(replace(FAST, name="absent"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_benchmark_has_a_file_and_a_page_and_stands_on_the_written_page() -> None:
    results = ROOT / "docs" / "results"
    assert all((ROOT / "benchmarks" / f"{each.name}.py").is_file() for each in BENCHMARKS)
    assert all((results / each.page).is_file() for each in BENCHMARKS)
    written = re.findall(r"^## (.+)$", (results / "benchmarks.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(written) <= {each.question for each in BENCHMARKS}
    assert written


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text(json.dumps(asdict(RESULT)), encoding="utf-8")
    assert benchmarks.result_of(FAST, tmp_path) == RESULT

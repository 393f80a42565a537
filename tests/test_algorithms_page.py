"""The pages of estimators, losses, rewards and credit against the code: tables, formulas, plot, and what they name."""

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from command import succeed_as_script
from estimating import ESTIMATORS, LOSSES

from condensegrpo.algorithms.advantages import whiten
from condensegrpo.algorithms.objective import importance, token_weights
from condensegrpo.assembly.build import build
from condensegrpo.config.load import load_config

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "scripts" / "algorithms.py"
PATHS = [
    ROOT / "docs" / path
    for path in (
        "reference/estimators.md",
        "reference/losses.md",
        "reference/rewards.md",
        "explanation/credit.md",
        "explanation/worked-example.md",
    )
]
PAGE = "\n".join(path.read_text(encoding="utf-8") for path in PATHS)
FORMULAS = [
    *((f"### Estimator `{name}`", plugin.function) for name, plugin in ESTIMATORS.items()),
    *((f"### Loss `{name}`", plugin.function) for name, plugin in LOSSES.items()),
    ("**Whitening**", whiten),
    ("## Importance correction", importance),
    ("## Aggregation", token_weights),
]


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """The tables that the script prints, by their titles."""
    made = succeed_as_script(SCRIPT)
    return dict(re.findall(r"^# (.+?)\n\n(.+?)\s*(?=^# |\Z)", made, flags=re.MULTILINE | re.DOTALL))


def rows(table: str) -> dict[str, list[str]]:
    """The cells of every line of a table after the first, by the first cell."""
    lines = [[cell.strip() for cell in line.split(" | ")] for line in table.splitlines()[2:]]
    return {line[0].strip("| "): [cell.strip(" |") for cell in line[1:]] for line in lines}


def section(start: str) -> str:
    """The page from a heading on to the next."""
    assert PAGE.count(f"\n{start}") == 1, f"the page needs one {start}"
    after = PAGE.split(f"\n{start}", 1)[1]
    return re.split(r"^##+ ", after, maxsplit=1, flags=re.MULTILINE)[0]


def words(text: str) -> str:
    return " ".join(text.split())


def test_every_table_of_the_page_is_what_the_script_prints(printed: dict[str, str]) -> None:
    assert len(printed) == 12
    for title, table in printed.items():
        assert f"\n\n{table}\n" in PAGE, f"the pages lack the table {title} as docs/scripts/algorithms.py prints it"


@pytest.mark.parametrize(("start", "function"), FORMULAS, ids=[start for start, _ in FORMULAS])
def test_every_formula_of_the_page_is_that_of_the_docstring(start: str, function: Callable[..., object]) -> None:
    formula = section(start).split("```text\n", 1)[1].split("```", 1)[0]
    told = words(function.__doc__ or "")
    for line in filter(str.strip, formula.splitlines()):
        assert words(line) in told


@pytest.mark.parametrize("start", [start for start, _ in FORMULAS if start.startswith("### ")])
def test_each_has_a_source_a_use_and_a_bias(start: str) -> None:
    text = section(start)
    assert [text.count(mark) for mark in ("* *Source:*", "* *Use it*", "* *Biased by:*")] == [1, 1, 1]


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_every_link_leads_somewhere(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    for file, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page):
        assert not file or (path.parent / file).exists(), file
        text = (path.parent / file).read_text(encoding="utf-8") if file else page
        headings = [re.sub(r"[^\w\- ]", "", line.lstrip("# ")).lower() for line in text.splitlines() if line[:1] == "#"]
        assert not anchor or anchor in [heading.replace(" ", "-") for heading in headings], anchor


def test_every_test_that_the_page_names_exists() -> None:
    for pattern in re.findall(r"`tests/([\w*.]+)`", PAGE):
        assert list((ROOT / "tests").glob(pattern)), pattern
    everything = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {name}(" in everything


def test_every_command_of_the_page_would_train() -> None:
    commands = re.findall(r"^condensegrpo train (\S+) (.*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 2
    for file, changes in commands:
        build(load_config(ROOT / file, shlex.split(changes)))


def test_advantages_by_hand(printed: dict[str, str]) -> None:
    found = rows(printed["Example: advantages"])
    outcome, turn = 0.5 / math.sqrt(1 / 3), 1 / math.sqrt(2 / 3)  # N(R^O) and N(R^T) of a, without ε
    merged = 1.5 / math.sqrt(5 / 3)
    saving = 0.2 * 0.5 * math.sqrt(0.5)  # λ·p·E: of two values each lies 1/√2 deviations off their mean
    wanted = {
        "grpo": [outcome],
        "grpo_merged": [merged],
        "ms_grpo": [outcome + turn, outcome, outcome],
        "ms_po": [merged, outcome, outcome],
        "rloo": [1 - 1 / 3],
        "turn_discounted": [0.81 * outcome, 0.9 * outcome, outcome],
        "efficient": [outcome - saving],
    }
    for name, values in wanted.items():
        cells = found[f"`{name}`"][0].replace("−", "-").split(", ")
        assert [float(cell) for cell in cells] == pytest.approx(values, abs=1e-3)  # ε, and three digits


def test_weights_by_hand(printed: dict[str, str]) -> None:
    # B = 4, ΣK = 10, ΣN = 200, L = 100; a has 20, 10 and 10 tokens
    found = {name: cells[0] for name, cells in rows(printed["Example: weights"]).items()}
    assert found == {
        "`trajectory_constant`": "0.00250 (20 %)",  # 1/(4·100)
        "`trajectory_mean`": "0.00625 (25 %)",  # 1/(4·40)
        "`token_mean`": "0.00500 (20 %)",  # 1/200
        "`turn_mean`": "0.00500, 0.01000, 0.01000 (30 %)",  # 1/(10·20), 1/(10·10)
    }


def test_losses_by_hand(printed: dict[str, str]) -> None:
    token, turn, size = math.exp(0.5), math.exp(0.05), 0.866
    wanted = {  # ratio; loss and gradient for A > 0; loss and gradient for A < 0
        "`clipped`": [token, -1.2 * size, 0, token * size, token * size],
        "`clipped`, `dual_clip` 1.5": [token, -1.2 * size, 0, 1.5 * size, 0],
        "`gspo`": [turn, -1.0004 * size, 0, turn * size, turn * size],
        "`cispo`": [token, token * size, -token * size, -token * size, token * size],  # −factor·A·logp, logp = −1
        "`reinforce`": [token, size, -size, -size, size],
    }
    found = rows(printed["Example: losses"])
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert [float(cell.replace("−", "-")) for cell in found[name]] == pytest.approx(values, abs=6e-4)


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.97])
def test_the_pressure_of_the_inverse_context_in_closed_form(rate: float, printed: dict[str, str]) -> None:
    # x = C/1024 log-uniform on [1, 16]: E 1/x = (1 − 1/16)/ln 16 = m, E 1/x² = (1 − 1/256)/(2 ln 16)
    mean = (1 - 1 / 16) / math.log(16)
    within = (1 - 1 / 256) / (2 * math.log(16)) - mean**2
    negative = 1 - math.log(1 / (rate * mean)) / math.log(16)  # 1/x < rate·m
    context = rate * within / (rate * within + rate * (1 - rate) * mean**2)
    cells = rows(printed["Pressure"])[f"one group of 100, pass rate {rate}"]
    assert [float(cells[0].strip("% ")), float(cells[2].strip("% "))] == pytest.approx(
        [100 * negative, 100 * context],
        abs=2.5,  # one of 30 trajectories is 3 %
    )
    assert cells[3] == "0 %"  # efficient: none, in a mixed group


def test_the_plot_is_drawn_and_the_one_of_the_page_has_the_same_labels(tmp_path: Path) -> None:
    drawn = tmp_path / "advantage.svg"
    succeed_as_script(SCRIPT, "--plot", str(drawn))
    labels = (
        "(a) inverse_max_context with grpo", "(b) efficient", "advantage of a correct trajectory",
        "largest context of the trajectory, tokens", "pass rate 0.3", "pass rate 0.7", "pass rate 0.97",
    )  # fmt: skip
    for path in (drawn, ROOT / "docs" / "images" / "advantage.svg"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("<?xml")
        assert [label for label in labels if f">{label}<" not in text] == []
    assert "](../images/advantage.svg)" in PAGE


def test_the_readme_and_the_page_of_credit_lead_to_the_estimators() -> None:
    assert "](docs/reference/estimators.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](../reference/estimators.md)" in (ROOT / "docs" / "explanation" / "credit.md").read_text(encoding="utf-8")

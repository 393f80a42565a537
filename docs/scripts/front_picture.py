"""Draws the README's picture from docs/results/studies: success over steps (H), and by length (S2 again).

    python docs/scripts/front_picture.py docs/images/results.svg

A line for each arm, a dot for each seed.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from condensegrpo.reporting.plots import arm_style, canvas, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[1] / "results/studies"
Arms = dict[str, str]  # in the order of drawing, with what the picture calls them
Json = dict[str, Any]
H: Arms = {
    "grpo": "GRPO trains notes and answers",
    "rft": "imitation of successes",
    "told": "started from notes that know the demand",
    "frozen": "the start writes the notes",
    "full": "no condensation",
}
LENGTHS: Arms = {
    "precise": "GRPO, trained on 2 to 4 chunks",
    "rft": "imitation of successes",
    "full_long": "no condensation, shown 2 to 64 chunks",
}
STYLES = {"grpo": 0, "precise": 0, "rft": 1, "told": 2, "frozen": 3, "full": 4, "full_long": 4}  # one an arm in both


def main() -> None:
    """Write the picture."""
    with canvas(11, 4.4) as figure:
        steps, lengths = figure.subplots(1, 2, sharey=True)
        _over_steps(steps, _results("h_demand"))
        _by_length(lengths, _results("s2_precision"))
        for axes in (steps, lengths):
            axes.set_ylim(-0.02, 1.02)
            axes.grid(alpha=0.3)
            axes.legend(loc="lower right", fontsize=8)
        steps.set_ylabel("success on held-out problems")
        save_figure(figure, Path(sys.argv[1]).with_suffix(""))


def _results(study: str) -> Json:
    results: Json = json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))
    return results


def _over_steps(axes: "Axes", results: Json) -> None:
    """The mean over seeds at each evaluation of a run; the seeds at the last."""
    curves = {curve["arm"]: curve["points"] for curve in results["curves"]}
    ends = {arm["arm"]: arm["by_seed"]["success"].values() for arm in results["evaluations"][0]["arms"]}
    for number, (arm, label) in enumerate(H.items()):
        points, style = curves[arm], arm_style(STYLES[arm])
        axes.plot([p["step"] for p in points], [p["success"][0] for p in points], label=label, markersize=4, **style)
        last = points[-1]["step"] + 1.5 + 1.2 * number
        axes.plot([last] * len(ends[arm]), [*ends[arm]], ".", color=style["color"], markersize=4)
    axes.set_xlabel("steps of GRPO; dots: seeds at the end")
    axes.set_title("Which facts are worth a note? (H, ten hidden demands)", fontsize=10)


def _by_length(axes: "Axes", results: Json) -> None:
    """The mean over seeds of each length, and the seeds."""
    by_length = {int(e["name"][2:]): e["arms"] for e in results["evaluations"] if e["name"].startswith("K=")}
    for number, (arm, label) in enumerate(LENGTHS.items()):
        style = arm_style(STYLES[arm])
        values = {
            length: [*each["by_seed"]["success"].values()]
            for length, arms in by_length.items()
            for each in arms
            if each["arm"] == arm
        }
        axes.plot([*values], [fmean(each) for each in values.values()], label=label, markersize=4, **style)
        for length, each in values.items():
            axes.plot([length * (1 + 0.04 * number)] * len(each), each, ".", color=style["color"], markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks([*by_length], [str(length) for length in by_length])
    axes.set_xlabel("chunks of the story; dots: seeds")
    axes.set_title("Longer stories than in training (S2 again)", fontsize=10)


if __name__ == "__main__":
    main()

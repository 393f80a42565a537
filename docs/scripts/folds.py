"""What training is worth over the folds of a study, each of which is evaluated on questions of its own:

    python docs/scripts/folds.py runs/c_memory/results.json

Prints for each evaluation what the success of the arms FOLD is above that before the run and, where there is an arm
FOLD_zero, above that of the untrained model: the differences, and their mean with its 95 % t interval over the folds.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from condensegrpo.core.wording import plural
from condensegrpo.studies.lab.intervals import mean_interval

UNTRAINED = "_zero"


def main() -> None:
    """Print the figures of the file that the command names."""
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(line for evaluation in results["evaluations"] for line in lines(evaluation)))


def lines(evaluation: Mapping[str, Any]) -> list[str]:
    """One evaluation; a fold whose trained arm has not finished is left out."""
    arms = {arm["arm"]: arm for arm in evaluation["arms"]}
    after = {name: arm["success"][0] for name, arm in arms.items()}
    before = {name: arm["success_before"] for name, arm in arms.items()}
    folds = [name for name in arms if not name.endswith(UNTRAINED)]
    gains = {
        "before the run": {name: after[name] - before[name] for name in folds if before[name] is not None},
        "untrained": {name: after[name] - after[name + UNTRAINED] for name in folds if name + UNTRAINED in after},
    }
    return [f"{evaluation['name']} − {what}: {_over_folds(each)}" for what, each in gains.items() if each]


def _over_folds(differences: Mapping[str, float]) -> str:
    mean = mean_interval(np.array([[value] for value in differences.values()]), share=False)
    folds = ", ".join(f"{name} {value:+.3f}" for name, value in differences.items())
    spread = mean if len(differences) > 1 else mean.mean  # one fold has no interval
    return f"{spread:+.3f} over {plural(len(differences), 'fold')} ({folds})"


if __name__ == "__main__":
    main()

"""What training is worth over the folds of a study, each of which is evaluated on questions of its own:

    python docs/scripts/folds.py runs/c_memory/results.json

The arms FOLD and FOLD_zero are trained and untrained; without the latter, what is subtracted is FOLD before training.
Prints for each evaluation the differences in success, and their mean with its 95 % t interval over the folds.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from condensegrpo.core.wording import counted
from condensegrpo.metrics.seeds import mean_interval

UNTRAINED = "_zero"


def main() -> None:
    """Print the figures of the file that the command names."""
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(map(line, results["evaluations"])))


def line(evaluation: Mapping[str, Any]) -> str:
    """One evaluation; a fold whose trained arm has not finished is left out."""
    arms = {arm["arm"]: arm for arm in evaluation["arms"]}
    untrained = {name.removesuffix(UNTRAINED): arm["success"][0] for name, arm in arms.items() if UNTRAINED in name}
    if not untrained:
        untrained = {name: arm["success_before"] for name, arm in arms.items()}
    differences = {name: arms[name]["success"][0] - before for name, before in untrained.items() if name in arms}
    mean = mean_interval(np.array([[value] for value in differences.values()]), share=False)
    folds = ", ".join(f"{name} {value:+.3f}" for name, value in differences.items())
    spread = mean if len(differences) > 1 else mean.mean  # one fold has no interval
    return f"{evaluation['name']}: {spread:+.3f} over {counted(len(differences), 'fold')} ({folds})"


if __name__ == "__main__":
    main()

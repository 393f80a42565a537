"""Checks a study, writes its results, or writes the study file of its pilots:

python -m condensegrpo.studies.lab check studies/s1_summaries.yaml       # before its runs
python -m condensegrpo.studies.lab results studies/s1_summaries.yaml     # after, or during, condensegrpo sweep
python -m condensegrpo.studies.lab cross-play studies/h_demand.yaml --arm grpo     # before results
python -m condensegrpo.studies.lab pilots studies/s1_summaries.yaml      # then sweep the file that it names
"""

import argparse
import sys
from pathlib import Path

from condensegrpo.config.load import HELD_OUT
from condensegrpo.config.study import find_study
from condensegrpo.core.errors import CondenseError
from condensegrpo.display.console import quiet_libraries
from condensegrpo.studies.lab.predictions import power_lines
from condensegrpo.studies.lab.results import RESULTS, markdown, play_study, write_results
from condensegrpo.studies.lab.study import load_lab_study, write_pilots


def main(arguments: list[str] | None = None) -> None:
    """Run the command; an error of the study ends it with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m condensegrpo.studies.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("check", "results", "cross-play", "pilots"))
    parser.add_argument("study", help="a study file, or the name of a shipped study")
    parser.add_argument("--out", type=Path, help="folder of the runs; by default runs/ and the name of the study")
    parser.add_argument("--arm", help="of cross-play; by default those of its predictions")
    parser.add_argument("--evaluation", default=HELD_OUT, help="of --arm; by default held-out")
    given = parser.parse_args(arguments)
    try:
        study = load_lab_study(find_study(given.study))
        if given.action == "check":
            print("\n".join([f"{given.study}: predictions, pilots and report fit its arms", *power_lines(study)]))
            return
        if given.action == "pilots":
            file = write_pilots(study, given.out)
            print(f"no held-out problem of the pilots is one of the study. Run them: condensegrpo sweep {file}")
            return
        out = given.out or Path("runs") / study.name
        if given.action == "cross-play":
            quiet_libraries()
            for line in play_study(study, out, given.arm, given.evaluation):
                print(line, flush=True)
            return
        print(markdown(write_results(study, out)))
        print(f"folder {out}: {', '.join(RESULTS)}", file=sys.stderr)
    except CondenseError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()

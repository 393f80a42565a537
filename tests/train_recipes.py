"""Trains every shipped recipe a step in one process, small: ``python train_recipes.py FOLDER NAME…``."""

import sys
import traceback
from pathlib import Path

from recipe_world import make_model, recipe_overrides

from condensegrpo.cli.app import app


def main() -> None:
    """The recipes of the command line, one after another."""
    folder, *names = Path(sys.argv[1]), *sys.argv[2:]
    make_model(folder / "model")
    for name in names:
        try:
            app(["train", name, *recipe_overrides(name, folder)], standalone_mode=False)
        except Exception:  # each recipe is a test of its own: what failed is told by its test
            (folder / f"{name}.error").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()

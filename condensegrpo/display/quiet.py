"""Turns off the progress bars of libraries, because the command shows its own."""

import os
import sys


def quiet_libraries() -> None:
    """Call before models are loaded; warnings and errors are still shown.

    datasets takes half a second to import, and only some tasks do: it reads the variable then.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if "datasets" in sys.modules:
        from datasets.utils.logging import disable_progress_bar as disable_progress_bar_of_datasets

        disable_progress_bar_of_datasets()

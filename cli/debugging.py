"""The option ``--debug``: tracebacks of errors that the command line shows as one line."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from condensegrpo.core.errors import CondenseError

Debug = Annotated[bool, typer.Option("--debug", help="Show the tracebacks of errors and of failed trajectories.")]


@contextmanager
def tracebacks(*, shown: bool) -> Iterator[None]:
    """Print the traceback of an error that passes through, if it is to be shown."""
    try:
        yield
    except CondenseError:
        if shown:
            sys.stderr.write(traceback.format_exc())
        raise

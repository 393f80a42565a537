"""The report of a run: ``report.html``, one interactive page that needs nothing else.

It is written while the run trains, as often as that takes little of its time, and at its end.
"""

import json
import math
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from condensegrpo.config.load import HELD_OUT
from condensegrpo.config.resumed import recorded_changes
from condensegrpo.config.yaml_tree import leaves, read_yaml
from condensegrpo.core.credentials import without_credentials
from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.core.wording import plural
from condensegrpo.inspection.page import page, typed_path
from condensegrpo.inspection.pictures import pictures_named
from condensegrpo.inspection.samples import SampleReader
from condensegrpo.reporting.plots import PANELS, SHARES, Diagram, Pairs, Series, series, variants
from condensegrpo.storage.environment import ENVIRONMENT
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.run_folder import RunFolder, read_metrics

MOST_PICTURES = 100  # on a page, of the newest trajectories: 20 kB each for a screen
MOST_POINTS = 2000  # of a curve; of longer ones every second, third … point and the last
SHARE_OF_TIME = 0.01  # of a run that writing its page may take


def write_page(run_folder: Path, reader: SampleReader | None = None, *, file: Path | None = None) -> Path:
    """Write a run's page, by default ``report.html`` in its folder, whether it has ended or not; returns its path."""
    run, file = RunFolder(run_folder), file or run_folder / "report.html"
    report = run_report(run, reader or SampleReader(run))
    styles = ("inspection/page.css", "reporting/report.css")
    scripts = ("inspection/page.js", "reporting/report.js")
    write_atomically(file, page(run.path.resolve().name, report, styles=styles, scripts=scripts))
    return file


class ReportTracker:
    """Writes the page of a run while it trains, as often as that takes a small share of its time."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._reader = run, SampleReader(run)
        self._next = -math.inf  # seconds on the clock
        self._outdated = True  # whether the page misses something

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the page if it is time. The metrics are in their file already."""
        began, self._outdated = time.monotonic(), True
        if began >= self._next:
            self.flush()
            ended = time.monotonic()
            self._next = ended + (ended - began) / SHARE_OF_TIME

    def flush(self) -> None:
        """Write the page if it misses something."""
        if self._outdated and self._run.metrics.is_file() and self._run.metrics.stat().st_size:
            write_page(self._run.path, self._reader)
            self._outdated = False


def run_report(run: RunFolder, reader: SampleReader) -> dict[str, object]:
    """The data of the page of a run."""
    metrics = read_metrics(run.metrics)
    if not metrics:
        raise RunError(f"making the report of {run.path}: {run.metrics} holds no metrics yet. Train a step first.")
    configuration = _settings(run.config)
    varied = variants(metrics)
    grids: dict[tuple[float, ...], int] = {}  # the steps of curves
    curves: dict[str, tuple[int, tuple[float | None, ...]]] = {}  # by metric: the index of its grid, and its values
    for key in sorted({key for line in metrics for key in line} - {"step"}):
        steps, values = _thinned(series(metrics, key))
        rounded = (float(f"{value:.6g}") if math.isfinite(value) else None for value in values)  # JSON has no NaN
        curves[key] = grids.setdefault(steps, len(grids)), tuple(rounded)
    samples = reader.read()
    newest = (text for each in reversed(samples) for text in each.texts)
    last, planned = round(max(line["step"] for line in metrics)), dict(configuration).get("train.steps")
    written = datetime.now().astimezone().isoformat(" ", "minutes")
    return {
        "name": run.path.resolve().name,
        "state": f"{plural(last, 'step')}{f' of {planned}' if planned else ''}, written {written}",
        "folder": shlex.quote(str(typed_path(run.path))),  # as a shell takes it
        "grids": tuple(grids),
        "curves": curves,
        # by name: the lines of its diagram, each a key of ``curves`` and a label
        "metrics": {name: _lines(name, varied) for name in sorted(_names(curves, varied))},
        "variants": varied,  # of the evaluation
        "diagrams": tuple(_diagrams(curves, varied)),  # that it shows first
        "changes": [  # by resumes
            {"first_step": change.first_step, "text": str(change), "learned": change.learned}
            for change in recorded_changes(run)
        ],
        "samples": samples,
        "pictures": pictures_named(newest, run.media, most=MOST_PICTURES),
        "configuration": configuration,
        "environment": _settings(run.path / ENVIRONMENT),
    }


def _thinned(line: Series) -> Series:
    """A curve of at most about ``MOST_POINTS`` points, the last one among them."""
    stride = math.ceil(len(line.steps) / MOST_POINTS)
    if stride < 2:
        return line
    last = len(line.steps) - 1
    kept = [index for index in range(len(line.steps)) if (last - index) % stride == 0]
    return Series(*(tuple(column[index] for index in kept) for column in line))


def _names(measured: Collection[str], varied: Sequence[str]) -> set[str]:
    """The metrics of which something was measured, without eval/, variant and interval."""
    prefixes = (*(f"eval/{name}/" for name in varied), "eval/")
    values = [key for key in measured if not (key.endswith(("_low", "_high")) and key.rpartition("_")[0] in measured)]
    return {key.removeprefix(next(filter(key.startswith, prefixes), "")) for key in values}


def _lines(metric: str, varied: Sequence[str]) -> Pairs:
    """The lines of one metric: in training, on held-out problems and in the variants."""
    variant_lines = ((f"eval/{name}/{metric}", name) for name in varied)
    return ((metric, "training"), (f"eval/{metric}", HELD_OUT), *variant_lines)


def _diagrams(measured: Collection[str], varied: Sequence[str]) -> Iterator[Diagram]:
    """The diagrams that something was measured for."""
    for panel in PANELS:
        lines = _lines(panel.metric, varied if panel.varied else ())
        if any(key in measured for key, _ in lines):
            yield Diagram(title=panel.title, unit=panel.unit, lines=lines)
    yield from (shares for shares in SHARES if any(key in measured for key, _ in shares.lines))


def _settings(file: Path) -> Pairs:
    """The leaves of a YAML or JSON file by their dotted keys; none if it cannot be read."""
    try:
        values = [*leaves(without_credentials(read_yaml(file)), lists=False)]
    except ConfigError:
        return ()
    return tuple(
        (".".join(path), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
        for path, value in values
    )

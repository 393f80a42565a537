"""The closing summary of a run: metrics before and after, its files, and what to run next."""

from rich.console import Console
from rich.table import Table

from condensegrpo.core.wording import counted
from condensegrpo.display.tables import table
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trackers import read_metrics

MEASURES = (
    ("success", "success", "{:.3f}"),
    ("largest context, tokens", "context_tokens", "{:.1f}"),
    ("tokens read, all calls", "prompt_tokens", "{:.1f}"),
    ("output, tokens", "output_tokens", "{:.1f}"),
    ("valid format", "format_valid", "{:.3f}"),
    ("successful tool calls", "tool_calls_valid", "{:.3f}"),
)


def print_summary(folder: RunFolder) -> None:
    """Print the closing summary of a run, from its ``metrics.jsonl`` alone."""
    from condensegrpo.config.resumed import recorded_changes

    evaluated = [line for line in read_metrics(folder.metrics) if "eval/success" in line]
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if evaluated:
        before = evaluated[0] if evaluated[0]["step"] == 0 else None
        console.print(_table(before, evaluated[-1]))
    for change in recorded_changes(folder):
        console.print(f"changed     from step {change.first_step} on, {change}")
    path = folder.path
    console.print(f"policy      {path}/checkpoints (newest: a Hugging Face folder in model/)")
    console.print(f"curves      {path}/report.html  {path}/report.png  {path}/metrics.jsonl")
    console.print(f"next        condensegrpo inspect {path}")
    console.print(f"            condensegrpo eval {path} --samples 4")


def _table(before: dict[str, float] | None, after: dict[str, float]) -> Table:
    """The evaluations after training, beside those before it if there were any."""
    from condensegrpo.evaluation.figures import evaluations_in

    steps = counted(round(after["step"]), "step")
    shown = {"after": after} if before is None else {"before": before, "after": after}
    title = f"held-out problems, {' → '.join(shown)} {steps}, [95 % interval]"
    drawn = table(title, ("evaluation", "metric", *shown), (), left=2)
    for name, prefix in sorted(evaluations_in(after).items(), key=lambda evaluation: len(evaluation[1])):
        measured = [measure for measure in MEASURES if f"{prefix}/{measure[1]}" in after]
        for row, (label, key, form) in enumerate(measured):
            cells = [_cell(line, f"{prefix}/{key}", form) for line in shown.values()]
            drawn.add_row("" if row else name, label, *cells)
        drawn.add_section()
    return drawn


def _cell(line: dict[str, float], key: str, form: str) -> str:
    """A metric, with its 95 % interval if it has one."""
    if key not in line:
        return "–"
    bounds = [form.format(line[f"{key}{bound}"]) for bound in ("_low", "_high") if f"{key}{bound}" in line]
    return f"{form.format(line[key])} [{', '.join(bounds)}]" if bounds else form.format(line[key])

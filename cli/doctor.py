"""``condensegrpo doctor``: checks this machine, and a configuration on it, and says how to fix what is wrong."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from condensegrpo.cli import theme
from condensegrpo.cli.console import PhaseDisplay
from condensegrpo.cli.doctor_machine import disk_finding, machine_findings
from condensegrpo.cli.findings import Level, show


def doctor(
    config: Annotated[
        str | None, typer.Argument(help="Also check what this needs: a YAML file, a shipped name or a run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of its keys.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder for runs.")] = Path("runs"),
    sampler: Annotated[
        str | None,
        typer.Option(
            help="Also compare this sampler (such as vllm) with the learner on a tiny model; takes half a minute."
        ),
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also try what a run does on the GPUs of this machine; takes minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check Python, packages, devices, compilers, memory and disk, and say how to fix what is wrong.

    Exit code 1 if there is a problem.

    Example: condensegrpo doctor gsm8k model.path=Qwen/Qwen2.5-0.5B-Instruct
    """
    with PhaseDisplay(Console(stderr=True)) as display:
        display.phase("checking this machine", None)
        findings = [*machine_findings(), disk_finding(runs_dir)]
        if config is not None:
            display.phase(f"checking {config}", None)
            from condensegrpo.cli.doctor_config import config_findings

            findings += [found for found in config_findings(config, overrides or ()) if found not in findings]
        if sampler is not None:
            display.phase(f"comparing {sampler} with the learner", None)
            from condensegrpo.cli.doctor_parity import sampler_findings

            findings += sampler_findings(sampler, config, overrides or [])
        if gpu:
            display.phase("trying the GPUs", None)
            from condensegrpo.cli.doctor_gpu import gpu_findings

            findings += gpu_findings(config, overrides or ())
    if as_json:
        typer.echo(json.dumps({"version": 1, "findings": [asdict(finding) for finding in findings]}))
    else:
        show(findings, theme.console())
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(1)

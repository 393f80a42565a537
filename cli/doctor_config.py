"""Checks of one configuration on this machine. Loads its plug-ins and reads headers of files; loads no model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.doctor_data import data_findings
from condensegrpo.cli.doctor_machine import disk_finding
from condensegrpo.cli.doctor_model import model_findings
from condensegrpo.cli.doctor_sandbox import sandbox_finding
from condensegrpo.cli.findings import Finding, ok, problem
from condensegrpo.core.errors import CondenseError, DataError

if TYPE_CHECKING:
    from condensegrpo.config.schema import Plugin, RunConfig


def config_findings(name: str, overrides: Sequence[str]) -> list[Finding]:
    """Check that a configuration is valid and that everything it names exists."""
    from condensegrpo.config.load import find_config, load_config

    try:
        config = load_config(find_config(name), overrides)
    except CondenseError as error:
        return [problem("configuration", str(error), "correct the file or the overrides")]
    return [
        ok("configuration", f"{name} is valid"),
        *data_findings(config),
        _plugins(config),
        *model_findings(config),
        disk_finding(Path(config.runs_dir)),
        *([sandbox_finding(config.sandbox.isolation)] if config.sandbox.isolation != "auto" else []),
    ]


def _plugins(config: "RunConfig") -> Finding:

    from condensegrpo.assembly.build import build

    try:
        build(config)
    except DataError as error:
        return problem("data", str(error), "correct the data, or give other files (docs/reference/tasks.md)")
    except CondenseError as error:
        return problem("plug-ins", str(error), "condensegrpo plugins lists what is installed")
    named = (
        config.task.name,
        config.condenser.name,
        config.reward.name,
        config.sampler.name,
        *map(_tool_name, config.rollout.tools.use),
    )
    return ok("plug-ins", f"{', '.join(named)}: all load")


def _tool_name(tool: "str | Plugin") -> str:
    return tool if isinstance(tool, str) else tool.name

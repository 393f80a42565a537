"""What ``doctor --sampler`` finds: whether a sampler tells the learner's probabilities, tried out on a tiny model."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from condensegrpo.cli.findings import Finding, ok, problem
from condensegrpo.core.errors import CondenseError

if TYPE_CHECKING:
    from condensegrpo.training.parity import Parity, Trial

CURE = "do not train with it: importance ratios would be wrong; condensegrpo train … sampler.name=transformers works"


def sampler_findings(name: str, config: str | None, overrides: list[str]) -> list[Finding]:
    """Sample, take an optimiser step, send the weights, sample again, and compare. Takes half a minute."""
    from condensegrpo.cli.quiet import quiet_libraries
    from condensegrpo.storage.run_folder import RunFolder
    from condensegrpo.training.parity import configuration, trial

    area = f"sampler {name}"
    quiet_libraries()
    try:
        options = _options(name, config, overrides)
        with tempfile.TemporaryDirectory(prefix="condensegrpo-") as place:
            found = trial(configuration(name, options), RunFolder.create(Path(place) / "run"))
    except CondenseError as error:
        return [problem(area, str(error), "see condensegrpo plugins, and docs/reference/samplers.md")]
    return _findings(area, found)


def _options(name: str, config: str | None, overrides: list[str]) -> Mapping[str, Any]:
    """The options that a configuration gives this sampler; none where it names another."""
    from condensegrpo.config.schema import find_config, load_config

    if config is None:
        return {}
    sampler = load_config(find_config(config), overrides).sampler
    return sampler.options if sampler.name == name else {}


def _findings(area: str, found: "Trial") -> list[Finding]:
    if not found.moved_enough:
        text = f"the optimiser step moved its samples by {found.moved:.1e} nats only: nothing is proved"
        return [problem(area, text, "report this: the trial should move them by far more")]
    stages = (("as loaded", found.before), ("after an optimiser step", found.after))
    return [_finding(area, stage, one, found.device) for stage, some in stages for one in some]


def _finding(area: str, stage: str, one: "Parity", device: str) -> Finding:
    text = (
        f"{stage}, temperature {one.temperature:g}: largest difference to the learner {one.largest_gap:.1e} nats, mean "
        f"ratio 1 {'−' if one.mean_ratio < 1 else '+'} {abs(one.mean_ratio - 1):.1e}, {one.tokens} tokens"
    )
    return ok(area, text) if one.holds(device) else problem(area, text, CURE)

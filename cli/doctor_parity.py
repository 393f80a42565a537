"""``doctor --sampler``: compares a sampler's log-probabilities with the learner's on a tiny model."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.findings import Finding, ok, problem
from condensegrpo.core.errors import CondenseError

if TYPE_CHECKING:
    from condensegrpo.training.parity import Trial

CURE = "do not train with it: importance ratios would be wrong; condensegrpo train … sampler.name=transformers works"


def sampler_findings(name: str, config: str | None, overrides: list[str]) -> list[Finding]:
    """Sample, take an optimiser step, send the weights, sample again and compare. Takes half a minute."""
    from condensegrpo.cli.quiet import quiet_libraries
    from condensegrpo.config.load import named_config
    from condensegrpo.storage.run_folder import RunFolder
    from condensegrpo.training.parity import configuration, trial

    area = f"sampler {name}"
    quiet_libraries()
    try:
        sampler = named_config(config, overrides).sampler if config is not None else None
        options = sampler.options if sampler is not None and sampler.name == name else {}
        with tempfile.TemporaryDirectory(prefix="condensegrpo-") as place:
            outcome = trial(configuration(name, options), RunFolder.create(Path(place) / "run"))
    except CondenseError as error:
        return [problem(area, str(error), "see condensegrpo plugins and docs/how-to/sample-with-vllm.md")]
    return parity_findings(area, outcome)


def parity_findings(area: str, outcome: "Trial") -> list[Finding]:
    """What a trial says: a finding for each stage and temperature."""
    if not outcome.moved_enough:
        text = f"the optimiser step changed the log-probabilities by {outcome.moved:.1e} nats only: no conclusion"
        return [problem(area, text, "report this: the change should be far larger")]
    findings = []
    for stage, parities in (("as loaded", outcome.before), ("after an optimiser step", outcome.after)):
        for parity in parities:
            sign = "−" if parity.mean_ratio < 1 else "+"
            text = (
                f"{stage}, temperature {parity.temperature:g}: largest difference from the learner "
                f"{parity.largest_gap:.1e} nats, mean ratio 1 {sign} {abs(parity.mean_ratio - 1):.1e}, "
                f"{parity.tokens} tokens"
            )
            findings.append(ok(area, text) if parity.holds(outcome.bounds) else problem(area, text, CURE))
    return findings

"""The model card of an exported policy: what it is, how it was trained, what it can do, and how to run it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.assembly.exported import CONDENSER_FILE, exported_settings
from condensegrpo.config.load import portable, validate
from condensegrpo.config.resumed import config_at, recorded_changes
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import dump
from condensegrpo.core.protocols.tracker import Cell, Table, markdown
from condensegrpo.evaluation.figures import evaluations_in
from condensegrpo.learner.export import ExportedPart
from condensegrpo.learner.model_folder import auto_class, configuration, sees
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import sample_trajectories

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SHOWN = {
    "success": "success",
    "context_tokens": "largest context, tokens",
    "price": "price, in tokens read",
    "turns": "turns",
}  # metric → column
CARD = """\
# {name}

A policy after {steps} optimiser steps of multi-turn GRPO with condensegrpo, which condenses the history before a turn.
**It was trained on condensed contexts**: run it with the same condenser, whose settings are in `{condenser}`.

{training}
{changes}## Evaluation

{evaluation}
## Use

{use}
## Licence

{licence}
"""
MODEL_USE = """\
`condenser.yaml` holds the condenser and the limits of contexts and turns. This program, run in this folder, plays an
episode with them; replace `World` by the environment that your agent acts in.

```python
import asyncio

from condensegrpo.assembly.exported import open_engine
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.episodes.episode import run_episode


class World:
    async def start(self) -> tuple[Message, ...]:
        return (Message(role="user", content={question!r}),)

    async def step(self, reply: Message) -> Step:
        print("policy:", reply.text)
        return Step(observations=(Message(role="user", content={observation!r}),))  # or Step(done=True, answer="…")


with open_engine(".") as engine:  # this folder: weights, tokenizer and condenser.yaml
    problem = Problem(id="mine", question={question!r})
    episode = run_episode(problem, environment=lambda _: World(), engine=engine, group_id="mine", sample=0, seed=abs)
    trajectory = asyncio.run(episode)
print([(len(turn.prompt_ids), turn.condensation) for turn in trajectory.turns])
```

`vllm serve .` serves the weights. A server sees only the prompts that it is sent: condense on the client's side, as
above (`open_engine(".", ["sampler.name=vllm"])` samples with vLLM).
"""
ADAPTER_USE = """\
```python
from peft import PeftModel
from transformers import {model_class}

base = {model_class}.from_pretrained({base!r})
model = PeftModel.from_pretrained(base, ".")
```

{origin}
`condenser.yaml` holds the condenser and the limits of contexts and turns. `condensegrpo export RUN TARGET` without
`--adapter` writes merged weights with a program that runs them under this condenser.
"""


def write_card(run: RunFolder, target: Path, step: int, *, part: ExportedPart, name: str, licence: str | None) -> None:
    """Write ``README.md`` and ``condenser.yaml`` beside the weights of a step."""
    config = config_at(run, step)
    # without folders of this machine
    written = validate(portable(config.model_dump(mode="json")), source=str(run.config))
    write_atomically(target / CONDENSER_FILE, exported_settings(config))
    evaluation = evaluation_table(read_metrics(run.metrics), step)
    of_step = [row for row in evaluation.rows if row[1] == step]
    base = base_model(config)
    model = target if part == "model" else next(run.checkpoints.glob("*/model"), target)
    trained = configuration(str(model)) if (model / "config.json").is_file() else None
    changes = [str(change) for change in recorded_changes(run) if change.learned and change.first_step <= step]
    kind = "image-text-to-text" if trained and sees(trained) else "text-generation"
    terms = f"The licence of the base model {base} applies" if base else "Not stated"
    text = CARD.format(
        name=name,
        steps=step,
        condenser=CONDENSER_FILE,
        training=markdown(_training(written, base, step)),
        changes="".join(f"Changed while it was trained: {change}\n\n" for change in changes),
        evaluation=(markdown(evaluation) if evaluation.rows else "")
        + ("" if of_step else "\nThe policy of this step was not evaluated.\n"),
        use=_adapter_use(config, base, trained) if part == "adapter" else MODEL_USE.format_map(_example(run, step)),
        licence=f"{terms}. Set the field `license` at the top of this file." if licence is None else f"{licence}.",
    )
    write_atomically(target / "README.md", f"---\n{_metadata(config, of_step, part, name, licence, kind)}\n---\n{text}")


def evaluation_table(metrics: Sequence[Mapping[str, float]], step: int) -> Table:
    """A row for each evaluation before training and after the step: success and context with 95 % intervals."""
    rows: list[tuple[str | float | None, ...]] = []
    for at in dict.fromkeys((0, step)):
        figures = {key: value for line in metrics if line["step"] == at for key, value in line.items()}
        for name, prefix in evaluations_in(figures).items():
            rows.append((name, at, *(_with_interval(figures, f"{prefix}/{metric}") for metric in SHOWN)))
    return Table(columns=("evaluation", "step", *SHOWN.values()), rows=tuple(rows))


def _with_interval(figures: Mapping[str, float], key: str) -> str | None:
    value, low, high = (figures.get(f"{key}{bound}") for bound in ("", "_low", "_high"))
    if value is None:
        return None
    return f"{value:.4g}" if low is None or high is None else f"{value:.4g} [{low:.3g}, {high:.3g}]"


def base_model(config: RunConfig) -> str | None:
    """The Hub id that training started from; None: a local folder or a new model."""
    path = config.model.path
    return path if path is not None and HUB_ID.fullmatch(path) and not Path(path).exists() else None


def _training(config: RunConfig, base: str | None, step: int) -> Table:
    algorithm, train, optimiser = config.algorithm, config.train, config.learner.optimiser
    condenser = f"{config.condenser.name} {config.condenser.options or ''}".strip()
    new = f"a new model ({config.model.new})"
    lora = config.model.lora
    rows = (
        ("base", base or ("a local model" if config.model.path else new)),
        ("task", config.task.name),
        ("training data", config.task.data or "of the task"),
        ("warm start", f"{config.warm_start.steps} supervised steps" if config.warm_start.steps else "none"),
        ("algorithm", f"estimator {config.estimator}, loss {algorithm.loss.name}, {algorithm.aggregation.mode}"),
        ("KL coefficient", algorithm.kl.coefficient),
        ("steps", f"{step} of {train.problems_per_step} problems × {train.samples_per_problem} trajectories"),
        ("optimiser", f"AdamW, learning rate {optimiser.lr:g}, {optimiser.schedule}"),
        ("weights", "all" if lora is None else f"LoRA, rank {lora.rank}"),
        ("condenser", condenser),
        ("context budget", f"{config.rollout.limits.max_context_tokens} tokens"),
        ("condensed", config.rollout.condense.when),
        ("reward", config.reward.name),
        ("seed", config.seed),
    )
    return Table(columns=("", "trained with"), rows=rows)


def _adapter_use(config: RunConfig, base: str | None, trained: "PretrainedConfig | None") -> str:
    model_class = auto_class(trained).__name__ if trained else "AutoModelForCausalLM"
    warmed = config.warm_start.steps > 0
    origin = (
        "The base is the policy after the warm start, in the folder `origin/warm` of the run.\n\n" if warmed else ""
    )
    named = "path/to/the/base" if warmed or base is None else base
    return ADAPTER_USE.format(base=named, origin=origin, model_class=model_class)


def _example(run: RunFolder, step: int) -> dict[str, str]:
    """A question of the run and what its environment answered, which the tokenizer has words for; of any step."""
    for number in sorted(run.steps(), key=lambda number: abs(number - step)):
        for scored in sample_trajectories(run.trajectories(number), 1):
            observed = [message.text for turn in scored.trajectory.turns for message in turn.observations]
            if scored.trajectory.question:
                return {"question": scored.trajectory.question, "observation": next(iter(observed), "Go on.")}
    return {"question": "…", "observation": "Go on."}


def _metadata(
    config: RunConfig,
    evaluated: Sequence[Sequence[Cell]],
    part: ExportedPart,
    name: str,
    licence: str | None,
    kind: str,
) -> str:
    """The YAML that the Hub reads, with the rows of the exported step; what is not known, or no Hub id, is left out."""
    path, base = config.task.data, base_model(config)
    data = path if path and HUB_ID.fullmatch(path) and not Path(path).exists() else None
    condenser, task = config.condenser.name.rpartition(":")[2], portable(config.task.name)
    results = [
        {
            "task": {"type": kind},
            "dataset": {"name": f"{task}, {row[0]}", "type": data or task},
            "metrics": [{"type": "success", "value": float(str(row[2]).split()[0]), "name": f"success {row[2]}"}],
        }
        for row in evaluated
    ]
    tree = {
        "library_name": "peft" if part == "adapter" else "transformers",
        "pipeline_tag": kind,
        "base_model": base,
        "datasets": [data] if data else None,
        "license": licence,
        "tags": ["condensegrpo", "grpo", "reinforcement-learning", "agent", f"condenser-{condenser}"],
        "model-index": [{"name": name, "results": results}] if results else None,
    }
    return dump({key: value for key, value in tree.items() if value is not None}).rstrip()

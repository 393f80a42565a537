"""The engine and its condensers in TRL's ``GRPOTrainer``, and rows that were sampled here as its inputs.

    rollouts = rollout_func("gsm8k", "condenser.name=last_k", model="Qwen/Qwen2.5-0.5B-Instruct")
    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        rollout_func=rollouts,
        reward_funcs=score,
        train_dataset=rollouts.dataset("train"),
        args=GRPOConfig(loss_type="grpo", ...),
    )

TRL itself is imported by nobody here.
"""

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from condensegrpo.assembly.build import build
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.objects import Parts, configured
from condensegrpo.assembly.preflight import check_model
from condensegrpo.assembly.runtime import open_sampler
from condensegrpo.assembly.workers import RolloutPlayers
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.group import problem_groups
from condensegrpo.integrations.rows import Exported, exported

if TYPE_CHECKING:
    import datasets

PADDED = ("prompt_ids", "completion_ids", "tool_mask", "old_per_token_logps", "advantages")
Prompt = Sequence[Mapping[str, Any]]


def rollout_func(
    config: RunConfig | os.PathLike[str] | str,
    *overrides: str,
    model: str | os.PathLike[str] | None = None,
    **parts: Unpack[Parts],
) -> "RolloutFunction":
    """A ``rollout_func`` that plays the task of a configuration with its condenser, tools and sampler.

    Args:
        config: a YAML file, the name of a shipped configuration, a run folder or a configuration.
        overrides: ``key=value``, as on the command line.
        model: the model folder or Hub id that the trainer begins with; by default ``model.path``.
        parts: task, reward, condenser, tools and sampler, as objects or by name.

    Raises:
        ConfigError: the configuration is wrong, or names no model.
    """
    settings, objects = configured(config, overrides, parts)
    source = settings.model.path if model is None else os.fspath(model)
    if source is None:
        raise ConfigError(f"making a rollout function of {settings.name}: it names no model. Give model=….")
    components = build(settings, objects=objects)
    check_model(components, source)
    return RolloutFunction(components, source)


def score(prompts: Sequence[object], completions: Sequence[object], score: Sequence[float], **_: object) -> list[float]:
    """A reward function of TRL: the total that the configuration's reward gave each trajectory."""
    return list(score)


class RolloutFunction:
    """Plays an episode for each prompt, with the weights that the trainer has.

    TRL trains one row for each prompt, a condensed trajectory has several. One of them is drawn with a probability in
    proportion to its sampled tokens: with ``loss_type="grpo"``, the mean over a row's tokens, the expected gradient is
    that of all rows under ``trajectory_mean``. A trajectory that was not condensed is one row.
    """

    def __init__(self, components: Components, source: str) -> None:
        """Load the sampler."""
        self._components = components
        self._sampler = open_sampler(components.config, source, objects=components.objects)
        self._players = RolloutPlayers(self._sampler, source)
        self._problems: dict[str, Problem] = {}  # by the names in prompts
        self._calls = 0

    def dataset(self, split: Split = "train") -> "datasets.Dataset":
        """The problems of a split, as prompts that the function recognises."""
        import datasets

        names = {f"{split}/{problem.id}": problem for problem in self._components.problems(split)}
        self._problems |= names
        prompts = [[{"role": "user", "content": each.question, "problem": name}] for name, each in names.items()]
        return datasets.Dataset.from_dict({"prompt": prompts})

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, list[Any]]:  # noqa: ANN401  a GRPOTrainer
        """Sample and score one trajectory for each prompt; equal prompts are a group."""
        names = [str(prompt[-1].get("problem")) for prompt in prompts]
        if unknown := set(names) - self._problems.keys():
            raise ConfigError(
                f"playing the prompts of TRL: {min(unknown)!r} is no problem of the task. Train on dataset() of the "
                f"rollout function."
            )
        model = _whole(trainer.accelerator.unwrap_model(trainer.model))
        self._sampler.update(iter(model.named_parameters()), int(trainer.state.global_step))
        config, counts = self._components.config, Counter(names)
        player = self._players.player(self._components, temperature=float(trainer.temperature))
        with BackgroundLoop("rollout", close_seconds=PLUGIN_SECONDS) as loop:
            scored = loop.run(
                player.play(
                    problem_groups([self._problems[name] for name in counts], step=self._calls),
                    samples=max(counts.values()),
                    run_seed=config.seed + trainer.accelerator.process_index,
                    step=self._calls,
                    on_scored=lambda _: None,
                )
            )
        self._calls += 1
        samples = max(counts.values())
        of_name = {name: iter(scored[at * samples :]) for at, name in enumerate(counts)}
        chosen = [next(of_name[name]) for name in names]
        rows = [_drawn(each, config.seed, pad=trainer.processing_class.eos_token_id) for each in chosen]
        columns = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "score")
        return {name: [row[name] for row in rows] for name in columns}

    def close(self) -> None:
        """Free the sampler's weights."""
        self._players.close()
        self._sampler.close()


def _whole(model: nn.Module) -> nn.Module:
    """The trainer's model, if the sampler can be given its weights: whole, and by the names that they have alone."""
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "sampling for TRL: the trainer's model has PEFT adapters, whose weights have other names than the "
            "sampler's. Leave peft_config out, or train adapters with condensegrpo train model.lora={}."
        )
    if any(hasattr(each, "ds_id") for each in model.parameters()):  # DeepSpeed's number of a divided weight
        raise ConfigError(
            "sampling for TRL: the trainer's weights are divided over the ranks (ZeRO 3), and the sampler takes whole "
            "ones. Set zero_optimization.stage to 2 or less."
        )
    return model


def _drawn(scored: ScoredTrajectory, seed: int, *, pad: int) -> Exported:
    """A row of a trajectory by its sampled tokens; of one that sampled nothing, a row that trains nothing."""
    total, rows = scored.score.total, list(exported([scored], "trl"))
    if not rows:
        return {"prompt_ids": [pad], "completion_ids": [pad], "logprobs": [0.0], "env_mask": [0], "score": total}
    draw = random.Random(f"{seed}/{scored.trajectory.id}")
    (row,) = draw.choices(rows, [sum(row["tool_mask"]) for row in rows])
    return {**row, "logprobs": row["old_per_token_logps"], "env_mask": row["tool_mask"], "score": total}


def inputs(rows: Sequence[Exported], *, pad_token_id: int) -> dict[str, Tensor]:
    """Rows of ``export_rows(…, "trl")`` with credit as the inputs of ``GRPOTrainer.compute_loss``.

    With ``loss_type="dapo"``, whose divisor is 1 here, the loss is Σ weight · loss over all rows, as in training here,
    whatever the number of rows; a step may be cut into as many micro-batches as it accumulates.
    """
    if any(row["advantages"] is None for row in rows):
        raise ConfigError("making inputs of TRL: a row has no advantages. Export the training steps of a run.")
    weighed = [
        {**row, "advantages": [a * w for a, w in zip(row["advantages"], row["weights"], strict=True)]} for row in rows
    ]
    made = {name: _padded([row[name] for row in weighed], left=name == "prompt_ids") for name in PADDED}
    made["prompt_mask"] = _padded([[1] * len(row["prompt_ids"]) for row in rows], left=True)
    made["completion_mask"] = _padded([[1] * len(row["completion_ids"]) for row in rows])
    for ids, mask in (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")):
        made[ids] = made[ids].masked_fill(made[mask] == 0, pad_token_id)
    return {**made, "num_items_in_batch": torch.tensor(1.0)}


def _padded(rows: Sequence[Sequence[float]], *, left: bool = False) -> Tensor:
    """Rows of different lengths as one tensor, 0 beyond them."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side="left" if left else "right")

"""The configuration: a YAML file and ``key=value`` overrides in, frozen and checked values out.

Defaults live here and nowhere else; a YAML file holds what an experiment changes. Every key says its unit and range.
Plug-in options are checked by the plug-in itself when ``assemble`` builds it, before any model is loaded.
"""

import difflib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from condensegrpo.config.section import Section, parse
from condensegrpo.config.yaml_tree import apply_overrides, read_yaml
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.trajectory import Handling, Stop

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9=._-]*$")]  # of a folder, or in a metric's name
LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]  # of Llama, Qwen and their like
HELD_OUT = "held-out"  # the evaluation on a configuration's own problems
FAILURES_MASKED: dict[Stop, Handling] = {  # what went wrong there was not the policy's doing
    Stop.ENVIRONMENT_ERROR: "mask",
    Stop.SAMPLER_ERROR: "mask",
    Stop.ABORTED: "mask",
}


def _one_place(given: str | None) -> str | None:
    if given is not None and given.count("{answer}") != 1:
        raise ValueError(f"found {given!r}, wanted {{answer}} in it exactly once, as in <answer>{{answer}}</answer>")
    return given


class Plugin(Section):
    """A plug-in by name (see ``condensegrpo plugins``) or as ``path/to/file.py:Name``."""

    name: str
    options: dict[str, Any] = {}
    """Keyword arguments of the plug-in."""


class CondenserPlugin(Plugin):
    """What rewrites the history before a turn."""

    name: str = "full"


class StagePlugin(Plugin):
    """A condenser in a pipeline."""

    over: float = Field(default=1.0, ge=0, le=1)
    """Share of the budget that a prompt must exceed before this stage is asked; 0: always."""


class RewardPlugin(Plugin):
    """What a trajectory is worth."""

    name: str = "correct"


class SamplerPlugin(Plugin):
    """What samples replies."""

    name: str = "transformers"


class WeightedPlugin(Plugin):
    """A reward in a weighted sum."""

    weight: float = Field(default=1.0, ge=0)


class NewModel(Section):
    """A Qwen3 model made on the spot, with a tokenizer built from the task's own text."""

    tokenizer: Literal["words", "bpe"] = "words"
    vocab_size: int = Field(default=2048, ge=64)
    """Of a bpe tokenizer; the most that a words tokenizer may need."""
    hidden_size: int = Field(default=64, ge=8)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    ffn_size: int = Field(default=256, ge=8)
    initializer_range: float = Field(default=0.15, gt=0)
    """Standard deviation of the initial weights."""
    max_positions: int = Field(default=4096, ge=64)
    """Longest context in tokens."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "NewModel":
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size={self.hidden_size} is no multiple of heads={self.heads}")
        return self


class Lora(Section):
    """Adapters (PEFT) that train in place of the weights: (alpha/rank)·B·A beside a weight, which stays as it is."""

    rank: int = Field(default=16, ge=1)
    """Rows of A, columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """Strength: B·A is multiplied by alpha/rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs set to 0 while an optimiser step is taken, and nowhere else."""
    targets: list[str] | Literal["all-linear"] = LINEAR
    """Linear layers by the last part of their names, each of which must exist; all-linear: all but the LM head."""


class Model(Section):
    """The policy: a Hugging Face folder or Hub id, or a new model."""

    path: str | None = None
    """Folder or Hub id with a tokenizer and a chat template. Not together with ``new``."""
    new: NewModel | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: str = "sdpa"
    """transformers' ``attn_implementation`` of the learner."""
    lora: Lora | None = None
    """null: all weights train. The warm start of a new model trains all of them in any case."""

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        if self.path is not None and self.new is not None:
            raise ValueError(
                "set either path or new: a policy has one origin (model.new=null drops the one of the file)"
            )
        if self.path is None and self.new is None:
            raise ValueError("set path (a Hugging Face folder or Hub id) or new (a model made on the spot)")
        return self


class Task(Section):
    """Where the problems come from."""

    name: str
    data: str | None = None
    """Training problems: a JSONL or Parquet file, a folder or a Hub id."""
    eval_data: str | None = None
    """Held-out problems, likewise."""
    options: dict[str, Any] = {}
    """Keyword arguments of the task."""


class StopWhenConfident(Section):
    """Before a turn the policy drafts its answer; one that it is sure of ends the trajectory (stop: confident)."""

    threshold: float = Field(default=0.9, gt=0, le=1)
    """Probability of the draft as a whole, what closes it included, from which on it is taken."""
    form: str = "<answer>{answer}</answer>"
    """How an answer is written; what stands before {answer} is given, the rest is sampled."""
    after_turns: int = Field(default=1, ge=0)
    """Replies before the first draft."""
    max_tokens: int = Field(default=32, ge=1)
    """Sampled tokens of a draft."""

    _one_place = field_validator("form")(_one_place)


class Rollout(Section):
    """How trajectories are sampled."""

    max_turns: int = Field(default=8, ge=1)
    """Replies of one trajectory, every reply counted."""
    max_context_tokens: int = Field(default=2048, ge=8)
    """Largest prompt of a turn, template included."""
    max_output_tokens: int = Field(default=512, ge=1)
    """Sampled tokens of one turn."""
    temperature: float = Field(default=1.0, ge=0)
    condense: Literal["every_turn", "over_budget"] = "every_turn"
    """When the condenser is asked: before every turn, or once a prompt would exceed condense_share."""
    condense_share: float = Field(default=1.0, gt=0, le=1)
    """Share of max_context_tokens beyond which over_budget condenses."""
    condense_to: float | None = Field(default=None, gt=0, le=1)
    """Share of max_context_tokens that a condenser may leave, up to condense_share; null: all of that."""
    condense_jitter: float = Field(default=0.0, ge=0, lt=1)
    """Largest part that is taken off condense_share, drawn by problem: siblings condense at the same length."""
    max_tool_turns: int | None = Field(default=None, ge=0)
    """Replies whose calls are run; one that calls a tool after that ends the trajectory unexecuted. null: all."""
    tools: list[str | Plugin] = []
    """Names of tools, path/to/file.py:function, or {name, options} where a tool has options."""
    tool_format: Literal["native", "tagged", "code"] = "native"
    """native: the template's own calls (Hermes/Qwen); tagged: <tool>{…}</tool>; code: <code>, <python>, fences."""
    tool_seconds: float = Field(default=10.0, gt=0)
    """Time limit of one tool call."""
    tool_chars: int = Field(default=4000, ge=1)
    """Characters of a tool's result that are shown; of a longer one, its head and its tail."""
    turn_seconds: float = Field(default=600.0, gt=0)
    """Time limit of one reply and of one environment step."""
    staleness: int = Field(default=0, ge=0)
    """Optimiser steps by which the weights that sampled a batch may be behind those that it trains.

    0: sampling and learning take turns. 1: the next batch is sampled while the learner works. n: so is the one after,
    up to n batches, and the sampler gets new weights every n steps.
    """
    template_options: dict[str, Any] = {}
    """Extra variables of the chat template, such as enable_thinking."""
    answer_form: str | None = None
    """How a right answer is written, such as <answer>{answer}</answer>; null: what contexts know is not measured."""
    stop_when_confident: StopWhenConfident | None = None
    """null: a trajectory ends when the policy gives its answer, and not before."""

    _one_place = field_validator("answer_form")(_one_place)


class Kl(Section):
    """A term that keeps the policy near the one that GRPO started from."""

    coefficient: float = Field(default=0.0, ge=0)
    """Of the KL term, a token; 0: none, and no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """One of condensegrpo.algorithms.losses.KL."""


class Importance(Section):
    """Correction for what sampler and learner make of the same weights: other kernels, lower precision."""

    cap: float = Field(default=0.0, ge=0)
    """Bound of the weight, at least 1; 0: no correction, ratios are taken against the sampler."""
    level: Literal["token", "turn"] = "token"
    """Whose probabilities the weight compares."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: min(weight, cap); mask: 0 outside 1/cap … cap."""


class Algorithm(Section):
    """How scores become gradients."""

    estimator: str = "efficient"
    """One of condensegrpo.algorithms.advantages.ESTIMATORS."""
    estimator_options: dict[str, Any] = {}
    """Keyword arguments of the estimator."""
    context_anchors: tuple[float, float] | None = None
    """Context tokens that cost nothing and that cost all, to efficient; None: 1/16 and all of the context budget."""
    loss: str = "clipped"
    """One of condensegrpo.algorithms.losses.LOSSES."""
    loss_options: dict[str, Any] = {}
    aggregation: Literal["trajectory_constant", "trajectory_mean", "token_mean", "turn_mean"] = "trajectory_constant"
    """The weight of a token in the optimiser step."""
    aggregation_tokens: int | None = Field(default=None, ge=1)
    """L of trajectory_constant; by default max_turns · max_output_tokens."""
    summary_share: float | None = Field(default=None, ge=0, le=1)
    """Share of all token weight that the tokens of summaries have; null: what the aggregation gives them."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimiser steps on each batch of trajectories."""
    whiten: bool = False
    """Whether advantages get mean 0 and deviation 1 over all trained tokens of the batch."""
    kl: Kl = Kl()
    importance: Importance = Importance()
    on_stop: dict[Stop, Handling] = FAILURES_MASKED
    """By stop reason: train (where none is named), mask (as if never sampled) or penalise (wrong, and less reward)."""
    stop_penalty: float = Field(default=1.0, ge=0)
    """What penalise takes off the total reward; efficient takes correctness only and does not see it."""
    resample_rounds: int = Field(default=0, ge=0)
    """Rounds of new problems for groups without any advantage, which are dropped (DAPO); 0: they stay and count."""

    @field_validator("on_stop")
    @classmethod
    def _over_defaults(cls, given: dict[Stop, Handling]) -> dict[Stop, Handling]:
        return {**FAILURES_MASKED, **given}


class Optimiser(Section):
    """AdamW and its schedule."""

    lr: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    """Kept of the running means of gradient and squared gradient at a step; each from 0 to below 1."""
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient."""
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"

    @field_validator("betas")
    @classmethod
    def _shares(cls, given: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in given):
            raise ValueError(f"found {list(given)}, wanted two numbers from 0 to below 1")
        return given


class Learner(Section):
    """The DeepSpeed learner."""

    optimiser: Optimiser = Optimiser(lr=1e-6)
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: Literal["none", "optimiser", "optimiser_and_weights"] = "none"
    """What lies in the machine's memory instead of the GPU's; the optimiser needs zero_stage ≥ 1, the weights 3."""
    offload_reference: bool = False
    """Whether the reference model of algorithm.kl lies there while it is not in use; with LoRA there is none."""
    tokens_per_micro_batch: int = Field(default=16384, ge=16)
    """Largest packed micro-batch, in tokens; no row is ever split."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch, the sampler's included; None: one a core. For tiny models one is fastest."""


class WarmStart(Section):
    """Supervised steps on the task's own demonstrations before GRPO."""

    steps: int = Field(default=0, ge=0)
    """0: no warm start."""
    turns_per_step: int = Field(default=64, ge=1)
    optimiser: Optimiser = Optimiser(lr=4e-3, betas=(0.9, 0.98), schedule="cosine")
    probe_target: float | None = Field(default=None, ge=0, le=1)
    """Share of sampled replies that the task must call sound; short of it another round of steps follows."""
    probe_turns: int = Field(default=256, ge=1)
    """Contexts that the probe samples one reply for."""
    max_rounds: int = Field(default=3, ge=1)
    """Rounds of steps before the warm start gives up and says so."""


class Train(Section):
    """The loop."""

    steps: int = Field(default=100, ge=0)
    problems_per_step: int = Field(default=16, ge=1)
    """Problems of one batch, over all ranks."""
    samples_per_problem: int = Field(default=8, ge=1)
    """Trajectories of a group."""
    eval_every: int = Field(default=20, ge=0)
    """Steps between evaluations on held-out problems; 0: only before and after."""
    save_every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)


class Evaluate(Section):
    """Evaluation on held-out problems."""

    problems: int = Field(default=256, ge=1)
    samples: int = Field(default=1, ge=1)
    """Trajectories a problem."""
    temperature: float | None = Field(default=None, ge=0)
    """None: as in training."""
    variants: dict[Name, list[str]] = {}
    """Further evaluations before and after training: name → key=value overrides."""


class Sandbox(Section):
    """Where code that a model wrote runs, for tools and rewards; see docs/explanation/sandbox.md."""

    rung: Literal["auto", "namespaces", "landlock", "none"] = "auto"
    """auto: the stronger of namespaces and landlock that holds, or refuse; none: code runs with your own rights."""
    seconds: float = Field(default=10.0, gt=0)
    """Wall clock of one call, and CPU time of each of its processes."""
    memory_mib: int = Field(default=512, ge=64)
    """MiB of address space of a process, and of resident memory of all processes of a call together."""
    processes: int = Field(default=16, ge=1)
    """Processes and threads of a call; under landlock threads only."""
    disk_mib: int = Field(default=64, ge=1)
    """MiB in the folder of a call; a file may be half of it."""
    files: int = Field(default=2048, ge=1)
    """Files and folders there."""
    output_bytes: int = Field(default=65536, ge=2)
    """Kept of stdout and of stderr each, half from the beginning and half from the end."""
    parallel: int | None = Field(default=None, ge=1)
    """Calls at a time; null: two a core."""
    packages: list[str] = []
    """Folders with Python packages that code may import besides the standard library, read-only."""


class RunConfig(Section):
    """One run."""

    name: Name = "run"
    """Of the run's folder."""
    runs_dir: str = "runs"
    seed: int = Field(default=0, ge=0)
    model: Model
    task: Task
    condenser: CondenserPlugin = CondenserPlugin()
    reward: RewardPlugin = RewardPlugin()
    sampler: SamplerPlugin = SamplerPlugin()
    trackers: list[Plugin] = []
    """Beside metrics.jsonl, which is always written."""
    rollout: Rollout = Rollout()
    sandbox: Sandbox = Sandbox()
    algorithm: Algorithm = Algorithm()
    learner: Learner = Learner()
    warm_start: WarmStart = WarmStart()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a YAML file with ``key=value`` overrides on top.

    A value is read as YAML: ``train.steps=20``, ``rollout.tools=[calculator]``, ``model.new=null``.

    Raises:
        ConfigError: no such file, not YAML, an unknown key (with its nearest match), a wrong type or range.
    """
    tree = apply_overrides(read_yaml(path), overrides)
    return validate(tree, source=str(path))


def vary(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A configuration with some ``key=value`` overrides."""
    return validate(apply_overrides(config.model_dump(mode="json"), overrides), source=f"overrides {list(overrides)}")


def evaluations(config: RunConfig) -> dict[str, RunConfig]:
    """What a configuration evaluates on: ``held-out``, its own problems, then each of ``evaluate.variants``."""
    return {HELD_OUT: config, **{name: vary(config, overrides) for name, overrides in config.evaluate.variants.items()}}


def longest_request(config: RunConfig) -> int:
    """The most tokens that a prompt and its reply make, in training and in every evaluation."""
    rollouts = [varied.rollout for varied in evaluations(config).values()]
    return max(one.max_context_tokens + one.max_output_tokens for one in rollouts)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; ``load_config`` reads it back to an equal value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def shipped() -> tuple[str, ...]:
    """The names of the configurations in the package, without ``.yaml``."""
    return tuple(
        sorted(entry.name[:-5] for entry in files("condensegrpo.configs").iterdir() if entry.name.endswith(".yaml"))
    )


def find_config(name: str) -> Path:
    """The file that a command's CONFIG argument means: a path, or the name of a shipped configuration.

    ``configs/quickstart.yaml`` works from an installed wheel as it does in a checkout.
    """
    path = Path(name)
    if path.is_file():
        return path
    stem = path.name.removesuffix(".yaml")  # a name may hold a dot of its own: qwen3_0.6b
    inside = Path(str(files("condensegrpo.configs"))) / f"{stem}.yaml"
    if path.parent in (Path(), Path("configs")) and inside.is_file():
        return inside
    near = difflib.get_close_matches(stem, shipped(), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"reading the configuration {name}: there is no such file.{hint} Shipped: {', '.join(shipped())}."
    )


def validate(tree: Mapping[str, Any], *, source: str) -> RunConfig:
    """The checked configuration of a tree.

    Raises:
        ConfigError: every fault, one a line: the key, what was found and what was wanted.
    """
    return parse(RunConfig, tree, source=f"the configuration {source}")

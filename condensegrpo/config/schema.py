"""The sections of a configuration: frozen and checked values. ``load.py`` makes them of a file and overrides.

Defaults live here and in the settings of the folders below; a YAML file holds what an experiment changes. Every key
states its unit and range. Options of plug-ins are checked when they are built (``use.py``), before any model is loaded.
"""

import re
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from condensegrpo.algorithms.settings import (
    AdvantageSettings,
    AggregationSettings,
    ImportanceSettings,
    KlSettings,
    LossSettings,
    StopSettings,
)
from condensegrpo.config.section import Section
from condensegrpo.config.use import CondenserUse, FormatUse, NamedTracker, RewardUse, SamplerUse, TaskUse, ToolUse
from condensegrpo.episodes.settings import CondenseSettings, ConfidenceSettings, Limits, ToolLimits, Workers, check_form
from condensegrpo.learner.settings import (
    TIMEOUT_MINUTES,
    Checkpointing,
    Dtype,
    LoraSettings,
    NewModel,
    OffloadSettings,
    OptimizerSettings,
    Switch,
    Vision,
)
from condensegrpo.sandbox.calls import SandboxLimits

# the name of a folder, or a part of a metric's name; file systems allow 255 bytes, and some files begin with it
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9=._-]*$", max_length=200)]


class ModelSettings(Section):
    """The policy: a Hugging Face folder or Hub id, or a new model."""

    path: str | None = None
    """Folder or Hub id with a tokenizer and a chat template. Not together with ``new``."""
    new: NewModel | None = None
    dtype: Dtype = Field(default="auto", validate_default=True)
    """auto: bfloat16 on a GPU that computes in it, else float32. A run's ``config.yaml`` holds the resolved value."""
    attention: str = "auto"
    """The learner's kernel: auto chooses; sdpa, flex and flash compute prefix trees; other names are transformers'."""
    vision: Vision = "frozen"
    """Whether the vision tower trains too: all of its weights, or with ``lora`` adapters of its layers."""
    renderer: str = "auto"
    """Renders prompts and reads replies: auto finds the model's family, template takes the chat template."""
    lora: LoraSettings | None = None
    """null: all weights train, as in the warm start of a new model."""

    @model_validator(mode="before")
    @classmethod
    def _without_auto(cls, section: object) -> object:
        """Leave out a dtype of auto: ``load.config_on`` chooses those that are not set."""
        if isinstance(section, dict) and section.get("dtype") == "auto":
            return {key: value for key, value in section.items() if key != "dtype"}
        return section

    @field_validator("dtype", mode="before")
    @classmethod
    def _of_this_machine(cls, dtype: object) -> object:
        if dtype in get_args(Dtype):
            return dtype
        if dtype != "auto":
            raise ValueError(f"wanted auto, {' or '.join(get_args(Dtype))}")
        if find_spec("torch") is None:  # nothing computes here
            return "float32"
        from condensegrpo.learner.devices import default_dtype, gpu_bfloat16  # imports torch

        return default_dtype(gpu_bfloat16())

    @property
    def sampled_lora(self) -> LoraSettings | None:
        """The adapters that a sampler may compute; None: it gets merged weights, as where a vision tower has some."""
        return None if self.vision == "train" else self.lora

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSettings":
        if self.path is not None and self.new is not None:
            raise ValueError(
                "set either path or new: a policy has one origin (model.new=null drops the one of the file)"
            )
        if self.path is None and self.new is None:
            raise ValueError("set path (a Hugging Face folder or Hub id) or new (a model made on the spot)")
        if self.new is not None and self.new.pictures is None and self.vision == "train":
            raise ValueError("vision is train, and a new model without pictures is one of text: set vision=frozen")
        return self


@dataclass(frozen=True, kw_only=True)
class ToolSettings(ToolLimits):
    """The tools of the policy and how it calls them."""

    use: tuple[str | ToolUse, ...] = ()
    """Names of tools, path/to/file.py:function, or {name, options} where a tool has options."""
    format: str | FormatUse = "native"
    """native: the template's own calls (Hermes/Qwen); tagged: <tool>{…}</tool>; code: <code>, <python>, fences; or
    path/to/file.py:Name."""

    @property
    def tools(self) -> tuple[ToolUse, ...]:
        """The tools as sections."""
        return tuple(ToolUse(name=each) if isinstance(each, str) else each for each in self.use)

    @property
    def call_format(self) -> FormatUse:
        """The format as a section."""
        return FormatUse(name=self.format) if isinstance(self.format, str) else self.format


class RolloutSettings(Section):
    """How trajectories are sampled."""

    limits: Limits = Limits()
    condense: CondenseSettings = CondenseSettings()
    tools: ToolSettings = ToolSettings()
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 takes the likeliest token."""
    template_options: dict[str, Any] = {}
    """Extra variables of the chat template, such as enable_thinking."""
    answer_form: str | None = None
    """How an answer is written, such as <answer>{answer}</answer>; null: log π(answer|context) is not measured."""
    stop_when_confident: ConfidenceSettings | None = None
    """null: a trajectory ends only when the policy gives its answer."""

    staleness: int = Field(default=0, ge=0)
    """Maximum number of training steps between the weights that sampled a batch and the weights that it trains.

    0: sampling and learning alternate. n: up to n batches are sampled in advance, and weights are sent every n steps.
    """
    workers: Workers = Workers()

    @field_validator("answer_form")
    @classmethod
    def _one_place(cls, form: str | None) -> str | None:
        if form is not None:
            check_form(form)
        return form


class AlgorithmSettings(Section):
    """How scores become gradients."""

    advantage: AdvantageSettings = AdvantageSettings()
    loss: LossSettings = LossSettings()
    aggregation: AggregationSettings = AggregationSettings()
    kl: KlSettings = KlSettings()
    importance: ImportanceSettings = ImportanceSettings()
    stops: StopSettings = StopSettings()
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimiser steps on each batch of trajectories."""
    resample_rounds: int = Field(default=0, ge=0)
    """Rounds of new problems for groups without any advantage, which are dropped (DAPO); 0: they stay and count."""


def _completed(default: OptimizerSettings, value: object) -> object:
    """A section that sets some keys of the optimiser, the others as in its default and not as in that of the class."""
    return {**asdict(default), **value} if isinstance(value, dict) else value


LEARNER_OPTIMISER = OptimizerSettings(lr=1e-6)
WARM_START_OPTIMISER = OptimizerSettings(lr=4e-3, betas=(0.9, 0.98), schedule="cosine")


class LearnerSettings(Section):
    """The DeepSpeed learner."""

    optimiser: Annotated[OptimizerSettings, BeforeValidator(partial(_completed, LEARNER_OPTIMISER))] = LEARNER_OPTIMISER
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed's ZeRO stage. Ranks share out: 0 nothing, 1 the optimiser's state, 2 also gradients, 3 also weights."""
    offload: OffloadSettings = OffloadSettings()
    tokens_per_micro_batch: int = Field(default=16384, ge=16)
    """Largest packed micro-batch, in tokens; no row is ever split."""
    checkpoint_activations: Checkpointing = "auto"
    """Whether backward computes decoder layers again: on, off, or how many. auto: as many as the GPU's memory
    requires."""
    compile_layers: Switch = "auto"
    """Whether decoder layers are compiled, not with zero_stage 3; auto: on a GPU, if a trial finds them faster."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks that compute every micro-batch together, for rows that no GPU holds alone; divides ranks and heads."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch, the sampler's included; None: one a core. For tiny models one is fastest."""
    timeout_minutes: float = Field(default=TIMEOUT_MINUTES, gt=0)
    """Longest wait of a rank for the others, such as for a rollout or a checkpoint; the run ends after it."""


class WarmStartSettings(Section):
    """Supervised steps on the task's own demonstrations before GRPO."""

    steps: int = Field(default=0, ge=0)
    """0: no warm start."""
    turns_per_step: int = Field(default=64, ge=1)
    """Demonstrated turns of an optimiser step, over all ranks."""
    optimiser: Annotated[OptimizerSettings, BeforeValidator(partial(_completed, WARM_START_OPTIMISER))] = (
        WARM_START_OPTIMISER
    )
    probe_target: float | None = Field(default=None, ge=0, le=1)
    """Share of sampled replies that the task must call sound; short of it another round of steps follows."""
    probe_turns: int = Field(default=256, ge=1)
    """Contexts that the probe samples one reply for."""
    max_rounds: int = Field(default=3, ge=1)
    """Rounds of steps before the warm start gives up and says so."""


class TrainSettings(Section):
    """The loop."""

    steps: int = Field(default=100, ge=0)
    """Batches of trajectories."""
    problems_per_step: int = Field(default=16, ge=1)
    """Problems of one batch, over all ranks."""
    samples_per_problem: int = Field(default=8, ge=1)
    """Trajectories of a group."""
    eval_every: int = Field(default=20, ge=0)
    """Steps between evaluations on held-out problems; 0: only before and after."""
    eval_on_start: bool = True
    """Whether the policy is evaluated before the first step as well; else tables have no figures of then."""
    save_every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """The newest; older ones are removed."""
    save_in_background: bool = False
    """Whether a checkpoint is written while the next steps are taken, from a copy in main memory."""
    max_failed: float = Field(default=0.5, ge=0, le=1)
    """Fraction of a step's trajectories that may end with an error; more in two steps in a row stop the run.

    More in one evaluation end it as well. If all fail, the first step does.
    """


class EvaluateSettings(Section):
    """Evaluation on held-out problems."""

    problems: int = Field(default=256, ge=1)
    """Most problems of an evaluation."""
    skip: int = Field(default=0, ge=0)
    """Held-out problems before the first that is evaluated: tune on the first N, report on the rest."""
    samples: int = Field(default=1, ge=1)
    """Trajectories a problem."""
    temperature: float | None = Field(default=None, ge=0)
    """None: as in training."""
    variants: dict[Name, list[str]] = {}
    """Further evaluations before and after training: name → key=value overrides."""

    @field_validator("variants")
    @classmethod
    def _with_names_of_their_own(cls, variants: dict[str, list[str]]) -> dict[str, list[str]]:
        if taken := [name for name in variants if re.fullmatch(r"held-out|eval-\d+", name)]:
            raise ValueError(
                f"a variant cannot be called {taken[0]}: held-out is the evaluation on the run's own problems, and "
                f"eval-1 and so on are those of condensegrpo eval. Give it another name"
            )
        return variants


class SandboxSettings(Section):
    """Where code that a model wrote runs, for tools and rewards; see docs/explanation/sandbox.md."""

    isolation: Literal["auto", "namespaces", "landlock", "none"] = "auto"
    """auto: the stronger of namespaces and landlock that works, or an error; none: code runs with your own rights."""
    limits: SandboxLimits = SandboxLimits()
    parallel: int | None = Field(default=None, ge=1)
    """Maximum number of concurrent calls; null: two per core."""
    packages: list[str] = []
    """Folders with Python packages that code may import besides the standard library, read-only."""


class RunConfig(Section):
    """One run: what it is called, what it is made of, and how it samples, trains and evaluates."""

    name: Name = "run"
    """Name of the run's folder."""
    runs_dir: str = "runs"
    """Folder of the run's folder."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of problems and of all sampling."""
    model: ModelSettings
    task: TaskUse
    condenser: CondenserUse = CondenserUse()
    reward: RewardUse = RewardUse()
    sampler: SamplerUse = SamplerUse()
    trackers: list[NamedTracker] = []
    """Trackers in addition to metrics.jsonl, which is always written: names, or {name, options}."""
    rollout: RolloutSettings = RolloutSettings()
    sandbox: SandboxSettings = SandboxSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    learner: LearnerSettings = LearnerSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()

    @property
    def estimator(self) -> str:
        """The estimator of advantages: the one that is set, or the default for the reward."""
        default = "efficient" if self.reward.name == RewardUse().name else "grpo"
        return self.algorithm.advantage.estimator or default

    @property
    def shared_options(self) -> dict[str, tuple[str, object]]:
        """Options of a task that are settings of the rollout: by their names, the key of the setting and its value."""
        shared: dict[str, tuple[str, object]] = {
            "tool_format": ("rollout.tools.format", self.rollout.tools.call_format.name)
        }
        if "keep_last" in self.condenser.options:
            shared["keep_last"] = ("condenser.options.keep_last", self.condenser.options["keep_last"])
        return shared

    @property
    def in_bfloat16(self) -> bool:
        """Whether the learner or the sampler computes in bfloat16."""
        return "bfloat16" in (self.model.dtype, self.sampler.options.get("dtype"))

    @property
    def longest_output(self) -> int:
        """L of the aggregation trajectory_constant: what is set, or the most tokens that a trajectory may sample."""
        limits = self.rollout.limits
        return self.algorithm.aggregation.max_tokens or limits.max_turns * limits.max_output_tokens

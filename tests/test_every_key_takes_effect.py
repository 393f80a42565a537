"""Every key of the schema, changed alone, changes something that the assembly builds. A key that nobody reads fails."""

import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from talk import tokenizer
from tiny import qwen3

from condensegrpo.assembly.build import build, build_components
from condensegrpo.assembly.runtime import open_sampler, open_trackers, renderer_for, trajectory_engine
from condensegrpo.config.load import load_config, validate, vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.section import keys_of, sections_in
from condensegrpo.config.use import TaskUse, Use
from condensegrpo.core.observer import Observer
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.train import run_training

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = """
class Sampler:
    version = 0
    def __init__(self, model_path, dtype, max_model_len, **options):
        self.settings = (model_path, dtype, max_model_len, options)
    async def sample(self, prompt_ids, params): ...
    def update(self, named_tensors, version): ...
    def close(self): ...
    async def score(self, prompt_ids, output_ids): ...
    async def attend(self, *given): ...
class OtherSampler(Sampler): ...
class Tracker:
    def log(self, step, metrics): ...
"""
NOT_ASSEMBLED = {  # read from the configuration itself where they are used: there is no copy to lose
    "name": "the run's folder",
    "runs_dir": "the run's folder",
    "seed": "the loop draws from it",
    "model.path": "the model, opened when the run starts",
    "model.new": "the model, made when the run starts",
    "model.attention": "the learner, opened when the run starts",
    "model.lora": "the learner, opened when the run starts",
    "model.vision": "the learner, opened when the run starts",
    "learner": "the learner, opened when the run starts",
    "warm_start": "steps before the loop",
    "train": "the loop",
    "evaluate": "evaluations",
    "rollout.staleness": "the prefetcher",
    "rollout.workers": "the players",
    "rollout.condense.writer": "the players, with a copy of the initial policy or another model",
    "algorithm.advantage.sources": "the credit step",
    "algorithm.advantage.whiten": "the credit step",
    "algorithm.aggregation": "the credit step",
    "algorithm.kl.aggregation": "the credit step",
    "algorithm.stops": "the credit step",
    "algorithm.resample_rounds": "the rollout step",
}
OTHER: Mapping[str, str] = {  # values that no rule can find
    "model.renderer": "template",
    "rollout.template_options": "{enable_thinking: true}",
    "task.name": "jsonl",
    "task.options": "{system: other}",
    "condenser.name": "truncate",
    "condenser.options": "{keep_last: 2}",
    "reward.name": "inverse_max_context",
    "reward.options": "{match: math}",
    "sampler.options": "{other: 1}",
    "rollout.tools.use": "[read_file]",
    "rollout.tools.format": "native",
    "rollout.condense.target": "0.3",
    "rollout.condense.schedule": "[[0, 1], [9, 0.5]]",
    "rollout.answer_form": "'So: {answer}'",
    "rollout.stop_when_confident.form": "'So: {answer}'",
    "algorithm.advantage.estimator": "grpo",
    "algorithm.advantage.options": "{coefficient: 0.1}",
    "algorithm.advantage.context_anchors": "[3, 9]",
    "algorithm.loss.name": "cispo",
    "algorithm.loss.options": "{clip_low: 0.1}",
    "algorithm.updates_per_batch": "2",
    "sandbox.packages": "[/tmp]",
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for number, name in enumerate(("a", "b", "c"), 1):
        row = {"question": f"{number} and 1?", "answer": f"{number}+1 = <<{number}+1={number + 1}>>\n#### {number + 1}"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "own.py").write_text(PLUGINS)
    qwen3().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    tree = {
        "model": {"path": str(tmp_path / "model")},
        "task": {"name": "gsm8k", "data": str(tmp_path / "a.jsonl"), "eval_data": str(tmp_path / "b.jsonl")},
        "condenser": {"name": "last_k", "options": {"keep_last": 1}},
        "sampler": {"name": f"{tmp_path / 'own.py'}:Sampler"},
        "rollout": {
            "condense": {"when": "over_budget"},
            "tools": {"use": ["calculator"], "format": "tagged"},
            "answer_form": "{answer}",
            "stop_when_confident": {},
        },
        "algorithm": {"importance": {"cap": 2.0}, "kl": {"coefficient": 0.1}},
    }
    return validate(tree, source="test")


def leaves(section: type, place: str = "") -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(section, include_extras=True)
    for name in keys_of(section):
        key, inner = f"{place}{name}", list(sections_in(hints[name]))
        if inner and (not issubclass(inner[0], Use) or name in ("task", "condenser", "reward", "sampler")):
            yield from leaves(inner[0], f"{key}.")
        else:
            yield key, hints[name]


def allowed(key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in NOT_ASSEMBLED)


def other(key: str, annotation: object, value: object, folder: Path) -> str:
    """Another valid value of a key, as YAML."""
    if key in OTHER:
        return OTHER[key]
    if key in ("task.data", "task.eval_data"):
        return str(folder / "c.jsonl")
    if key == "sampler.name":
        return f"'{folder / 'own.py'}:OtherSampler'"
    if key == "trackers":
        return f"[{{name: '{folder / 'own.py'}:Tracker'}}]"
    if get_origin(annotation) is Literal:
        return next(str(choice) for choice in get_args(annotation) if choice != value)
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int) or value is None:
        return str((value or 0) + 1)
    assert isinstance(value, float), key
    return str(value + 1 if key == "algorithm.importance.cap" else value / 2 or 0.5)


def described(value: object, above: tuple[object, ...] = ()) -> object:
    """Plain values that are equal exactly if nothing in a value differs; ``above``: the objects that hold it."""
    if len(above) > 12 or isinstance(value, str | int | float | bool | bytes | Enum | type | Path) or value is None:
        return value
    if any(value is each for each in above):  # such as a renderer among those by tools
        return type(value).__name__
    deeper = partial(described, above=(*above, value))
    if isinstance(value, Mapping):
        return {str(key): deeper(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(deeper, value), key=str)  # equal sets may be in other orders
    if isinstance(value, list | tuple):
        return [deeper(item) for item in value]
    if isinstance(value, partial):
        return [deeper(value.func), deeper(value.args), deeper(value.keywords)]
    if isinstance(value, MethodType):
        return [value.__func__.__qualname__, deeper(value.__self__)]
    if isinstance(value, ThreadPoolExecutor):
        return value._max_workers
    if isinstance(value, FunctionType):
        return value.__qualname__
    if is_dataclass(value):
        return [type(value).__name__, {each.name: deeper(getattr(value, each.name)) for each in fields(value)}]
    if type(value).__module__.startswith("condensegrpo"):
        return [type(value).__name__, deeper(vars(value) if hasattr(value, "__dict__") else {})]
    return type(value).__name__


def built(config: RunConfig) -> object:
    """What the assembly makes of a configuration."""
    parts = build_components(config)
    sampler, renderer = open_sampler(config, "folder"), renderer_for(parts, str(config.model.path))
    engine = trajectory_engine(parts, renderer=renderer, sampler=sampler, temperature=config.rollout.temperature)
    components = {each.name: getattr(parts, each.name) for each in fields(parts) if each.name != "config"}
    rollout = {each.name: getattr(engine, each.name) for each in fields(engine)}
    return described([components, rollout, sampler, open_trackers(config), parts.problems("train")[0].question])


def test_every_key_changes_something_that_is_built(config: RunConfig, tmp_path: Path) -> None:
    before, without_effect = built(config), []
    tree = config.model_dump()
    assert built(config) == before
    for key, annotation in leaves(RunConfig):
        if allowed(key):
            continue
        value = tree
        for part in key.split("."):
            value = value[part]
        change = f"{key}={other(key, annotation, value, tmp_path)}"
        alone = ["condenser.options={}", change] if key == "condenser.name" else [change]
        if built(vary(config, alone)) == before:
            without_effect.append(change)
    assert without_effect == []


@pytest.mark.parametrize("change", ["condenser.options={keep_last: 2}", "rollout.tools.format=native"])
def test_a_setting_that_a_task_shares_with_the_rollout_reaches_the_task(tmp_path: Path, change: str) -> None:
    """The condenser and the tools differ as well, so that the test of all keys would not miss the task's argument."""
    (tmp_path / "own.py").write_text(
        "class Task:\n"
        "    def __init__(self, keep_last, tool_format): self.settings = (keep_last, tool_format)\n"
        "    def problems(self, split): ...\n"
        "    def environment(self, problem): ...\n"
    )
    tree = {
        "model": {"path": "nowhere"},
        "task": {"name": f"{tmp_path / 'own.py'}:Task"},
        "condenser": {"name": "last_k", "options": {"keep_last": 1}},
        "rollout": {"tools": {"use": ["calculator"], "format": "tagged"}},
    }
    config = validate(tree, source="test")
    before, after = (described(build_components(each).task) for each in (config, vary(config, [change])))
    assert before != after


def test_the_schemas_of_native_tools_reach_the_chat_template(config: RunConfig) -> None:
    native = build_components(vary(config, ["rollout.tools.format=native"]))
    tagged, source = build_components(config), str(config.model.path)
    assert described(renderer_for(native, source)) != described(renderer_for(tagged, source))


def test_the_scorers_that_a_condenser_names_reach_the_engine(config: RunConfig) -> None:
    scorer = str(config.model.path)
    attention = build_components(vary(config, [f"condenser={{name: attention, options: {{scorer: '{scorer}'}}}}"]))
    sampler, renderer = open_sampler(config, "folder"), renderer_for(attention, scorer)
    assert [*trajectory_engine(attention, renderer=renderer, sampler=sampler, temperature=1.0).scorers] == [scorer]


# --- keys that are not assembled

RUN = (  # a warm start with a probe, stale batches, a KL term, penalised stops, evaluations, checkpoints, adapters
    "model.lora={rank: 2}",
    "task.options={min_ops: 2, max_ops: 2, eval_problems: 2}",
    "rollout.staleness=1",
    "algorithm={importance: {cap: 2}, kl: {coefficient: 0.1}, stops: {handling: {format: penalise}}}",
    "algorithm.advantage.sources={}",
    "warm_start={steps: 2, turns_per_step: 4, probe_target: 0.0, probe_turns: 4}",
    "train={steps: 2, problems_per_step: 2, samples_per_problem: 2, eval_every: 1, save_every: 1}",
    "evaluate={problems: 2, variants: {short: [rollout.limits.max_turns=2]}}",
)
NOT_IN_THE_RUN = {
    "name": "the command makes the folder of it, test_train.py looks there",
    "runs_dir": "likewise",
    "learner.offload.reference": "adapters need no copy of the reference, test_offload.py moves one",
    **{
        f"model.new.pictures.{key}": "the model of the run sees nothing, test_new_vision.py makes one that does"
        for key in ("size", "patch", "layers", "initializer_range")
    },
}


class Reads:
    """The keys that the package's own code reads from any configuration; checks of the configuration do not count."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.places: dict[type, list[str]] = {}
        for place, section in _sections(RunConfig):
            self.places.setdefault(section, []).append(place)
        self._known: dict[int, tuple[str, object]] = {}  # place by id; the section is held, so that no id recurs

    def read(self, section: object, name: str) -> object:
        """The value of a key. Which of two places of one class a section has is known from the section above it."""
        value = object.__getattribute__(section, name)
        reader = sys._getframe(2).f_globals["__name__"]
        if reader.startswith("condensegrpo.") and reader != "condensegrpo.config.checks":
            places = self.places[type(section)]
            place, _ = self._known.get(id(section)) or (places[0], section)
            assert id(section) in self._known or len(places) == 1, f"{places} are read from copies, none is told apart"
            self.keys.add(f"{place}{name}")
            if type(value) in self.places:
                self._known[id(value)] = f"{place}{name}.", value
        return value


def _sections(section: type, place: str = "") -> Iterator[tuple[str, type]]:
    yield place, section
    hints = get_type_hints(section, include_extras=True)
    for name in keys_of(section):
        for inner in sections_in(hints[name]):
            if not issubclass(inner, Use) or inner is TaskUse:
                yield from _sections(inner, f"{place}{name}.")


def test_every_key_that_is_not_assembled_is_read_by_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, reads = load_config(ROOT / "configs/quickstart.yaml", RUN), Reads()
    threads = torch.get_num_threads()
    for section in reads.places:
        monkeypatch.setattr(section, "__getattribute__", lambda *of: reads.read(*of), raising=False)
    assert run_training(build(config), RunFolder.create(tmp_path / "run"), observer=Observer(), stopping=lambda: False)
    monkeypatch.undo()
    torch.set_num_threads(threads)
    wanted = {key for key, _ in leaves(RunConfig) if allowed(key)}
    assert wanted - reads.keys == NOT_IN_THE_RUN.keys()
    assert all(any(key == known or key.startswith(f"{known}.") for key in wanted) for known in NOT_ASSEMBLED)

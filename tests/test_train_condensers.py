"""Training with condensers that write or ask: two steps on the quickstart, and exactly the right tokens trained."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import OPTIONS
from talk import save_model
from typer.testing import CliRunner

from condensegrpo import api
from condensegrpo.algorithms import segments
from condensegrpo.assembly.build import build, build_components
from condensegrpo.assembly.preflight import check_settings
from condensegrpo.assembly.runtime import open_writers, renderer_for
from condensegrpo.attention.scorer import AttentionScorer
from condensegrpo.cli.app import app
from condensegrpo.config.load import find_config, load_config, vary
from condensegrpo.config.resumed import allowed_changes, store_configuration
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.condenser import Budget, condensation_spans, with_tokens
from condensegrpo.core.errors import CheckpointError, ConfigError
from condensegrpo.core.messages import History, Unit
from condensegrpo.core.observer import Observer
from condensegrpo.core.scored_trajectory import ScoredTrajectory, information_changes
from condensegrpo.core.trajectory import SamplingParams, Trajectory
from condensegrpo.display.console import quiet_libraries
from condensegrpo.episodes.engine import AnswerProbe
from condensegrpo.episodes.render import Renderer
from condensegrpo.samplers.transformers import TransformersSampler
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import read_credit, read_trajectories
from condensegrpo.studies.lab import cross_play
from condensegrpo.studies.lab.cross_play import POLICIES
from condensegrpo.training.train import run_training

SMALL = (
    "warm_start.probe_target=null",
    "train.problems_per_step=2",
    "train.samples_per_problem=4",
    "train.eval_every=0",
    "train.save_every=0",
    "evaluate.problems=2",
    "evaluate.variants={}",
    "algorithm={advantage: {estimator: grpo}}",
    "task.options={min_ops: 4, max_ops: 6}",
    "reward={name: weighted_sum, options: {parts: [{name: correct, weight: 1}, {name: format, weight: 0.2}]}}",
)
# a condenser of the package that has more to do on so short a conversation with other options than in the suite
TRAINED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "summary": lambda template: {"template": str(template), "max_tokens": 16},
    "summary_model": lambda template: {"model": "none", "url": "http://127.0.0.1:9/v1"},  # where nobody answers
    "pipeline": lambda template: {
        "stages": [
            {"name": "observation_mask", "options": {"keep": 1, "drop_oldest": False}},
            {"name": "summary", "options": {"template": str(template), "max_tokens": 16}},
            {"name": "last_k", "options": {"keep_last": 2, "keep_first": 1}},
        ]
    },
}


class Listening(Observer):
    """Notes down what a person is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def notice(self, text: str) -> None:
        self.said.append(text)


def run(config: RunConfig, observer: Observer | None = None) -> RunFolder:
    quiet_libraries()
    folder = RunFolder.create(Path(config.runs_dir) / config.name)
    with folder.locked():
        assert run_training(build(config), folder, observer=observer or Observer(), stopping=lambda: False)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a short warm start."""
    runs = tmp_path_factory.mktemp("warm")
    overrides = (*SMALL, "warm_start={steps: 60, turns_per_step: 16}", "train.steps=0", f"runs_dir={runs}", "name=warm")
    return run(load_config(find_config("quickstart"), overrides)).checkpoints / "step_000000" / "model"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ask.txt"
    path.write_text("keep a note")  # words that the model knows
    return path


def config(name: str, options: dict[str, Any], model: Path, runs: Path, *more: str) -> RunConfig:
    base = load_config(
        find_config("quickstart"),
        (
            *SMALL,
            "model.new=null",
            f"model.path={model}",
            "warm_start.steps=0",
            "train.steps=3",
            "rollout.limits.max_context_tokens=80",
            "rollout.condense.when=over_budget",
            "rollout.condense.threshold=0.75",
            f"runs_dir={runs}",
            f"name=of-{name}",
            *more,
        ),
    )
    tree = base.model_dump(mode="json")
    return RunConfig.model_validate({**tree, "condenser": {"name": name, "options": options}})


def sampled(folder: RunFolder) -> Iterator[tuple[int, list[ScoredTrajectory]]]:
    for step in folder.steps():
        yield step, list(read_trajectories(folder.trajectories(step)))


def options_of(name: str, template: Path) -> dict[str, Any]:
    chosen = TRAINED[name](template) if name in TRAINED else OPTIONS.get(name, [{}])[0]
    return chosen() if callable(chosen) else chosen


# last_k: test_train.py; attention: below; summary: as a stage
@pytest.mark.parametrize("name", ["anchors", "summary_model", "pipeline"])
def test_two_steps_with_a_condenser_train_every_sampled_token_once(
    name: str, model: Path, template: Path, tmp_path: Path
) -> None:
    listening = Listening()
    shared = ("algorithm.aggregation.summary_share=0.5",) if name == "pipeline" else ()
    folder = run(config(name, options_of(name, template), model, tmp_path, "train.steps=2", *shared), listening)
    lines = {int(line["step"]): line for line in read_metrics(folder.metrics) if "groups_dropped" in line}
    assert set(lines) == {1, 2}
    turns = [turn for _, found in sampled(folder) for one in found for turn in one.trajectory.turns]
    rewritten = [turn for turn in turns if turn.condensation is not None]
    assert rewritten, "a run in which nothing was condensed tests nothing"
    for step, found in sampled(folder):
        assert [segments.broken_invariants(one.trajectory) for one in found] == [()] * len(found)
        credit = read_credit(folder.credit(step))
        learning = [one.trajectory for one in found if any(credit[one.trajectory.id].advantages)]
        assert lines[step].get("tokens", 0) == sum(one.output_tokens for one in learning), "each exactly once"
    if name == "pipeline":
        wrote = [turn for turn in turns if turn.kind == "condense"]
        assert wrote
        assert sum(line.get("summaries", 0) for line in lines.values()) > 0
        assert any(line.get("weight/summaries", 0) > 0 for line in lines.values())
        assert lines[1]["weight/summaries"] == pytest.approx(0.5)
    if name == "summary_model":
        assert all(line["condenser/calls"] == line["condenser/refused"] for line in lines.values())
        assert "condensegrpo inspect says why" in next(text for text in listening.said if "condenser/refused: " in text)
        assert all("no summary can be used" in turn.condensation.reason for turn in rewritten if turn.condensation)


COUNTING = """
import asyncio
from condensegrpo.condensers.whole_units import Full
from condensegrpo.core.condenser import Condenser

class Counting(Condenser):
    calls = 0.0

    def counts(self):
        calls, self.calls = self.calls, 0.0
        return {"calls": calls}

    async def condense(self, history, budget):
        await asyncio.sleep(0.1)  # longer than a step learns
        self.calls += 1
        return await Full().condense(history, budget)
"""


def test_a_condenser_is_counted_by_whole_batches_where_the_next_one_is_prefetched(model: Path, tmp_path: Path) -> None:
    """Counted while the next batch is being sampled, the figures of a step would depend on the machine's speed."""
    (tmp_path / "own.py").write_text(COUNTING)
    prefetched = ("rollout.staleness=1", "algorithm.importance.cap=2", "rollout.condense={when: every_turn}")
    own = config(f"{tmp_path / 'own.py'}:Counting", {}, model, tmp_path, *prefetched, "name=counting")
    lines = [line for line in read_metrics(run(own).metrics) if "groups_dropped" in line]
    first, second, last = (line["condenser/calls"] for line in lines)
    assert first > second > last == 0  # batches 1 and 2, batch 3, none


@pytest.fixture(scope="module")
def with_frozen_writer(model: Path, template: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Three steps in which the initial policy wrote the summaries."""
    frozen = ("rollout.condense.writer=initial", "learner.optimiser.lr=0.002", "train.problems_per_step=4")
    runs = tmp_path_factory.mktemp("frozen")
    return run(config("summary", options_of("summary", template), model, runs, *frozen))


def test_the_initial_policy_writes_the_summaries_and_they_train_nothing(
    model: Path, with_frozen_writer: RunFolder
) -> None:
    folder = with_frozen_writer
    scored = [(step, one) for step, found in sampled(folder) for one in found]
    late = [turn for step, one in scored if step > 1 for turn in one.trajectory.turns]
    assert {turn.kind == "condense" for turn in late} == {True, False}
    assert all(turn.frozen == (turn.kind == "condense") for turn in late)
    assert {turn.policy_version for turn in late} == {0, 1, 2}
    assert {turn.policy_version for turn in late if turn.frozen} == {0}
    initial = TransformersSampler(str(model))
    try:
        error = {True: 0.0, False: 0.0}
        for turn in late:
            logprobs = asyncio.run(initial.score(turn.prompt_ids, turn.output_ids))
            worst = max(abs(ours - theirs) for ours, theirs in zip(logprobs, turn.logprobs, strict=True))
            error[turn.frozen] = max(error[turn.frozen], worst)
    finally:
        initial.close()
    assert error[True] < 1e-4 < 0.05 < error[False]
    for step, one in scored:
        weights = read_credit(folder.credit(step))[one.trajectory.id].weights
        assert all((weight > 0) is not turn.frozen for weight, turn in zip(weights, one.trajectory.turns, strict=True))
    lines = [line for line in read_metrics(folder.metrics) if "groups_dropped" in line]
    assert all(line["staleness_max"] == 0 for line in lines)
    assert sum(line.get("summaries", 0) for line in lines) > 0
    assert all(line.get("weight/summaries", 0) == 0 for line in lines)
    rollouts = api.rollout(folder.path, n=4, problems=2, observer=Observer())  # after three steps: its origin writes
    turns = [turn for each in rollouts for turn in each.trajectory.turns]
    assert {turn.policy_version for turn in turns if turn.frozen} == {0}
    assert {turn.policy_version for turn in turns if not turn.frozen} == {3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["rollout.workers.processes=2"], r"found rollout\.workers, which reach the policy alone"),
        (["algorithm.aggregation.turns=condense"], r"turns=condense, so that nothing would train"),
        (["algorithm.aggregation.summary_share=0"], r"found algorithm\.aggregation\.summary_share, a share for texts"),
        (["condenser={name: last_k}"], r"found initial, and the condenser last_k asks for no text"),
    ],
)
def test_a_frozen_writer_that_cannot_be_is_refused_before_a_model_is_loaded(
    changes: list[str], message: str, model: Path, template: Path, tmp_path: Path
) -> None:
    chosen = config("summary", options_of("summary", template), model, tmp_path, "rollout.condense.writer=initial")
    with pytest.raises(ConfigError, match=message):
        check_settings(build(vary(chosen, changes)))


def test_beside_another_sampler_transformers_writes_as_the_initial_policy(
    model: Path, template: Path, tmp_path: Path
) -> None:
    beside = ("rollout.condense.writer=initial", "sampler={name: vllm, options: {dtype: bfloat16, engine: {}}}")
    chosen = config("summary", options_of("summary", template), model, tmp_path, *beside)
    writer = open_writers([chosen], str(model), MediaFolder(tmp_path / "media"))["initial"]
    assert isinstance(writer, TransformersSampler)
    with closing(writer):
        found = asyncio.run(writer.sample((1, 2, 3), SamplingParams(max_tokens=2, temperature=0)))
    assert len(found.token_ids) == 2
    assert {parameter.dtype for parameter in writer._model.parameters()} == {torch.bfloat16}


def rolled_out(config: Path, policy: Path, writer: str) -> list[tuple[tuple[int, ...], bool]]:
    """The output of every turn in four rollouts, and whether another writer than the policy wrote it."""
    found = api.rollout(config, f"rollout.condense.writer={writer}", model=policy, n=2, problems=2, observer=Observer())
    return [(turn.output_ids, turn.frozen) for each in found for turn in each.trajectory.turns]


def test_a_writer_is_a_model_folder_or_a_run(model: Path, with_frozen_writer: RunFolder) -> None:
    """Cross-play: the initial policy as a folder writes as the writer initial does, to the token; a run as it does."""
    trained = with_frozen_writer.path
    alone, initial = (rolled_out(trained, trained, writer) for writer in ("policy", "initial"))
    assert rolled_out(trained, trained, str(model)) == initial
    assert {frozen for _, frozen in initial} == {True, False}
    assert [ids for ids, _ in initial] != [ids for ids, _ in alone]
    assert [ids for ids, _ in rolled_out(trained, trained, str(trained))] == [ids for ids, _ in alone]
    before = rolled_out(trained, model, "initial")  # without a run, the model that is evaluated
    assert rolled_out(trained, model, str(model)) == before


def test_a_resumed_run_says_that_its_writer_changed_and_a_damaged_writer_is_refused(
    model: Path, template: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "other/checkpoints/step_000000"
    shutil.copytree(model.parent, checkpoint)
    frozen = (f"rollout.condense.writer={checkpoint}", "train.steps=1")
    chosen = config("summary", options_of("summary", template), model, tmp_path / "runs", *frozen)
    folder, observer = run(chosen), Listening()
    file = checkpoint / "model/generation_config.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(CheckpointError, match=r"reading the checkpoint .*other.*: model/generation_config\.json has"):
        run_training(build(chosen), folder, observer=observer, stopping=lambda: False)
    assert f"{checkpoint} was edited since this run began to use it" in observer.said


def test_cross_play_of_a_run_plays_writer_and_reader_apart(with_frozen_writer: RunFolder) -> None:
    """Its own evaluation, of the trained reader beside the initial writer, is one of the four cells."""
    folder = with_frozen_writer
    chosen = load_config(folder.config)
    cross_play.play(chosen, folder, "held-out")
    cells = cross_play.stored(folder)["held-out"]
    own = cross_play.by_problem(read_trajectories(folder.evaluation(3, "held-out")))
    assert cells[cross_play.cell("initial", "trained")] == own
    assert [*cells] == [f"writer {writer}, reader {reader}" for writer in POLICIES for reader in POLICIES]
    assert all(each.keys() == own.keys() for each in cells.values())
    made = (folder.path / cross_play.FILE).read_bytes()
    cross_play.play(chosen, folder, "held-out")
    assert (folder.path / cross_play.FILE).read_bytes() == made
    (later := folder.checkpoints / "step_000099").mkdir()
    assert cross_play.stored(folder) == {}  # of a run that went on
    later.rmdir()


def test_a_writer_that_is_missing_or_has_other_tokens_is_refused(model: Path, template: Path, tmp_path: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    save_model(other)
    chosen = config("summary", options_of("summary", template), model, tmp_path)
    for writer, message in (
        (empty, r"checking rollout\.condense\.writer: loading .*empty"),
        (tmp_path / "none", r"checking rollout\.condense\.writer: loading .*none"),
        (other, r"writer: the tokenizer of .*other is not that of the policy, .* Name a model"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_settings(build(vary(chosen, [f"rollout.condense.writer={writer}"])))
    made = load_config(find_config("quickstart"), SMALL).model.model_dump_json()  # its tokens are compared once it is
    with pytest.raises(ConfigError, match=r"checking rollout\.condense\.writer: loading .*intial"):
        check_settings(build(vary(chosen, [f"model={made}", "rollout.condense.writer=intial"])))


def test_a_resume_with_another_writer_would_change_what_is_learned(
    model: Path, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    chosen = config("summary", options_of("summary", template), model, tmp_path, "rollout.condense.writer=model")
    assert chosen.rollout.condense.writer == str(model)
    folder = RunFolder.create(tmp_path / chosen.name)
    store_configuration(folder, chosen, first_step=0)
    assert allowed_changes(folder, chosen, allow_changes=False) == ()
    with pytest.raises(ConfigError, match=r"rollout\.condense\.writer would change what is learned"):
        allowed_changes(folder, vary(chosen, ["rollout.condense.writer=initial"]), allow_changes=False)


def test_a_budget_that_leaves_a_summary_no_room_is_refused_before_the_run(
    model: Path, template: Path, tmp_path: Path
) -> None:
    wrong = config("summary", options_of("summary", template), model, tmp_path, "rollout.limits.max_context_tokens=30")
    with pytest.raises(ConfigError, match="checking the room of the condenser summary: behind system message and"):
        check_settings(build(wrong))


# --- attention and information under the weights of the step ----------------------------------------------------------

ALONE = {"smoothing": 0.0, "lookback": 0, "hysteresis": 1.0}  # each turn for itself


def condensations(one: Trajectory, renderer: Renderer) -> Iterator[tuple[History, tuple[Any, ...]]]:
    """The history before every condensed turn, and what became of its units; replies have the ids that were sampled."""
    turns = [(turn, renderer.parse(turn.output_ids, turn.prompt_ids).message) for turn in one.turns]
    units = [Unit(turn=number, reply=reply, results=turn.observations) for number, (turn, reply) in enumerate(turns)]
    for number, turn in enumerate(one.turns):
        if turn.condensation is not None:
            yield History(pinned=one.turns[0].context, units=tuple(units[:number])), turn.condensation.spans


def test_the_policys_attention_is_that_of_the_weights_that_the_step_was_sampled_from(
    model: Path, tmp_path: Path
) -> None:
    """Stale weights would choose by what an older policy looked at, and nothing would show it."""
    made = config(
        "attention", ALONE, model, tmp_path, "train.steps=2", "train.save_every=1", "train.problems_per_step=6"
    )
    folder = run(made)
    after_1 = TransformersSampler(str(folder.checkpoints / "step_000001" / "model"))
    before = TransformersSampler(str(model))
    components = build_components(made)
    renderer = renderer_for(components, str(model))
    budgets = {
        name: Budget(tokens=60, prompt_tokens=60, scorers={"policy": AttentionScorer(sampler, renderer)})
        for name, sampler in (("after 1", after_1), ("before", before))
    }
    scored = read_trajectories(folder.trajectories(2))
    chosen = [found for one in scored for found in condensations(one.trajectory, renderer)]
    assert len(chosen) > 8
    for past, spans in chosen:
        past = with_tokens(past, renderer.count)
        room = replace(budgets["after 1"], tokens=60 - renderer.count(past.pinned))
        condensed = asyncio.run(components.condenser.condense(past, room))
        assert condensation_spans(past, condensed.units) == spans
    scores = {
        name: asyncio.run(budget.scorers["policy"].score([past for past, _ in chosen], 60))
        for name, budget in budgets.items()
    }
    assert scores["after 1"] != scores["before"]
    after_1.close()
    before.close()


def test_a_run_measures_and_pays_what_contexts_know_and_the_commands_tell_it(model: Path, tmp_path: Path) -> None:
    parts = "[{name: correct}, {name: answer_information, weight: 0.1, options: {bound: 2}}]"
    made = config(
        "last_k",
        {"keep_last": 1},
        model,
        tmp_path,
        "train.steps=1",
        "algorithm={advantage: {estimator: mt_grpo}}",
        "rollout.answer_form='<answer> {answer} </answer>'",
        f"reward={{name: weighted_sum, options: {{parts: {parts}}}}}",
    )
    folder = run(made)
    found = read_trajectories(folder.trajectories(1))
    for one in found:
        known = [nats for nats in one.figures.information if nats is not None]
        assert len(known) == len(one.trajectory.turns)
        gains = [0.1 * min(max(after - before, -2), 2) for before, after in pairwise(known)]
        assert one.score.turn_rewards == pytest.approx([*gains, 0.0])
    (line,) = [line for line in read_metrics(folder.metrics) if "groups_dropped" in line]
    ends = [one.figures.information[-1] for one in found]
    assert line["answer_information"] == pytest.approx(sum(nats for nats in ends if nats is not None) / len(ends))

    sampler, components = TransformersSampler(str(model)), build_components(made)
    probe = AnswerProbe(
        sampler=sampler, renderer=renderer_for(components, str(model)), form="<answer> {answer} </answer>"
    )
    problems = {problem.id: problem for problem in components.problems("train")}
    last = next(one.trajectory for one in reversed(found) if information_changes(one.trajectory))
    (problem,) = [problem for name, problem in problems.items() if last.problem_id.endswith(name)]
    measured = asyncio.run(probe.measure(problem, last.turns[-1].prompt_ids))
    assert measured == pytest.approx(last.turns[-1].answer_logprob, abs=1e-4)
    sampler.close()

    result = CliRunner().invoke(app, ["inspect-trajectory", str(folder.path), "--trajectory", last.id])
    assert result.exit_code == 0, result.output
    assert "information about the answer" in result.output
    result = CliRunner().invoke(app, ["eval", str(folder.path), "--json"])
    assert result.exit_code == 0, result.output
    known = json.loads(result.stdout)["information"]
    assert len(known) > 1
    assert all(nats < 0 for nats in known)

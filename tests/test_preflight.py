"""A configured thing takes effect or is refused, before a run folder is made and without weights."""

import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from command import ROOT, run, succeed
from talk import tokenizer
from tiny import qwen3

from condensegrpo.assembly.build import build
from condensegrpo.assembly.preflight import check_model, check_run
from condensegrpo.config.load import load_config
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.observer import Observer
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import read_credit, read_trajectories
from condensegrpo.training.run_setup import prepare_run
from condensegrpo.training.train import run_training

OWN = """
class Odd:
    '''1 for an odd number of sampled tokens, whatever the answer.'''
    def __call__(self, trajectory, problem):
        return {"correct": 0.0, "odd": float(sum(len(turn.output_ids) for turn in trajectory.turns) % 2)}
"""
SHORT_RUN = (
    "warm_start.steps=0",
    "rollout.limits.max_turns=2",
    "train={steps: 2, problems_per_step: 4, samples_per_problem: 4, eval_every: 0}",
    "evaluate={problems: 2}",
)


def quickstart(*overrides: str) -> RunConfig:
    return load_config(ROOT / "configs/quickstart.yaml", [*SHORT_RUN, *overrides])


def refused(*overrides: str) -> str:
    """The message that a variant of the quickstart is refused with."""
    with pytest.raises(ConfigError) as caught:
        check_run(build(quickstart(*overrides)))
    return str(caught.value)


def test_a_sampler_that_cannot_take_weights_evaluates_and_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PLUG_INS)
    with pytest.raises(ConfigError, match=r"own.py:Other, which has no update\(.*\(.*own.py:4\)\. Write one"):
        check_run(build(quickstart(f"sampler={{name: '{tmp_path}/own.py:Other'}}", "evaluate.variants={}")))


def test_heads_of_a_new_model_must_divide_over_the_ranks_of_a_row() -> None:
    assert "found 3, and model.new has 2 attention heads" in refused("learner.sequence_parallel=3")
    check_run(build(quickstart("learner.sequence_parallel=2")))


REWARDS = """
class Bare:
    def __call__(self, trajectory, problem):
        return "good"

class Failing:
    def __call__(self, trajectory, problem):
        raise RuntimeError("called")

class Demanding:
    def __call__(self, trajectory, problem):
        return {"far": float(trajectory.turns[1].tool_attempts)}

class OneArgument:
    def __call__(self, trajectory):
        return {"correct": 1.0}

class Flat:
    def turn_rewards(self, trajectory, problem):
        return 0.5

class First:
    def turn_rewards(self, trajectory, problem):
        return [1.0]

class Undefined:
    def __call__(self, trajectory, problem):
        return {"undefined": float("nan")}

class Percent:
    def __call__(self, trajectory, problem):
        return {"correct": 5}

class Delayed:
    async def __call__(self, trajectory, problem):
        return {"correct": 1.0}

class ById:
    def score_group(self, trajectories, problem):
        return [*{each.id: {"one": 1 / each.seconds} for each in trajectories}.values()]

class Single:
    def score_group(self, trajectories, problem):
        return {"one": 1.0}
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path / "rewards.py"


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("{{name: '{file}:Bare'}}", "returned 'good', wanted a number, numbers by name"),
        ("{{name: '{file}:Failing'}}", "the reward Failing: RuntimeError: called ({file}:8)"),
        ("{{name: '{file}:OneArgument'}}", "__call__() takes 2 positional arguments but 3 were given ({file}:14)"),
        ("{{name: '{file}:Single'}}", "returned 1 result for 2 trajectories, wanted one for each"),
        (
            "{{name: weighted_sum, options: {{parts: [{{name: correct}}, {{name: '{file}:Flat'}}]}}}}",
            "returned 0.5, wanted a number for each turn",
        ),
        (
            "{{name: weighted_sum, options: {{parts: [{{name: correct}}, {{name: '{file}:First'}}]}}}}",
            "the part First returned 1 turn rewards for 2 turns, wanted one per turn",
        ),
        ("{{name: '{file}:Delayed'}}", "Define it with def: it is a coroutine"),
        ("{{name: '{file}:Undefined'}}", "undefined is nan, wanted a finite number"),
        ("{{name: '{file}:Percent'}}", "returned correct = 5.0, wanted a number from 0 to 1"),
    ],
)
def test_a_reward_of_another_shape_is_refused_by_a_dry_run(rewards: Path, reward: str, expected: str) -> None:
    change = f"reward={reward.format(file=rewards)}"
    with pytest.raises(ConfigError, match=re.escape(expected.format(file=rewards))):
        prepare_run(quickstart(change, "algorithm.advantage.estimator=mt_grpo"), dry_run=True)


def test_what_fails_in_an_episode_of_meaningless_replies_is_noted(rewards: Path) -> None:
    notes = check_run(build(quickstart(f"reward={{name: '{rewards}:Demanding'}}")))
    fault = f"a reply of 0 ended in the reward Demanding: IndexError: tuple index out of range ({rewards}:12)"
    assert any(note.endswith(fault) for note in notes)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ("id='a', question='1 + 1', answer=2", "the answer of the problem 'a' is 2, wanted a text ({file}:6)"),
        ("id=7, question='1 + 1'", "the id of the problem 7 is 7, wanted a text ({file}:6)"),
        ("id='a', question=None", "the question of the problem 'a' is None, wanted a text ({file}:6)"),
    ],
)
def test_a_task_whose_problems_hold_no_texts_says_where_it_makes_them(tmp_path: Path, fields: str, wanted: str) -> None:
    file = tmp_path / "numbers.py"
    file.write_text(
        "from condensegrpo.core.protocols.task import Problem\n\n"
        "class Numbers:\n"
        "    def environment(self, problem): ...\n"
        f"    def problems(self, split):\n        return [Problem({fields})]\n"
    )
    with pytest.raises(ConfigError, match=re.escape(wanted.format(file=file))):
        prepare_run(quickstart(f"task={{name: '{file}:Numbers'}}"), dry_run=True)


def test_a_reward_made_by_a_factory_is_rehearsed_too(rewards: Path) -> None:
    rewards.write_text("from functools import partial\ndef paid(): return partial(lambda k, t, p: {'k': k}, 0.5)\n")
    notes = check_run(build(quickstart(f"reward={{name: '{rewards}:paid'}}")))
    assert "rewards 0.5 and 0.5, " in notes[2]
    high = rewards.with_name("high.py")
    high.write_text("class Two:\n    def __call__(self, trajectory, problem):\n        return {'two': 2.0}\n")
    message = refused(f"reward={{name: '{high}:Two'}}")
    assert "the outcome of trajectory 0 (of 2, counted from 0) is 2.0, wanted a score in [0, 1]" in message


@pytest.mark.parametrize("chosen", [{}, {"estimator": "efficient"}])
def test_training_is_on_a_reward_of_the_users_own(tmp_path: Path, chosen: dict[str, str]) -> None:
    """By default, and under ``efficient``: the siblings of 1 are pushed up and those of 0 down, right or wrong."""
    (tmp_path / "own.py").write_text(OWN)
    config = quickstart(f"reward={{name: '{tmp_path}/own.py:Odd'}}", f"algorithm={{advantage: {chosen}}}")
    folder = RunFolder.create(tmp_path / "run")
    assert run_training(build(config), folder, observer=Observer(), stopping=lambda: False)
    signs = set()
    for step in (1, 2):
        credit = read_credit(folder.credit(step))
        for scored in read_trajectories(folder.trajectories(step)):
            (advantage,) = set(credit[scored.trajectory.id].advantages)
            signs.add((scored.score.total, (advantage > 0) - (advantage < 0)))
    assert signs >= {(1.0, 1), (0.0, -1)}
    assert signs.isdisjoint({(1.0, -1), (0.0, 1)})


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["algorithm={}"], "estimator efficient: the default where reward.name is correct"),
        (["algorithm={}", "reward.name=format"], "estimator grpo: the default where reward.name is format"),
        (
            ["reward.name=format"],
            "estimator efficient: set by algorithm.advantage.estimator; its score is the total of the reward",
        ),
    ],
)
def test_the_estimator_follows_the_reward_and_a_dry_run_says_why(overrides: list[str], note: str) -> None:
    assert check_run(build(quickstart(*overrides)))[0] == note
    assert f"# {note}\n" in succeed("train", "quickstart", *SHORT_RUN, *overrides, "--dry-run")


def parts(*weighted: str) -> str:
    return f"reward={{name: weighted_sum, options: {{parts: [{', '.join(f'{{{part}}}' for part in weighted)}]}}}}"


def test_a_reward_that_the_estimator_cannot_learn_from_is_refused() -> None:
    turns = parts("name: correct", "name: tool_execution, weight: 0.2")
    message = refused("algorithm={}", turns)
    assert "algorithm.advantage.estimator: it is not set, and tool_execution in reward.options.parts pays" in message
    check_run(build(quickstart("algorithm={advantage: {estimator: grpo}}", turns)))  # the user's choice
    message = refused(parts("name: correct", "name: format, weight: 0.2"))
    assert "which takes a score in [0, 1], and the weights in reward.options.parts sum to 1.2" in message
    check_run(build(quickstart(parts("name: correct, weight: 0.7", "name: format, weight: 0.3"))))


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (
            ["rollout.limits.max_context_tokens=9"],
            "the context budget is 9; system message and question need 10 tokens with the chat template, which no",
        ),
        (
            ["rollout.limits.max_context_tokens=10"],
            "the context budget is 10; system message and question need 10 tokens",
        ),
        (
            ["evaluate.variants={tight: [rollout.limits.max_context_tokens=10]}"],
            "checking evaluate.variants.tight: checking rollout.limits.max_context_tokens: the context budget is 10",
        ),
        (["model={path: /nowhere}"], "there is no folder /nowhere. Set model.path"),
        (["model={path: no such model}"], "looking for model.path=no such model: it is no folder and not in the Hub"),
        (
            ["model.new.vocab_size=64", "task={name: studies/tasks/facts.py:FactsTask}", "condenser={name: full}"],
            "checking model.new: making",
        ),
        (
            ["rollout.condense.target=0.01"],
            "checking rollout.condense.target: found 0.01, which leaves a condensed prompt",
        ),
        (["sandbox.packages=[/nowhere]"], "checking sandbox.packages: there is no folder /nowhere. Install"),
        (["runs_dir=QUESTIONS/runs"], "questions.jsonl, and it is no folder. Set runs_dir"),
        (["rollout.temperature=0"], "all samples of a problem are the same"),
        (
            ["evaluate.variants={big: [model.new.layers=3]}"],
            "evaluate.variants.big: it changes model",
        ),
        (["evaluate.variants={wide: [learner.threads=2]}"], "evaluate.variants.wide: it changes learner"),
        (
            ["evaluate.variants={K_20: [], k__20: []}"],
            "evaluate.variants.k__20: its trajectories would be written over those of K_20, both to k_20.parquet",
        ),
        (["model.new.max_positions=87"], "raise model.new.max_positions to at least 88"),
        (["train.problems_per_step=4097"], "found 4097, and the task has 4096 training problems"),
        (
            [
                f"algorithm.stops.handling.{stop}=mask"
                for stop in (
                    "answered",
                    "confident",
                    "turn_limit",
                    "context_overflow",
                    "output_length",
                    "format",
                    "finished",
                )
            ],
            "algorithm.stops.handling: every stop reason is masked",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_training(overrides: list[str], wanted: str, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"question": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(40)))
    assert wanted in refused(*(each.replace("QUESTIONS", str(questions)) for each in overrides))


PLUG_INS = """
from condensegrpo.core.condenser import Condenser; from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.tasks.ledger import Ledger
class Other:
    version = 0
    def problems(self, split):
        return ()
    async def sample(self, prompt_ids, params):
        return None

class Hasty(Ledger):
    def problems(self):
        return ()

class Empty(Condenser):
    async def condense(self, history, budget):
        return None

class Stepless(Ledger):
    def environment(self, problem):
        return Episode()

class Silent(Sampler):
    pass

class Episode:
    async def start(self):
        return ()
    def close(self):
        open(f"{__file__}.closed", "w").close()
"""


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ("reward={name: 'F:Other'}", "Other has no method of a reward, wanted exactly one of"),
        ("condenser={name: 'F:Other'}", "Other is no Condenser (PATH:4)"),
        ("task={name: 'F:Other', options: {}}", "Other has no environment (PATH:4)"),
        ("sampler={name: 'F:Silent'}", "Silent has no sample (PATH:23)"),
        ("rollout.tools.format='F:Other'", "setting up PATH:Other: Other has no parse and no result (PATH:4)"),
    ],
)
def test_a_plug_in_without_the_methods_of_one_is_refused(section: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "plug_ins.py"
    path.write_text(PLUG_INS)
    with pytest.raises(ConfigError, match=re.escape(fault.replace("PATH", str(path)))):
        build(quickstart(section.replace("F:", f"{path}:"), "evaluate.variants={}"))


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ("condenser={name: 'F:Empty'}", "condense() returned None, wanted a Condensed, as in return Condensed("),
        ("task={name: 'F:Hasty', options: {}}", "Hasty.problems() takes 1 positional argument but 2 were given"),
    ],
)
def test_a_plug_in_that_cannot_be_called_is_refused_by_the_rehearsal(section: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "plug_ins.py").write_text(PLUG_INS)
    with pytest.raises(ConfigError, match=re.escape(fault)):
        check_run(build(quickstart(section.replace("F:", f"{tmp_path}/plug_ins.py:"), "evaluate.variants={}")))


def test_an_environment_without_a_method_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plug_ins.py").write_text(PLUG_INS)
    task = f"task={{name: '{tmp_path}/plug_ins.py:Stepless', options: {{}}}}"
    with pytest.raises(ConfigError, match=r"environment\(\) returned <.*Episode object .*wanted an object with start"):
        check_run(build(quickstart(task, "evaluate.variants={}")))
    assert (tmp_path / "plug_ins.py.closed").exists()  # the environment that the check made


CALCULATOR = ("rollout.tools.use=[calculator]", "rollout.limits.max_context_tokens=600", "evaluate.variants={}")
MISSING_WORDS = """
from dataclasses import replace
from condensegrpo.core.messages import Message
from condensegrpo.studies.tasks.facts import FactsTask
from condensegrpo.tasks.ledger import Ledger

class Chatty(FactsTask):
    def demonstrations(self, seed):
        for turn in super().demonstrations(seed):
            yield replace(turn, reply=f"Let us see : {turn.reply}")

class Renamed(Ledger):
    def problems(self, split):
        kept = super().problems(split)[:40]
        return [replace(each, question=f"begin with {each.question}") for each in kept] if split == "eval" else kept
"""


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (CALCULATOR, "70 of the 81 words of the tools that the chat template shows, which the policy would read as"),
        ((*CALCULATOR, "rollout.tools.format=tagged"), "89 of the 107 words of system message and question, which"),
        (
            ("task={name: 'F:Chatty'}", "rollout.limits.max_context_tokens=200", "warm_start.steps=1"),
            "words of the demonstrations, which .* The most frequent are 'Let'",
        ),
        (("task.name=F:Renamed", "train.problems_per_step=4"), "2 of the 7 words of system message and "),
    ],
)
def test_words_that_a_tokenizer_of_words_does_not_know_are_refused(
    overrides: tuple[str, ...], fault: str, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(MISSING_WORDS)
    named = [override.replace("F:", f"{tmp_path}/tasks.py:") for override in overrides]
    message = refused("evaluate.variants={}", *named)
    assert re.search(f"checking the tokenizer: it does not know (\\d+ of the \\d+ )?{fault}", message), message
    assert "Set model.new.tokenizer=bpe, or add them to corpus() of the task" in message


def test_a_tokenizer_of_bytes_knows_every_word() -> None:
    check_run(build(quickstart(*CALCULATOR, "model.new.tokenizer=bpe", "rollout.limits.max_context_tokens=1000")))


SAME = """
from condensegrpo.core.protocols.task import Problem
from condensegrpo.tasks.ledger import Ledger

class Same(Ledger):
    def problems(self, split):
        data = {"cells": {(0, 1): "x"}, "votes": {1: 2, "none": 3}}
        return [Problem(id=str(n), question=f"{n} + {n}", answer=str(2 * n), data=data) for n in range(40)]
"""


def test_splits_that_share_problems_are_refused(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text(SAME)
    task = f"task={{name: '{tmp_path}/same.py:Same', options: {{}}}}"
    with pytest.raises(DataError, match=r"0 of the evaluation held-out is also 0 of the training problems: '0 \+ 0'"):
        check_run(build(quickstart(task, "evaluate.variants={}", f"train.steps={10**18}")))


def test_a_resumed_run_may_lie_elsewhere_than_runs_dir_says(tmp_path: Path) -> None:
    """Copied to another machine: ``runs_dir`` cannot change any more, and need not exist there."""
    (tmp_path / "file").touch()
    components = build(quickstart(f"runs_dir={tmp_path / 'file' / 'runs'}"))
    with pytest.raises(ConfigError, match="checking runs_dir"):
        check_run(components)
    check_run(components, resumed=True)


def questions_by_a_saved_model(folder: Path) -> list[str]:
    """The overrides for 40 sums in a file, and the model that is saved beside them."""
    questions = folder / "questions.jsonl"
    questions.write_text("".join(f'{{"question": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(40)))
    policy, ids = qwen3(), tokenizer()
    policy.resize_token_embeddings(len(ids), mean_resizing=False)
    policy.save_pretrained(folder)
    ids.save_pretrained(folder)
    return [f"task={{name: jsonl, data: '{questions}'}}", f"model={{path: '{folder}'}}"]


def test_what_is_left_out_of_the_training_data_is_said(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(f'{{"question": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in (7, 8, 50)))
    overrides = (*questions_by_a_saved_model(tmp_path), "evaluate.variants={}", "rollout.limits.max_context_tokens=200")
    note = "2 training problems left out: the evaluation data has them too"
    assert check_run(build(quickstart(*overrides, f"task.eval_data={held_out}")))[-1] == note
    assert note not in check_run(build(quickstart(*overrides)))
    held_out.write_text('{"question": "7 + 7?", "answer": "14"}\n{"question": "8 + 8?", "answer": "16", "page": 3}\n')
    assert check_run(build(quickstart(*overrides, f"task.eval_data={held_out}")))[-2:] == (
        "1 training problem left out: the evaluation data has them too",
        "1 training problem kept with a question of the evaluation data: another column differs",
    )


@pytest.mark.parametrize(
    ("truth", "match", "complaint"),
    [
        ("null", "exact", "it has no ground truth"),
        ('"="', "math", "the ground truth '=' cannot be read as mathematics"),
    ],
)
def test_a_problem_that_the_reward_cannot_judge_is_named_before_the_run(
    tmp_path: Path, truth: str, match: str, complaint: str
) -> None:
    overrides = [*questions_by_a_saved_model(tmp_path), "evaluate.variants={}", "rollout.limits.max_context_tokens=200"]
    rows = tmp_path / "questions.jsonl"
    rows.write_text(rows.read_text() + f'{{"question": "who?", "answer": {truth}}}\n')
    judged = f"reward={{name: weighted_sum, options: {{parts: [{{name: correct, options: {{match: {match}}}}}]}}}}"
    with pytest.raises(DataError, match=rf"1 of \d+ cannot be judged, the first is train-40 of .*{complaint}"):
        check_run(build(quickstart(*overrides, judged, "train.steps=20")))
    check_run(build(quickstart(*overrides, judged, "train.steps=20", "task.options.max_examples=40")))


def test_a_new_model_for_questions_in_a_file_has_a_tokenizer_of_its_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    pairs = [(one, two) for one in range(7) for two in range(7)]  # every word is in many rows, held-out ones too
    rows.write_text("".join(f'{{"question": "{one} plus {two} ?", "answer": "{one + two}"}}\n' for one, two in pairs))
    task = f"task={{name: jsonl, data: '{rows}'}}"
    changes = (task, "warm_start.steps=0", "evaluate.variants={}", "rollout.limits.max_context_tokens=200")
    assert "rehearsed train-" in "".join(check_run(build(quickstart(*changes))))


def test_a_warm_start_without_demonstrations_is_refused(tmp_path: Path) -> None:
    changes = [*questions_by_a_saved_model(tmp_path), "warm_start.steps=1"]
    assert "warming up with the task Jsonl: it has no demonstrations. Set warm_start.steps=0" in refused(*changes)


def test_all_that_a_task_lacks_is_reported_at_once(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from condensegrpo.tasks.ledger import Ledger\n\nclass Mine:\n    inner = Ledger()\n"
        "    problems, environment = inner.problems, inner.environment\n"
    )
    message = refused(f"task={{name: '{mine}:Mine'}}", "warm_start.steps=1", "evaluate.variants={}")
    assert "warming up with the task Mine: it has no demonstrations. Set warm_start.steps=0" in message
    assert "making a new model with the task Mine: a tokenizer needs its corpus()" in message


def test_nothing_is_written_for_a_run_that_is_refused(tmp_path: Path) -> None:
    done = run("train", "quickstart", f"runs_dir={tmp_path}", "rollout.limits.max_context_tokens=10")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    cure = "Raise it, or set rollout.limits.max_turns=1. The smallest that works is "
    assert f"{cure}rollout.limits.max_context_tokens=14." in done.stderr


def test_credit_is_rehearsed_only_where_a_run_trains(tmp_path: Path) -> None:
    (tmp_path / "high.py").write_text("class Two:\n    def __call__(self, trajectory, problem): return {'two': 2.0}\n")
    changes = (*questions_by_a_saved_model(tmp_path), "evaluate.variants={}", "rollout.limits.max_context_tokens=200")
    components = build(quickstart(*changes, f"reward={{name: '{tmp_path}/high.py:Two'}}"))
    source = str(components.config.model.path)
    assert "rewards 2 and 2" in check_model(components, source)[0]
    with pytest.raises(ConfigError, match=r"is 2.0, wanted a score in \[0, 1\]"):
        check_model(components, source, trains=True)


def test_the_rehearsal_says_what_fails_in_later_turns(tmp_path: Path) -> None:
    small = ("rollout.limits.max_context_tokens=22", "rollout.limits.max_turns=6", "evaluate.variants={}")
    said = check_run(build(quickstart("condenser={name: full}", *small)))
    assert any(re.search(r"scripted episode ended after 2 turns: .*context budget is 22", note) for note in said)
    (tmp_path / "own.py").write_text(TOOL_OF_AN_EXPERT)
    task, tool = f"task={{name: '{tmp_path}/own.py:Dialling'}}", f"rollout.tools.use=['{tmp_path}/own.py:dial']"
    tools = (*questions_by_a_saved_model(tmp_path), task, tool, "rollout.tools.format=tagged", "evaluate.variants={}")
    room = ("rollout.limits.max_context_tokens=600", "rollout.limits.max_output_tokens=100")
    said = check_run(build(quickstart(*tools, *room)))
    assert any(
        "the expert's tool calls failed, the first with \"<result>Error: dial: KeyError" in each for each in said
    )


TOOL_OF_AN_EXPERT = """
from condensegrpo.core.protocols.task import Problem, Task
from condensegrpo.tasks.ledger import Ledger

class Dialling(Ledger):
    def expert(self, problem):
        return Caller()

class Caller:
    replies = ['<tool>{"name": "dial", "args": {"number": "112"}}</tool>', "<answer>1</answer>"]
    def reply(self, context):
        return self.replies[len(context) > 2]

def dial(number: str) -> str:
    \"\"\"Dial a number.

    Args:
        number: To dial.
    \"\"\"
    return {}[number]
"""


def test_the_check_of_room_names_the_smallest_context_that_works() -> None:
    summary = "condenser={name: summary, options: {max_tokens: 16}}"
    fault = refused(summary, "rollout.limits.max_context_tokens=20")
    assert fault.startswith("checking the room of the condenser summary: ")
    assert "to at least" not in refused("rollout.limits.max_context_tokens=9")  # one number, the one that works
    least = int(fault.removesuffix(".").rpartition("The smallest that works is rollout.limits.max_context_tokens=")[2])
    assert "The smallest that works" in refused(summary, f"rollout.limits.max_context_tokens={least - 1}")
    check_run(build(quickstart(summary, f"rollout.limits.max_context_tokens={least}")))


def hub_error(call: str, **variables: str) -> tuple[str, float]:
    """What a fresh interpreter with these variables says to a call, and the seconds that the call took."""
    code = (
        f"import time{', datasets' if call.startswith('read') else ''}\n"
        "from condensegrpo.storage.rows import read_rows\nfrom condensegrpo.storage.hub import model_fault\n"
        "began = time.monotonic()\n"
        f"try: print({call})\nexcept Exception as error: print(error)\nprint(time.monotonic() - began)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"} | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    *text, seconds = done.stdout.splitlines()
    return "\n".join(text), float(seconds)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 does not answer"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_data_of_the_hub_without_network_is_refused_within_seconds(
    variables: dict[str, str], why: str, tmp_path: Path
) -> None:
    """Without the check the libraries try five times, for 25 s and more."""
    text, seconds = hub_error("read_rows('openai/gsm8k:main', split='train')", HF_HOME=str(tmp_path), **variables)
    assert f"loading the split 'train' of 'openai/gsm8k' from the Hugging Face Hub: {why}, and the data set is" in text
    assert "set task.data and task.eval_data to local JSONL or Parquet files" in text
    assert seconds < 20


class Refusing(BaseHTTPRequestHandler):
    """A proxy that lets no request through."""

    def do_HEAD(self) -> None:
        self.send_response(403)
        self.end_headers()

    def log_message(self, *given: object) -> None:
        """Write nothing to standard error."""


def test_a_proxy_that_refuses_every_request_is_not_the_hub(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        text, _ = hub_error("model_fault('owner/model')", HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path))
        server.shutdown()
    assert text == f"{endpoint} answers with the HTTP status 403"


class NoSuchModel(BaseHTTPRequestHandler):
    """A Hub that is there and has no models."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *given: object) -> None:
        """Write nothing to standard error."""


def test_a_model_that_the_hub_does_not_have_is_refused(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), NoSuchModel) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        text, _ = hub_error("model_fault('owner/modle')", HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path))
        server.shutdown()
    assert text == "the Hub has no model of this name that you may read"

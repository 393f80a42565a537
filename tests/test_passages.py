"""The tasks of the studies of a pretrained model on passages: what is held out, shown, paid and trained."""

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT
from memory_questions import write_memory_questions
from safetensors.torch import load_file
from talk import save_model, tokenizer
from test_rewards import answered

from condensegrpo.algorithms.credit import Estimator
from condensegrpo.algorithms.invariance import SCORES, check_estimator
from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import DataError
from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.samplers.transformers import TransformersSampler

FILE = f"{ROOT}/studies/passages.py"
SCENARIOS = ("customer", "finance", "student")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """190 questions on 100 passages, ten of them on two. An answer is a word of no other passage."""
    path = tmp_path / "rows.jsonl"
    made = [
        {"question": f"what is thing {n % 190}", "answers": [word], "ctxs": [{"text": f"It is {word}."}]}
        for n, word in enumerate(f"word{n // 2}x" for n in range(200))
    ]
    path.write_text("\n".join(map(json.dumps, made)))
    return str(path)


def shown(task: Task, split: Split) -> set[str]:
    """The questions and texts of a split."""
    problems = task.problems(split)
    return {text for problem in problems for text in (problem.question, *problem.data["messages"])}


def nq(rows: str, **options: Any) -> Task:
    task: Task = build_plugin("tasks", f"{FILE}:NqPassages", {"data": rows, **options})
    return task


@pytest.mark.parametrize("passages", [1, 2, 8])
def test_the_splits_of_nq_share_nothing_and_one_passage_of_an_episode_has_the_answer(rows: str, passages: int) -> None:
    task = nq(rows, passages=passages)
    assert len(task.problems("train")) + len(task.problems("eval")) == 190
    assert not shown(task, "train") & shown(task, "eval")
    for problem in (*task.problems("train"), *task.problems("eval")):
        texts = problem.data["messages"]
        assert len(set(texts)) == passages
        assert sum(str(problem.answer) in text for text in texts) == 1


def test_retrieval_leaves_one_passage(rows: str) -> None:
    task = nq(rows, passages=4, retrieved=True)
    assert {len(problem.data["messages"]) for problem in task.problems("eval")} == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ctxs": []}, "row 200 has question: 'q', answers: .'a'., ctxs: ..\\. Wanted"),
        ({"answers": "a"}, "row 200 has question: 'q', answers: 'a', ctxs"),
        ({"question": None}, "rows.jsonl: row 200 has question: None"),
    ],
)
def test_a_row_of_another_schema_is_an_error(rows: str, changes: dict[str, Any], message: str) -> None:
    row = {"question": "q", "answers": ["a"], "ctxs": [{"text": "a"}], **changes}
    Path(rows).write_text("\n".join([*Path(rows).read_text().splitlines()[1:], json.dumps(row)]))
    with pytest.raises(DataError, match=message):
        nq(rows)


def test_a_split_without_problems_is_an_error(rows: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl: found 0 problems for training and 0 for evaluation"):
        nq(rows, passages=100)


def test_no_question_or_message_of_the_held_out_scenario_is_trained_on(tmp_path: Path) -> None:
    """The scenarios share the question about the jay, and the message about the fox."""
    things = ("cat", "dog", "owl", "jay")
    said = {
        name: [[*(f"The {thing} of {name} is {name}{thing}." for thing in things), "A red fox."]] for name in SCENARIOS
    }
    distinct = [(name, f"Which {thing} has {name}?", [name + thing]) for name in SCENARIOS for thing in ("cat", "owl")]
    shared = [(name, "Which jay?", [f"{name}jay"]) for name in SCENARIOS]
    shared += [(name, f"Which fox has {name}?", ["red"]) for name in SCENARIOS]
    data = str(write_memory_questions(tmp_path, said, distinct + shared))
    for name in SCENARIOS:
        options = {"data": data, "messages": 2, "held_out": name}
        task: Task = build_plugin("tasks", f"{FILE}:MemoryScenarios", options)
        held_out = {q for s, q, _ in distinct + shared if s == name}
        assert {problem.question for problem in task.problems("eval")} == held_out
        assert {problem.question for problem in task.problems("train")} == {q for s, q, _ in distinct if s != name}
        assert not shown(task, "train") & shown(task, "eval")


@pytest.mark.parametrize(
    ("note", "answer", "total"), [("a red cat", "red", 1.5), ("red", "blue", 0.5), ("?", "red", 1)]
)
def test_a_note_with_the_answer_is_paid_half_and_is_no_success(note: str, answer: str, total: float) -> None:
    reward = build_plugin("rewards", f"{FILE}:NoteAndAnswer", {"match": "words"})
    problem = Problem(id="p", question="?", answer="red", data={"aliases": ["red"]})
    result = reward(answered(answer, contexts=(3, 3), replies=(note, answer)), problem)
    assert (result.total, result.correct) == (total, float(answer == "red"))


def test_with_frozen_notes_only_the_last_turn_of_a_trajectory_has_an_advantage() -> None:
    answers = Estimator(load_plugin("estimators", f"{FILE}:answers_only"))
    check_estimator(answers)
    all_NK = Estimator(load_plugin("estimators", "grpo"))(SCORES).advantage_NK
    found_NK = answers(SCORES).advantage_NK
    last_N = SCORES.turns_N - 1
    at_last_N = found_NK.gather(1, last_N[:, None])[:, 0]
    assert torch.allclose(at_last_N, all_NK.gather(1, last_N[:, None])[:, 0], atol=1e-3)
    assert found_NK.abs().sum() == at_last_N.abs().sum() > 0


def test_frozen_notes_are_of_the_initial_policy_and_the_answer_is_of_the_trained_one(tmp_path: Path) -> None:
    save_model(tmp_path)
    frozen = build_plugin("samplers", f"{FILE}:FrozenNotes", {}, {"model_path": str(tmp_path), "dtype": "float32"})
    initial = TransformersSampler(str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    frozen.update([(name, tensor.flip(0)) for name, tensor in weights.items()], 1)

    async def logprobs(sampler: Sampler, text: str) -> tuple[float, ...]:
        chat = [{"role": "user", "content": text}]
        ids = tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return (await sampler.sample(ids, SamplingParams(max_tokens=4, seed=0))).logprobs

    async def compare() -> None:
        module: Any = inspect.getmodule(type(frozen))
        assert await logprobs(frozen, f"Text: x {module.COPY}") == await logprobs(initial, f"Text: x {module.COPY}")
        assert await logprobs(frozen, f"x {module.LAST}") != await logprobs(initial, f"x {module.LAST}")

    asyncio.run(compare())
    frozen.close()
    initial.close()

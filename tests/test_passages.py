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
from talk import save_model, tokenizer
from test_rewards import answered

from condensegrpo.algorithms.credit import Estimator
from condensegrpo.algorithms.invariance import SCORES, check_estimator
from condensegrpo.assembly.plugins import build_plugin
from condensegrpo.core.plugins import load
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Problem, Task
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.samplers.transformers import TransformersSampler

FILE = f"{ROOT}/studies/passages.py"
SCENARIOS = ("customer", "finance", "student")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """200 questions, two for each passage, whose answers are words of no other passage."""
    path = tmp_path / "rows.jsonl"
    made = [
        {"question": f"what is thing {n}", "answers": [f"word{n // 2}x"], "ctxs": [{"text": f"It is word{n // 2}x."}]}
        for n in range(200)
    ]
    path.write_text("\n".join(map(json.dumps, made)))
    return str(path)


def shown(task: Task, split: str) -> set[str]:
    return {text for problem in task.problems(split) for text in problem.data["messages"]}  # type: ignore[arg-type]


def nq(rows: str, **options: Any) -> Task:
    task: Task = build_plugin("tasks", f"{FILE}:NqPassages", {"data": rows, **options})
    return task


@pytest.mark.parametrize("passages", [1, 2, 8])
def test_no_passage_of_nq_is_in_both_splits_and_one_of_an_episode_has_the_answer(rows: str, passages: int) -> None:
    task = nq(rows, passages=passages)
    assert len(task.problems("train")) + len(task.problems("eval")) == 200
    assert not shown(task, "train") & shown(task, "eval")
    for problem in (*task.problems("train"), *task.problems("eval")):
        texts = problem.data["messages"]
        assert len(set(texts)) == passages
        assert sum(str(problem.answer) in text for text in texts) == 1


def test_retrieval_leaves_one_passage(rows: str) -> None:
    task = nq(rows, passages=4, retrieved=True)
    assert {len(problem.data["messages"]) for problem in task.problems("eval")} == {1}


def test_the_held_out_scenario_of_memory_questions_is_not_trained_on(tmp_path: Path) -> None:
    said = {
        name: [[f"The {thing} of {name} is {name}{thing}." for thing in ("cat", "dog", "owl")]] for name in SCENARIOS
    }
    questions = [
        (name, f"Which {thing} has {name}?", [f"{name}{thing}"]) for name in SCENARIOS for thing in ("cat", "owl")
    ]
    data = str(write_memory_questions(tmp_path, said, questions))
    for name in SCENARIOS:
        options = {"data": data, "messages": 2, "held_out": name}
        task: Task = build_plugin("tasks", f"{FILE}:MemoryScenarios", options)
        assert {problem.question for problem in task.problems("eval")} == {q for s, q, _ in questions if s == name}
        assert {problem.question for problem in task.problems("train")} == {q for s, q, _ in questions if s != name}
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
    answers = Estimator(load("estimators", f"{FILE}:answers_only"))
    check_estimator(answers)
    all_NK = Estimator(load("estimators", "grpo"))(SCORES).advantage_NK
    found_NK = answers(SCORES).advantage_NK
    last_N = SCORES.turns_N - 1
    at_last_N = found_NK.gather(1, last_N[:, None])[:, 0]
    assert torch.allclose(at_last_N, all_NK.gather(1, last_N[:, None])[:, 0], atol=1e-3)
    assert found_NK.abs().sum() == at_last_N.abs().sum() > 0


def test_frozen_notes_are_of_the_initial_policy_and_the_answer_is_of_the_trained_one(tmp_path: Path) -> None:
    save_model(tmp_path)
    frozen = build_plugin("samplers", f"{FILE}:FrozenNotes", {}, {"model_path": str(tmp_path), "dtype": "float32"})
    initial = TransformersSampler(str(tmp_path))
    weights = {name: tensor.clone() for name, tensor in initial._model.state_dict().items()}
    frozen.update_weights([(name, tensor.flip(0)) for name, tensor in weights.items()], 1)

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

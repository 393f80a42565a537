"""The tasks of the studies b_passages and c_memory: a question, one text a turn, and the answer from the last note.

One episode with 2 texts (the user on the left, replies on the right). The first message stays:

    You will get texts, …        ─▶  none
    Text: …  Question: …         ─▶  the words that answer it
    Text: …  Question: …         ─▶  the same words, or others
    Question: …  Repeat …        ─▶  the answer

Under ``last_k(keep_last=1)`` a turn sees that message, its previous reply and the newest text only. No demonstration
is written by hand. ``FrozenNotes`` and ``answers_only`` make the arm whose notes are those of the initial policy.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt

from condensegrpo.algorithms.advantages import Batch, Estimate, against_group, estimator, total
from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.reward import RewardResult
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.core.trajectory import Generation, SamplingParams, Trajectory
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.learner.settings import DtypeName
from condensegrpo.rewards.matches import contains_answer
from condensegrpo.rewards.outcome import Correct
from condensegrpo.samplers.transformers import TransformersSampler
from condensegrpo.storage.rows import Row, read_rows
from condensegrpo.studies.tasks.bfcl_memory import BfclMemory
from condensegrpo.studies.tasks.needles import passage_of
from condensegrpo.studies.tasks.notes import NotesEnvironment
from condensegrpo.tasks.answers import Splits, fold, is_held_out

PINNED = (
    "You will get texts, one at a time, each with the same question. Answer with a few words copied from the text. You "
    "see only the newest text and your last reply: if the text does not answer the question, repeat your last reply. "
    "Reply to this message with: none"
)
COPY = "Answer with a few words copied from the text, or repeat your last reply."
LAST = "Repeat the answer in your last reply."
Scenario = Literal["customer", "finance", "healthcare", "notetaker", "student"]


def episode(question: str, texts: Sequence[str]) -> NotesEnvironment:
    """An episode: the texts, each followed by the question, and then the question alone."""
    question = f"Question: {question}"
    messages = (*(f"Text: {text}\n\n{question}\n{COPY}" for text in texts), f"{question}\n{LAST}")
    pinned = (Message(role="user", content=PINNED),)
    return NotesEnvironment(pinned=pinned, messages=messages, answer=lambda reply: reply.strip() or None)


@dataclass(kw_only=True, eq=False)
class NqPassages(Task):
    """Questions of NQ-open. One passage of an episode has the answer; the others are those of other questions."""

    data: str  # rows with question, answers and ctxs, the first of which has an answer
    passages: Annotated[int, Ge(1)] = 2  # of an episode
    words: Annotated[int, Ge(8)] = 60  # of a passage that are shown
    retrieved: bool = False  # whether the episode has the passage alone that BM25 finds best for the question
    eval_share: Annotated[float, Gt(0), Lt(1)] = (
        0.4  # of the passages, held out by their hash with the questions that they answer
    )

    def __post_init__(self) -> None:
        self._splits = _nq_splits(self.data, self.passages, self.words, self.retrieved, self.eval_share)

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, in the order of the rows."""
        return self._splits.train if split == "train" else self._splits.held_out

    def environment(self, problem: Problem) -> NotesEnvironment:
        """A fresh episode."""
        return episode(problem.question, problem.data["messages"])


@lru_cache(maxsize=8)  # a sweep builds the same tasks for each of its runs
def _nq_splits(data: str, passages: int, words: int, retrieved: bool, share: float) -> Splits:
    rows = read_rows(data, split="train")
    texts = [" ".join(passage_of(row, number, data).split()[:words]) for number, row in enumerate(rows, start=1)]
    train, held_out = (
        _nq_problems(
            [(row, text) for row, text in zip(rows, texts, strict=True) if is_held_out(text, share=share) is side],
            passages=passages,
            retrieved=retrieved,
        )
        for side in (False, True)
    )
    return _separated(train, held_out, source=data)


def _separated(train: Sequence[Problem], held_out: Sequence[Problem], *, source: str) -> Splits:
    """The splits, without the training problems that share a question or a text with a held-out problem."""

    def texts(problem: Problem) -> set[str]:
        return {fold(text) for text in (problem.question, *problem.data["messages"])}

    unseen = set[str]().union(*map(texts, held_out))
    kept = tuple(problem for problem in train if unseen.isdisjoint(texts(problem)))
    if not kept or not held_out:
        raise DataError(
            f"splitting {source}: found {len(kept)} problems for training and {len(held_out)} for evaluation, wanted "
            f"at least one of each. Give more data or fewer passages, or hold out another part"
        )
    return Splits(train=kept, held_out=tuple(held_out), left_out=len(train) - len(kept))


def _nq_problems(rows: Sequence[tuple[Row, str]], *, passages: int, retrieved: bool) -> tuple[Problem, ...]:
    """The problems of a split: every row whose clipped passage has an answer, each question once."""
    problems: dict[str, Problem] = {}
    unique = list(dict.fromkeys(text for _, text in rows))
    folded = [text.casefold() for text in unique]
    for row, text in rows:
        question, aliases = str(row["question"]), [str(alias) for alias in row["answers"]]
        rng = random.Random(f"nq {question}")
        order = rng.sample(range(len(unique)), min(len(unique), 50 * passages))
        fit = (at for at in order if not any(alias.casefold() in folded[at] for alias in aliases))
        shown = [unique[at] for at in islice(fit, passages - 1)]
        if not contains_answer(aliases, text) or len({*shown, text}) < passages:
            continue
        shown.insert(rng.randrange(passages), text)
        data = {"aliases": aliases, "messages": [_best(question, shown)] if retrieved else shown}
        problems[fold(question)] = Problem(id=fold(question), question=f"{question}?", answer=aliases[0], data=data)
    return tuple(problems.values())


def _best(question: str, texts: Sequence[str]) -> str:
    """The text that BM25 finds best."""
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(list(texts), stopwords="english", show_progress=False), show_progress=False)
    words = bm25s.tokenize([question], stopwords="english", show_progress=False)
    found, _ = index.retrieve(words, k=1, show_progress=False, backend_selection="numpy")
    return texts[int(found[0, 0])]


@dataclass(kw_only=True, eq=False)
class MemoryScenarios(BfclMemory):
    """BFCL's memory questions, split by scenario: no message of a held-out problem is trained on."""

    held_out: Scenario

    def __post_init__(self) -> None:
        BfclMemory.__post_init__(self)
        every = (*self._splits.train, *self._splits.held_out)
        chosen = tuple(problem for problem in every if problem.data["scenario"] == self.held_out)
        rest = tuple(problem for problem in every if problem not in chosen)
        self._splits = _separated(rest, chosen, source=self.data or "bfcl_eval")

    def environment(self, problem: Problem) -> NotesEnvironment:
        """A fresh episode."""
        return episode(problem.question, problem.data["messages"])


@dataclass(kw_only=True, eq=False)
class NoteAndAnswer(Correct):
    """1 for a right answer, and ½ if the last note has one; only the answer counts as correct."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        answer = Correct.__call__(self, trajectory, problem).correct or 0.0
        notes = [turn.reply.text for turn in trajectory.turns[:-1]]
        note = float(bool(notes) and contains_answer(problem.data["aliases"], notes[-1]))
        return RewardResult(total=answer + note / 2, components={"answer": answer, "note": note / 2}, correct=answer)


class FrozenNotes(TransformersSampler):
    """The initial policy writes every reply but the last of an episode, which the policy that is trained writes.

    The initial policy is the model that the sampler opens. Under ``condensegrpo eval RUN`` that is the trained policy,
    so that only evaluations within a run have frozen notes.
    """

    def __init__(self, model_path: str, *, dtype: DtypeName = "float32") -> None:
        super().__init__(model_path, dtype=dtype)
        self._initial = TransformersSampler(model_path, dtype=dtype)
        tokenizer = load_tokenizer(model_path)
        self._is_last: Callable[[Sequence[int]], bool] = lambda ids: LAST in tokenizer.decode(ids[-128:])

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """A reply by one of the two."""
        sampler = super() if self._is_last(prompt_ids) else self._initial
        return await sampler.sample(prompt_ids, params)

    def close(self) -> None:
        """Free both."""
        super().close()
        self._initial.close()


@estimator(summary="as grpo, for the last turn alone", formula="A_it = N_ε(R)_i at the last turn, else 0")
def answers_only(batch: Batch) -> Estimate:
    """Trains the last turn alone, with the advantage and the biases of ``grpo``: another policy writes the notes."""
    compared = against_group("R", batch.outcome_N, batch.group_N, scale="std", eps=1e-4)
    turn_K = torch.arange(int(batch.turns_N.max()), device=batch.turns_N.device)
    last_NK = turn_K == (batch.turns_N - 1)[:, None]
    return total(compared._replace(value_NK=compared.value_NK[:, None].expand(last_NK.shape), applies_NK=last_NK))

"""Demonstrations of experts: they are played through the engine, so that they show what its condenser shows."""

import collections
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from command import ROOT
from playing_experts import played, turns
from talk import tokenizer

from condensegrpo.assembly.build import build
from condensegrpo.assembly.demonstrations import TOGETHER, DemonstratedTurn, demonstrations
from condensegrpo.assembly.held_out import check_disjoint
from condensegrpo.assembly.preflight import made_tokenizer
from condensegrpo.assembly.runtime import renderer_for
from condensegrpo.condensers.summary import PolicySummary
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.load import load_config
from condensegrpo.core.condenser import Request
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.display.console import quiet_libraries
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import CondenseSettings
from condensegrpo.learner.new_model import new_model, new_tokenizer, save_new


class Counting:
    """Answers the nth reply with ``seen n``, and after the fifth asks for it."""

    def __init__(self) -> None:
        self.seen = 0

    async def start(self) -> tuple[Message, ...]:
        return (Message(role="user", content="count"),)

    async def step(self, reply: Message) -> Step:
        self.seen += 1
        if self.seen == 6:
            return Step(done=True, answer=reply.text)
        return Step(observations=(Message(role="user", content=f"seen {self.seen}"),))


class Counter:
    """Says the number after the last one that it is shown; sums up what it is shown."""

    def reply(self, context: Sequence[Message]) -> str:
        newest = context[-1].text
        return f"say {int(newest.removeprefix('seen ').split()[0]) + 1 if newest.startswith('seen') else 1}"

    def write(self, request: Request) -> str:
        return "sum " + " ".join(unit.reply.text.removeprefix("sum ") for unit in request.units)


class Counts:
    """Problems that an expert plays in six turns."""

    def __init__(self, size: int = 3) -> None:
        self.size, self.played = size, list[str]()

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(id=f"{split}-{number}", question="count") for number in range(self.size)]

    def environment(self, problem: Problem) -> Counting:
        return Counting()

    def expert(self, problem: Problem) -> Counter:
        self.played.append(problem.id)
        return Counter()


def texts(turn: DemonstratedTurn) -> list[str]:
    return [message.text for message in turn.shown.context]


def test_a_demonstration_is_a_turn_of_an_episode_in_the_context_that_the_condenser_left() -> None:
    made = turns(Counts(size=1), 6, condenser=LastK(keep_last=1))
    by_reply = {turn.shown.reply: texts(turn)[-3:] for turn in made}
    assert by_reply["say 1"] == ["count"]
    assert by_reply["say 2"] == ["count", "say 1", "seen 1"]
    assert by_reply["say 6"] == ["count", "say 5", "seen 5"]
    assert len(by_reply) == 6
    for turn in made:
        words = tokenizer().decode(list(turn.prompt_ids), skip_special_tokens=False)
        assert words.endswith(f"{texts(turn)[-1]}<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer().decode(list(turn.reply_ids)) == f"{turn.shown.reply}<|im_end|>"


def test_requests_of_a_condenser_are_demonstrated_too(tmp_path: Path) -> None:
    template = tmp_path / "template.txt"
    template.write_text("sum up")
    condenser = PolicySummary(keep_last=1, max_tokens=60, always=True, template=str(template))
    made = turns(Counts(size=1), 12, condenser=condenser, max_context_tokens=600)
    by_reply = {turn.shown.reply: texts(turn) for turn in made}
    (summary,) = (text for text in by_reply if text.startswith("sum"))
    assert summary == "sum say 1 say 2 say 3 say 4 say 5"
    assert by_reply[summary] == [*by_reply["say 5"], "say 5", "seen 5\n\nsum up"]
    assert by_reply["say 6"][1] == summary
    assert by_reply["say 6"][3:] == ["say 5", "seen 5"]


def test_turns_are_fixed_by_the_seed_and_go_on_where_they_were_left() -> None:
    whole = turns(Counts(), 40)
    assert turns(Counts(), 10, skipped=30) == whole[30:]
    assert turns(Counts(), 40, seed=1) != whole
    assert overrides(Counts(), Task.expert)


def test_budgets_of_a_schedule_are_shown_the_last_one_most() -> None:
    """An evaluation has the last: a meter says numbers there that no policy could know otherwise."""
    trigger = CondenseSettings(schedule=((0, 1.0), (4, 0.5)), meter="tokens")
    made = turns(Counts(size=40), 6 * 40, trigger=trigger, max_context_tokens=1200)
    shown = ((turn.shown.problem, re.findall(r"of (\d+) context tokens", "".join(texts(turn)))) for turn in made)
    of_problem = {problem.id: budgets[0] for problem, budgets in shown if problem is not None and budgets}
    budgets = collections.Counter(of_problem.values())
    assert set(budgets) == {"1200", "1050", "900", "750", "600"}
    assert 14 < budgets["600"] < 34


def test_every_problem_is_played_once_before_the_first_is_shown_again() -> None:
    task = Counts(size=TOGETHER + 4)
    made = turns(task, 6 * (TOGETHER + 4) * 2)
    assert sorted(task.played) == sorted(problem.id for problem in task.problems("train"))
    first = [turn.shown.problem for turn in made[: 6 * TOGETHER]]
    assert len({problem.id for problem in first if problem is not None}) == TOGETHER


def test_an_expert_that_fails_or_has_no_room_is_named() -> None:
    class Lost(Counter):
        def reply(self, context: Sequence[Message]) -> str:
            return str({}["page"])

    class Losing(Counts):
        def expert(self, problem: Problem) -> Counter:
            return Lost()

    with pytest.raises(
        ConfigError, match=r"expert of the task Losing: a problem ended without an answer; train-\d as "
    ):
        turns(Losing(), 1)
    failed = r"as sampler_error: the expert: KeyError: 'page' \(.*test_experts\.py:\d+\)\. Correct that, or set"
    with pytest.raises(ConfigError, match=failed):
        turns(Losing(), 1)
    no_room = r"Counts: 3 of 3 problems ended .* as turn_limit: no answer in 4 repl.*\. Give it the room that it needs"
    with pytest.raises(ConfigError, match=no_room):
        turns(Counts(), 1, max_turns=4)
    with pytest.raises(ConfigError, match=r"as output_length: a reply was cut off at 3 tokens"):
        turns(Counts(), 1, max_output_tokens=3)


def test_a_problem_that_the_expert_has_no_room_for_is_left_out() -> None:
    class Wordy(Counts):
        def expert(self, problem: Problem) -> Any:
            class Long(Counter):
                def reply(self, context: Sequence[Message]) -> str:
                    return "and so " * 40

            return Long() if problem.id == "train-0" else Counter()

    problems = {turn.shown.problem and turn.shown.problem.id for turn in turns(Wordy(), 24)}
    assert problems == {"train-1", "train-2"}


class Partly(Counts):
    """An expert that gives up at the third turn of all problems but the last."""

    def expert(self, problem: Problem) -> Any:
        class Quitter(Counter):
            def reply(self, context: Sequence[Message]) -> Any:
                return None if context[-1].text == "seen 2" else super().reply(context)

        return Counter() if problem.id == f"train-{self.size - 1}" else Quitter()


def test_a_problem_that_the_expert_gives_up_is_left_out() -> None:
    problems = {turn.shown.problem and turn.shown.problem.id for turn in turns(Partly(size=40), 12)}
    assert problems == {"train-39"}


def test_an_expert_that_gives_up_every_problem_is_named() -> None:
    class Never(Counts):
        def expert(self, problem: Problem) -> Any:
            class Quitter(Counter):
                def reply(self, context: Sequence[Message]) -> Any:
                    return None

            return Quitter()

    with pytest.raises(ConfigError, match=r"as the expert of the task Never: it gave up 48 training problems in a row"):
        turns(Never(size=40), 1)


def test_the_task_judges_replies_where_it_can() -> None:
    class Judging(Counts):
        def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
            return None if reply == "" else reply == "say anything"

    (turn,) = turns(Counts(size=1), 1)
    assert played(Counts()).sound(turn.shown, f" {turn.shown.reply}\n") is True
    assert played(Counts()).sound(turn.shown, "say anything") is False
    assert [played(Judging()).sound(turn.shown, reply) for reply in ("say anything", "say 1", "")] == [
        True,
        False,
        None,
    ]


def test_an_expert_does_not_write_words_that_the_tokenizer_does_not_know() -> None:
    words = new_tokenizer(["count seen say 1 2 3"], kind="words", vocab_size=64)
    shown = played(Counts(size=1))
    shown = replace(shown, engine=replace(shown.engine, renderer=Renderer(words)))
    with pytest.raises(ConfigError, match=r"writing 'say 4': the tokenizer does not know '4'\. Add them to corpus"):
        next(shown.turns(0))


def test_problems_of_an_expert_are_compared_with_those_of_the_evaluations() -> None:
    components = build(load_config(ROOT / "configs" / "quickstart.yaml", ["evaluate.variants={}", "train.steps=0"]))
    (held_out, *_) = components.problems("eval")
    task = Counts()
    check_disjoint(replace(components, task=task, problems=task.problems))
    clash = [replace(held_out, id="shown"), *task.problems("train")]
    with pytest.raises(DataError, match=r"is also shown of the demonstrations of the warm start"):
        check_disjoint(replace(components, task=task, problems=lambda _: clash))


def test_a_condenser_that_scores_by_the_policy_scores_by_the_model_of_the_warm_start(tmp_path: Path) -> None:
    quiet_libraries()
    changes = ["condenser={name: attention, options: {scorer: policy@0}}", "task.options={chunks: 6, sentences: 2}"]
    limits = ["rollout.limits={max_turns: 7, max_context_tokens: 48, max_output_tokens: 12}"]
    components = build(load_config(ROOT / "studies" / "configs" / "stories.yaml", [*changes, *limits]))
    new = components.config.model.new
    assert new is not None
    words = made_tokenizer(components.task, new)
    save_new(tmp_path / "model", words, new_model(words, new, seed=0))
    shown = demonstrations(components, renderer_for(components, str(tmp_path / "model")), str(tmp_path / "model"))
    made = list(islice(shown.turns(0), 40))
    assert max(len(turn.prompt_ids) for turn in made) <= 48
    assert any(
        "omitted" in message.text or len(turn.shown.context) < 7 for turn in made for message in turn.shown.context
    )

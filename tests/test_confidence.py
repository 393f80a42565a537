"""Ending early: what a draft is, when it is taken, and that it changes nothing else."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from builders import add_trajectory, scored
from talk import END, Counting, agent, counting, engine, problem, said, shown, tokenizer
from token_columns import columns, trained_tokens

from condensegrpo.algorithms import segments
from condensegrpo.assembly.rehearsal import check_confidence
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.load import load_config, vary
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams, StopReason, Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import ConfidenceSettings
from condensegrpo.metrics.trajectories import summarise
from condensegrpo.rewards.matches import Matcher
from condensegrpo.rewards.outcome import judge_trajectory
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.trajectories import read_trajectories

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
ASKED = ConfidenceSettings(threshold=0.5, max_tokens=40)


class Deciding:
    """Counts as ``talk.counting`` does; its drafts say ``7`` with a probability that depends on the count.

    It ends a draft as a real sampler does, with the token that completes the stop string.
    """

    version = 0

    def __init__(self, *probabilities: float, draft: str = " 7 </answer>") -> None:
        self._probabilities = probabilities  # by draft
        self._draft = draft
        self._acts = agent(counting)
        self.drafts: list[tuple[str, SamplingParams]] = []
        self.seeds: list[int] = []  # of the acts

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        if not shown(prompt_ids).endswith("<answer>"):
            self.seeds.append(params.seed)
            return await self._acts.sample(prompt_ids, params)
        probability = self._probabilities[min(len(self.drafts), len(self._probabilities) - 1)]
        self.drafts.append((shown(prompt_ids), params))
        ids = said(self._draft)[:-1][: params.max_tokens]
        cut_off = not any(stop in self._draft for stop in params.stop_strings)
        return Generation(
            token_ids=tuple(ids),
            logprobs=(math.log(probability), *[0.0] * (len(ids) - 1)),
            finish=FinishReason.LENGTH if cut_off else FinishReason.STOP,
        )

    def update(self, named_tensors: object, version: int) -> None:
        """No weights."""

    def close(self) -> None:
        """Nothing is held."""


def played(
    model: Deciding | ScriptedSampler, asked: ConfidenceSettings | None = ASKED, **options: object
) -> Trajectory:
    parts: Engine = replace(engine(model, **options), confidence=asked)  # type: ignore[arg-type]  # options by name
    return asyncio.run(
        run_episode(problem(), environment=Counting, engine=parts, group_id="g", sample=0, seed=lambda number: number)
    )


def test_an_episode_ends_with_the_first_draft_that_is_probable_enough() -> None:
    model = Deciding(0.2, 0.5, 0.9)
    one = played(model)
    assert (one.stop, one.answer, one.replies) == (StopReason.CONFIDENT, "7", 3)
    assert [turn.draft and round(turn.draft.probability, 6) for turn in one.turns] == [None, 0.2, 0.5]
    last = one.turns[-1]
    assert shown(last.prompt_ids).endswith("seen 2<|im_end|>\n<|im_start|>assistant\n<answer>")
    assert (shown(last.output_ids), last.reply.content) == (" 7 </answer>", "<answer> 7 </answer>")
    assert segments.broken_invariants(one) == ()


def test_the_draft_that_is_taken_is_trained_and_what_opens_it_is_not() -> None:
    one = played(Deciding(0.9))
    (row,) = segments.segments(one, advantage_K=[1.0, 1.0], weight_K=[1.0, 1.0])
    trained = trained_tokens(row)
    assert trained == [*said("hello 0"), *said(" 7 </answer>")[:-1]]
    assert columns(row).logprobs[-len(one.turns[1].output_ids)] == pytest.approx(math.log(0.9))


def test_drafts_that_are_not_taken_change_nothing() -> None:
    plain, drafting = Deciding(), Deciding(0.1)
    without, with_drafts = played(plain, None), played(drafting)
    assert with_drafts.stop is StopReason.ANSWERED
    assert plain.seeds == drafting.seeds
    assert [replace(turn, draft=None) for turn in with_drafts.turns] == list(without.turns)
    assert len(drafting.drafts) == len(without.turns) - 1


def test_drafts_have_random_streams_of_their_own() -> None:
    model = Deciding(0.1)
    played(model)
    assert [params.seed for _, params in model.drafts] == [-2, -3, -4, -5, -6]
    assert model.drafts[0][1].stop_strings == ("</answer>",)


@pytest.mark.parametrize(("after", "replies"), [(0, 1), (1, 2), (3, 4), (9, 6)])
def test_the_first_draft_comes_after_so_many_replies(after: int, replies: int) -> None:
    assert played(Deciding(0.9), replace(ASKED, after_turns=after)).replies == replies


@pytest.mark.parametrize("draft", [" 7", " </answer>", "</answer>", " 7 and so on"])
def test_a_draft_that_is_empty_or_cut_off_is_no_answer(draft: str) -> None:
    one = played(Deciding(1.0, draft=draft))
    assert (one.stop, one.answer) == (StopReason.ANSWERED, "5")


def test_what_stands_behind_the_end_of_an_answer_is_none_of_it() -> None:
    assert played(Deciding(1.0, draft=" 7 </answer> 8")).answer == "7"


def test_without_anything_to_close_it_an_answer_ends_with_the_reply() -> None:
    def reply(prompt_ids: tuple[int, ...]) -> list[int]:
        return said("42") if shown(prompt_ids).endswith("So: ") else said("hello")

    one = played(ScriptedSampler(reply, logprob=0.0), ConfidenceSettings(threshold=1.0, form="So: {answer}"))
    assert (one.stop, one.answer, one.turns[-1].output_ids[-1]) == (StopReason.CONFIDENT, "42", END)


def test_a_draft_behind_a_condensed_prompt_is_declared_with_its_length() -> None:
    one = played(Deciding(0.1, 0.1, 0.9), condenser=LastK(keep_last=1))
    declared = one.turns[-1].condensation
    assert declared is not None
    assert declared.tokens_after == len(one.turns[-1].prompt_ids)
    assert segments.broken_invariants(one) == ()


def test_the_draft_counts_as_a_reply() -> None:
    assert played(Deciding(0.1, 0.9), max_turns=3).stop is StopReason.CONFIDENT
    assert played(Deciding(0.1, 0.9), max_turns=2).stop is StopReason.TURN_LIMIT


def test_an_early_answer_is_judged_like_any_other() -> None:
    one = played(Deciding(0.9))
    assert judge_trajectory(one, Problem(id="p", question="?", answer="7"), Matcher("number")) == (True, 1.0)
    assert judge_trajectory(one, Problem(id="p", question="?", answer="8"), Matcher("number")) == (True, 0.0)


def test_metrics_count_the_tokens_of_drafts_beside_those_of_turns() -> None:
    model = Deciding(0.2, 0.9)
    one = played(model)
    found = summarise([scored(one, 1.0).figures])
    length = len(said(" 7 </answer>")) - 1
    assert (found["drafts"], found["draft_tokens"], found["stop/confident"]) == (2.0, length, 1.0)
    assert found["output_tokens"] == len(said("hello 0")) + len(said("hello 1")) + length
    assert found["confidence"] == pytest.approx(0.9)
    assert "drafts" not in summarise([scored(played(Deciding(), None), 1.0).figures])


def test_a_trajectory_with_drafts_is_stored_and_read_back(tmp_path: Path) -> None:
    kept = scored(played(Deciding(0.2, 0.9)), 1.0)
    add_trajectory(tmp_path / "t.parquet", kept)
    assert read_trajectories(tmp_path / "t.parquet") == (kept,)


def test_the_configuration_sets_it_and_is_checked() -> None:
    config = load_config(QUICKSTART, ["rollout.stop_when_confident={threshold: 0.8, form: 'It is {answer}.'}"])
    settings = config.rollout.stop_when_confident
    assert settings == ConfidenceSettings(threshold=0.8, form="It is {answer}.")
    assert (settings.opening, settings.closing) == ("It is ", ".")
    check_confidence(vary(config, ["rollout.limits.max_output_tokens=7"]), Renderer(tokenizer()))
    with pytest.raises(ConfigError, match=r"has 6 tokens, and\s+rollout\.limits\.max_output_tokens=6 leaves no room"):
        check_confidence(vary(config, ["rollout.limits.max_output_tokens=6"]), Renderer(tokenizer()))
    with pytest.raises(ConfigError, match="exactly once"):
        load_config(QUICKSTART, ["rollout.stop_when_confident={form: '<answer></answer>'}"])
    assert load_config(QUICKSTART).rollout.stop_when_confident is None


def test_opening_and_draft_together_are_at_most_as_long_as_a_reply() -> None:
    model = Deciding(0.9)
    played(model, max_output_tokens=20)
    opening = len(Renderer(tokenizer()).text_ids("<answer>"))
    assert {params.max_tokens for _, params in model.drafts} == {20 - opening}
    played(model, max_output_tokens=80)
    assert model.drafts[-1][1].max_tokens == 40  # its own limit

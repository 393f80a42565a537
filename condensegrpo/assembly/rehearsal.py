"""Rehearses a run without weights: scripted episodes through its real parts, from the first prompt to packed rows.

    environment ─▶ condenser ─▶ prompt ─▶ scripted reply ─▶ tools ─▶ reward ─▶ estimator ─▶ rows ─▶ micro-batches

Two episodes of the first training problem are a group: one plays as the task's expert, or calls a tool and gives the
right answer; the other one always replies the same. Of every evaluation an episode of the first problem is played.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.demonstrations import made_turns
from condensegrpo.assembly.runtime import trajectory_engine
from condensegrpo.assembly.scorers import check_frozen
from condensegrpo.config.load import in_evaluation, longest_request
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop, Watch
from condensegrpo.core.condenser import Budget
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import ConfigError, PluginError, ScoreError
from condensegrpo.core.failures import message_of, plugin_code
from condensegrpo.core.messages import History, Message
from condensegrpo.core.protocols.task import Problem, Task
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Generation, SamplingParams, StopReason
from condensegrpo.core.wording import plural
from condensegrpo.episodes.chat_template import tool_text
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.failures import FAILURES
from condensegrpo.episodes.families import NO_FAMILY
from condensegrpo.episodes.group import problem_groups
from condensegrpo.episodes.player import LocalPlayer
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.episodes.toolformats import Native, Tagged
from condensegrpo.samplers.scripted import ScriptedSampler

MAX_REPLIES = 16  # of an episode at most
DEMONSTRATIONS = 64  # whose words are looked up, from the first
MAX_UNKNOWN_SHARE = 0.03  # of the tokens of a text
LARGEST_CONTEXT = 1 << 20  # tokens of context that are tried for one that works
WORDS_SHOWN = 8  # unknown words in the message, the most frequent first
Ids = Sequence[int]


class ScriptReader(ScriptedSampler):
    """Reads out a script in the first episode of a group, and gives one reply in all others."""

    def __init__(self, script: Sequence[Ids], other: Ids) -> None:
        """The last reply of the script is repeated; ``other``: of the other episodes."""
        super().__init__([])
        self._first, self._other, self._replies = script, other, Counter[str]()  # replies by trajectory

    async def sample(self, prompt_ids: Ids, params: SamplingParams) -> Generation:
        """The next reply of an episode, cut off at its limit."""
        del prompt_ids
        number = self._replies[params.trajectory]
        self._replies[params.trajectory] += 1
        is_first = params.trajectory.endswith("/0")
        return self._ended(tuple(self._first[min(number, len(self._first) - 1)] if is_first else self._other), params)

    async def score(self, prompt_ids: Ids, output_ids: Ids) -> Sequence[float]:
        """The same of every token."""
        del prompt_ids
        return (-0.5,) * len(output_ids)


class _EvenScores:
    """A scorer that finds all units of a history equally important."""

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        del tokens
        return [[0.0] * len(history.units) for history in histories]


def rehearse(
    components: Components, renderer_of: Callable[[Components], Renderer], *, max_positions: int | None, trains: bool
) -> tuple[str, ...]:
    """Rehearse a run and its evaluations. Raises ConfigError for what would fail in every trajectory.

    Args:
        renderer_of: the renderer of the policy for the run or an evaluation of it.
        max_positions: of the policy; None: any number.
        trains: whether the episodes are given credit and made into rows.

    Returns:
        What came of it, and what failed in one of the two episodes.
    """
    config, renderer, notes = components.config, renderer_of(components), list[str]()
    watch = Watch(config.rollout.limits.turn_seconds, notes.append)
    with BackgroundLoop("rehearsal", close_seconds=PLUGIN_SECONDS, watch=watch) as loop:
        problem = components.problems("train")[0]
        scored = loop.run(_played(components, renderer, problem, samples=2))
        first = scored[0].trajectory
        overflow = first.detail if first.stop is StopReason.CONTEXT_OVERFLOW and not first.turns else ""
        if overflow:  # it is played to say how many tokens it needs
            scored = loop.run(_played(components, renderer, problem, samples=2, most=LARGEST_CONTEXT))
        notes += _faults(components, problem, scored)
        _check_texts(components, renderer, scored)
        if overflow:
            raise ConfigError(overflow)
        outcome = _outcome(problem, scored)
        if trains:
            outcome += _packed(components, scored)
        for name, varied in components.evaluations.items():
            its_renderer = renderer if varied.toolbox is components.toolbox else renderer_of(varied)
            with in_evaluation(name):
                held_out = varied.held_out()[0]
                its_scored = loop.run(_played(varied, its_renderer, held_out, samples=1))
                notes += _faults(varied, held_out, its_scored)
                _check_texts(varied, its_renderer, its_scored)
    longest = longest_request(config)
    if max_positions is not None and longest > max_positions:
        cure = "" if config.model.new is None else f", or raise model.new.max_positions to at least {longest}"
        raise ConfigError(
            f"checking rollout.limits.max_context_tokens: with rollout.limits.max_output_tokens it makes {longest} "
            f"tokens, and the model has {max_positions} positions. Lower one of them{cure}."
        )
    condensed = any(turn.condensation for each in scored for turn in each.trajectory.turns)
    if not condensed and config.condenser.name != "full":
        notes.append(
            f"not rehearsed: the condenser {config.condenser.label}, which had nothing to condense in these episodes"
        )
    components.condenser.counts()  # those of the run begin at 0
    if renderer.chosen != NO_FAMILY:
        notes.append(f"prompts and replies: {renderer.chosen}")
    pays_turns = any(each.figures.turn_reward for each in scored)
    if trains and pays_turns and not components.estimator.plugin.sees_turn_rewards:
        from condensegrpo.assembly.learning_signal import turn_reward_estimators

        notes.append(
            f"turn rewards are only logged: the estimator {config.estimator} does not use them; "
            f"{turn_reward_estimators()} do"
        )
    return outcome, *notes


def _outcome(problem: Problem, scored: Sequence[ScoredTrajectory]) -> str:
    turns = " and ".join(str(len(each.trajectory.turns)) for each in scored)
    rewards = " and ".join(f"{each.score.total:g}" for each in scored)
    longest = max(each.trajectory.max_context_tokens for each in scored)
    return (
        f"rehearsed {problem.id} with scripted replies: {turns} turns, prompts of at most {longest} tokens, "
        f"rewards {rewards}"
    )


async def _played(
    components: Components, renderer: Renderer, problem: Problem, *, samples: int, most: int | None = None
) -> tuple[ScoredTrajectory, ...]:
    """Scored episodes of a problem; ``most``: tokens of context, in place of the setting."""
    config, task = components.config, components.task
    limits = config.rollout.limits
    script = _script(components.toolbox, problem)
    reader = ScriptReader([renderer.reply_ids(text) for text in script], renderer.reply_ids("0"))
    engine = trajectory_engine(
        components,
        renderer=renderer,
        sampler=reader,
        temperature=config.rollout.temperature,
        writers={config.rollout.condense.writer: reader},
        scorers={name: _EvenScores() for name in components.condenser.scorers},
    )
    limits = replace(
        limits, max_turns=min(limits.max_turns, MAX_REPLIES), max_context_tokens=most or limits.max_context_tokens
    )
    engine = replace(engine, limits=limits, confidence=None)
    if overrides(task, Task.expert) and samples > 1:
        playing = f"playing as the expert of the task {type(task).__name__}"
        with plugin_code(playing, ConfigError):
            expert = task.expert(problem)
        played = await run_episode(
            problem,
            environment=task.environment,
            engine=replace(engine.at_step(0), expert=expert),
            group_id="expert",
            sample=0,
            seed=abs,  # of the number of a text: an expert writes without random numbers
        )
        if played.stop in FAILURES:
            raise ConfigError(f"{playing}: {played.detail}.")
        if played.turns:
            reader = ScriptReader([turn.output_ids for turn in played.turns], renderer.reply_ids("0"))
            engine = replace(engine, sampler=reader)
    player = LocalPlayer(environment=task.environment, engine=engine, reward=components.reward)
    return await player.play(
        problem_groups([problem], 0), samples=samples, run_seed=config.seed, step=0, on_scored=lambda _: None
    )


def _script(toolbox: Toolbox, problem: Problem) -> Sequence[str]:
    """A call without arguments, which a tool that needs some refuses, and the right answer."""
    answer = "0" if problem.answer is None else f"<answer>{problem.answer}</answer>"
    if not toolbox.names:
        return [answer]
    form = toolbox.format
    return [form.call(toolbox.names[0], {}) if isinstance(form, Native | Tagged) else form.opening, answer]


def _faults(components: Components, problem: Problem, scored: Sequence[ScoredTrajectory]) -> Iterator[str]:
    """The failures that are not of every trajectory; raises ConfigError if the first episode failed.

    The single episode of an evaluation is too short for some rewards, which are rehearsed in training.
    """
    playing = f"rehearsing the problem {problem.id} of the task {type(components.task).__name__}"
    first, *others = (each.trajectory for each in scored)
    if first.stop in FAILURES and (others or first.stop is not StopReason.REWARD_ERROR):
        raise ConfigError(f"{playing}: {first.detail}. It would fail in every trajectory.")
    if not first.turns:  # system message and question alone are too long
        raise ConfigError(first.detail)
    if first.stop is StopReason.CONTEXT_OVERFLOW:
        yield f"{playing}: the scripted episode ended after {plural(len(first.turns), 'turn')}: {first.detail}"
    calls, answered = sum(turn.tool_attempts for turn in first.turns), sum(turn.tool_successes for turn in first.turns)
    if others and overrides(components.task, Task.expert) and calls and not answered:
        said = next(turn.observations[0].text for turn in first.turns if turn.tool_attempts)
        yield f"{playing}: all of the expert's tool calls failed, the first with {said!r:.200}"
    yield from (f"{playing}: a reply of 0 ended in {each.detail}" for each in others if each.stop in FAILURES)


def _packed(components: Components, scored: Sequence[ScoredTrajectory]) -> str:
    """The training rows that the episodes make, and their micro-batches."""
    import torch

    from condensegrpo.algorithms.credit import rows_of, scores_of
    from condensegrpo.algorithms.packing import blocks, micro_batches

    config = components.config
    try:
        with plugin_code("computing the advantages of the rehearsed episodes", PluginError):
            advantage_NK = components.estimator(scores_of(scored, config.algorithm.stops)).advantage_NK
    except ScoreError as error:
        raise ConfigError(f"rehearsing two episodes: {error}") from error
    every_NK = torch.ones_like(advantage_NK)  # as if all turns had an advantage
    rows = [replace(row, media=()) for row in rows_of(scored, every_NK, every_NK)]  # the learner names its pictures
    room = config.learner.tokens_per_micro_batch
    batches = micro_batches(blocks(rows, max_tokens=room, share=False), max_tokens=room)
    return f", {plural(len(rows), 'row')} in {plural(len(batches), 'micro-batch', 'micro-batches')}"


def _check_texts(components: Components, renderer: Renderer, scored: Sequence[ScoredTrajectory]) -> None:
    """Check that the tokenizer knows what the policy reads, and that it fits under the smallest context budget."""
    trajectory = scored[0].trajectory
    pinned = trajectory.turns[0].context
    if renderer.has_unknown:
        for source, text in _texts(components, pinned):
            _check_words(renderer, source, text, new=components.config.model.new is not None)
    if components.toolbox.names:
        if isinstance(components.toolbox.format, Native):
            renderer.check_calls()
        renderer.check_roles(pinned, components.toolbox.format.result("call_0", components.toolbox.names[0], "0"))
    for name in components.condenser.scorers:
        check_frozen(name, pinned, components.config.rollout.limits.max_context_tokens)
    _check_room(components, renderer, pinned)
    check_confidence(components.config, renderer)


def _texts(components: Components, pinned: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """The texts that the policy reads, with their names; not the observations, which answer scripted replies."""
    yield "system message and question", "\n".join(message.text for message in pinned)
    if schemas := components.toolbox.template_schemas:
        yield "the tools that the chat template shows", tool_text(schemas)
    if components.config.warm_start.steps and overrides(components.task, Task.demonstrations):
        turns = islice(made_turns(components.task, components.config.seed), DEMONSTRATIONS)
        texts = (text for turn in turns for text in (*(message.text for message in turn.context), turn.reply))
        yield "the demonstrations", "\n".join(texts)


def _check_words(renderer: Renderer, source: str, text: str, *, new: bool) -> None:
    """Check that hardly any token of a text is unknown."""
    tokens, words = renderer.unknown(text)
    unknown = Counter(words)
    if unknown.total() > MAX_UNKNOWN_SHARE * tokens:
        cure = "Set model.new.tokenizer=bpe, or add them to corpus() of the task" if new else "Use another model"
        raise ConfigError(
            f"checking the tokenizer: it does not know {unknown.total()} of the {tokens} words of {source}, which the "
            f"policy would read as [UNK]; at most {MAX_UNKNOWN_SHARE:.0%} may be unknown. The most frequent are "
            f"{', '.join(repr(word) for word, _ in unknown.most_common(WORDS_SHOWN))}. {cure}."
        )


def _check_room(components: Components, renderer: Renderer, pinned: Sequence[Message]) -> None:
    """Check the room of a context that begins with ``pinned``; an error names the smallest context that works."""
    most = components.config.rollout.limits.max_context_tokens
    if fault := _lack_of_room(components, renderer, pinned, most):
        larger = range(most + 1, LARGEST_CONTEXT)
        works = bisect_left(larger, True, key=lambda tokens: not _lack_of_room(components, renderer, pinned, tokens))
        cure = f" The smallest that works is rollout.limits.max_context_tokens={larger[works]}."
        raise ConfigError(f"{fault}{cure if works < len(larger) else ''}")


def _lack_of_room(components: Components, renderer: Renderer, pinned: Sequence[Message], most: int) -> str:
    """Why ``most`` tokens of context are too few for a first prompt, a reply and the condenser; empty: they suffice."""
    rollout = components.config.rollout
    least = rollout.condense.least_budget(most)
    tokens, reply = renderer.count(pinned), Message(role="assistant", content="0")
    with_reply = renderer.count((*pinned, reply)) if rollout.limits.max_turns > 1 else tokens
    if with_reply > least:
        cure = "" if tokens > least else ", or set rollout.limits.max_turns=1"
        replied = f", and with a reply of one word {with_reply}" if rollout.limits.max_turns > 1 else ""
        return (
            f"checking rollout.limits.max_context_tokens: the context budget is {least}; system message and question "
            f"need {tokens} tokens with the chat template, which no condenser shortens{replied}. Raise it{cure}."
        )
    room = rollout.condense.target_tokens(least, draw=0.0)  # of a condensed prompt
    if rollout.condense.target is not None and room < tokens:
        return (
            f"checking rollout.condense.target: found {rollout.condense.target:g}, which leaves a condensed prompt "
            f"{room} tokens; system message and question need {tokens}, which no condenser shortens. Raise it, or "
            f"rollout.limits.max_context_tokens."
        )
    budget = Budget(
        tokens=max(rollout.condense.target_tokens(least, draw=1.0) - tokens, 0),  # at the draw that leaves it the least
        prompt_tokens=least,
        reply_tokens=rollout.limits.max_output_tokens,
    )
    try:
        components.condenser.check(pinned, budget, renderer.count)
    except Exception as error:  # the boundary to a condenser
        return f"checking the room of the condenser {components.config.condenser.name}: {message_of(error)}."
    return ""


def check_confidence(config: RunConfig, renderer: Renderer) -> None:
    """Check that a draft of the answer has room for more than the text that opens it."""
    settings, most = config.rollout.stop_when_confident, config.rollout.limits.max_output_tokens
    if settings is None:
        return
    opening = len(renderer.text_ids(settings.opening))
    if opening >= most:
        raise ConfigError(
            f"checking rollout.stop_when_confident.form: the text that opens an answer, {settings.opening!r}, has "
            f"{opening} tokens, and rollout.limits.max_output_tokens={most} leaves no room for the answer. Raise it."
        )

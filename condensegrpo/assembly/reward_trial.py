"""Calls the rewards of a user once before a run: without an annotation nothing else says what they return."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from inspect import Signature, signature

from condensegrpo.assembly.components import Components
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.failures import PluginFailure, at_definition
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.reward import GroupReward, Reward, RewardResult, SumsParts, TurnReward
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.threads import result_in_thread
from condensegrpo.core.trajectory import StopReason, Trajectory, Turn
from condensegrpo.episodes.scoring import named, score_of

SECONDS = 10.0  # that a reward may take for the trial


def try_rewards(components: Components) -> tuple[str, ...]:
    """Call each of the user's rewards once, for a made-up episode of two turns that gave the right answer.

    A group reward gets it twice. Not called is a reward that says by annotation what it returns, or that was given the
    sandbox: it may be expensive.

    Returns:
        Which rewards could not be tried, and why.
    """
    problem = components.problems("train")[0]
    episode = _episode(problem)
    return tuple(note for reward in _untold(components) if (note := _tried(reward, episode, problem)))


def _untold(components: Components) -> Iterator[Reward | GroupReward | TurnReward]:
    """The rewards from outside this package that are not annotated; of a sum, its parts."""
    reward = components.reward
    for each in [part.reward for part in reward.parts] if isinstance(reward, SumsParts) else [reward]:
        kind = type(each)
        of_user = kind.__module__.partition(".")[0] != __name__.partition(".")[0]
        if of_user and not _takes_sandbox(kind) and not _says_what(each):
            yield each


def _takes_sandbox(kind: type) -> bool:
    try:
        return "sandbox" in signature(kind).parameters
    except ValueError:  # not known of what is built in, such as functools.partial
        return False


def _says_what(reward: Reward | GroupReward | TurnReward) -> bool:
    try:
        return signature(_method(reward)).return_annotation is not Signature.empty
    except ValueError:  # not known of a class that is built in
        return False


def _method(reward: Reward | GroupReward | TurnReward) -> Callable[..., object]:
    if isinstance(reward, GroupReward):
        return reward.score_group
    return reward.turn_rewards if isinstance(reward, TurnReward) else reward


def _episode(problem: Problem) -> Trajectory:
    answer = problem.answer or "0"
    turn = Turn(
        prompt_ids=(0,),
        output_ids=(0,),
        logprobs=(0.0,),
        policy_version=0,
        context=(Message(role="user", content=problem.question),),
        reply=Message(role="assistant", content=answer),
    )
    return Trajectory(
        id="0/0/0",
        problem_id=problem.id,
        group_id="0/0",
        sample=0,
        question=problem.question,
        ground_truth=problem.answer,
        turns=(replace(turn, reply=Message(role="assistant", content="…")), turn),
        stop=StopReason.ANSWERED,
        answer=answer,
        seconds=1.0,
    )


def _tried(reward: Reward | GroupReward | TurnReward, episode: Trajectory, problem: Problem) -> str:
    """Why a reward could not be tried; empty: it returned one."""
    given = (episode, replace(episode, id="0/0/1", sample=1)) if isinstance(reward, GroupReward) else episode
    name = named(reward)
    returned = result_in_thread(partial(_method(reward), given, problem), name=name, seconds=SECONDS)
    if isinstance(returned, PluginFailure):
        return f"{returned}; that was a made-up episode, so what it returns is not checked until the first real one"
    if fault := _fault(reward, returned, episode):
        raise ConfigError(f"trying {name} on a made-up episode{at_definition(reward)}: {fault}.")
    return ""


def _fault(reward: Reward | GroupReward | TurnReward, returned: object, episode: Trajectory) -> str:
    """Why what was returned is no reward; empty: it is one."""
    if not isinstance(reward, GroupReward | TurnReward):
        return _refused(reward, returned, episode)
    turns = isinstance(reward, TurnReward)
    form = "a number for each turn, here 2" if turns else "a reward for each trajectory, here 2"
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != 2:
        return f"returned {returned!r:.80}, wanted {form}"
    if turns:
        return _refused(reward, RewardResult(total=0.0, turn_rewards=tuple(returned)), episode)
    return next(filter(None, (_refused(reward, each, episode) for each in returned)), "")


def _refused(reward: Reward | GroupReward | TurnReward, result: object, episode: Trajectory) -> str:
    """Why a result is no score of the episode; empty: it is one."""
    score = score_of(result, episode, reward)
    if not isinstance(score, PluginFailure):
        return ""
    plain = score.error in ("TypeError", "ValueError", "ScoreError")
    return score.message if plain else str(replace(score, source=""))

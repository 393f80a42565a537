"""The process rewards of folding, by hand: long turns of the main line, failed calls, work outside a branch's task."""

import json
from dataclasses import replace

import pytest
from builders import trajectory, turn

from condensegrpo.config.use import RewardUse
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.protocols.reward import RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Turn
from condensegrpo.sandbox.sandbox import Sandbox

SEVEN = Problem(id="p0", question="3 + 4?", answer="7")


def of(tokens: int, tool: str = "search", result: str = "found", kind: str = "act") -> Turn:
    """A turn of so many tokens in all that called a tool."""
    call = ToolCall(id="call_0", name=tool, arguments='{"message": "m", "description": "d"}')
    answer = Message(role="tool", content=result, tool_call_id="call_0", name=tool)
    made = turn(range(tokens - 1), [5], observations=[answer])
    failed = result.startswith("Error:")
    reply = replace(made.reply, tool_calls=(call,))
    return replace(made, reply=reply, tool_attempts=1, tool_successes=int(not failed), kind=kind)


def paid(name: str, turns: list[Turn], **options: object) -> RewardResult:
    parts = [{"name": "correct"}, {"name": name, "weight": 0.5, "options": options}]
    with Sandbox(isolation="none") as sandbox:
        reward = RewardUse(name="weighted_sum", options={"parts": parts}).build(sandbox=sandbox)
        result = reward(trajectory(*turns), SEVEN)
    assert isinstance(result, RewardResult)
    return result


def test_turns_of_the_main_line_beyond_the_share_of_the_budget_are_penalised() -> None:
    tools = [(300, "search"), (520, "search"), (560, "branch"), (700, "search"), (720, "return"), (610, "search")]
    result = paid("main_line", [of(*each) for each in tools], budget=1000)
    assert result.turn_rewards == (0, -0.5, 0, 0, 0, -0.5)
    assert (result.total, result.components["main_line"]) == (1, -1)


def test_an_open_branch_lasts_to_the_end_and_a_refused_one_does_not_count() -> None:
    opened = [of(9, "branch"), of(9), of(9)]
    assert paid("main_line", opened, budget=10).turn_rewards == (0, 0, 0)
    refused = [of(9, "branch", "Error: branch: no"), of(9, kind="condense"), of(5)]
    assert paid("main_line", refused, budget=10).turn_rewards == (-0.5, 0, 0)


def test_turns_with_a_failed_call_are_penalised() -> None:
    result = paid("failed_calls", [of(9), of(9, "search", "Error: search: no"), turn([1], [2])])
    assert result.turn_rewards == (0, -0.5, 0)
    assert result.components["failed_calls"] == -0.5


def calling(tool: str, *texts: str, result: str = "found") -> Turn:
    """A turn that called a tool with these texts."""
    arguments = json.dumps({"description" if tool == "branch" else "query": text for text in texts})
    made = of(9, tool, result)
    return replace(made, reply=replace(made.reply, tool_calls=(ToolCall(id="call_0", name=tool, arguments=arguments),)))


def test_calls_of_a_branch_without_a_word_of_its_description_are_penalised() -> None:
    turns = [
        calling("search", "Zoe"),  # the main line has no task of its own
        calling("branch", "Birthplace of Mia"),
        calling("search", "mia born"),
        calling("search", "Ben is of no use"),  # "of" is too short to count
        turn([1], [2]),
        calling("return", "Rome"),
        calling("branch", "Ben", result="Error: branch: no"),
        calling("search", "Zoe"),
        calling("branch", "the year of Ben"),
        calling("search", "year of Zoe"),
        calling("search", "Zoe"),  # the branch is open to the end
    ]
    penalised = paid("off_branch", turns).turn_rewards
    assert penalised == (0, 0, 0, -0.5, 0, 0, 0, 0, 0, 0, -0.5)


def test_of_two_branches_in_one_reply_the_first_is_the_task() -> None:
    first, second = calling("branch", "zebras"), calling("branch", "weather")
    calls = (*first.reply.tool_calls, *second.reply.tool_calls)
    both = replace(first, reply=replace(first.reply, tool_calls=calls))
    assert paid("off_branch", [both, calling("search", "stripes of zebras")]).turn_rewards == (0, 0)


@pytest.mark.parametrize("options", [{}, {"budget": 0}, {"budget": 9, "share": 0}])
def test_a_main_line_without_a_budget_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(Exception, match="setting up the reward 'main_line'"):
        paid("main_line", [of(9)], **options)

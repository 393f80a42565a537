"""What follows from a reply: the tools that it calls, or the environment; both may end the episode."""

import time
from collections.abc import Sequence
from dataclasses import replace

from condensegrpo.core.messages import Message, ToolCall, meter_line
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.trajectory import FinishReason, StopReason
from condensegrpo.episodes.boundary import Boundary, EndEpisode, call_method
from condensegrpo.episodes.conversation import NOTHING, Conversation, Response, SampledReply
from condensegrpo.episodes.toolcalls import NO_CALLS, ToolAnswers, is_success
from condensegrpo.episodes.toolformats import Malformed
from condensegrpo.episodes.view import View


async def respond(conversation: Conversation, view: View, output: SampledReply) -> Response:
    """Let the tools or the environment respond to a reply. If they raise, the episode ends and the turn stays."""
    engine, reply = conversation.engine, output.reply.message
    if engine.limits.ends_at_cut and output.finish is FinishReason.LENGTH:
        detail = f"a reply was cut off at {len(output.token_ids)} tokens (rollout.limits.max_output_tokens)"
        return Response(reply, end=EndEpisode(StopReason.OUTPUT_LENGTH, detail))
    began = time.monotonic()
    try:
        with Boundary("the tools"):  # each call has the toolbox's own time limit
            calls = engine.toolbox.calls_in(output.reply)
            exhausted = engine.toolbox.exhausted(conversation.tool_turns, conversation.tool_turns_of_query)
            if calls and exhausted:
                detail = f"a reply called a tool after {exhausted}"
                return Response(reply, end=EndEpisode(StopReason.TURN_LIMIT, detail))
            if conversation.environment.stop_strings is not None:
                response = await _answered_calls(conversation, output, calls)
            elif calls:
                tools = await engine.toolbox.run(calls, replace(conversation.history, shown=view.units))
                step = _step_of(tools)
                step = replace(step, observations=engine.renderer.store_media(step.observations))
                response = Response(replace(reply, tool_calls=tools.calls), step, tools)
            else:
                response = await _environment_response(conversation, reply, output.finish)
    except EndEpisode as end:
        response = Response(reply, end=end)
    response = response._replace(seconds=round(time.monotonic() - began, 6), end=response.end or _end(response.step))
    with Boundary("rendering the meter"):
        return _metered(conversation, view, output, response)


async def _answered_calls(
    conversation: Conversation, output: SampledReply, calls: Sequence[ToolCall | Malformed]
) -> Response:
    """The response of an environment that answers tool calls itself. Calls that ended the episode did not fail."""
    read = tuple(call for call in calls if isinstance(call, ToolCall))
    response = await _environment_response(conversation, replace(output.reply.message, tool_calls=read), output.finish)
    results = [message.text for message in response.step.observations if message.role == "tool"]
    unanswered = len(read) - len(results) if response.step.done else 0
    succeeded = min(sum(map(is_success, results)) + max(unanswered, 0), len(read))
    step = replace(response.step, observations=conversation.engine.toolbox.shown(response.step.observations))
    tools = replace(NO_CALLS, attempted=len(calls), succeeded=succeeded)
    return response._replace(step=step, tools=tools)


async def _environment_response(conversation: Conversation, reply: Message, finish: FinishReason) -> Response:
    """The response of the environment."""
    engine, environment = conversation.engine, conversation.environment
    try:
        async with Boundary("the environment", seconds=engine.limits.turn_seconds, plugin=environment):
            environment.read_history(conversation.history)
            environment.read_finish(finish)
            step: object = await call_method(environment.step, reply)
            if not isinstance(step, Step):
                raise TypeError(
                    f'step() returned {step!r:.80}, wanted a Step, as in return Step(done=True, answer="4")'
                )
            observations = engine.renderer.store_media(step.checked().observations)
    except EndEpisode as end:
        return Response(reply, end=end)
    return Response(reply, step if observations is step.observations else replace(step, observations=observations))


def _step_of(tools: ToolAnswers) -> Step:
    """The answers of tools as a step: turn rewards are added, the first tool that is done ends the episode."""
    rewards: dict[str, float] = {}
    with Boundary("the environment"):
        steps = [
            Step(
                turn_rewards=result.turn_rewards, done=result.done, answer=result.answer, outcome=result.outcome
            ).checked()
            for result in tools.results
        ]
    for step in steps:
        for name, value in step.turn_rewards.items():
            rewards[name] = rewards.get(name, 0.0) + value
    last = next((step for step in steps if step.done), NOTHING)
    return replace(last, observations=tools.messages, turn_rewards=rewards)


def _end(step: Step) -> EndEpisode | None:
    """The end of an episode whose step is done."""
    if not step.done:
        return None
    if step.answer is not None:
        return EndEpisode(StopReason.ANSWERED, answer=step.answer, outcome=step.outcome)
    if step.outcome is not None:
        return EndEpisode(StopReason.FINISHED, outcome=step.outcome)
    return EndEpisode(StopReason.FORMAT, "the environment could not read a reply and ended the episode")


def _metered(conversation: Conversation, view: View, output: SampledReply, response: Response) -> Response:
    """A response whose last observation ends with the line of the meter, if there is a meter and an observation.

    The line holds the number of the turn, and the used and free tokens. It is never changed, so that later prompts
    continue by token ids. Used are the tokens of the prompt that would come next, before a condenser rewrites it and
    without the line itself.
    """
    engine, observations = conversation.engine, response.step.observations
    condense = engine.condense
    if condense.meter == "none" or not observations or response.end is not None:
        return response
    tokens = None
    if condense.meter == "tokens":
        ids = output.token_ids
        added = engine.renderer.continuation(view.context, response.reply, observations, ids, view.ids)
        most = condense.target_tokens(engine.limits.max_context_tokens, conversation.draw)
        tokens = len(view.ids) + len(ids) + len(added), most
    *before, last = observations
    line = last.followed_by(meter_line(len(conversation.turns), tokens))
    return response._replace(step=replace(response.step, observations=(*before, line)))

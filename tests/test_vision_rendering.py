"""Conversations with pictures: our ids are those of the family's processor, turns continue by ids, faults are named."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from talk import engine, problem
from vision_models import (
    FAMILIES,
    FamilyName,
    family_processor,
    image_processor,
    picture,
    vision_config,
    vision_tokenizer,
)

from condensegrpo.algorithms.segments import segments
from condensegrpo.core.errors import RolloutError
from condensegrpo.core.messages import MediaPart, Message, Part, TextPart
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.render import Renderer
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.image_files import open_picture
from condensegrpo.vision.processor import PictureProcessor, family_of

FIRST, SECOND, THIRD = picture(40, 20), picture(20, 100, color=(9, 9, 200)), picture(24, 24, color=(0, 99, 0))


def shown(text: str, *parts: MediaPart | str, role: Any = "user") -> Message:
    made = (TextPart(text=part) if isinstance(part, str) else part for part in (text, *parts))
    return Message(role=role, content=tuple(part for part in made if part.text))


CONVERSATIONS = {
    "a picture between two texts": (shown("look at ", FIRST, " there"),),
    "two pictures, the first of them first": (shown("", FIRST, SECOND, "say what"),),
    "a system message, turns with and without": (
        Message(role="system", content="be brief"),
        shown("", FIRST, "what is there"),
        Message(role="assistant", content="a square"),
        Message(role="user", content="and there"),
        Message(role="assistant", content="a circle\n"),
        shown("look: ", SECOND),
        Message(role="assistant", content="ok"),
        shown("", THIRD, "no"),
    ),
}


def renderer(family: FamilyName, folder: Path, **options: Any) -> Renderer:
    tokenizer = vision_tokenizer(family)
    known = family_of(family)
    assert known is not None
    pictures = PictureProcessor(
        family=known,
        config=vision_config(family, tokenizer),
        tokenizer=tokenizer,
        image_processor=image_processor(family),
        media=MediaFolder(folder / "media"),
    )
    return Renderer(tokenizer, pictures=pictures, **options)


def theirs(family: FamilyName, messages: Sequence[Message]) -> list[int]:
    """The ids of the family's processor, called on the whole conversation."""

    def entry(part: Part) -> dict[str, str]:
        return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}

    processor = family_processor(family)
    conversation = [{"role": each.role, "content": [entry(part) for part in each.parts]} for each in messages]
    text = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    images = [open_picture(part.data or b"", "it") for message in messages for part in message.media]
    ids: list[int] = processor(images=[images], text=[text])["input_ids"][0]
    return ids


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_the_familys_processor_makes_of_the_conversation(
    family: FamilyName, conversation: str, tmp_path: Path
) -> None:
    messages = CONVERSATIONS[conversation]
    if family == "llava_onevision" and sum(len(message.media) for message in messages) == 1:
        pytest.skip("alone in a prompt, a picture has more tokens in LLaVA-OneVision's processor, see processor.py")
    ours = renderer(family, tmp_path)
    held = ours.store_media(messages)
    assert all(part.data is None for message in held for part in message.media)
    assert list(ours.prompt(held)) == theirs(family, messages)
    assert ours.count(held) == len(theirs(family, messages))


class Shows:
    """Shows a picture at the start and after every reply; ``answer …`` ends the episode."""

    def __init__(self) -> None:
        self.pictures = [FIRST, SECOND, THIRD]

    async def start(self) -> tuple[Message, ...]:
        return (shown("look at ", self.pictures.pop(0)),)

    async def step(self, reply: Message) -> Step:
        if reply.text.startswith("answer "):
            return Step(done=True, answer=reply.text.removeprefix("answer "))
        return Step(observations=(shown("now ", self.pictures.pop(0)),))


def played(environment: Any, parts: Any) -> Trajectory:
    episode = run_episode(
        problem(),
        environment=lambda _: environment,
        engine=parts,
        group_id="1/0",
        sample=0,
        seed=lambda number: number,
    )
    return asyncio.run(episode)


def saying(rendering: Renderer, *replies: str, **options: Any) -> Any:
    parts = engine(ScriptedSampler([rendering.reply_ids(reply) for reply in replies]), **options)
    return replace(parts, renderer=rendering)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_with_pictures_continue_by_ids_and_name_their_pictures(family: FamilyName, tmp_path: Path) -> None:
    ours = renderer(family, tmp_path)
    space = " " if family in ("smolvlm", "idefics3") else ""  # after "Assistant:", as in the template
    trajectory = played(Shows(), saying(ours, f"{space}a square", f"{space}a circle", "answer 3"))
    assert trajectory.stop is StopReason.ANSWERED, trajectory.detail
    hashes = [part.sha256 for part in (FIRST, SECOND, THIRD)]
    assert [turn.media for turn in trajectory.turns] == [tuple(hashes[:count]) for count in (1, 2, 3)]
    assert [turn.condensation for turn in trajectory.turns] == [None] * 3
    conversation = (
        shown("look at ", FIRST),
        Message(role="assistant", content="a square"),
        shown("now ", SECOND),
        Message(role="assistant", content="a circle"),
        shown("now ", THIRD),
    )
    assert list(trajectory.turns[2].prompt_ids) == theirs(family, conversation)
    (row,) = segments(trajectory, advantage_K=[1.0] * 3, weight_K=[1.0] * 3)
    assert row.media == tuple(hashes)


def test_a_tool_may_return_a_picture(tmp_path: Path) -> None:
    class Screen(Shows):
        def tools(self) -> Sequence[EnvironmentTool]:
            async def click(arguments: Any, history: Any) -> ToolResult:
                return ToolResult(text=f"clicked {arguments['x']}", media=(SECOND,))

            schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
            return [EnvironmentTool(name="click", description="Click.", parameters=schema, call=click)]

    ours = renderer("qwen2_5_vl", tmp_path)
    call = f"<tool>{json.dumps({'name': 'click', 'args': {'x': 3}})}</tool>"
    trajectory = played(Screen(), saying(ours, call, "answer 1"))
    assert trajectory.stop is StopReason.ANSWERED, trajectory.detail
    (result,) = trajectory.turns[0].observations
    assert (result.text_without_media, result.media) == ("<result>clicked 3</result>", (SECOND,))
    assert trajectory.turns[1].media == (FIRST.sha256, SECOND.sha256)


def test_a_broken_picture_ends_the_episode_as_data(tmp_path: Path) -> None:
    class Broken(Shows):
        async def step(self, reply: Message) -> Step:
            return Step(observations=(shown("now ", MediaPart.of(b"no picture", "image/png")),))

    trajectory = played(Broken(), saying(renderer("qwen2_5_vl", tmp_path), "a square"))
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.ENVIRONMENT_ERROR, 1)
    assert "cannot identify image file" in trajectory.detail


def test_a_sampled_placeholder_ends_the_episode(tmp_path: Path) -> None:
    ours = renderer("qwen2_5_vl", tmp_path)
    assert ours.pictures is not None
    parts = replace(engine(ScriptedSampler([[5, ours.pictures.placeholder_id, 6]])), renderer=ours)
    trajectory = played(Shows(), parts)
    assert (trajectory.stop, trajectory.turns) == (StopReason.FORMAT, ())
    assert "the policy sampled <|image_pad|>, the placeholder of a picture" in trajectory.detail


def test_the_text_of_a_placeholder_is_text(tmp_path: Path) -> None:
    ours = renderer("qwen2_5_vl", tmp_path)
    assert ours.pictures is not None
    ids = ours.prompt(ours.store_media((shown("<|image_pad|> or ", FIRST, " <|vision_start|>"),)))
    assert list(ids).count(ours.pictures.placeholder_id) == 10


def test_a_template_without_a_place_for_pictures_is_an_error(tmp_path: Path) -> None:
    from talk import CHATML

    ours = renderer("qwen2_5_vl", tmp_path)
    tokenizer = vision_tokenizer("qwen2_5_vl")
    tokenizer.chat_template = CHATML.replace(
        "message.content", "(message.content if message.content is string else message.content[-1].text)"
    )
    with pytest.raises(RolloutError, match=r"wrote 0 placeholders <\|image_pad\|> for 1 picture"):
        Renderer(tokenizer, pictures=ours.pictures).prompt(ours.store_media((shown("", FIRST, "what"),)))


def test_a_text_model_refuses_pictures_before_it_is_loaded(tmp_path: Path) -> None:
    from talk import tokenizer

    with pytest.raises(RolloutError, match=r"cannot show .image/png .*: the model sees no pictures"):
        Renderer(tokenizer()).prompt((shown("look ", FIRST),))


def test_messages_with_pictures_are_located(tmp_path: Path) -> None:
    ours = renderer("qwen2_5_vl", tmp_path)
    messages = ours.store_media((Message(role="system", content="be brief"), shown("look ", FIRST)))
    located = ours.content_spans(messages)
    assert ours.pictures is not None
    assert located.ids[located.spans[1].start :].count(ours.pictures.placeholder_id) == 10
    assert len(located.spans[1]) >= 10

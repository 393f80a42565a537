"""Messages of parts: equality, storage, prefixes and rows in which pictures are told apart by their content."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import add_trajectory, scored, trajectory, turn
from command import ROOT
from talk import agent, engine, problem
from token_columns import marked

from condensegrpo.algorithms.credit import prompt_digests
from condensegrpo.algorithms.packing import blocks, lay_out
from condensegrpo.algorithms.prefix_tree import distinct_tokens
from condensegrpo.algorithms.segments import named_picture, segments, with_names
from condensegrpo.core.errors import DataError, LearnerError, PrefixBroken
from condensegrpo.core.messages import MediaPart, Message, TextPart, Unit
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.trajectory import StopReason
from condensegrpo.episodes.episode import run_episode
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.trajectories import Provenance, StoredTrajectory, read_row, read_trajectories

RED, BLUE = (MediaPart(sha256=letter * 64, type="image/png") for letter in "ab")
SHOWN = Message(role="user", content=(TextPart(text="look: "), RED, TextPart(text=" there")))
KNOWN = Provenance(evaluation=None, step=1, model="m", condenser="full", max_context_tokens=64, temperature=1.0, seed=0)


def test_a_message_of_text_parts_is_a_message_of_their_text() -> None:
    message = Message(role="user", content=(TextPart(text="a"), TextPart(text="b")))
    assert message == Message(role="user", content="ab")
    assert (message.content, message.parts, message.media) == ("ab", (TextPart(text="ab"),), ())


def test_messages_with_different_pictures_differ_and_name_them() -> None:
    other = replace(SHOWN, content=(TextPart(text="look: "), BLUE, TextPart(text=" there")))
    assert other != SHOWN
    assert SHOWN.text == "look: [image/png aaaaaaaaaaaa] there"
    assert SHOWN.media == (RED,)
    assert SHOWN.followed_by("!").parts == (*SHOWN.parts, TextPart(text="!"))
    unit = Unit(turn=0, reply=Message(role="assistant", content="ok"), results=(SHOWN,))
    assert unit.with_instruction("Sum up.").results[0].media == (RED,)


def test_parts_are_stored_and_read_back_and_a_text_stays_a_text(tmp_path: Path) -> None:
    one = trajectory(replace(turn([1, 2], [3]), observations=(SHOWN, Message(role="user", content="plain"))))
    file = tmp_path / "step_000001.parquet"
    add_trajectory(file, scored(one, 1.0), KNOWN)
    (read,) = read_trajectories(file)
    assert read.trajectory.turns[0].observations == one.turns[0].observations
    *_, shown, plain = read_row(StoredTrajectory(file, 0))["messages"]
    assert (plain["content"], plain["parts"]) == ("plain", None)
    assert RED.sha256 in [part["sha256"] for part in shown["parts"]]


def test_the_bytes_of_a_picture_are_stored_once_and_checked(tmp_path: Path) -> None:
    media, part = MediaFolder(tmp_path / "media"), MediaPart.of(b"\x89PNG red", "image/png")
    assert media.write(part).data is None
    assert media.write(part) == part == media.write(replace(part, data=None))
    assert [file.name for file in (tmp_path / "media").iterdir()] == [part.sha256]
    assert media.read(part.sha256) == b"\x89PNG red"
    media.path(part.sha256).write_bytes(b"other")
    with pytest.raises(DataError, match="other bytes than when it was stored"):
        media.read(part.sha256)
    with pytest.raises(DataError, match="No such file"):
        media.read(BLUE.sha256)


def test_bytes_are_not_in_a_trajectory_file(tmp_path: Path) -> None:
    shown = Message(role="user", content=(MediaPart.of(b"bytes", "image/png"),))
    file = tmp_path / "step_000001.parquet"
    add_trajectory(file, scored(trajectory(replace(turn([1, 2], [3]), observations=(shown,))), 1.0), KNOWN)
    assert [*read_row(StoredTrajectory(file, 0))["messages"][-1]["parts"][0]] == ["text", "sha256", "type"]
    assert read_trajectories(file)[0].trajectory.turns[0].observations == (shown,)


def test_different_pictures_behind_equal_ids_are_no_continuation_and_no_shared_prefix() -> None:
    # 9 stands for any picture
    first = replace(turn([1, 9], [3]), media=(RED.sha256,))
    same, other = (replace(turn([1, 9, 3, 4], [5]), media=(part.sha256,)) for part in (RED, BLUE))
    numbers = {"advantage_K": [1.0, 1.0], "weight_K": [1.0, 1.0]}
    (row,) = segments(trajectory(first, same), **numbers)
    assert row.media == (RED.sha256,)
    with pytest.raises(PrefixBroken, match="its prompt shows the media"):
        segments(trajectory(first, other), **numbers)
    digests = [next(prompt_digests(trajectory(each))) for each in (first, replace(first, media=(BLUE.sha256,)))]
    assert digests[0] != digests[1]
    rows = [replace(marked([1, 9, 3], [False, False, True]), media=(part.sha256,)) for part in (RED, RED, BLUE)]
    named = [with_names(row, lambda sha256: named_picture(sha256, (9,), placeholder_id=9)) for row in rows]
    assert distinct_tokens([row.token_ids for row in named]) == 5  # 1, then 9 3 of each picture
    batch = lay_out(blocks(named, max_tokens=100, share=True))
    assert batch.pictures == (BLUE.sha256, RED.sha256)
    assert batch.token_ids.tolist() == [[1, ~0, 3, ~(1 << 20), 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 1, 2]]
    with pytest.raises(LearnerError, match="it shows pictures, and the model that trains is no model that sees"):
        lay_out([tuple(rows)])


def test_a_placeholder_that_the_policy_sampled_is_no_picture() -> None:
    """9 stands for any picture of two tokens, and was sampled before the second one."""
    row = replace(marked([9, 9, 3, 9, 9, 9, 9, 4], [*[False] * 3, True, True, *[False] * 2, True]), media=("a", "b"))
    named = with_names(row, lambda sha256: named_picture(sha256, (9, 9), placeholder_id=9))
    assert named.token_ids[2:5] == (3, 9, 9)
    assert all(token < 0 for token in (*named.token_ids[:2], *named.token_ids[5:7]))
    assert len({*named.token_ids}) == 7
    with pytest.raises(LearnerError, match=r"does not hold the 2 tokens of the picture c\. Sample and train with"):
        with_names(replace(row, media=("a", "b", "c")), lambda sha256: named_picture(sha256, (9, 9), placeholder_id=9))


def test_a_picture_for_a_text_model_is_a_clear_error() -> None:
    class Shows:
        async def start(self) -> tuple[Message, ...]:
            return (SHOWN,)

        async def step(self, reply: Message) -> Step:
            return Step(done=True, answer=reply.text)

    episode = run_episode(
        problem(),
        environment=lambda _: Shows(),
        engine=engine(agent(lambda _: "hi")),
        group_id="1/0",
        sample=0,
        seed=lambda number: number,
    )
    ended = asyncio.run(episode)
    assert ended.stop is StopReason.ENVIRONMENT_ERROR
    assert "cannot show [image/png aaaaaaaaaaaa]: the model sees no pictures" in ended.detail


def test_the_example_of_the_guide_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "how-to" / "train-with-pictures.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "MediaFolder" in block)
    names: dict[str, Any] = {}
    exec(block, names)
    (shown,) = re.findall(r"message\.text  # '(.*?)'", block)
    assert names["message"].text == shown
    assert names["media"].read(names["chart"].sha256) == b"\x89PNG the bytes of a file"

"""The turn reward of the study s2_precision, by hand."""

from builders import assistant, trajectory, turn, user
from command import ROOT

from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.protocols.task import Problem

QUESTION = user("where are Mira and Jon ?")
PROBLEM = Problem(id="a", question=QUESTION.text, answer="Mira office Jon cellar")


def test_a_reply_is_paid_for_what_its_own_context_says() -> None:
    read = "<note> read </note>"
    wrong, kept = "<note> Mira attic Jon somewhere </note>", "<note> Mira attic Jon cellar </note>"
    entered = user("Mira entered the garden . Ada remembered the attic .")
    joined = user("Jon reached the cellar .")
    due = user("Mira mentioned the stable . done")
    replies = (
        ((QUESTION,), "<note> Mira somewhere Jon somewhere </note>", 1),
        ((QUESTION, assistant(read), entered), wrong, 0),
        ((QUESTION, assistant(wrong), joined), kept, 1),  # it says what it was told
        ((QUESTION, assistant(wrong), joined), read, 0),  # it forgets
        ((QUESTION, assistant(kept), due), "<answer> Mira attic Jon cellar </answer>", 1),
        ((QUESTION, assistant(kept), due), "<answer> Mira stable Jon cellar </answer>", 0),
        ((QUESTION, assistant(kept), due), "attic", 0),
    )
    one = trajectory(*(turn([1], [2], context=context, reply=reply) for context, reply, _ in replies))
    reward = load_plugin("rewards", f"{ROOT}/studies/sound_replies.py:SoundReplies")()
    assert reward.turn_rewards(one, PROBLEM) == tuple(paid for *_, paid in replies)

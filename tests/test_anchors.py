"""The condenser ``anchors``: what an anchor is, where it is listed, and that its stages stay what they are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conformance import Case, answered, condense, count, history, statuses, unit

from condensegrpo.condensers.anchors import anchors
from condensegrpo.core.condenser import Condensed
from condensegrpo.core.messages import MediaPart, flatten

MASK = {"name": "observation_mask", "options": {"keep": 1}}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Build 1142 failed: bad id in src/app.py:88", ["1142", "failed: bad id in src/app.py:88"]),
        ("see https://a.b/c?x=1, or mail me@x.org.", ["https://a.b/c?x=1", "me@x.org"]),
        ("ValueError: no key 'u 17'.\nnext line", ["ValueError: no key 'u 17'"]),
        ("./run.sh and/or ~/x, e.g. C:\\tmp\\a.txt", ["./run.sh", "~/x", "C:\\tmp\\a.txt"]),
        ("On 2024-05-01 at 10:30 it was -3.5% of $49.99.", ["2024-05-01", "10:30", "-3.5%", "$49.99"]),
        ("call get_user or fooBar of ABC-12 with id a1b2", ["get_user", "fooBar", "ABC-12", "a1b2"]),
        ('{"id": "u 17", "price": 49.99}', ["u 17", "49.99"]),
        ("My name is Mia, I'm in Porto Alegre. It rains.", ["Mia", "Porto Alegre"]),
        ("nothing to see here", []),
        *((text, []) for text in ("x" * 200_000, "9" * 200_000, "-" * 200_000, "a-" * 100_000, '"' * 100_000)),
    ],
)
def test_anchors_of_a_text(text: str, found: list[str]) -> None:
    """The last ones take minutes if the time is quadratic."""
    assert list(anchors(text)) == found


def test_kinds_can_be_chosen() -> None:
    assert anchors("id u_17 costs 49.99", ("number",)) == ("49.99",)


def test_the_hash_that_names_a_picture_is_no_anchor() -> None:
    screens = [unit(turn, "look", "r" * 80) for turn in range(4)]
    picture = MediaPart.of(b"7abc", "image/png")
    assert anchors(picture.text)
    shown = [replace(each, results=(each.results[0].showing([picture]),)) for each in screens]
    assert "Verbatim" not in str(texts(condense(Case("anchors", {}).build(), history(*shown), 300)))


def kept(tokens: int, stages: Sequence[object] = (), **options: object) -> Condensed:
    """Four units: one word each that is an anchor, a long result each."""
    given = {"stages": list(stages)} if stages else {}
    past = history(*(unit(turn, f"try t_{turn}", f"port 80{turn} " + "r" * 80) for turn in range(4)))
    return condense(Case("anchors", {**options, **given}).build(), past, tokens)


def texts(found: Condensed) -> list[list[str]]:
    return [[message.content for message in each.messages] for each in found.units]


def test_dropped_units_are_replaced_by_a_list_of_their_anchors() -> None:
    """A unit has 104 tokens, the pinned messages 23: half of 300 holds one unit. The list with its note has 127."""
    found = kept(300, share=0.5)
    assert texts(found)[0] == [
        "Verbatim from omitted turns:\nt_0\n800\nt_1\n801\nt_2\n802",
        "[turns up to 2 omitted, parts of them verbatim above: 312 tokens]",
    ]
    assert texts(found)[1:] == [["try t_3", "port 803 " + "r" * 80]]
    past = history(*(unit(turn, f"try t_{turn}", f"port 80{turn} " + "r" * 80) for turn in range(4)))
    assert statuses(past, found) == "ddrk"
    assert found.reason == "truncate: cut off the 3 oldest of 4 units; 6 anchors of what was left out"


def test_a_masked_result_has_its_anchors_behind_its_placeholder() -> None:
    found = kept(400, [MASK])
    assert texts(found) == [
        *([f"try t_{turn}", f"[turn {turn}, tool result omitted: 93 tokens] verbatim: 80{turn}"] for turn in range(3)),
        ["try t_3", "port 803 " + "r" * 80],
    ]


def test_over_its_share_the_newest_anchors_stay() -> None:
    """12 tokens hold the anchor of the newest placeholder, `` verbatim: 802``: 14 do not fit, 15 do."""
    shown = {share: [each[1][-14:] for each in texts(kept(400, [MASK], share=share))] for share in (0.036, 0.04)}
    assert [place.endswith("802") for place in shown[0.04][:3]] == [False, False, True]
    assert not any(place.endswith("802") for place in shown[0.036])


def test_an_anchor_that_is_shown_anyway_is_not_listed() -> None:
    past = history(*(unit(turn, "try id_7", f"{turn} " + "r" * 80) for turn in range(3)))
    (listed, newest) = condense(Case("anchors", {"kinds": ["identifier"]}).build(), past, 200).units, None
    assert [each.reply.content for each in listed] == ["try id_7"]
    assert newest is None


def test_within_the_budget_nothing_changes() -> None:
    found = kept(10_000, [MASK], share=0.9)
    assert texts(found)[3] == ["try t_3", "port 803 " + "r" * 80]
    past = history(*(unit(turn, "a", "b") for turn in range(4)))
    assert condense(Case("anchors", {}).build(), past, 200).units == past.units


def test_a_new_summary_gets_the_anchors_of_what_it_replaces() -> None:
    found = kept(320, [{"name": "summary", "options": {"max_tokens": 40}}])
    assert found.note is not None
    assert found.note == found.units[0]
    assert found.note.reply.text.splitlines()[:3] == ["done: all <|im_end|>", "", "Verbatim from omitted turns:"]
    assert "802" in found.note.reply.text
    past = history(*(unit(turn, f"try t_{turn}", f"port 80{turn} " + "r" * 80) for turn in range(4)))
    assert statuses(past, found) == "rrrk"


def test_the_next_summary_has_the_anchors_of_the_raw_units_once(tmp_path: Path) -> None:
    """What a condenser listed before is not read again: the second list is made from all units that it replaces."""
    (tmp_path / "ask.txt").write_text("Sum up.")
    summary = {"name": "summary", "options": {"max_tokens": 40, "template": str(tmp_path / "ask.txt")}}
    condenser = Case("anchors", {"stages": [summary]}).build()
    past = history(*(answered(turn, f"try t_{turn}", "r" * 80) for turn in range(3)))
    first = condense(condenser, past, 280)
    assert first.note is not None
    longer = replace(past, note=first.note).add(answered(3, "try t_3", "r" * 80)).add(answered(4, "t_4", "r" * 80))
    second = condense(condenser, longer, 280)
    assert second.note is not None
    assert second.note.reply.text.splitlines()[2:] == ["Verbatim from omitted turns:", "t_0", "t_1", "t_2", "t_3"]


def test_what_its_stages_need_is_what_it_needs() -> None:
    writing = Case("anchors", {"stages": [{"name": "summary", "options": {"attempts": 3}}]}).build()
    assert writing.writes == 3
    ranking = Case("anchors", {"stages": [{"name": "attention", "options": {"scorer": "policy@1"}}]}).build()
    assert list(ranking.scorers) == ["policy@1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"share": 1}, "less than 1"), ({"kinds": ["verb"]}, "kinds"), ({"stages": []}, "at least one stage")],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=f"setting up the condenser 'anchors'.*{words}"):
        Case("anchors", options).build()


def test_no_list_grows_over_two_hundred_turns() -> None:
    past, condenser, sizes = history(), Case("anchors", {}).build(), []
    for turn in range(200):
        past = past.add(unit(turn, f"step_{turn}", f"result {turn} " * 6))
        sizes.append(count(flatten(past.pinned, condense(condenser, past, 500).units)))
    assert max(sizes) <= 500

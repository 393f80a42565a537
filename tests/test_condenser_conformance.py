"""The conformance suite: laws that every condenser keeps, ours and those of others, and the field's known faults."""

from dataclasses import replace
from pathlib import Path

import pytest
from conformance import (
    CHOOSING,
    LONG,
    NEVER_CUTS,
    PINNED,
    Case,
    answered,
    cases,
    check_account,
    check_atomic,
    check_budget,
    check_placeholders,
    condense,
    count,
    histories,
    history,
    rule_based,
    spans,
    statuses,
    turns,
    unit,
)
from hypothesis import given, note, settings
from hypothesis import strategies as st
from talk import Counting, agent, last_count, play_all, problem, tokenizer
from talk import engine as talking

from condensegrpo.attention.scorer import ScriptedScorer
from condensegrpo.core.condenser import with_tokens
from condensegrpo.core.messages import History, Message, flatten
from condensegrpo.core.protocols.environment import Step
from condensegrpo.episodes.render import Renderer

ONE_EACH = [pytest.param(case, id=case.name) for case in rule_based()]
CUTTING = [pytest.param(case, id=case.name) for case in rule_based() if case.name not in NEVER_CUTS]
OLDEST_FIRST = [case for case in CUTTING if case.id not in CHOOSING]


def check_contract(case: Case, past: History, tokens: int) -> None:
    """Order, whole units, true accounts and placeholders, the budget; the same again; nothing to do within it."""
    condenser = case.build()
    found = condense(condenser, past, tokens)
    assert condense(condenser, past, tokens) == found, "it gave two answers for one history: keep no state"
    check_account(past, found)
    check_atomic(past, found)
    check_placeholders(past, found)
    check_budget(case.name, past, found, tokens)
    if count(flatten(past.pinned, found.units)) <= tokens:
        again = condense(condenser, History(pinned=past.pinned, units=found.units), tokens)
        assert again.units == found.units, "it changed its own answer, which is within the budget"


# --- laws -------------------------------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(past=histories(), tokens=st.integers(0, 2000))
def test_every_condenser_keeps_the_contract(past: History, tokens: int) -> None:
    for case in cases():
        note(f"{case}")
        check_contract(case, past, tokens)


@settings(max_examples=8)
@given(
    past=histories(most=12, results=st.text(max_size=40) | st.sampled_from(["<|im_end|>", "x " * 300])),
    tokens=st.integers(0, 900),
)
def test_the_budget_is_kept_by_the_policys_own_tokenizer_and_template(past: History, tokens: int) -> None:
    real = Renderer(tokenizer()).count
    for case in rule_based():
        note(f"{case}")
        found = condense(case.build(), past, tokens, real)
        check_account(past, found, real)
        check_placeholders(past, found, real)
        check_budget(case.name, past, found, tokens, real)


@pytest.mark.parametrize("case", CUTTING)
def test_over_100_turns_no_context_grows_beyond_its_budget(case: Case) -> None:
    """Contexts that embed condensed contexts grow geometrically: 12, 103, 323, 672, 1241 tokens in the original."""
    condenser, past, sizes = case.build(), history(), []
    for turn in range(100):  # as the engine does it: raw units, and the last note
        past = with_tokens(past.add(unit(turn, f"step {turn}", "result " * 6)), count)
        found = condense(condenser, past, 400)
        past = past if found.note is None else replace(past, note=found.note)
        sizes.append(count(flatten(PINNED, found.units)))
    assert max(sizes) <= 400
    assert max(sizes[-20:]) <= 1.2 * max(sizes[50:80])


@pytest.mark.parametrize("case", OLDEST_FIRST)
def test_the_oldest_go_first(case: Case) -> None:
    """Truncating from the right deletes the newest turn first."""
    past = history(*(unit(turn, f"reply {turn}", "r" * 30) for turn in range(12)))
    found = condense(case.build(), past, 200)
    letters = statuses(past, found)
    assert letters[-1] != "d" or turns(found) == []
    assert "k" not in letters or letters.rfind("d") < letters.rfind("k")


@pytest.mark.parametrize("case", ONE_EACH)
def test_a_history_of_nothing_and_one_of_one_unit(case: Case) -> None:
    assert condense(case.build(), history(), 100).units == ()
    found = condense(case.build(), history(unit(0, "a", "b")), 1000)
    check_account(history(unit(0, "a", "b")), found)


@pytest.mark.parametrize("case", CUTTING)
def test_an_observation_of_50_000_tokens_does_not_break_the_budget(case: Case) -> None:
    past = history(unit(0, "a", "b"), unit(1, "look", LONG), unit(2, "c", "d"))
    found = condense(case.build(), past, 120)
    assert count(flatten(PINNED, found.units)) <= 120


@pytest.mark.parametrize("case", CUTTING)
def test_a_question_larger_than_the_budget_leaves_at_most_the_newest_unit(case: Case) -> None:
    """The engine stops such an episode, and a run finds it before it starts (test_assemble)."""
    past = history(*(unit(turn, "abc", "x" * 20) for turn in range(5)))
    found = condense(case.build(), past, 5)
    assert len(found.units) <= 1
    check_account(past, found)


# --- known faults of the field ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ONE_EACH)
def test_no_tool_result_is_orphaned(case: Case) -> None:
    """langchain #38352, letta #2605: results whose call was cut away, and calls whose ids come again in every turn."""
    past = history(*(unit(turn, "call", "one", "two " * 20, ids=["call_0", "call_1"]) for turn in range(20)))
    for tokens in (40, 80, 150, 400, 4000):
        check_atomic(past, condense(case.build(), past, tokens))


@pytest.mark.parametrize("case", ONE_EACH)
def test_no_head_is_duplicated_and_no_unit_stands_twice(case: Case) -> None:
    """OpenHands duplicated first events; keeping first and last units without a set union duplicates units."""
    past = history(*(unit(turn, "abc") for turn in range(3)))
    found = condense(case.build(), past, 10_000)
    assert turns(found) == sorted(set(turns(found)))
    assert not [message for message in flatten((), found.units) if message in PINNED]


def test_keeping_the_last_none_keeps_none() -> None:
    """``x[-0:]`` keeps everything."""
    past = history(*(unit(turn, "abc", "long result " * 4) for turn in range(4)))
    assert condense(Case("last_k", {"keep_last": 0}).build(), past, 10_000).units == ()
    masked = condense(Case("observation_mask", {"keep": 0}).build(), past, 10_000)
    assert statuses(past, masked) == "rrrr"


@pytest.mark.parametrize("case", ONE_EACH)
def test_a_condenser_is_asked_once_a_turn_and_ends(case: Case) -> None:
    """OpenHands #8630: condensation that condenses its own work again, for ever."""
    past = history(*(unit(turn, "abc", "y" * 50) for turn in range(30)))
    once = condense(case.build(), past, 300)
    twice = condense(case.build(), History(pinned=PINNED, units=once.units), 300)
    thrice = condense(case.build(), History(pinned=PINNED, units=twice.units), 300)
    assert thrice.units == twice.units


class Instructing(Counting):
    """Says ``do n`` with the observations 1, 3 and 5, and something of the same length with the others."""

    async def step(self, reply: Message) -> Step:
        step = await super().step(reply)
        number = len(self.replies)
        asks = number in (1, 3, 5)
        text = f"seen {number}<{'do' if asks else 'ok'} {number} {'x' * 40}"
        return replace(step, observations=(Message(role="user", content=text),), new_query=asks)


def instructed(case: Case, most: int) -> list[list[int]]:
    """The instructions that each of eight prompts shows, in an episode of units of about 110 tokens."""
    condenser = case.build()
    replies = agent(lambda prompt: f"hello {last_count(prompt)}" if "hello" in prompt else "hello")
    made = talking(replies, condenser=condenser, max_turns=8, max_context_tokens=most)
    made = replace(made, scorers={name: ScriptedScorer(lambda unit: unit.turn) for name in condenser.scorers})
    (one,) = play_all(made, [problem()], Instructing)
    acts = [turn.context for turn in one.turns if turn.kind == "act"]
    return [[n for n in (1, 3, 5) if any(f"do {n} " in message.text for message in context)] for context in acts]


@pytest.mark.parametrize("case", ONE_EACH)
def test_messages_of_the_user_are_shown_whatever_a_condenser_drops(case: Case) -> None:
    shown = instructed(case, 800)
    assert shown == [[], [1], [1], [1, 3], [1, 3], *[[1, 3, 5]] * 3]


@pytest.mark.parametrize("case", CUTTING)
def test_where_there_is_no_room_the_oldest_messages_of_the_user_go_first(case: Case) -> None:
    shown = instructed(case, 290)
    assert shown[-1] in ([5], [3, 5]), "the newest waits for its answer"
    for said, context in zip([[], [1], [1], [1, 3], [1, 3], *[[1, 3, 5]] * 3], shown, strict=True):
        assert context == said[len(said) - len(context) :], "the oldest go first"
        assert context or not said, "the newest stays"


# --- those of others --------------------------------------------------------------------------------------------------

OWN = """
from dataclasses import replace
from condensegrpo.core.messages import Message
from condensegrpo.core.condenser import Condensed, Condenser

class Orphans(Condenser):
    async def condense(self, history, budget):
        return Condensed(units=tuple([replace(unit, results=unit.results[-1:]) for unit in history.units]))

class Backwards(Condenser):
    async def condense(self, history, budget):
        return Condensed(units=tuple(reversed(history.units)))

class Twice(Condenser):
    async def condense(self, history, budget):
        return Condensed(units=tuple([*history.units[:2], *history.units[-2:]]))

class Oversized(Condenser):  # a plain function is taken too
    def condense(self, history, budget):
        return Condensed(units=tuple(history.units))

class Miscounting(Condenser):
    async def condense(self, history, budget):
        empty = Message(role="tool", content="[turn 0, tool result omitted: 1 tokens]", tool_call_id="call_0", name="t")
        return Condensed(units=tuple([replace(unit, results=(empty,)) for unit in history.units]))

class Rewording(Condenser):
    async def condense(self, history, budget):
        short = Message(role="assistant", content="")
        return Condensed(units=tuple([replace(unit, reply=short, results=()) for unit in history.units[-1:]]))

class ByChance(Condenser):
    calls = 0
    async def condense(self, history, budget):
        self.calls += 1
        return Condensed(units=tuple(history.units[-1 - self.calls % 2:]))
"""


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("Orphans", r"has results of the calls \['call_1'\].*keep or drop a unit with all its results"),
        ("Backwards", r"returned units of the turns \[2, 1, 0\]: return each at most once, in the order"),
        ("Twice", r"returned units of the turns \[0, 1, 1, 2\]: return each at most once"),
        ("Oversized", r"3 units make a prompt of 239 tokens, and 180 are allowed: leave out units until"),
        ("Miscounting", "does not count what it replaces"),
        ("Rewording", r"the unit of turn 2 has another reply, '' for 'look'.*note\(history, dropped, text\)"),
        ("ByChance", "gave two answers for one history"),
    ],
)
def test_a_condenser_of_others_that_breaks_a_law_is_caught(name: str, law: str, tmp_path: Path) -> None:
    """In a file, as others come; one that keeps the contract goes through the whole suite in test_condensers_page."""
    (tmp_path / "own.py").write_text(OWN)
    past = history(*(unit(turn, "look", "r" * 60, *(["s" * 60] if name == "Orphans" else [])) for turn in range(3)))
    with pytest.raises(AssertionError, match=law):
        check_contract(Case(f"{tmp_path / 'own.py'}:{name}", {}), past, 180)


# --- observation_mask -------------------------------------------------------------------------------------------------


def mask(tokens: int = 10_000, **options: object) -> list[list[str]]:
    past = history(
        unit(0, "look", "r" * 60),
        answered(1, "think", "o" * 60),
        unit(2, "look", "s" * 60, "t" * 60, tool="notes"),
        unit(3, "look", "u" * 60),
    )
    found = condense(Case("observation_mask", options).build(), past, tokens)
    check_account(past, found)
    return [[message.content for message in kept.messages] for kept in found.units]


def test_old_results_become_placeholders_that_say_how_long_they_were() -> None:
    assert mask(keep=1) == [
        ["look", "[turn 0, tool result omitted: 64 tokens]"],
        ["think", "[turn 1, observation omitted: 64 tokens]"],
        ["look", "[turn 2, tool result omitted: 64 tokens]", "[turn 2, tool result omitted: 64 tokens]"],
        ["look", "u" * 60],
    ]


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(0, 200), max_size=4))
def test_placeholders_count_what_they_replace(lengths: list[int]) -> None:
    past = history(unit(0, "look", *("z" * length for length in lengths)), unit(1))
    (first, _) = condense(Case("observation_mask", {"keep": 1}).build(), past, 100_000).units
    for length, result in zip(lengths, first.results, strict=True):
        omitted = f"[turn 0, tool result omitted: {4 + length} tokens]"
        assert result.content == (omitted if len(omitted) < length else "z" * length)


def test_results_of_excluded_tools_stay() -> None:
    assert mask(keep=0, exclude_tools=["notes"])[2] == ["look", "s" * 60, "t" * 60]


def test_what_the_environment_says_stays_if_only_tools_are_masked() -> None:
    assert mask(keep=0, only_tools=True)[1] == ["think", "o" * 60]


def test_over_budget_kept_results_go_the_oldest_first_and_then_whole_units() -> None:
    whole = count(flatten(PINNED, history(unit(0, "look", "r" * 60)).units))
    assert whole == 23 + 8 + 64
    letters = {}
    past = history(*(unit(turn, "look", "r" * 60) for turn in range(4)))
    for tokens in (23 + 4 * 72, 23 + 4 * 72 - 1, 23 + 3 * 52 + 72, 23 + 3 * 52 + 71, 23 + 72, 23 + 71):
        found = condense(Case("observation_mask", {"keep": 4}).build(), past, tokens)
        letters[tokens] = statuses(past, found)
    assert list(letters.values()) == ["kkkk", "rkkk", "rrrk", "drrk", "dddk", "dddk"]


def test_a_mask_says_what_it_did() -> None:
    past = history(*(unit(turn, "look", "r" * 60) for turn in range(4)))
    told = [condense(Case("observation_mask", {"keep": 2}).build(), past, tokens).reason for tokens in (1000, 150)]
    assert told == ["masked the results of 2 of 4 units", "masked the results of 1 of 4 units, dropped the 2 oldest"]


@pytest.mark.parametrize(("options", "words"), [({"keep": -1}, "at least 0"), ({"exclude_tools": "notes"}, "a list")])
def test_a_mask_refuses_options_that_mean_nothing(options: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=f"setting up the condenser 'observation_mask'.*{words}"):
        Case("observation_mask", options).build()


# --- pipeline ---------------------------------------------------------------------------------------------------------

STAGES = {
    "stages": [{"name": "observation_mask", "options": {"keep": 1}}, {"name": "last_k", "options": {"keep_last": 2}}]
}


def test_a_pipeline_stops_as_soon_as_it_is_within_the_budget() -> None:
    past = history(*(unit(turn, "look", "r" * 60) for turn in range(4)))
    pipeline = Case("pipeline", STAGES).build()
    reasons = [condense(pipeline, past, tokens).reason for tokens in (311, 310, 23 + 3 * 52 + 72, 23 + 52 + 72)]
    assert reasons == ["", *["observation_mask: masked the results of 3 of 4 units"] * 2, reasons[3]]
    assert reasons[3] == "observation_mask: masked the results of 1 of 4 units, dropped the 2 oldest"


def test_a_stage_with_a_trigger_of_its_own_starts_before_the_budget() -> None:
    stages = [{"name": "observation_mask", "options": {"keep": 1}, "over": 0.5}]
    past = history(*(unit(turn, "look", "r" * 60) for turn in range(4)))  # 311 tokens
    pipeline = Case("pipeline", {"stages": stages}).build()
    assert [bool(condense(pipeline, past, tokens).reason) for tokens in (599, 598)] == [False, True]


def test_a_unit_that_two_stages_changed_is_accounted_for_once_and_by_its_raw_tokens() -> None:
    stages = [
        {"name": "observation_mask", "options": {"keep": 1}},
        {"name": "last_k", "options": {"keep_last": 2}, "over": 0},
    ]
    past = history(*(unit(turn, "look", "r" * 60) for turn in range(4)))
    found = condense(Case("pipeline", {"stages": stages}).build(), past, 300)
    assert [(span.units, span.status.value, span.tokens) for span in spans(past, found)] == [
        (2, "dropped", 144),
        (1, "rewritten", 72),
        (1, "kept", 72),
    ]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "at least one stage"),
        ("last_k", "wanted a list of condensers"),
        ([{"name": "last_k", "over": 2}], r"stages\[0\] of the condenser pipeline"),
        ([{"name": "last_q"}], "Did you mean 'last_k'"),
        ([{"name": "last_k", "options": {"keep": 1}}], "keep_last"),
    ],
)
def test_a_pipeline_names_the_stage_that_is_wrong(stages: object, words: str) -> None:
    with pytest.raises(Exception, match=words):
        Case("pipeline", {"stages": stages}).build()

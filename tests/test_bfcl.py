"""The task ``bfcl`` on the real package: the ground truth replayed, the benchmark's verdicts, attacks, two steps."""

import asyncio
import json
import random
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mpmath
import pytest
from command import ROOT, succeed
from recipe_world import make_model
from talk import agent, engine, play_one

from condensegrpo.condensers.observation_mask import ObservationMask
from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.toolformats import JSON_FORMATS
from condensegrpo.integrations.bfcl import CATEGORIES, Bfcl, BfclEpisode, Simulators, bfcl_rows
from condensegrpo.storage.run_folder import read_metrics

FOLDER = Path(sys.prefix) / "others" / "bfcl"
if find_spec("bfcl_eval") is None and FOLDER.is_dir():
    sys.path.append(str(FOLDER))
pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed: make others")

PAGE = (ROOT / "docs" / "how-to" / "connect-bfcl.md").read_text(encoding="utf-8")
CONTRADICTS = "multi_turn_miss_func_49"  # its ground truth calls tail two messages before tail is added
MISTYPED = {f"multi_turn_{category}_173" for category in CATEGORIES}  # close_ticket(ticket_id='ticket_001')
Calls = Sequence[Sequence[tuple[str, dict[str, Any]]]]  # name and arguments, by message of the user


@cache
def task() -> Bfcl:
    return Bfcl()


@cache
def problems() -> dict[str, Problem]:
    """All episodes, by id."""
    return {problem.id: problem for split in ("train", "eval") for problem in task().problems(split)}  # type: ignore[arg-type]  # a loop has str, not Split


def calls_of(problem: Problem) -> list[list[tuple[str, dict[str, Any]]]]:
    """The calls of the ground truth."""
    simulators = Simulators(problem.data, task()._documents)
    return [[simulators.read(source) for source in sources] for sources in problem.data["ground_truth"]]


def said(*calls: tuple[str, object]) -> Message:
    """A reply with these calls."""
    made = (
        ToolCall(id=f"call_{number}", name=name, arguments=json.dumps(arguments))
        for number, (name, arguments) in enumerate(calls)
    )
    return Message(role="assistant", content="", tool_calls=tuple(made))


async def steps(problem: Problem, calls: Calls) -> list[Step]:
    """The steps of an episode with these calls, one a reply, and a reply without a call after each message."""
    episode = task().environment(problem)
    await episode.start()
    replies = [reply for message in calls for reply in [*(said(call) for call in message), said()]]
    return [await episode.step(reply) for reply in replies]


def play(problem: Problem, calls: Calls) -> list[Step]:
    return asyncio.run(steps(problem, calls))


def texts(steps: Sequence[Step]) -> list[str]:
    return [message.text for step in steps for message in step.observations if message.role == "tool"]


def test_the_ground_truth_of_all_episodes_passes_but_for_one_that_contradicts_itself() -> None:
    async def replay() -> dict[str, list[Step]]:
        return {name: await steps(problem, calls_of(problem)) for name, problem in problems().items()}

    played = asyncio.run(replay())
    assert len(played) == 800
    assert {name for name, steps in played.items() if steps[-1].outcome != 1.0} == {CONTRADICTS}
    assert all(step.done is (step is steps[-1]) for steps in played.values() for step in steps)
    refused = {name for name, steps in played.items() if any(text.startswith("Error:") for text in texts(steps))}
    assert refused == MISTYPED | {CONTRADICTS}
    assert max(sum(map(len, texts(steps))) for steps in played.values()) > 70_000


def changed(calls: Calls, rng: random.Random) -> Calls:
    """The calls with one left out, made twice, made a message earlier or later, or with another text as argument."""
    copy = [[(name, dict(arguments)) for name, arguments in message] for message in calls]
    message = rng.choice([message for message in copy if message])
    name, arguments = message.pop(rng.randrange(len(message)))
    match rng.choice(["out", "twice", "moved", "other"]):
        case "twice":
            message += [(name, arguments)] * 2
        case "moved":
            rng.choice(copy).append((name, arguments))
        case "other":
            texts = [key for key, value in arguments.items() if isinstance(value, str)]
            message.append((name, {**arguments, **dict.fromkeys(texts[:1], "other")}))
    return copy


def official(problem: Problem, calls: Calls, model: str) -> bool:
    """The verdict of the benchmark, which evaluates calls as Python."""

    def written(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    source = [[[written(*call)] for call in message] for message in calls]
    checker = import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    verdict = checker.multi_turn_checker(source, problem.data["ground_truth"], dict(problem.data), "", model)
    return bool(verdict["valid"])


def test_changed_calls_are_judged_as_the_benchmark_judges_them() -> None:
    rng, verdicts = random.Random(0), list[bool]()
    for number, problem in enumerate(list(problems().values())[::4]):
        if problem.id == CONTRADICTS:
            continue
        calls = changed(calls_of(problem), rng)
        verdicts.append(official(problem, calls, f"model{number}"))
        assert play(problem, calls)[-1].outcome == float(verdicts[-1]), (problem.id, calls)
    assert 30 < sum(verdicts) < 150


def test_a_user_turn_that_passed_is_a_turn_reward_and_an_omitted_call_costs_the_outcome() -> None:
    problem = problems()["multi_turn_miss_param_1"]
    calls = calls_of(problem)
    assert [bool(message) for message in calls] == [True, True, True, False, True]  # the fourth lacks a number
    rewards = [step.turn_rewards for step in play(problem, calls) if step.new_query or step.done]
    assert rewards == [{"user_turn": 1.0}] * 3 + [{}] + [{"user_turn": 1.0}]
    steps = play(problem, [*calls[:-1], []])
    assert (steps[-1].outcome, steps[-1].turn_rewards) == (0.0, {"user_turn": 0.0})


# --- attacks on the functions


def attacked(name: str, arguments: object, scenario: str) -> tuple[str, bool]:
    """What a call returned, and whether the simulators are as at the beginning."""
    problem = problems()[scenario]

    async def attack() -> tuple[str, BfclEpisode]:
        episode = task().environment(problem)
        await episode.start()
        return (await episode.step(said((name, arguments)))).observations[0].text, episode

    text, episode = asyncio.run(attack())
    fresh = Simulators(problem.data, task()._documents).instances
    checker = import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    return text, bool(checker.state_checker(episode._policy.instances, fresh)["valid"])


FILES = "multi_turn_base_0"  # GorillaFileSystem and TwitterAPI
MATHS = next((name for name, each in problems().items() if "MathAPI" in each.data["involved_classes"]), "")


@pytest.mark.parametrize(
    "name",
    [
        *("__init__", "__class__", "_load_scenario", "_navigate_to_directory", "root", "long_context", "cd.__func__"),
        *("eval", "exec", "__import__('os').system", "os.system", "ls()", "get_stock_info", "cd\n", "𝒄𝒅"),
    ],
)
def test_only_functions_that_are_documented_for_the_scenario_can_be_called(name: str) -> None:
    text, untouched = attacked(name, {}, FILES)
    assert text.startswith("Error: there is no function")
    assert "The functions are: authenticate_twitter, comment," in text
    assert untouched


@pytest.mark.parametrize(
    ("scenario", "name", "arguments", "fault"),
    [
        (FILES, "mkdir", {"dir_name": 3}, "dir_name is 3, wanted a value of type string"),
        (FILES, "mkdir", {"dir_name": None}, "dir_name is None, wanted a value of type string"),
        (FILES, "mkdir", {}, "the call lacks the argument 'dir_name'"),
        (FILES, "mkdir", {"dir_name": "a", "self": {}}, "the call has no argument 'self'"),
        (FILES, "mkdir", {"dir_name": "a", "__class__": "x"}, "the call has no argument '__class__'"),
        (FILES, "mkdir", "__import__('os')", None),
        (FILES, "mkdir", [["a"]], None),
        (FILES, "ls", {"a": 1}, "a is 1, wanted a value of type boolean"),
        (FILES, "tail", {"file_name": "x", "lines": True}, "lines is True, wanted a value of type integer"),
        (FILES, "tail", {"file_name": "x", "lines": 2.0}, "lines is 2.0, wanted a value of type integer"),
        (FILES, "post_tweet", {"content": "a", "tags": "b"}, "tags is 'b', wanted a value of type array"),
        (FILES, "post_tweet", {"content": "a", "tags": [{}]}, "tags is {}, wanted a value of type string"),
        (MATHS, "power", {"base": 9, "exponent": 10**9}, "exponent is 1000000000, wanted at most 1000"),
        (MATHS, "power", {"base": 10**19, "exponent": 2}, "wanted at most 1000000000000000000"),
        (MATHS, "power", {"base": 10**18, "exponent": 1000}, "Exceeds the limit"),
        (MATHS, "power", {"base": 1e18, "exponent": 1000}, "out of range"),
        (MATHS, "square_root", {"number": 2, "precision": 10**8}, "precision is 100000000, wanted at most 1000"),
        (MATHS, "round_number", {"number": 5, "decimal_places": -(10**9)}, "wanted at most 1000"),
        (MATHS, "mean", {"numbers": [1, "2"]}, "numbers is '2', wanted a value of type number"),
    ],
)
def test_arguments_that_do_not_fit_the_schema_are_refused(
    scenario: str, name: str, arguments: object, fault: str | None
) -> None:
    text, untouched = attacked(name, arguments, scenario)
    assert text.startswith(f"Error: {name}: ")
    assert fault is None or fault in text
    assert untouched


@pytest.mark.parametrize(
    "arguments",
    [
        '{"lines": 1e999}',
        '{"lines": NaN}',
        "[" * 100_000,
        '{"lines": ' + "9" * 5000 + "}",
        "",
    ],
)
def test_arguments_that_are_hardly_json_are_refused(arguments: str) -> None:
    async def attack() -> str:
        episode = task().environment(problems()[FILES])
        await episode.start()
        call = ToolCall(id="call_0", name="tail", arguments=arguments)
        return (await episode.step(Message(role="assistant", content="", tool_calls=(call,)))).observations[0].text

    assert asyncio.run(attack()).startswith("Error: tail: ")


def test_a_megabyte_of_text_is_an_argument_like_any_other() -> None:
    text, untouched = attacked("echo", {"content": "x" * 2**20}, FILES)
    assert (len(text), untouched) == (2**20 + len('{"terminal_output": ""}'), True)


def test_nothing_that_an_episode_does_reaches_another_one() -> None:
    posting = problems()[FILES]
    login = {name: posting.data["initial_config"]["TwitterAPI"][name] for name in ("username", "password")}
    dps = mpmath.mp.dps
    for _ in range(2):
        simulators = Simulators(posting.data, task()._documents)
        simulators.call("authenticate_twitter", login)
        tweet = json.loads(simulators.call("post_tweet", {"content": "a"}))
        assert tweet["mentions"] == []
        simulators.call("mention", {"tweet_id": tweet["id"], "mentioned_usernames": ["ana"]})
    Simulators(problems()[MATHS].data, task()._documents).call("logarithm", {"value": 2, "base": 3, "precision": 99})
    assert mpmath.mp.dps == dps


# --- episodes of the engine


def run(problem: Problem, replies: Sequence[str], **options: Any) -> Trajectory:
    left = iter(replies)
    limits = {"max_turns": 40, "max_context_tokens": 40_000, "max_output_tokens": 8000, **options}
    return asyncio.run(play_one(engine(agent(lambda _: next(left)), **limits), problem, task().environment))


def reply_of(calls: Sequence[tuple[str, dict[str, Any]]], form: str = "tagged") -> str:
    return "".join(JSON_FORMATS[form].call(name, arguments) for name, arguments in calls)


def replies_of(problem: Problem, form: str = "tagged") -> list[str]:
    """The calls of a message in replies of at most 16, then one reply without a call."""
    replies = list[str]()
    for calls in calls_of(problem):
        replies += [reply_of(calls[first : first + 16], form) for first in range(0, len(calls), 16)]
        replies.append("done")
    return replies


@pytest.mark.parametrize("name", [*(f"multi_turn_{category}_0" for category in CATEGORIES), "multi_turn_miss_func_1"])
def test_the_engine_plays_the_ground_truth(name: str) -> None:
    problem = problems()[name]
    trajectory = run(problem, replies_of(problem))
    assert (trajectory.stop, trajectory.outcome) == (StopReason.FINISHED, 1.0), trajectory.detail
    assert trajectory.ground_truth == problem.answer
    assert trajectory.answer is None
    assert all(turn.tool_attempts == turn.tool_successes for turn in trajectory.turns)


def test_a_function_that_is_added_later_is_unknown_before_and_shown_by_the_user() -> None:
    problem = problems()["multi_turn_miss_func_1"]  # the third message adds mv
    calls = calls_of(problem)
    replies = [reply_of(calls[0]), "done", reply_of(calls[2]), "I cannot", reply_of(calls[2][1:]), "done"]
    trajectory = run(problem, replies, max_turns=6)
    before, after = trajectory.turns[2].observations, trajectory.turns[4].observations
    assert '"name": "mv"' not in trajectory.turns[0].context[0].text
    assert before[1].text.startswith("<result>Error: there is no function 'mv'. The functions are: cat, cd")
    (added,) = trajectory.turns[3].observations
    schema, _, asked = added.text.partition("\n")
    assert json.loads(schema)["function"]["parameters"]["required"] == ["source", "destination"]
    assert asked.startswith("I have updated some more functions")
    assert "'log.txt' moved to" in after[0].text
    assert trajectory.turns[3].turn_rewards == {}  # nothing was due
    assert trajectory.turns[5].turn_rewards == {"user_turn": 1.0}


def test_long_results_are_condensed_and_judged_in_full() -> None:
    """Of each of four long results the policy reads 4,000 characters, and none when the next unit is there."""
    problem = problems()["multi_turn_long_context_135"]
    condenser = ObservationMask(keep=1, only_tools=True)
    trajectory = run(problem, replies_of(problem), condenser=condenser)
    assert (trajectory.stop, trajectory.outcome) == (StopReason.FINISHED, 1.0), trajectory.detail
    results = [message.text for turn in trajectory.turns for message in turn.observations]
    long = [text for text in results if "characters left out …]" in text]
    assert [len(text) // 100 for text in long] == [40] * 4
    shown = [message.text for message in trajectory.turns[-1].context]
    assert [text in shown for text in long] == [False, False, False, True]
    assert all(message["content"] in shown for turn in problem.data["question"] for message in turn)


def test_a_reply_whose_call_cannot_be_read_ends_the_answer_to_a_message_as_in_the_benchmark() -> None:
    problem = problems()[FILES]
    trajectory = run(problem, ['<tool>{"name": "ls"', "done"], max_turns=2)
    assert [turn.observations[0].role for turn in trajectory.turns] == ["user", "user"]
    assert trajectory.turns[0].turn_rewards == {"user_turn": 0.0}


# --- splits, the page, the recipe


def test_no_scenario_is_in_both_splits_whatever_the_categories() -> None:
    numbers = {split: {each.data["scenario"] for each in task().problems(split)} for split in ("train", "eval")}  # type: ignore[arg-type]  # a loop has str, not Split
    assert not numbers["train"] & numbers["eval"]
    assert len(numbers["train"] | numbers["eval"]) == 200
    base = Bfcl(categories=("base",)).problems("eval")
    assert {each.data["scenario"] for each in base} == numbers["eval"]


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(DataError, match=r"bfcl_eval is not installed. Run `pip install --no-deps bfcl-eval=="):
        Bfcl()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose contexts may be long."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, steps=1)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 32768}))
    return str(folder)


def test_the_recipe_passes_the_checks_before_a_run(model: str) -> None:
    assert "evaluate:" in succeed("train", "bfcl_multi_turn", f"model.path={model}", "--dry-run")


def test_the_example_of_the_page_trains_and_evaluates(model: str, tmp_path: Path) -> None:
    """The replies are those of the ground truth; the template of the tiny model leaves the tools out."""
    (block,) = re.findall(r"```yaml\n(# bfcl\.yaml.*?)```", PAGE, re.DOTALL)
    (tmp_path / "bfcl.yaml").write_text(block)
    script = {
        each.question: [*replies_of(each, "native"), *["done"] * 20]
        for name, each in problems().items()
        if "base" in name
    }
    (tmp_path / "replies.json").write_text(json.dumps(script))  # which is YAML too
    succeed(
        "train",
        "bfcl.yaml",
        f"model.path={model}",
        "sampler={name: scripted, options: {file: replies.json}}",
        "rollout.limits={max_turns: 60, max_context_tokens: 12288, max_output_tokens: 4000}",
        "learner.threads=1",
        "train={steps: 1, problems_per_step: 1, samples_per_problem: 1, eval_every: 1}",
        "algorithm.advantage.options={singleton: raw}",
        "evaluate.problems=2",
        cwd=tmp_path,
    )
    lines = read_metrics(tmp_path / "runs/bfcl/metrics.jsonl")
    trained = [line for line in lines if "rows" in line]
    assert [(line["reward"], line["tool_calls_valid"]) for line in trained] == [(1.0, 1.0)]
    assert all(line["grad_norm"] > 0 for line in trained)
    first, _ = (line["eval/success"] for line in lines if "rows" not in line)  # in the second the script counts on
    assert first == 1.0


def test_a_row_may_hold_a_line_separator_of_unicode(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"id": "a\u2028b"}\n{"id": "c"}\n', encoding="utf-8")
    assert bfcl_rows(tmp_path / "rows.json", "id") == [{"id": "a\u2028b"}, {"id": "c"}]

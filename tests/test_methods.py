"""The recipes of published methods: what three turns see, by hand from each paper's description, and two steps.

The contexts are those of the shipped recipe, played through the engine: its condenser, trigger, tools and messages.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from answering import always
from deciding import call
from memory_questions import write_memory_questions
from recipe_world import write
from talk import said, save_model, tokenizer

from condensegrpo.algorithms.segments import broken_invariants
from condensegrpo.assembly.build import build, build_components
from condensegrpo.assembly.runtime import trajectory_engine
from condensegrpo.config.load import find_config, named_config, shipped
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.messages import Message
from condensegrpo.core.observer import Observer
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.display.console import quiet_libraries
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.render import Renderer
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.training.train import run_training

METHODS = tuple(name for name in shipped() if name.startswith("methods/"))
ROOT = Path(__file__).resolve().parent.parent
PEOPLE = ("Mia", "Ben", "Zoe", "Ada")
EIGHT = PEOPLE * 2
SUMMED = "All four were born."  # by whoever writes summaries
ANSWER = "<answer>Paris</answer>"
POLICY = """
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.samplers.scripted import TextSampler


class Policy(TextSampler):
    '''Gives these replies; every second sample answers wrongly at the end.'''

    def __init__(self, model_path, replies):
        super().__init__(load_tokenizer(model_path), None)
        self._replies = replies

    async def sample(self, prompt_ids, params):
        last = self._replies[-1] if int(params.trajectory.rpartition("/")[2]) % 2 else "<answer>Rome</answer>"
        replies = [*self._replies[:-1], last]
        self._say = lambda request: replies[request.number % len(replies)]  # an evaluation may go on with an id
        return await super().sample(prompt_ids, params)
"""


def find(person: str) -> str:
    return call("search", query=person)


def units(*people: str) -> list[str]:
    """The calls for people with what they return, in short."""
    return [text for person in people for text in (find(person), f"page of {person}")]


def masked(person: str, turn: int) -> list[str]:
    """The call for a person, whose result is omitted."""
    return [find(person), f"[turn {turn}, tool result omitted]"]


def noted(note: str, turns: str) -> list[str]:
    """A note of the policy in the place of turns."""
    return [note, f"[{turns} omitted, replaced by your note above]"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An episode under a recipe."""

    replies: Sequence[str]  # of the policy, its summaries among them
    views: Mapping[int, Sequence[str]]  # by turn, what it sees behind the system message and the question
    written: tuple[int, ...] = ()  # the turns that write for the condenser
    changes: tuple[str, ...] = ()  # sizes; the rules stay


SUMMARISED = [SUMMED, "[turns up to 1 omitted, summarised above]"]
TRIGGER = ("rollout.limits.max_context_tokens=4000", "rollout.condense.threshold=0.4")  # three pages are more
OPEN, BACK = call("branch", description="Ben"), call("return", message="Ben is no use")
OPENED, BOTH, COMPACT = (
    "<result>The branch is open.</result>",
    call("prune", turns=[0, 1], note="no use"),
    call("compact"),
)
ASKED = "<result>You are asked for a summary next.</result>"
FOLDS = [
    call("prune", turns=[0], note="Mia: no") + find("Ben"),
    call("prune", turns=[1], note="Ben: no") + find("Zoe"),
    call("prune", turns=[0, 1, 2], note="none of them") + find("Ada"),
]
NOTING, CLEARING = call("memory_write", name="Mia", text="no"), call("prune", turns=[0, 1])
NOTED, GATE = "\n\n[Your notes]\nMia: no", call("memory_write", name="1", text="a lamp.")
ONE, REST = call("prune", turns=[0]), call("prune", turns=[1, 2], note="no")
CASES = {
    # question, latest state with its query, what the query returned
    "mem1": Case(
        replies=[f"<IS>know {number}</IS>{find(person)}" for number, person in enumerate(PEOPLE)] + [ANSWER],
        views={
            0: [],
            1: [f"<IS>know 0</IS>{find('Mia')}", "page of Mia"],
            2: [f"<IS>know 1</IS>{find('Ben')}", "page of Ben"],
            4: [f"<IS>know 3</IS>{find('Ada')}", "page of Ada"],
        },
    ),
    # question, report of the last round with its action, what the action returned
    "iterresearch": Case(
        replies=[f"<report>{number}</report>{find(person)}" for number, person in enumerate(PEOPLE)] + [ANSWER],
        views={
            1: [f"<report>0</report>{find('Mia')}", "page of Mia"],
            2: [f"<report>1</report>{find('Ben')}", "page of Ben"],
            3: [f"<report>2</report>{find('Zoe')}", "page of Zoe"],
        },
    ),
    # question, memory, chunk; at the end the memory
    "memagent": Case(
        replies=["nothing", "a sofa", "a sofa, a lamp", "sofa lamp desk vase"],
        views={
            0: [],
            1: ["nothing", "In room 0 is a sofa."],
            2: ["a sofa", "In room 1 is a lamp."],
            3: ["a sofa, a lamp", "Answer the question in a few words."],
        },
    ),
    # everything until the threshold, the request for a summary, then the summary in the place of the calls before
    "supo": Case(
        replies=[*map(find, PEOPLE[:3]), SUMMED, find("Ada"), ANSWER],
        views={
            2: units("Mia", "Ben"),
            3: units("Mia", "Ben", "Zoe"),
            4: [*SUMMARISED, *units("Zoe")],
            5: [*SUMMARISED, *units("Zoe", "Ada")],
        },
        written=(3,),
        changes=TRIGGER,
    ),
    # as supo
    "compactionrl": Case(
        replies=[*map(find, PEOPLE), SUMMED, ANSWER],
        views={
            3: units("Mia", "Ben", "Zoe"),
            4: units(*PEOPLE),
            5: [SUMMED, "[turns up to 2 omitted, summarised above]", *units("Ada")],
        },
        written=(4,),
        changes=(TRIGGER[0], "rollout.condense.threshold=0.5"),
    ),
    # before each step the history is edited, from the first on that has one
    "adacom": Case(
        replies=[find("Mia"), find("Ben"), SUMMED, find("Zoe"), SUMMED, ANSWER],
        views={
            1: units("Mia"),
            2: units("Mia", "Ben"),
            3: [SUMMED, "[turns up to 0 omitted, summarised above]", *units("Ben")],
            4: [SUMMED, "[turns up to 0 omitted, summarised above]", *units("Ben", "Zoe")],
            5: [*SUMMARISED, *units("Zoe")],
        },
        written=(2, 4),
    ),
    # as supo, but another model writes, by a guideline
    "acon": Case(
        replies=[*map(find, PEOPLE), ANSWER],
        views={
            2: units("Mia", "Ben"),
            3: [*SUMMARISED, *units("Zoe")],
            4: [*SUMMARISED, *units("Zoe", "Ada")],
        },
        changes=TRIGGER,
    ),
    # what the policy did not remove; its notes where the turn that wrote them is gone
    "swemem": Case(
        replies=[find("Mia"), NOTING, CLEARING, find("Ben"), ANSWER],
        views={
            1: units("Mia"),
            2: [*units("Mia"), NOTING, "<result>The note is written; 1995 characters are left.</result>"],
            3: [CLEARING, f"<result>2 turns left your context: 0–1</result>{NOTED}"],
            4: [CLEARING, f"<result>2 turns left your context: 0–1</result>{NOTED}", *units("Ben")],
        },
    ),
    # question, memory, chunk; the memory changes where the policy writes, and no chunk follows the answer
    "grumem": Case(
        replies=["next", "next", GATE, "next", "<answer>sofa lamp desk vase</answer>"],
        views={
            0: [],
            1: ["next", "In room 0 is a sofa."],
            2: ["next", "In room 1 is a lamp."],
            3: [GATE, "<result>The note is written; 1992 characters are left.</result>"],
            4: ["next", "In room 2 is a desk.\n\n[Your notes]\n1: a lamp."],
        },
        changes=("task.options.messages=4",),
    ),
    # as supo, but another model writes
    "resum": Case(
        replies=[*map(find, PEOPLE), ANSWER],
        views={
            2: units("Mia", "Ben"),
            3: [*SUMMARISED, *units("Zoe")],
            4: [*SUMMARISED, *units("Zoe", "Ada")],
        },
        changes=TRIGGER,
    ),
    # first events, a summary, the newest events
    "openhands": Case(
        replies=[*map(find, EIGHT), SUMMED, find("Mia"), ANSWER],
        views={
            7: units(*EIGHT[:7]),
            8: units(*EIGHT),
            9: [*SUMMARISED, *units(*EIGHT[2:])],
            10: [*SUMMARISED, *units(*EIGHT[2:], "Mia")],
        },
        written=(8,),
        changes=("rollout.limits.max_context_tokens=6000", "rollout.condense.threshold=0.6"),
    ),
    # the last ten observations; all calls
    "observation_masking": Case(
        replies=[*map(find, EIGHT), *map(find, PEOPLE), ANSWER],
        views={
            10: units(*EIGHT, "Mia", "Ben"),
            11: [*masked("Mia", 0), *units(*EIGHT[1:], "Mia", "Ben", "Zoe")],
            12: [*masked("Mia", 0), *masked("Ben", 1), *units(*EIGHT[2:], *PEOPLE)],
        },
        changes=("rollout.limits.max_context_tokens=6000",),
    ),
    # everything until the trigger, then the last three results; all calls
    "context_editing": Case(
        replies=[*map(find, EIGHT[:6]), ANSWER],
        views={
            4: units(*PEOPLE),
            5: [*masked("Mia", 0), *masked("Ben", 1), *units("Zoe", "Ada", "Mia")],
            6: [*masked("Mia", 0), *masked("Ben", 1), *masked("Zoe", 2), *units("Ada", "Mia", "Ben")],
        },
        changes=("rollout.limits.max_context_tokens=4000", "rollout.condense.threshold=0.55"),
    ),
    # the main line; in a branch also its turns; after the return only its message
    "foldgrpo": Case(
        replies=[find("Mia"), OPEN, find("Ben"), find("Zoe"), BACK, ANSWER],
        views={
            2: [*units("Mia"), OPEN, OPENED],
            4: [*units("Mia"), OPEN, OPENED, *units("Ben", "Zoe")],
            5: [*units("Mia"), OPEN, OPENED, BACK, "<result>Turns 2–3 left your context.</result>"],
        },
    ),
    # the history with a summary where the policy deleted; nothing where it gave none
    "memact": Case(
        replies=[find("Mia"), find("Ben"), BOTH, find("Zoe"), call("prune", turns=[2]), ANSWER],
        views={
            2: units("Mia", "Ben"),
            3: [*noted("no use", "turns up to 1"), BOTH, "<result>2 turns left your context: 0–1</result>"],
            5: [
                *noted("no use", "turns up to 1"),
                *units("Zoe"),
                *(call("prune", turns=[2]), "<result>1 turn left your context: 2</result>"),
            ],
        },
    ),
    # summaries in order and the latest turn; a granular condensation twice, then a deep consolidation
    "agentfold": Case(
        replies=[find("Mia"), *FOLDS, ANSWER],
        views={
            1: units("Mia"),
            2: [
                *noted("Mia: no", "turns up to 0"),
                *(FOLDS[0], "<result>1 turn left your context: 0</result>", "page of Ben"),
            ],
            3: [
                *noted("Mia: no", "turns up to 0"),
                *noted("Ben: no", "turns up to 1"),
                *(FOLDS[1], "<result>1 turn left your context: 1</result>", "page of Zoe"),
            ],
            4: [
                *noted("none of them", "turns up to 2"),
                *(FOLDS[2], "<result>3 turns left your context: 0–2</result>", "page of Ada"),
            ],
        },
    ),
    # everything until the policy calls, the request for a summary, then the summary
    "selfcompact": Case(
        replies=[find("Mia"), find("Ben"), COMPACT, SUMMED, find("Zoe"), ANSWER],
        views={
            2: units("Mia", "Ben"),
            3: [*units("Mia", "Ben"), COMPACT, ASKED],
            4: [*SUMMARISED, COMPACT, ASKED],
            5: [*SUMMARISED, COMPACT, ASKED, *units("Zoe")],
        },
        written=(3,),
    ),
    # nothing is compressed, then one block, then all of them
    "contextbudget": Case(
        replies=[find("Mia"), find("Ben"), ONE, REST, ANSWER],
        views={
            2: units("Mia", "Ben"),
            3: [*units("Ben"), ONE, "<result>1 turn left your context: 0</result>"],
            4: [*noted("no", "turns up to 2"), REST, "<result>2 turns left your context: 1–2</result>"],
        },
    ),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of one layer, a policy that plays a script, passages, questions and conversations."""
    quiet_libraries()
    folder = tmp_path_factory.mktemp("methods")
    save_model(folder / "model")
    (folder / "policy.py").write_text(POLICY)
    write(folder / "passages.jsonl", [{"title": person, "text": f"{person} was born. " * 20} for person in PEOPLE])
    for name, question in (("train", "Where was Mia born?"), ("eval", "Where was Ben born?")):
        write(folder / f"{name}.jsonl", [{"question": question, "answer": {"value": "Paris", "aliases": ["Paris"]}}])
    rooms = ("sofa", "lamp", "desk", "vase")
    asked = [("home", f"Which thing is in room {n % 2}, asked {n}?", [rooms[n % 2]]) for n in range(20)]
    write_memory_questions(folder, {"home": [[f"In room {n} is a {rooms[n]}." for n in range(4)]]}, asked)
    return folder


def recipe(method: str, world: Path, *more: str) -> RunConfig:
    """A recipe with the data and the model of the world; its rules stay."""
    changes = [
        f"runs_dir={world / 'runs'}",
        f"model.path={world / 'model'}",
        "model.dtype=float32",
        "learner={threads: 1, tokens_per_micro_batch: 9000, zero_stage: 0}",
        "train={steps: 1, problems_per_step: 1, samples_per_problem: 2, eval_every: 0, save_every: 0}",
        "evaluate.problems=1",
    ]
    if method in ("memagent", "grumem"):
        changes += [f"task.data={world}", "task.options.messages=2"]
    else:
        changes += [
            f"task.data={world / 'train.jsonl'}",
            f"task.eval_data={world / 'eval.jsonl'}",
            f"rollout.tools.use.0.options.corpus={world / 'passages.jsonl'}",
            f"rollout.tools.use.0.options.cache={world / 'cache'}",
            "rollout.tools.use.0.options.passages=1",
        ]
    if method in ("resum", "acon"):
        changes.append(f"condenser.options.url={always(SUMMED)}")
    return named_config(f"methods/{method}", [*changes, *CASES[method].changes, *more])


def played(config: RunConfig, replies: Sequence[str]) -> Trajectory:
    """The trajectory of a policy that gives these replies."""
    parts = build_components(config)
    sampler = ScriptedSampler([said(reply) for reply in replies])
    episode = run_episode(
        parts.problems("train")[0],
        environment=parts.task.environment,
        engine=trajectory_engine(parts, renderer=Renderer(tokenizer()), sampler=sampler, temperature=1.0),
        group_id="g",
        sample=0,
        seed=lambda number: number,
    )
    return asyncio.run(episode)


def short(message: Message) -> str:
    """A message in few words: of a result its page, without numbers of tokens, meter and request for a summary."""
    page = re.search(r"<result>\[1\] (\w+)", message.text)
    if page:
        return f"page of {page[1]}"
    text = re.sub(r"\s*\n(\[turn \d+[:\]][^\n]*|\nWrite a summary that.*)", "", message.text, flags=re.DOTALL)
    return re.sub(r": \d+ tokens\]", "]", text)


@pytest.mark.parametrize("method", CASES)
def test_the_turns_of_a_method_see_what_its_paper_describes(world: Path, method: str) -> None:
    case = CASES[method]
    one = played(recipe(method, world), case.replies)
    assert one.stop is StopReason.ANSWERED
    assert broken_invariants(one) == ()
    assert tuple(number for number, turn in enumerate(one.turns) if turn.kind == "condense") == case.written
    pinned = one.turns[0].context
    assert [message.role for message in pinned] == ["system", "user"]
    for number, expected in case.views.items():
        context = one.turns[number].context
        assert context[:2] == pinned
        assert [short(message) for message in context[2:]] == list(expected), number


# methods with an estimator, an aggregation, a task or a model of summaries of their own; the condensers of the others
# train in test_train_condensers.py and test_train_deciding.py
TRAINED = (
    *("adacom", "compactionrl", "contextbudget", "foldgrpo", "grumem", "iterresearch", "openhands", "resum", "supo"),
)


@pytest.mark.parametrize("method", TRAINED)
def test_a_method_trains(world: Path, method: str) -> None:
    plugin = {"name": f"{world / 'policy.py'}:Policy", "options": {"replies": list(CASES[method].replies)}}
    config = recipe(method, world, f"sampler={json.dumps(plugin)}")
    folder = RunFolder.create(world / "runs" / method)
    with folder.locked():
        assert run_training(build(config), folder, observer=Observer(), stopping=lambda: False)
    lines = [line for line in read_metrics(folder.metrics) if "loss" in line]
    assert [line["step"] for line in lines] == [1]
    assert all(line["grad_norm"] > 0 for line in lines)


def test_the_policy_under_a_shrinking_budget_reads_what_is_free(world: Path) -> None:
    one = played(recipe("contextbudget", world), CASES["contextbudget"].replies)
    meter = re.search(r"\[turn 0: (\d+) of 4096 context tokens used, (\d+) left\]$", one.turns[1].context[-1].text)
    assert meter is not None
    assert int(meter[1]) + int(meter[2]) == 4096
    trigger = named_config("methods/contextbudget").rollout.condense
    assert [trigger.budget(4096, step) for step in (0, 100, 200)] == [4096, 3072, 2048]


def test_every_method_is_tried_short_and_in_the_table() -> None:
    assert {f"methods/{method}" for method in CASES} == set(METHODS)
    page = (ROOT / "docs/reference/methods.md").read_text(encoding="utf-8")
    for method in CASES:
        text = find_config(f"methods/{method}").read_text(encoding="utf-8")
        header, _, differs = text.partition("# Differs: ")
        assert differs
        sources = re.findall(r"https://arxiv\.org/abs/\d{4}\.\d{5}|https://(?:docs|platform)[\w./-]+", header)
        (row,) = [line for line in page.splitlines() if f"| `methods/{method}` |" in line]
        assert len(sources) == 1
        assert sources[0] in row
        assert len(text.splitlines()) <= 40

"""What a configuration names is built, or refused before any model is loaded."""

import json
from pathlib import Path

import pytest
import torch
from builders import trajectory, turn
from formats import answers
from tiny import qwen3, tokenizer

from condensegrpo.algorithms import invariance
from condensegrpo.algorithms.objective import PerToken
from condensegrpo.assembly.build import build, build_components
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.objects import Parts, configured
from condensegrpo.assembly.preflight import check_model
from condensegrpo.condensers.pipeline import Pipeline
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.load import evaluations, find_config, load_config, shipped, vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import CondenseError, ConfigError, DataError
from condensegrpo.core.protocols.reward import RewardResult
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.weighted_sum import WeightedSum
from condensegrpo.tasks.answers import AnswerEnvironment


def quickstart(*overrides: str) -> RunConfig:
    return load_config(find_config("quickstart"), overrides)


def test_every_shipped_configuration_that_needs_no_data_can_be_built() -> None:
    for name in shipped():
        config = load_config(find_config(name))
        if config.task.name == "ledger":
            train, held_out = map(build(config).problems, ("train", "eval"))
            assert len(train) > len(held_out) == 256, name


def test_the_evaluations_of_the_quickstart_reach_beyond_what_it_trains_on() -> None:
    config = quickstart()
    longest = {len(one.data["ops"]) for one in build(config).problems("train")[:200]}
    assert longest == {3, 4, 5, 6}
    for variant in ("K=20", "K=50"):
        varied = evaluations(config)[variant]
        problems = build(varied).problems("eval")
        operations = {len(one.data["ops"]) for one in problems}
        assert operations == {int(variant.removeprefix("K="))}
        assert varied.rollout.limits.max_turns == operations.pop() + 2  # the first note, and the answer


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("condenser.name=last_kk", "Did you mean 'last_k'"),
        ("condenser.options.keep_lst=3", "keep_last"),
        ("algorithm.advantage.estimator=grop", "Did you mean 'grpo'"),
        ("algorithm.advantage.options.context_lo=3", "context_low"),
        ("algorithm.loss.name=cliped", "Did you mean 'clipped'"),
        ("algorithm.loss.options.clip=3", "clip_low"),
        ("rollout.tools.use=[calculater]", "Did you mean 'calculator'"),
        ("task.options.min_ops=9", "min_ops <= max_ops"),
        ("task.data=x.jsonl", "data"),
        ("train.samples_per_problem=1", "at least 2 trajectories"),
        ("algorithm.advantage.options.context_low=60", "context_low"),
        ("algorithm.loss.options.clip_low=abc", "the option clip_low is 'abc', wanted a number"),
        ("task.options={min_ops: 1, max_ops: 1}", "only 9 exist"),
        ("evaluate.variants={far: [rollout.limits.max_turnz=20]}", "Did you mean 'max_turns'"),
        ("evaluate.variants={far: [task.options.min_opz=20]}", "min_opz"),
        ("sampler.name=transfomers", "Did you mean 'transformers'"),
        ("sampler.options.max_bach=2", "max_bach"),
        ("trackers=[{name: wandb, options: {projekt: x}}]", "Did you mean 'project'"),
        (
            "trackers=[{name: mlflow, options: {tracking_uri: 'http://ana:secret@host'}}]",
            "{'tracking_uri': 'http://***@host'}: tracking_uri names a user or password",
        ),
        ("reward={name: weighted_sum, options: {parts: {name: correct}}}", "wanted a list of rewards"),
        (
            "algorithm.advantage.options.coeficient=1",
            "no option 'coeficient'. Did you mean 'coefficient'? Its options are: context_",
        ),
        (
            "algorithm={loss: {name: reinforce, options: {clip: 1}}}",
            "'reinforce': it has no option 'clip'. Its options are: n",
        ),
        ("algorithm.advantage.options.coefficient=null", "the option coefficient is None, wanted a number"),
        ("algorithm.advantage.options.guard='0.2'", "the option guard is '0.2', wanted a number"),
        ("algorithm.advantage.options.accuracy=batch", "the option accuracy is 'batch', wanted 'std' or 'none'"),
        ("algorithm.loss.options.clip_low='0.2'", "the option clip_low is '0.2', wanted a number"),
        ("algorithm.loss.options.dual_clip=many", "the option dual_clip is 'many', wanted a number"),
        (
            "algorithm.advantage.context_anchors=[48, 16]",
            "checking algorithm.advantage.context_anchors: found [48.0, 16.0]",
        ),
        ("algorithm.importance.cap=0.5", "cap is 0.5, wanted a finite number >= 1, or none (0 in a configuration)"),
    ],
)
def test_what_does_not_exist_or_fit_is_named(override: str, wanted: str) -> None:
    with pytest.raises(CondenseError) as caught:
        build(quickstart(override))
    assert wanted in str(caught.value)
    assert ".." not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "source"),
    [("tool_format: tagged", "rollout.tools.format"), ("keep_last: 3", "condenser.options.keep_last")],
)
def test_what_a_task_gets_from_the_rollout_is_no_option_of_it(option: str, source: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 and 1?", "answer": "1+1 = <<1+1=2>>2\\n#### 2"}\n')
    data = [f"task.data={rows}", f"task.eval_data={rows}"]
    with pytest.raises(ConfigError, match=rf"the task gets it from {source}, which is .* Remove task\.options"):
        build_components(load_config(find_config("gsm8k"), [*data, f"task.options={{{option}}}"]))


@pytest.mark.parametrize(
    ("chosen", "option"),
    [
        ("advantage: {estimator: efficient, options", "context_N"),
        ("advantage: {estimator: efficient, options", "truncated_N"),
        ("advantage: {estimator: gigpo, options", "state_NK"),
        ("loss: {name: gspo, options", "turn_T"),
    ],
)
def test_what_the_engine_supplies_is_no_option(chosen: str, option: str) -> None:
    with pytest.raises(CondenseError) as caught:
        build(quickstart(f"algorithm={{{chosen}: {{{option}: 1}}}}}}"))
    told, _, known = str(caught.value).partition("Its options are: ")
    assert f"has no option {option!r}" in told
    assert known
    assert option not in known


def test_a_reward_in_a_file_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Brief:\n"
        "    def __init__(self, bonus=1.0):\n"
        "        self.bonus = bonus\n"
        "    def __call__(self, trajectory, problem):\n"
        "        return {'brief': self.bonus / len(trajectory.turns)}\n"
    )
    components = build(quickstart(f"reward={{name: '{path}:Brief', options: {{bonus: 3.0}}}}"))
    assert type(components.reward).__name__ == "Brief"


def test_a_tool_in_a_file_gets_its_schema_from_its_signature(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(
        "def lookup(word: str) -> str:\n"
        '    """Look a word up.\n\n    Args:\n        word: what to look up.\n    """\n'
        "    return word.upper()\n"
    )
    components = build(quickstart(f"rollout.tools.use=['{path}:lookup']"))
    (schema,) = components.toolbox.schemas
    assert schema["function"]["name"] == "lookup"
    assert list(schema["function"]["parameters"]["properties"]) == ["word"]


def test_a_tool_with_options_is_a_class_whose_call_is_the_tool(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(
        "class Shout:\n"
        "    def __init__(self, *, times: int = 1) -> None:\n"
        "        self.times = times\n"
        "    def __call__(self, word: str) -> str:\n"
        '        """Shout a word.\n\n        Args:\n            word: what to shout.\n        """\n'
        "        return word.upper() * self.times\n"
    )
    components = build(quickstart(f"rollout.tools.use=[calculator, {{name: '{path}:Shout', options: {{times: 2}}}}]"))
    assert components.toolbox.names == ("calculator", "Shout")
    shouted = answers(components.toolbox, '<tool_call>{"name": "Shout", "arguments": {"word": "no"}}</tool_call>')
    assert [message.content for message in shouted.messages] == ["NONO"]


@pytest.mark.parametrize(
    ("tools", "wanted"),
    [
        ("[{name: calculator, options: {digits: 3}}]", "it is no class and has no options"),
        ("[{name: 'tests/tool_object.py:counted', options: {start: 3}}]", "it is no class and has no options"),
        ("[{name: search, options: {passage: 3}}]", "no option 'passage'"),
        ("[{name: search, options: {corpus: none.jsonl}}]", "opening the search corpus none.jsonl: there is no such"),
        ("[{name: calculator, opt: {}}]", "opt"),
    ],
)
def test_options_that_a_tool_does_not_take_are_refused(tools: str, wanted: str) -> None:
    with pytest.raises(CondenseError, match=wanted):
        build(quickstart(f"rollout.tools.use={tools}"))


def test_the_code_format_runs_python_and_nothing_else() -> None:
    with pytest.raises(ConfigError, match=r"found calculator, and rollout.tools.format=code runs the tool python"):
        build(quickstart("rollout.tools.use=[calculator]", "rollout.tools.format=code"))


@pytest.mark.parametrize(
    ("member", "fault"),
    [
        ("def parse(self, text): return None", "parse() is None, wanted ToolCalls or Malformed"),
        (
            "def parse(self, text): return (ToolCall(id='0', name='add', arguments={}),)",
            "arguments as JSON text, found",
        ),
        (
            "def result(self, call_id, name, text): return text",
            "result() is '2', wanted a Message of role tool or user",
        ),
        ("def instructions(self, schemas): return schemas[0]['name']", "KeyError: 'name'"),
        ("stop_strings = '</call>'", "stop_strings is '</call>', wanted a tuple of texts"),
    ],
)
def test_a_tool_format_is_tried_before_a_run(tmp_path: Path, member: str, fault: str) -> None:
    file = tmp_path / "mine.py"
    imports = "from condensegrpo.core.messages import ToolCall\nfrom condensegrpo.episodes.toolformats import Tagged\n"
    file.write_text(f"{imports}\nclass Mine(Tagged):\n    {member}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        build(quickstart(f"rollout.tools.format={file}:Mine"))
    assert fault in str(refused.value)
    assert f"trying the tool format {file}:Mine (" in str(refused.value)


def test_a_plug_in_without_its_method_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Forgetful:\n    def shorten(self, history): ...\n")
    with pytest.raises(ConfigError, match=r"Forgetful is no Condenser \(.*mine\.py:1\)"):
        build(quickstart(f"condenser={{name: '{path}:Forgetful'}}"))


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(
        'def calculator(expression: str) -> str:\n    """Add.\n\n    Args:\n        expression: it.\n    """\n'
    )
    with pytest.raises(ConfigError, match="two tools have one name"):
        build(quickstart(f"rollout.tools.use=[calculator, '{path}:calculator']"))


def test_every_reward_by_name_can_be_built() -> None:
    for name in ("correct", "format", "inverse_max_context", "tool_calls"):
        components = build(quickstart(f"reward={{name: {name}}}"))
        assert callable(components.reward)


def parts(text: str) -> str:
    return f"reward={{name: weighted_sum, options: {{parts: [{text}]}}}}"


def test_a_weighted_sum_takes_rewards_by_name_and_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Brief:\n"
        "    def __call__(self, trajectory, problem):\n"
        "        return {'brief': 1 / len(trajectory.turns)}\n"
    )
    reward = build(quickstart(parts(f"{{name: correct}}, {{name: '{path}:Brief', weight: 0.5}}"))).reward
    one = trajectory(turn([1], [2]), turn([1, 2], [3]), answer="7")
    result = reward(one, Problem(id="p", question="?", answer="7"))
    assert isinstance(result, RewardResult)
    assert result.components == {"correct": 1.0, "Brief": 0.25}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{name: corect}", "Did you mean 'correct'"),
        ("{name: correct, wieght: 2}", "Did you mean 'weight'"),
        ("{name: correct, weight: -1}", "weight: found -1"),
        ("{weight: 1}", "name: missing"),
        (
            "{name: correct}, {name: weighted_sum, options: {parts: [{name: correct}]}}",
            "the part weighted_sum of reward.options.parts: it has parts of its own",
        ),
    ],
)
def test_a_part_that_makes_no_sense_is_named(text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(quickstart(parts(text)))
    assert wanted in str(caught.value)


def test_the_anchors_of_the_default_estimator_follow_the_context_budget() -> None:
    """Budget 160: contexts of 10 tokens and fewer are as good as they get, those of 160 as bad."""
    components = build(quickstart("algorithm={}", "rollout.limits.max_context_tokens=160"))
    scores = invariance.SCORES._replace(
        score_N=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        total_N=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        context_N=torch.tensor([5.0, 10.0, 160.0, 5.0]),
        turn_N=torch.zeros(4),
        group_N=torch.zeros(4, dtype=torch.int64),
        turns_N=torch.ones(4, dtype=torch.int64),
        result_turn_N=-torch.ones(4, dtype=torch.int64),
        truncated_N=torch.zeros(4, dtype=torch.bool),
        state_NK=torch.zeros(4, 1, dtype=torch.int64),
        act_NK=torch.zeros(4, 1, dtype=torch.int64),
    )
    shortest, short, long, wrong = components.estimator(scores).advantage_NK.flatten().tolist()
    assert shortest == short > long > 0 > wrong


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (("algorithm.loss.name=clipped",), True),
        (("algorithm.loss.name=gspo",), False),
        (("algorithm.importance={cap: 2, level: token}",), True),
        (("algorithm.importance={cap: 2, level: turn}",), False),
        (("algorithm.importance={cap: 2, level: turn}", "algorithm.updates_per_batch=2"), False),
        (("algorithm.importance={cap: 0, level: turn}",), True),
        (("algorithm.loss.name=gspo", "algorithm.kl.coefficient=0.1"), False),
        (("algorithm.loss.name=cispo", "algorithm.kl.coefficient=0.1"), True),
    ],
)
def test_objectives_that_look_at_whole_turns_are_never_taken_in_parts(overrides: tuple[str, ...], wanted: bool) -> None:
    assert isinstance(build(quickstart(*overrides)).objective, PerToken) == wanted


@pytest.mark.parametrize(
    ("section", "base", "written", "fault"),
    [
        ("condenser", "condenser.Condenser", "condence", "Mine has no condense .* Did you mean 'condence'"),
        ("task", "protocols.task.Task", "problem", "Mine has no problems and no environment .* Did you mean 'problem'"),
    ],
)
def test_a_method_with_a_wrong_name_is_named(tmp_path: Path, section: str, base: str, written: str, fault: str) -> None:
    """A class that inherits its base has a method of the right name, which only raises."""
    module, _, name = base.rpartition(".")
    (tmp_path / "own.py").write_text(
        f"from condensegrpo.core.{module} import {name}\nclass Mine({name}):\n    def {written}(self, *_): ...\n"
    )
    with pytest.raises(ConfigError, match=fault):
        build(quickstart(f"{section}={{name: '{tmp_path}/own.py:Mine'}}", "warm_start.steps=0"))


FAILING = """
class Task:
    def __init__(self, where):
        self.where = where
    def problems(self, split):
        if self.where == "problems":
            return {}["train"]
        from condensegrpo.core.protocols.task import Problem
        return [Problem(id="p1", question="?")]
    def environment(self, problem):
        return self
    async def start(self):
        return {"start": 1 / 0} if self.where == "start" else "no messages"
    async def step(self, reply): ...
"""


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("problems", "making the train problems of the task: KeyError: 'train'"),
        ("start", "rehearsing the problem p1 of the task Task: starting the environment: ZeroDivisionError"),
        ("nothing", "the task Task: starting the environment: TypeError: .* returned 'no messages', wanted a tuple"),
    ],
)
def test_a_task_that_fails_before_training_is_named(tmp_path: Path, where: str, wanted: str) -> None:
    (tmp_path / "mine.py").write_text(FAILING)
    config = quickstart(f"task={{name: '{tmp_path}/mine.py:Task', options: {{where: {where}}}}}", "warm_start.steps=0")
    model = tmp_path / "model"
    qwen3().save_pretrained(model)
    tokenizer().save_pretrained(model)
    with pytest.raises(ConfigError, match=wanted):
        check_model(build_components(config), str(model))


@pytest.mark.filterwarnings("ignore:rendering a conversation")  # the template of tiny has no special tokens
def test_a_variant_that_leaves_a_draft_of_the_answer_no_room_is_refused_before_training(tmp_path: Path) -> None:
    form = "rollout.stop_when_confident={form: 'It is {answer}.'}"
    config = quickstart(form, "evaluate.variants={short: [rollout.limits.max_output_tokens=1]}")
    qwen3().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    check_model(build(vary(config, ["evaluate.variants={}"])), str(tmp_path))
    with pytest.raises(ConfigError, match=r"rollout\.limits\.max_output_tokens=1 leaves no room"):
        check_model(build(config), str(tmp_path))


@pytest.mark.filterwarnings("ignore:rendering a conversation")  # the template of tiny has no special tokens
def test_ranks_of_a_row_over_which_the_heads_do_not_divide_are_refused_before_training(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"sequence_parallel: found 3, .* 2 attention heads and 1 key heads"):
        check_model(build(quickstart("learner.sequence_parallel=3", "evaluate.variants={}")), str(tmp_path))


def test_quantised_weights_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    quantised = {**settings, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ConfigError, match=r"are quantised \(gptq\), and the learner .* need plain ones"):
        check_model(build(quickstart("evaluate.variants={}")), str(tmp_path))


COUNTING_TASK = """
from pathlib import Path
from condensegrpo.tasks.ledger import Ledger

class Counting:
    def __init__(self, *, log: str, min_ops: int = 3) -> None:
        self._task, self._log = Ledger(min_ops=min_ops), Path(log)
        self._note("built")

    def problems(self, split):
        self._note(split)
        return self._task.problems(split)

    def environment(self, problem):
        return self._task.environment(problem)

    def _note(self, text: str) -> None:
        with self._log.open("a") as file:
            file.write(text + "\\n")
"""


def test_a_task_is_built_and_read_once_for_training_and_its_evaluation(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(COUNTING_TASK)
    log = tmp_path / "log"
    task = f"task={{name: '{tmp_path / 'counting.py'}:Counting', options: {{log: {log}}}}}"
    variants = "evaluate.variants={short: [rollout.limits.max_turns=3], longer: [task.options.min_ops=4]}"
    parts = build(quickstart(task, variants))
    for each in (parts, *parts.evaluations.values()):
        each.problems("eval")
    assert sorted(log.read_text().split()) == ["built", "built", "eval", "eval", "train"]
    short, longer = parts.evaluations["short"], parts.evaluations["longer"]
    assert (short.task, short.reward, short.toolbox, short.sandbox) == (
        parts.task, parts.reward, parts.toolbox, parts.sandbox,
    )  # fmt: skip
    assert short.config.rollout.limits.max_turns == 3
    assert longer.task is not parts.task
    assert longer.reward is parts.reward
    assert short.condenser is not parts.condenser  # its counts are those of its own rollouts


class Numberless:
    """A task of a user whose problems all have one id."""

    def problems(self, split: Split) -> list[Problem]:
        return [Problem(id="", question=f"{split} {number}", answer="1") for number in range(3)]

    def environment(self, problem: Problem) -> AnswerEnvironment:
        return AnswerEnvironment(question=problem.question, system="")


def test_problems_of_an_evaluation_that_share_an_id_are_refused() -> None:
    """Its figures are by problem: three would count as one, and two of three stop the run after the sampling."""
    config, objects = configured(quickstart(), ["evaluate.variants={}", "warm_start.steps=0"], {"task": Numberless()})
    with pytest.raises(DataError, match="the evaluation held-out: found 3 with the id ''"):
        build(config, objects=objects)
    assert len(build(vary(config, ["evaluate.problems=1"]), objects=objects).problems("eval")) == 3


class Brief:
    def __call__(self, trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        return {"brief": 0.5}


def test_objects_may_be_parts_of_a_sum_and_stages_of_a_pipeline() -> None:
    brief, keeps = Brief(), LastK(keep_last=2)
    config, objects = configured(
        quickstart(),
        ["evaluate.variants={}", "warm_start.steps=0", "algorithm.advantage.estimator=grpo"],
        {
            "reward": {"name": "weighted_sum", "options": {"parts": ["correct", {"name": brief, "weight": 0.5}]}},
            "condenser": {"name": "pipeline", "options": {"stages": [keeps]}},
        },
    )
    assert config.reward.options["parts"] == ["correct", {"name": "python:Brief", "weight": 0.5}]
    built = build(config, objects=objects)
    assert isinstance(built.reward, WeightedSum)
    assert isinstance(built.condenser, Pipeline)
    assert [(part.name, part.weight) for part in built.reward.parts] == [("correct", 1.0), ("Brief", 0.5)]
    assert built.reward.parts[1].reward is brief
    assert built.condenser.stages[0].condenser is keeps


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"reward": 3}, "int has no method of a reward"),
        ({"condenser": 3}, "int is no Condenser"),
        (
            {"reward": {"name": "weighted_sum", "options": {"parts": ["correct", 3]}}},
            r"reading reward.options.parts\[1\]:\n.*found 3, wanted a mapping",
        ),
    ],
)
def test_an_argument_that_can_be_no_part_is_refused_by_its_name(parts: Parts, fault: str) -> None:
    def built() -> Components:
        config, objects = configured(quickstart(), [], parts)
        return build(config, objects=objects)

    with pytest.raises(ConfigError, match=fault):
        built()


def test_faults_of_several_parts_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build(quickstart("reward.name=corect", "algorithm={loss: {name: cliped}}", "sampler.options={max_bach: 2}"))
    assert "Did you mean 'correct'" in str(caught.value)
    assert "Did you mean 'clipped'" in str(caught.value)
    assert "no option 'max_bach'" in str(caught.value)

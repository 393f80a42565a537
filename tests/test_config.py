"""The configuration: files and overrides in, checked values out, and errors that help."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from condensegrpo.algorithms.objective import Objective, PerToken
from condensegrpo.assembly.learning_signal import objective
from condensegrpo.config.checks import check_values
from condensegrpo.config.load import (
    dump_config,
    dump_with_origins,
    evaluations,
    find_config,
    load_config,
    resolved,
    shipped,
    vary,
)
from condensegrpo.config.resumed import FIXED, LEARNED, UNSET, Change, config_at, differences, store_configuration
from condensegrpo.config.yaml_tree import apply_overrides
from condensegrpo.core.errors import ConfigError
from condensegrpo.storage.run_folder import RunFolder

SMALL = "model: {new: {}}\ntask: {name: ledger}\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "cap"),
    [
        ([], 0.0),
        (["model.dtype=bfloat16"], 2.0),
        (["sampler.options.dtype=bfloat16"], 2.0),
        (["model.dtype=bfloat16", "algorithm.importance.cap=0"], 0.0),
        (["model.dtype=bfloat16", "algorithm.importance.cap=5"], 5.0),
    ],
)
def test_importance_is_corrected_by_default_where_something_computes_in_bfloat16(
    small: Path, overrides: list[str], cap: float
) -> None:
    """The value is stored and shown by a dry run, and it is the objective's."""
    config = load_config(small, overrides)
    assert config.algorithm.importance.cap == cap
    assert yaml.safe_load(dump_config(config))["algorithm"]["importance"]["cap"] == cap
    assert re.search(rf"cap: {cap} +# ", dump_with_origins(config, small, overrides))
    built = objective(config.algorithm)
    assert isinstance(built, PerToken)
    assert isinstance(built.objective, Objective)
    assert built.objective.importance_cap == cap


def test_an_override_replaces_one_key_and_leaves_the_others(small: Path) -> None:
    config = load_config(small, ["train.steps=7", "task.options.min_ops=4", "rollout.tools.use=[calculator]"])
    assert config.train.steps == 7
    assert config.train.problems_per_step == 16
    assert config.task.options == {"min_ops": 4}
    assert config.rollout.tools.use == ("calculator",)


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", "1E-3"])
def test_a_learning_rate_may_be_written_in_any_notation(small: Path, text: str) -> None:
    assert load_config(small, [f"learner.optimiser.lr={text}"]).learner.optimiser.lr == 0.001


def test_an_override_can_drop_a_branch(small: Path) -> None:
    config = load_config(small, ["model.new=null", "model.path=some/model"])
    assert config.model.path == "some/model"
    assert config.model.new is None


def test_apply_overrides_leaves_the_given_tree_alone() -> None:
    tree = {"a": {"b": 1}}
    assert apply_overrides(tree, ["a.b=2", "a.c.d=x"]) == {"a": {"b": 2, "c": {"d": "x"}}}
    assert tree == {"a": {"b": 1}}


def test_an_unknown_key_names_its_nearest_match(small: Path) -> None:
    assert "train.stps: unknown key. Did you mean 'steps'?" in refusal(small, "train.stps=3")
    assert "model.new.hiden_size: unknown key. Did you mean 'hidden_size'?" in refusal(small, "model.new.hiden_size=3")


def test_a_key_of_an_inner_section_is_named_with_its_section(small: Path) -> None:
    assert "rollout.max_turns: unknown key. Did you mean 'limits.max_turns'?" in refusal(small, "rollout.max_turns=3")


def test_an_unknown_key_of_a_dataclass_names_its_nearest_match(small: Path) -> None:
    assert "rollout.limits.max_turn: unknown key. Did you mean 'max_turns'?" in refusal(
        small, "rollout.limits.max_turn=3"
    )
    assert "Did you mean 'threshold'?" in refusal(small, "rollout.stop_when_confident={treshold: 0.5}")


def test_an_unknown_key_like_no_other_lists_those_that_exist(small: Path) -> None:
    assert "Known here: name, options" in refusal(small, "condenser.name=full", "condenser.zzz=1")
    assert "Known here: name, options" in refusal(small, "rollout.tools.use=[{name: search, zzz: 1}]")
    assert "Did you mean 'options'?" in refusal(small, "trackers=[{name: jsonl, optons: {}}]")


def test_an_override_reaches_into_a_list(small: Path) -> None:
    config = load_config(
        small, ["reward={name: sum, options: {parts: [{name: a}, {name: b}]}}", "reward.options.parts.1.weight=0.5"]
    )
    assert config.reward.options["parts"] == [{"name": "a"}, {"name": "b", "weight": 0.5}]
    assert "no such entry" in refusal(small, "rollout.tools.use=[a]", "rollout.tools.use.3=b")
    refused = refusal(small, "trackers=[wandb]", "trackers.0.options.project=x")
    assert "'trackers.0.options.project=x': it sets a key of an entry of a list, which is a single value" in refused


@pytest.mark.parametrize("section", ["learner", "warm_start"])
def test_a_key_of_an_optimiser_leaves_the_others_as_their_section_has_them(small: Path, section: str) -> None:
    """With its rate alone the warm start had no cosine any more, and the learner refused any key without its rate."""
    changed, default = (getattr(load_config(small, keys), section) for keys in ([f"{section}.optimiser.eps=0.5"], []))
    assert changed.optimiser == replace(default.optimiser, eps=0.5)


@pytest.mark.parametrize("betas", ["[1.5,0.9]", "[0.9,1]", "[-0.1,0.9]"])
def test_the_means_of_adamw_must_forget(small: Path, betas: str) -> None:
    """Torch refuses them too, with its own words and once the models are loaded."""
    assert "learner.optimiser.betas." in refusal(small, f"learner.optimiser.betas={betas}")


@pytest.mark.parametrize("value", [".inf", ".nan", "-.inf"])
def test_a_figure_must_be_finite(small: Path, value: str) -> None:
    assert "learner.optimiser.lr" in refusal(small, f"learner.optimiser.lr={value}")


@pytest.mark.parametrize("change", ["train.steps=true", "learner.optimiser.lr=on", "learner.zero_stage=no"])
def test_true_and_false_are_no_numbers(small: Path, change: str) -> None:
    key, _, value = change.partition("=")
    found = f"{key}: found {value in ('true', 'on')}, wanted a number (the override {change})"
    assert found in refusal(small, "seed=1", change)


def test_the_size_of_a_new_model_must_divide_into_its_heads(small: Path) -> None:
    assert "hidden_size=64 is no multiple of heads=5" in refusal(small, "model.new.heads=5")


def test_a_variant_cannot_take_the_name_of_the_evaluation_itself_apart(small: Path) -> None:
    assert "evaluate.variants" in refusal(small, "evaluate.variants={a/b: []}")
    for name in ("held-out", "eval-1"):
        assert f"a variant cannot be called {name}: held-out is" in refusal(small, f"evaluate.variants={{{name}: []}}")


def test_every_fault_is_reported_at_once(small: Path) -> None:
    message = refusal(small, "train.steps=soon", "rollout.temperature=-1", "learner.zero_stage=4")
    assert "train.steps: found 'soon'" in message
    assert "rollout.temperature: found -1" in message
    assert "learner.zero_stage: found 4" in message


def test_a_fault_of_an_override_names_the_override(small: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps: found 'many', wanted .* \(the override train\.steps=many\)$"):
        load_config(small, ["train.steps=4", "train.steps=many"])
    with pytest.raises(ConfigError, match=r"train\.stepz: unknown key.*\(the override train={stepz: 1}\)$"):
        load_config(small, ["seed=1", "train={stepz: 1}"])
    with pytest.raises(ConfigError, match=r"rewrd: unknown key.*\(the override rewrd\.name=correct\)$"):
        load_config(small, ["rewrd.name=correct"])
    faulty = small.with_name("faulty.yaml")
    faulty.write_text(f"{small.read_text()}\nseed: many\n")
    with pytest.raises(ConfigError, match=r"seed: found 'many', wanted an integer$"):
        load_config(faulty, ["name=seed"])


def test_a_policy_needs_exactly_one_origin(small: Path) -> None:
    assert "set either path or new" in refusal(small, "model.path=x")
    assert "set path" in refusal(small, "model.new=null")


def test_a_run_name_cannot_leave_the_runs_folder(small: Path) -> None:
    assert "name: found '../elsewhere'" in refusal(small, "name=../elsewhere")


def test_an_override_without_a_value_says_how_it_is_written(small: Path) -> None:
    assert "wanted key=value" in refusal(small, "train.steps")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a: [1, 2", "not YAML: line 1, column 9: expected ',' or ']', but got '<stream end>'"),
        ("a: @x", "not YAML: line 1, column 4: found character '@' that cannot start any token"),
        ("- 1\n", "bad.yaml: found [1], wanted a mapping of keys"),
        ("", "bad.yaml: it is empty, wanted a mapping of keys"),
    ],
)
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert wanted in refusal(path)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("2026-02-30", "2026-02-30 is no timestamp: day is out of range for month"),
        ("!!int abc", "abc is no int"),
        ("!!bool abc", "abc is no bool"),
        ("1_", "1_ is no int"),
        ("9" * 6000, f"{'9' * 40}… is no int"),
    ],
)
def test_a_value_that_python_cannot_make_is_refused_in_one_line(
    small: Path, tmp_path: Path, value: str, wanted: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"name: small\ntrain: {{seed: {value}}}\n")
    for said, place in ((refusal(path), "line 2, column 15"), (refusal(small, f"name={value}"), "line 1, column 1")):
        assert f"not YAML: {place}: {wanted}" in said
        assert "\n" not in said
        assert len(said) < 400 + len(str(path))


def test_a_section_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(SMALL + "train: {steps: 3}\ntrain: {eval_every: 1}\n")
    assert "the key 'train' stands twice" in refusal(path)


def test_bytes_that_are_no_utf_8_are_no_yaml(small: Path) -> None:
    assert "the value is not YAML" in refusal(small, "name=\udcff")  # as Python reads them from a command line


def test_deep_nesting_is_no_yaml(small: Path) -> None:
    assert "the value is not YAML" in refusal(small, f"name={'[' * 20_000}{']' * 20_000}")


def test_a_time_of_the_day_is_no_number(small: Path) -> None:
    """In YAML 1.1 it is one to the base of 60."""
    assert "train.steps: found '1:30', wanted an integer" in refusal(small, "train.steps=1:30")


@pytest.mark.parametrize(("text", "steps"), [("010", 10), ("0x10", 16), ("1_000", 1000)])
def test_a_whole_number_is_decimal_unless_its_prefix_says_otherwise(small: Path, text: str, steps: int) -> None:
    assert load_config(small, [f"train.steps={text}"]).train.steps == steps


def test_a_name_that_no_file_system_takes_is_refused(small: Path) -> None:
    assert "name: found" in refusal(small, f"name={'x' * 300}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "absent.yaml" in refusal(tmp_path / "absent.yaml")


def test_a_dumped_configuration_reads_back_equal(small: Path, tmp_path: Path) -> None:
    config = load_config(small, ["learner.optimiser.lr=1e-3", "evaluate.variants={far: [task.options.min_ops=9]}"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


def test_a_quoted_text_that_looks_like_a_number_stays_a_text(small: Path, tmp_path: Path) -> None:
    config = load_config(small, ["task.options={id: '7e3', path: 1e-3, plain: 'x'}"])
    assert config.task.options == {"id": "7e3", "path": 0.001, "plain": "x"}
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


def test_vary_changes_only_what_it_is_told(small: Path) -> None:
    config = load_config(small)
    varied = vary(config, ["rollout.limits.max_turns=50"])
    assert varied.rollout.limits.max_turns == 50
    assert vary(varied, [f"rollout.limits.max_turns={config.rollout.limits.max_turns}"]) == config


def test_a_shipped_configuration_is_found_by_name_and_by_its_path_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # neither file exists from here
    assert find_config("quickstart") == find_config("configs/quickstart.yaml")
    assert find_config("quickstart").is_file()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("configs/quikstart.yaml", r"Did you mean 'quickstart', 'quickstart_full' or 'quickstart_outcome'\? "),
        ("tool_use_gsm8k", r"Did you mean 'tool_use_gsm8k_lora' or 'tool_use_mbpp_lora'\? "),
        ("nosuch.yaml", ""),
    ],
)
def test_a_missing_configuration_names_the_nearest_and_the_command_that_lists_all(name: str, near: str) -> None:
    wanted = rf"{name}: there is no such file\. {near}condensegrpo config --shipped lists those of the package\.$"
    with pytest.raises(ConfigError, match=wanted):
        find_config(name)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_configuration_loads(name: str) -> None:
    assert load_config(find_config(name)).name == Path(name).name


def test_shipped_configurations_are_not_tabs_and_anchors_but_plain_yaml() -> None:
    for name in shipped():
        tree = yaml.safe_load(find_config(name).read_text(encoding="utf-8"))
        assert tree["name"] == Path(name).name
        assert "extends" in tree or set(tree) >= {"model", "task"}
        assert set(resolved(find_config(name), ())) >= {"name", "model", "task"}


def test_the_page_on_resuming_says_of_every_key_what_a_change_needs(small: Path) -> None:
    page = (Path(__file__).parent.parent / "docs/how-to/resume-and-export.md").read_text()
    learned, free, fixed = (re.findall(r"`([a-z_.]+)`", row.split("|")[1]) for row in page.splitlines() if "| `" in row)
    assert set(learned) == set(LEARNED)
    assert set(fixed) == set(FIXED)
    named = (*learned, *free, *fixed)
    tree = load_config(small).model_dump(mode="json")
    keys = {f"{section}.{key}" for section in tree if section not in named for key in tree[section]}
    assert keys | (tree.keys() & set(named)) == set(named)


def test_a_changed_item_of_a_list_is_named_and_lists_of_other_lengths_differ_as_a_whole() -> None:
    before = {"parts": [{"name": "correct"}, {"name": "brief", "weight": 0.2}]}
    after = {"parts": [{"name": "correct"}, {"name": "brief", "weight": 0.4}]}
    assert differences(before, after) == {"parts.1.weight": (0.2, 0.4)}
    assert differences({"use": ["a"]}, {"use": ["a", "b"]}) == {"use": (["a"], ["a", "b"])}
    assert str(Change(first_step=3, key="size", old=UNSET, new=None)) == "size: not set → null"
    assert differences({"options": {}}, {"options": {"size": None}}) == {"options.size": ("not set", None)}


def test_a_step_had_the_configuration_of_its_time(small: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for first, rate in ((0, 1e-3), (6, 2e-3), (9, 3e-3), (7, 4e-3)):  # the last one resumes from step 6: 7 and 9 go
        store_configuration(run, load_config(small, [f"learner.optimiser.lr={rate}"]), first_step=first)
    rates = [config_at(run, step).learner.optimiser.lr for step in (0, 5, 6, 7, 12)]
    assert rates == [1e-3, 1e-3, 2e-3, 4e-3, 4e-3]


def test_a_folder_that_is_no_run_is_called_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it is a folder without config\.yaml, so not that of a run"):
        find_config(str(tmp_path))


def test_faults_between_keys_are_reported_at_once(small: Path) -> None:
    faulty = ["learner.tokens_per_micro_batch=64", "rollout.condense.jitter=0.5", "sampler.options.top_k=9"]
    with pytest.raises(ConfigError) as caught:
        check_values(load_config(small, faulty))
    keys = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert keys == [
        "checking learner.tokens_per_micro_batch",
        "checking rollout.condense.jitter=0.5",
        "checking sampler.options.top_k",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("rollout.tools.use=[{nam: x}]", ["rollout.tools.use.0.name: missing", "rollout.tools.use.0.nam: unknown key"]),
        ("rollout.tools.use=[3]", ["rollout.tools.use.0: found 3, wanted a string or a mapping of keys"]),
        ("rollout.tools.format={name: 3}", ["rollout.tools.format.name: found 3, wanted a string"]),
        ("learner.compile_layers=x", ["learner.compile_layers: found 'x', wanted a boolean or 'auto'"]),
        ("num_generations=4", ["num_generations: unknown key. It is train.samples_per_problem here."]),
        ("actor_rollout_ref.rollout.n=4", ["actor_rollout_ref: unknown key. It is of verl; condensegrpo explain KEY"]),
        ("model.dtype=float16", ["model.dtype: found 'float16'; wanted auto, float32 or bfloat16"]),
        ("learner.optimiser.betas=[1, 2, 3]", ["learner.optimiser.betas: found [1, 2, 3], wanted at most 2 items"]),
    ],
)
def test_a_value_of_several_kinds_is_refused_once_under_its_key(small: Path, change: str, said: list[str]) -> None:
    _, *lines = refusal(small, change).splitlines()
    assert len(lines) == len(said)
    assert all(line.strip().startswith(each) for line, each in zip(lines, said, strict=True))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ("learner: {null: 3}", "learner.None: found None, wanted a text as the key"),
        ("2.5: 1\nlearner: {threads: x}", "2.5: found 2.5, wanted a text as the key"),
        ("evaluate: {variants: {4096: []}}", "evaluate.variants.4096.[key]: found 4096, wanted a string"),
    ],
)
def test_a_key_that_is_no_text_is_named(small: Path, tree: str, said: str) -> None:
    (small.parent / "odd.yaml").write_text(f"extends: {small.name}\n{tree}\n")
    assert said in refusal(small.parent / "odd.yaml")


def test_a_fault_of_a_variant_names_it(small: Path) -> None:
    config = load_config(small, ["evaluate.variants={long: [rollout.limits.max_turns=x]}"])
    with pytest.raises(ConfigError, match=r"^checking evaluate.variants.long: (.|\n)*max_turns: found 'x'"):
        evaluations(config)

"""``extends``: configurations on top of others, and the origin of every value of a resolved one."""

from pathlib import Path

import pytest
import yaml
from command import succeed

from condensegrpo.config.load import dump_config, dump_with_origins, find_config, load_config, shipped, vary
from condensegrpo.config.yaml_tree import parse_yaml
from condensegrpo.core.errors import ConfigError

BASE = """
model: {new: {layers: 2, heads: 4}}
task: {name: ledger, options: {min_ops: 3, max_ops: 6}}
condenser: {name: last_k, options: {keep_last: 2}}
rollout: {tools: {use: [calculator, python]}}
learner: {optimiser: {lr: 0.1, betas: [0.8, 0.9]}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "base", BASE)
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def origins(path: Path, *overrides: str) -> dict[str, str]:
    """The comment of every line with a value, by the text before it."""
    text = dump_with_origins(load_config(path, overrides), path, overrides)
    pairs = [line.rpartition("  # ") for line in text.splitlines()]
    return {value.strip(): comment for value, mark, comment in pairs if mark}


def test_mappings_are_merged_and_lists_replaced(folder: Path) -> None:
    child = """
extends: base.yaml
task: {options: {max_ops: 9}}
rollout: {tools: {use: [read_file]}}
learner: {optimiser: {betas: [0.5, 0.6]}}
"""
    config = load_config(write(folder, "child", child))
    assert config.task.options == {"min_ops": 3, "max_ops": 9}
    assert config.rollout.tools.use == ("read_file",)
    assert (config.learner.optimiser.lr, config.learner.optimiser.betas) == (0.1, (0.5, 0.6))


def test_yaml_may_merge_mappings_by_an_anchor() -> None:
    assert parse_yaml("base: &b {a: 1, c: 3}\nx: {<<: *b, c: 2}\n") == {"base": {"a": 1, "c": 3}, "x": {"a": 1, "c": 2}}
    nested = "a: &a {x: 1}\ntop: {deep: {deeper: &b {<<: *a, x: 2}}}\nc: {<<: *b}\n"
    assert parse_yaml(nested)["c"] == {"x": 2}
    assert parse_yaml('{1: a, "1": b}') == {1: "a", "1": "b"}
    with pytest.raises(yaml.YAMLError, match="the key True stands twice"):
        parse_yaml("{true: 1, True: 2}")
    with pytest.raises(yaml.YAMLError, match="the key 'c' stands twice"):
        parse_yaml("base: &b {a: 1}\nx: {<<: *b, c: 2, c: 3}\n")


def test_an_empty_mapping_changes_nothing_and_null_is_a_value(folder: Path) -> None:
    child = write(folder, "child", "extends: base.yaml\ntask: {options: {}}\nmodel: {new: null, path: some/model}\n")
    config = load_config(child)
    assert config.task.options == {"min_ops": 3, "max_ops": 6}
    assert (config.model.new, config.model.path) == (None, "some/model")


def test_levels_and_paths_relative_to_the_file_that_names_them(folder: Path) -> None:
    write(folder, "mine/middle", "extends: ../base.yaml\nseed: 1\ntrain: {steps: 5}\n")
    config = load_config(write(folder, "mine/inner/child", "extends: ../middle.yaml\nseed: 2\n"))
    assert (config.seed, config.train.steps, config.condenser.name) == (2, 5, "last_k")


def test_of_several_files_the_later_one_wins(folder: Path) -> None:
    write(folder, "first", "seed: 1\nname: first\n")
    write(folder, "second", "seed: 2\n")
    config = load_config(write(folder, "child", "extends: [base.yaml, first.yaml, second.yaml]\n"))
    assert (config.seed, config.name, config.task.name) == (2, "first", "ledger")


def test_a_file_of_several_lies_on_its_own_bases(folder: Path) -> None:
    """Its condenser is that of ``other`` with other words for it; the options of the first file's stay."""
    write(folder, "other", "condenser: {name: full}")
    write(folder, "second", "extends: other.yaml\ncondenser: {name: last_k}")
    assert load_config(write(folder, "both", "extends: [base.yaml, second.yaml]")).condenser.options == {"keep_last": 2}


def test_an_override_of_an_entry_of_a_list_is_a_path_as_the_list_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "libs").mkdir()
    (folder / "new.py").write_text("")
    task = "task: {name: agent, options: {protected: [old.py]}}"
    write(folder, "agent", f"extends: base.yaml\n{task}\nsandbox: {{packages: [none]}}")
    found = load_config(folder / "agent.yaml", ["sandbox.packages.0=libs", "task.options.protected.0=new.py"])
    assert found.sandbox.packages == [str(folder / "libs")]
    assert found.task.options["protected"] == ["new.py"]


@pytest.mark.parametrize("name", ["search_base", "search_base.yaml"])
def test_a_shipped_configuration_is_extended_by_name(tmp_path: Path, name: str) -> None:
    child = write(
        tmp_path, "child", f"extends: {name}\nmodel: {{path: some/model}}\nalgorithm: {{kl: {{coefficient: 1}}}}\n"
    )
    config = load_config(child)
    assert (config.task.name, config.algorithm.kl.coefficient, config.algorithm.updates_per_batch) == (
        "search_qa",
        1,
        2,
    )


def test_a_file_in_the_same_folder_takes_precedence_over_a_shipped_one(tmp_path: Path) -> None:
    write(tmp_path, "search_base", BASE)
    assert load_config(write(tmp_path, "child", "extends: search_base.yaml\n")).task.name == "ledger"


def test_a_cycle_is_refused_with_its_files(folder: Path) -> None:
    child = write(folder, "child", "extends: middle.yaml\n")
    middle = write(folder, "middle", "extends: child.yaml\n")
    assert f"{child} → {middle} → {child}" in refusal(child)
    alone = write(folder, "alone", "extends: alone.yaml\n")
    assert f"{alone} → {alone}" in refusal(alone)


def test_a_file_extended_on_two_paths_is_no_cycle(folder: Path) -> None:
    write(folder, "left", "extends: base.yaml\nseed: 1\n")
    write(folder, "right", "extends: base.yaml\ntrain: {steps: 4}\n")
    config = load_config(write(folder, "child", "extends: [left.yaml, right.yaml]\n"))
    assert (config.seed, config.train.steps) == (1, 4)


def test_a_missing_file_is_refused_with_both_names(folder: Path) -> None:
    child = write(folder, "child", "extends: absent.yaml\n")
    message = refusal(child)
    assert str(child) in message
    assert str(folder / "absent.yaml") in message
    assert "Did you mean 'quickstart', 'quickstart_full' or" in refusal(write(folder, "child", "extends: quikstart\n"))


@pytest.mark.parametrize("value", ["3", "null", "{a: b}", "[base.yaml, 3]"])
def test_extends_names_files(folder: Path, value: str) -> None:
    assert "wanted the name of a file" in refusal(write(folder, "child", f"extends: {value}\n"))


def test_another_plug_in_drops_the_options_of_the_first(folder: Path) -> None:
    child = "extends: base.yaml\ncondenser: {name: full}\nalgorithm: {loss: {name: gspo}}\n"
    write(folder, "child", child)
    assert load_config(folder / "child.yaml").condenser.options == {}
    write(folder, "lossy", BASE + "algorithm: {loss: {options: {dual_clip: 3.0}}, advantage: {options: {coef: 0.1}}}\n")
    other = "extends: lossy.yaml\nalgorithm: {loss: {name: gspo}, advantage: {estimator: rloo}}\n"
    config = load_config(write(folder, "other", other))
    assert (config.algorithm.loss.options, config.algorithm.advantage.options) == ({}, {})


def test_the_same_plug_in_keeps_its_options_and_so_does_a_task_without_a_name(folder: Path) -> None:
    child = "extends: base.yaml\ncondenser: {name: last_k, options: {keep_first: 1}}\n"
    assert load_config(write(folder, "child", child)).condenser.options == {"keep_last": 2, "keep_first": 1}
    write(folder, "nameless", "model: {new: {}}\ntask: {options: {min_ops: 3}}\n")
    child = "extends: nameless.yaml\ntask: {name: ledger, options: {max_ops: 4}}\n"
    assert load_config(write(folder, "named", child)).task.options == {"min_ops": 3, "max_ops": 4}


def test_overrides_come_on_top_and_cannot_extend(folder: Path) -> None:
    child = write(folder, "child", "extends: base.yaml\nseed: 1\n")
    assert load_config(child, ["seed=2", "condenser.options.keep_last=5"]).condenser.options == {"keep_last": 5}
    assert "extends is a key of YAML files only" in refusal(child, "extends=other.yaml")


def test_an_override_that_names_another_plug_in_drops_the_options_of_the_file(folder: Path) -> None:
    text = "extends: base.yaml\ntask: {data: a.jsonl}\nreward: {name: composite, options: {tool: 1}}\n"
    child = write(folder, "child", text)
    config = load_config(child, ["condenser.name=full", "task.name=jsonl", "reward.options.x=2", "reward.name=other"])
    assert (config.condenser.name, config.condenser.options) == ("full", {})
    assert (config.task.options, config.task.data) == ({}, "a.jsonl")
    assert config.reward.options == {"x": 2}  # of the command line, before the name or after it
    assert load_config(child, ["condenser.name=last_k"]).condenser.options == load_config(child).condenser.options
    assert vary(load_config(child), ["condenser.name=full"]).condenser.options == {}


def test_an_override_inside_a_string_is_refused(folder: Path) -> None:
    refused = refusal(folder / "base.yaml", "rollout.tools.use.0.options.seconds=3")
    assert "it sets a key of an entry of a list, which is a single value and has no keys" in refused
    assert "no such entry of a list" in refusal(folder / "base.yaml", "learner.optimiser.betas.2=0.7")


def test_the_origin_of_every_value(folder: Path) -> None:
    child = write(
        folder, "child", "extends: base.yaml\nseed: 1\ntask: {options: {max_ops: 9}}\nmodel: {new: {layers: 1}}\n"
    )
    comments = origins(child, "learner.optimiser.betas.1=0.7", "train.steps=3", "rollout.template_options={}")
    assert {value: comments[value] for value in ("seed: 1", "max_ops: 9", "layers: 1")} == dict.fromkeys(
        ("seed: 1", "max_ops: 9", "layers: 1"), "child.yaml"
    )
    assert {comments[value] for value in ("min_ops: 3", "heads: 4", "- calculator", "lr: 0.1", "- 0.8")} == {
        "base.yaml"
    }
    assert {comments[value] for value in ("- 0.7", "steps: 3", "template_options: {}")} == {"override"}
    assert {comments[value] for value in ("name: run", "trackers: []", "path: null")} == {"default"}


def test_a_replaced_section_has_no_origins_of_the_old_one(folder: Path) -> None:
    comments = origins(folder / "base.yaml", "learner.optimiser={lr: 0.5}")
    assert (comments["lr: 0.5"], comments["- 0.9"], comments["- 0.95"]) == ("override", "default", "default")


def test_files_of_the_same_name_are_printed_with_their_paths(folder: Path) -> None:
    child = write(folder, "mine/base", "extends: ../base.yaml\nseed: 1\n")
    comments = origins(child)
    assert (comments["seed: 1"], comments["min_ops: 3"]) == (str(child), str(folder / "mine" / "../base.yaml"))


def test_the_printed_configuration_is_an_equal_one_in_100_columns(folder: Path) -> None:
    texts = [
        "# no comment",
        "two\nlines: x\n",
        "'quoted' # \"twice\"",
        "7e3",
        "",
        " ",
        "ä → 语",
        "word " * 60,
        "a: b",
        "\u2028",
    ]
    child = write(folder, "child", yaml.safe_dump({"extends": "base.yaml", "task": {"options": {"texts": texts}}}))
    text = dump_with_origins(load_config(child), child)
    assert parse_yaml(text) == load_config(child).model_dump(mode="json")
    assert max(map(len, text.splitlines())) <= 100
    write(folder, "printed", text)
    assert load_config(folder / "printed.yaml") == load_config(child)


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_prints_as_an_equal_configuration(name: str) -> None:
    path = find_config(name)
    config = load_config(path)
    text = dump_with_origins(config, path)
    assert parse_yaml(text) == config.model_dump(mode="json")
    assert max(map(len, text.splitlines())) <= 100
    assert "extends" not in text + dump_config(config)


def test_files_that_are_only_extended_are_shipped_but_not_listed() -> None:
    bases = {path.stem for path in find_config("quickstart").parent.glob("*_base.yaml")}
    assert {"search_base", "condensed_base", "tool_use_base"} <= bases
    assert not bases & set(shipped())
    for name in bases:
        with pytest.raises(ConfigError, match=r"set path|task: missing|task.name: missing"):
            load_config(find_config(name))


def test_a_stored_configuration_has_values_of_its_own_file(folder: Path) -> None:
    stored = write(folder, "config", yaml.safe_dump({**yaml.safe_load(BASE), "rollout": {"limits": {"max_turns": 3}}}))
    text = dump_with_origins(load_config(stored, ["seed=1"]), stored, ["seed=1"])
    lines = [line.split() for line in text.splitlines()]
    assert ["seed:", "1", "#", "override"] in lines
    assert ["max_turns:", "3", "#", "config.yaml"] in lines


def test_a_dry_run_prints_where_each_value_came_from(folder: Path) -> None:
    out = succeed("train", "quickstart_full", "train.steps=3", "--dry-run")
    lines = [line.split() for line in out.splitlines()]
    assert ["steps:", "3", "#", "override"] in lines
    assert ["max_context_tokens:", "1024", "#", "quickstart_full.yaml"] in lines
    assert ["min_ops:", "3", "#", "quickstart.yaml"] in lines
    assert ["staleness:", "0", "#", "default"] in lines


def test_a_fault_names_the_extended_file_that_it_is_in(folder: Path) -> None:
    (folder / "below.yaml").write_text("extends: base.yaml\ntrain: {stepz: 3, save_every: x, keep_checkpoints: 3}\n")
    (folder / "above.yaml").write_text("extends: below.yaml\ntrain: {eval_every: y, keep_checkpoints: z}\n")
    said = refusal(folder / "above.yaml")
    assert f"train.stepz: unknown key. Did you mean 'steps'? (in {folder / 'below.yaml'})" in said
    assert f"train.save_every: found 'x', wanted an integer (in {folder / 'below.yaml'})" in said
    assert "train.eval_every: found 'y', wanted an integer\n" in f"{said}\n"  # of the file itself
    assert "train.keep_checkpoints: found 'z', wanted an integer\n" in f"{said}\n"  # which below.yaml has too
    (folder / "list.yaml").write_text("extends: base.yaml\nrollout: {tools: {use: [{name: calculator}]}}\n")
    (folder / "its.yaml").write_text("extends: list.yaml\nrollout: {tools: {use: [{}]}}\n")
    assert "rollout.tools.use.0.name: missing\n" in f"{refusal(folder / 'its.yaml')}\n"  # its list replaced the other
    assert "(the override model.path=x)" in refusal(folder / "above.yaml", "model.path=x")

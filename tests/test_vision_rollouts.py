"""Pictures through whole rollouts: bytes stored once, hashes in files, faults before a model is loaded."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from stand_in_server import TOKEN, StandIn, serving
from transformers import GenerationConfig
from vision_models import picture, vision_model

from condensegrpo.assembly.build import build, build_components
from condensegrpo.assembly.preflight import check_model
from condensegrpo.assembly.runtime import open_sampler
from condensegrpo.assembly.workers import RolloutPlayers
from condensegrpo.config.load import validate, vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError, SamplerError, ServerUnreachable
from condensegrpo.core.observer import Observer
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.evaluation.evaluate import evaluate_variant
from condensegrpo.samplers.vllm.request import PicturePrompts, mismatch
from condensegrpo.samplers.vllm_server.client import ServerClient
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.trajectories import StoredTrajectory, read_row, read_trajectories
from condensegrpo.vision.processor import load_picture_processor

TASK = """
from pathlib import Path
from condensegrpo.core.messages import MediaPart, Message, TextPart
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem

HERE = Path(PLACE)

class Looks:
    def __init__(self, problem):
        self.files = problem.data["files"]

    def shown(self, text):
        part = MediaPart.of((HERE / self.files.pop(0)).read_bytes(), "image/png")
        return (Message(role="user", content=(TextPart(text=text), part)),)

    async def start(self):
        return self.shown("look at this ")

    async def step(self, reply):
        return Step(observations=self.shown("and ")) if self.files else Step(done=True, answer=reply.text)

class Task:
    def problems(self, split):
        return [Problem(id=f"{split}{n}", question="q", answer="1", data={"files": list(FILES)}) for n in range(2)]

    def environment(self, problem):
        return Looks(Problem(id=problem.id, question="q", data={"files": list(problem.data["files"])}))
"""


def configured(folder: Path, model: Path, files: Sequence[str], *changes: str) -> RunConfig:
    task = folder / f"shows_{'_'.join(files).replace('.', '_')}.py"  # a file is loaded once
    task.write_text(TASK.replace("PLACE", repr(str(folder))).replace("FILES", repr(tuple(files))))
    tree = {
        "model": {"path": str(model), "dtype": "float32"},
        "task": {"name": f"{task}:Task"},
        "condenser": {"name": "full"},
        "reward": {"name": "answered"},
        "sampler": {"name": "transformers"},
        "rollout": {"limits": {"max_context_tokens": 300, "max_output_tokens": 40, "max_turns": 3}},
        "evaluate": {"problems": 2},
    }
    return vary(validate(tree, source="test"), changes)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    vision_model("qwen2_5_vl", folder / "model")
    GenerationConfig(eos_token_id=list(range(250))).save_pretrained(folder / "model")  # a random model ends its replies
    for name, part in {"a.png": picture(24, 16), "b.png": picture(16, 24)}.items():
        (folder / name).write_bytes(part.data or b"")
    return folder


def test_a_rollout_stores_pictures_once_and_shows_them_by_their_hashes(world: Path, tmp_path: Path) -> None:
    config = configured(world, world / "model", ["a.png", "b.png"], "rollout.condense.when=over_budget")
    source, media, scored = str(world / "model"), MediaFolder(tmp_path / "media"), list[ScoredTrajectory]()
    file = tmp_path / "0.parquet"
    with (
        closing(open_sampler(config, source, media=media)) as sampler,
        closing(RolloutPlayers(sampler, source, media)) as players,
    ):
        parts, keep = build_components(config), scored.append
        evaluate_variant("held-out", parts, players=players, step=0, observer=Observer(), file=file, on_scored=keep)
    assert len(list(media.folder.iterdir())) == 2
    turns = scored[0].trajectory.turns
    assert [len(turn.media) for turn in turns] == [1, 2], scored[0].trajectory.detail
    stored = read_row(StoredTrajectory(file, 0))
    assert {name for message in stored["messages"] for part in message["parts"] or () for name in part} == {
        *("text", "sha256", "type")
    }
    (read, *_) = read_trajectories(file)
    assert [part.sha256 for part in read.trajectory.turns[1].context[0].media] == [turns[0].media[0]]
    assert media.read(turns[1].media[1]) == (world / "b.png").read_bytes()


def test_faults_of_the_first_problem_are_found_before_a_model_is_loaded(world: Path, tmp_path: Path) -> None:
    from talk import save_model

    save_model(tmp_path / "text")
    with pytest.raises(ConfigError, match="the model sees no pictures"):
        check_model(build(configured(world, tmp_path / "text", ["a.png"])), str(tmp_path / "text"))
    (world / "broken.png").write_bytes((world / "a.png").read_bytes()[:60])
    broken = build(configured(world, world / "model", ["broken.png"]))
    with pytest.raises(ConfigError, match="opening the picture"):
        check_model(broken, str(world / "model"))
    small = build(configured(world, world / "model", ["a.png"], "rollout.limits.max_context_tokens=20"))
    with pytest.raises(ConfigError, match="system message and question need"):
        check_model(small, str(world / "model"))


def test_vllm_is_given_one_placeholder_for_each_picture(world: Path, tmp_path: Path) -> None:
    media = MediaFolder(tmp_path / "media")
    processor = load_picture_processor(str(world / "model"), media)
    assert processor is not None
    first, second = (media.write(picture(*size)).sha256 for size in ((24, 16), (16, 24)))
    pad = processor.placeholder_id
    ids = (5, *processor.picture_ids(first), 6, 7, *processor.picture_ids(second), *processor.picture_ids(first), 8)
    prompt = PicturePrompts(processor).prompt(ids, (first, second, first))
    assert prompt["prompt_token_ids"] == [5, pad, 6, 7, pad, pad, 8]
    assert prompt["multi_modal_uuids"] == {"image": [first, second, first]}
    with pytest.raises(SamplerError, match="does not show the pictures in this order"):
        PicturePrompts(processor).prompt((5, pad, 6), (first,))
    assert mismatch((1, 2), [1, 2]) is None
    assert "vLLM made 3 tokens of it, and it was rendered with 2" in str(mismatch((1, 2), [1, 2, 2]))


def test_a_server_is_sent_a_picture_once_and_again_if_it_has_dropped_it(world: Path, tmp_path: Path) -> None:
    media = MediaFolder(tmp_path / "media")
    processor = load_picture_processor(str(world / "model"), media)
    assert processor is not None
    first, second = (media.write(picture(*size)).sha256 for size in ((24, 8), (8, 24)))
    one, two = ((5, *processor.picture_ids(first)), (6, *processor.picture_ids(second)))
    assert len(one) == len(two) == 4
    with serving(StandIn(shape={}, placeholder=processor.placeholder_id)) as server:

        async def asked(*prompts: tuple[tuple[int, ...], tuple[str, ...]]) -> None:
            client = ServerClient(server.url, TOKEN, pictures=PicturePrompts(processor))
            try:
                for ids, shown in prompts:
                    await client.generate(ids, SamplingParams(max_tokens=2, media=shown), 5)
                    server.pictures -= dropped
            finally:
                await client.close()

        dropped = set[str]()
        asyncio.run(asked((one, (first,)), ((*one, *two), (first, second)), ((7,), ())))
        sizes = {sha256: size for sha256, size in server.shown[1] if size} | dict(server.shown[0])
        assert server.prompts[:2] == [
            (5, processor.placeholder_id),
            (5, processor.placeholder_id, 6, processor.placeholder_id),
        ]
        assert server.shown == [[(first, sizes[first])], [(first, 0), (second, sizes[second])], []]
        dropped = {first}
        server.shown.clear()
        asyncio.run(asked((one, (first,)), ((*one, *two), (first, second))))
        both = [(first, sizes[first]), (second, sizes[second])]
        assert server.shown == [[(first, sizes[first])], [(first, 0), (second, sizes[second])], both]
        server.shown.clear()

        async def lost() -> None:
            client = ServerClient(server.url, TOKEN, pictures=PicturePrompts(processor))
            params = SamplingParams(max_tokens=2, media=(first,))
            try:
                await client.generate(one, params, 5)
                server.statuses = [500]  # such as of a picture that it lost
                with pytest.raises(ServerUnreachable):
                    await client.generate(one, params, 5)
                await client.generate(one, params, 5)
            finally:
                await client.close()

        asyncio.run(lost())
        assert [shown[0][1] for shown in server.shown] == [sizes[first], 0, sizes[first]]
        server.statuses = [400]  # such as of more pictures than it takes in a prompt
        with pytest.raises(SamplerError, match="400: a scripted failure"):
            asyncio.run(asked((one, (first,))))
        server.placeholder = -1
        with pytest.raises(SamplerError, match="vLLM made 2 tokens of it, and it was rendered with 4"):
            asyncio.run(asked((one, (first,))))

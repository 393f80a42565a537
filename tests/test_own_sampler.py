"""Samplers of a user's own, in a file: what is wrong with one is said in one line, before a run or in it."""

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import trajectory, turn
from command import ROOT, TINY, run

from condensegrpo.algorithms.segments import segments
from condensegrpo.assembly.build import build
from condensegrpo.assembly.objects import configured
from condensegrpo.assembly.runtime import check_sampler, open_sampler
from condensegrpo.config.load import load_config
from condensegrpo.core.errors import ConfigError, RolloutError, SamplerError
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.episodes.sampling import generated
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.train import run_training

SAMPLERS = """
    from dataclasses import replace

    from condensegrpo.core.trajectory import FinishReason, Generation
    from condensegrpo.samplers.transformers import TransformersSampler

    class Right:
        version = 0
        ids = (5, 6, 2)

        async def sample(self, prompt_ids, params):
            return Generation(token_ids=self.ids, logprobs=(-1.0,) * 3, finish=FinishReason.STOP)

        def update(self, named_tensors, version):
            self.version = version

        def close(self):
            pass

    class Unreachable(Right):
        def update(self, named_tensors, version):
            raise OSError("no route")

    class Sleepless(Right):
        def sleep(self, *, keep_weights):
            raise RuntimeError("not now")

    class Leaky(TransformersSampler):
        def close(self):
            raise RuntimeError("a handle leaks")

    class Shifted(TransformersSampler):
        async def sample(self, prompt_ids, params):
            reply = await super().sample(prompt_ids, params)
            return replace(reply, logprobs=tuple(each - 0.5 for each in reply.logprobs))

    class AnotherTokenizer(Right):
        ids = (5, 10_000_000, 2)

    class Mute:
        version = 0

    class Unclosed:
        version = 0
        async def sample(self, prompt_ids, params): ...
        def update(self, named_tensors, version): ...

    class Helper(Right):
        def reply(self, messages, params): ...

    class Unnumbered(Right):
        version = None

    class Odd(Right):
        @staticmethod
        def check_training():
            raise KeyError("licence")

    class Any:
        seen = 0

        def __call__(self, trajectory, problem):
            Any.seen += 1
            return {"any": Any.seen % 2}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(textwrap.dedent(SAMPLERS), encoding="utf-8")
    return path


class Gives(Sampler):
    """A sampler that returns what it is given."""

    version = 0

    def __init__(self, given: Any) -> None:
        self._given = given

    async def sample(self, prompt_ids: object, params: object) -> Generation:
        return self._given


def reply(*, ids: Any = (5, 6), logprobs: Any = (-1.0, -2.0), finish: Any = FinishReason.STOP) -> Generation:
    return Generation(token_ids=ids, logprobs=logprobs, finish=finish)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("text", "returned 'text', wanted a Generation"),
        (reply(ids=(5.0, 6)), "'float' object cannot be interpreted as an integer"),
        (reply(ids=(5, -6)), "returned the token id -6"),
        (reply(ids=(5,) * 9, logprobs=(-1.0,) * 9), "returned 9 tokens, wanted at most max_tokens=8"),
        (reply(logprobs=(-1.0, None)), "not 'NoneType'"),
        (reply(logprobs=(-1.0, float("nan"))), "log-probability nan of a token"),
        (reply(logprobs=(-1.0, float("-inf"))), "log-probability -inf of a token"),
        (reply(logprobs=(-1.0, 0.5)), "log-probability 0.5 of a token, wanted a finite number of at most 0"),
        (reply(finish="done"), "'done' is not a valid Finish"),
    ],
)
def test_a_reply_that_is_none_is_the_failure_of_the_sampler(given: object, fault: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        asyncio.run(generated(Gives(given), (1,), SamplingParams(max_tokens=8)))
    assert fault in str(raised.value)


def test_a_reply_gets_plain_numbers() -> None:
    given = reply(ids=tuple(np.array([5, 6])), logprobs=tuple(np.array([-1, 1e-6], dtype="float32")), finish="stop")
    sampler = Gives(given)
    plain = asyncio.run(generated(sampler, (1,), SamplingParams(max_tokens=8)))
    assert repr(plain) == repr(reply(logprobs=(-1.0, 0.0)))


def test_a_text_may_have_more_tokens_than_where_it_was_sampled() -> None:
    text = reply(ids=(5,) * 9, logprobs=(), finish=FinishReason.LENGTH)
    assert asyncio.run(generated(Gives(text), (1,), SamplingParams(max_tokens=8))) == text


def test_replies_without_log_probabilities_are_not_trained_on() -> None:
    with pytest.raises(RolloutError, match=r"without log-probabilities.*Return that of every token from sample"):
        segments(trajectory(turn([1], [2], logprobs=())), advantage_K=[1.0], weight_K=[1.0])


def test_a_sampler_that_inherits_nothing_has_the_defaults(file: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", [f"sampler.name={file}:Unclosed"])
    check_sampler(config)
    sampler = open_sampler(config, "")
    assert (sampler.version, sampler.takes_adapters) == (0, False)
    sampler.close()


def test_a_sampler_that_lacks_a_method_is_refused(file: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", [f"sampler.name={file}:Mute"])
    with pytest.raises(ConfigError, match=r"Mute has no sample \(.*mine\.py:\d+\)"):
        check_sampler(config)


def test_a_sampler_says_which_weights_it_has(file: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", [f"sampler.name={file}:Unnumbered"])
    with pytest.raises(ConfigError, match=r"its version is None, wanted the number of the optimiser step"):
        open_sampler(config, "")


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("Unreachable", 1, "error: giving the sampler the weights after step 0: OSError: no route ("),
        ("Sleepless", 1, "RuntimeError: not now ("),
        ("Odd", 2, "KeyError: 'licence' ("),
        ("AnotherTokenizer", 1, "found the token id 10000000, and the policy knows those below"),
        ("Leaky", 0, "closing the sampler: RuntimeError: a handle leaks ("),
        ("Leaky", 0, "Leaky: largest difference from the learner "),
        ("Shifted", 1, "the mean ratio of their probabilities is 1.649, wanted 1 ± 0.02; furthest apart is the token"),
    ],
)
def test_what_a_sampler_raises_outside_of_episodes_is_said_in_one_line(
    file: Path, tmp_path: Path, name: str, code: int, said: str
) -> None:
    changes = (f"sampler.name={file}:{name}", "warm_start.steps=0", f"reward={{name: '{file}:Any'}}")
    quick = ("train.steps=1", "train.eval_every=0", "train.save_every=0", "evaluate.problems=2")
    done = run("train", *TINY, *changes, *quick, f"runs_dir={tmp_path}", "name=own")
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


class Sleepless(Gives):
    closed = False

    def update(self, named_tensors: object, version: int) -> None: ...

    def sleep(self, *, keep_weights: bool) -> None:
        raise RuntimeError("not now")

    def close(self) -> None:
        self.closed = True


def test_a_sampler_is_closed_although_the_run_does_not_begin(tmp_path: Path) -> None:
    """In Python it would keep its servers and its share of the GPU, and the next attempt would find no room."""
    sampler = Sleepless(reply())
    overrides = (*TINY[1:], "warm_start.steps=0")
    config, objects = configured(ROOT / TINY[0], overrides, {"sampler": sampler})
    with pytest.raises(SamplerError, match="opening the sampler python:Sleepless: RuntimeError: not now"):
        run_training(
            build(config, objects=objects), RunFolder.create(tmp_path / "run"), observer=Observer(), stopping=bool
        )
    assert sampler.closed

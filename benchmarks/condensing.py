"""What a condenser that needs a model costs: calls of the model, tokens that they read, and time.

    python benchmarks/condensing.py                  # half a minute: attention, leave_one_out, summary_model
    python benchmarks/condensing.py --problems 4     # × 8 trajectories

Replies are random and cost nothing, so that the condenser's model is the only one. With ``--alike`` the trajectories of
a problem say the same, as greedy ones do: what they ask for is then computed once for all of them. The digest is of all
prompts: equal digests mean equal condensations.
"""

import argparse
import hashlib
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from engine import ANSWER, REPLY, SAMPLES, WORDS, Instant, play, questions
from tables import show
from transformers import GenerationConfig

from condensegrpo.attention.leave_one_out import LeaveOneOut
from condensegrpo.attention.scorer import AttentionScorer
from condensegrpo.condensers.attention import AttentionCondenser
from condensegrpo.condensers.summary_model import SummaryModel
from condensegrpo.core.protocols.attention import AttentionQuery, TokenAttention
from condensegrpo.core.protocols.condenser import UnitScorer
from condensegrpo.core.trajectory import Generation, SamplingParams, Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import Limits, ToolLimits
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.episodes.toolformats import Native
from condensegrpo.learner.new_model import new_model, new_tokenizer, save_new
from condensegrpo.learner.policy import load_tokenizer
from condensegrpo.learner.settings import NewModel
from condensegrpo.samplers.transformers import TransformersSampler

NAMES = ("attention", "leave_one_out", "summary_model")
BUDGET = 7 * (REPLY + ANSWER + 9)  # tokens of a context: about seven turns


@dataclass
class Calls:
    """Of a model."""

    calls: int = 0
    tokens: int = 0

    def count(self, tokens: int) -> None:
        """One more call."""
        self.calls += 1
        self.tokens += tokens


class Counted:
    """A sampler that counts what it is asked."""

    version = 0

    def __init__(self, model: TransformersSampler, calls: Calls) -> None:
        self._model, self._calls = model, calls

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        """Attend to a query."""
        self._calls.count(query.length)
        return await self._model.attend(query)

    async def measure(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """A measurement."""
        self._calls.count(len(prompt_ids) + len(output_ids))
        return await self._model.measure(prompt_ids, output_ids)


class Alike(Instant):
    """Answers the same to prompts of the same length."""

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The reply that the length draws."""
        return await super().sample(prompt_ids, replace(params, seed=len(prompt_ids)))


def played(name: str, folder: Path, *, problems: int, turns: int, alike: bool) -> list[str]:
    """One line of the table."""
    draw, calls, scorers = random.Random(0), Calls(), dict[str, UnitScorer]()
    tokenizer = load_tokenizer(str(folder))
    renderer = Renderer(tokenizer)
    condenser: AttentionCondenser | SummaryModel = AttentionCondenser()
    if name == "summary_model":
        condenser = SummaryModel(str(folder), max_tokens=REPLY)
    else:
        counted = Counted(TransformersSampler(str(folder)), calls)
        scorers["policy"] = (
            AttentionScorer(counted, renderer) if name == "attention" else LeaveOneOut(counted, renderer)
        )
    engine = Engine(
        sampler=(Alike if alike else Instant)(
            [renderer.reply_ids(" ".join(draw.choices(WORDS, k=REPLY))) for _ in range(64)]
        ),
        renderer=renderer,
        condenser=condenser,
        condenser_name=name,
        scorers=scorers,
        toolbox=Toolbox({}, format=Native(), limits=ToolLimits(seconds=10.0)),
        limits=Limits(max_turns=turns, max_context_tokens=BUDGET, max_output_tokens=2 * REPLY, turn_seconds=600),
    )
    digests: list[str] = []

    async def record(trajectory: Trajectory) -> None:
        if trajectory.failure:
            raise RuntimeError(str(trajectory.failure))
        prompts = [list(turn.prompt_ids) for turn in trajectory.turns]
        digests.append(f"{trajectory.id} {hashlib.sha256(repr(prompts).encode()).hexdigest()}")

    drawn = questions(draw, problems)
    began = time.process_time()
    play(engine, drawn, record)
    cpu = time.process_time() - began
    if isinstance(condenser, SummaryModel):
        calls.calls = int(condenser.counts()["calls"])
    digest = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:12]
    read = str(calls.tokens) if calls.tokens else "–"
    return [name, str(calls.calls), read, f"{cpu:.1f}", f"{engine.stopwatch.seconds:.1f}", digest]


def make_model(folder: Path) -> None:
    """Write a Qwen3 of 0.3 M parameters with random weights, whose texts end at their longest."""
    tokenizer = new_tokenizer([" ".join(WORDS)], kind="words", vocab_size=len(WORDS) + 600)
    new = NewModel(hidden_size=64, layers=2, heads=2, ffn_size=256, initializer_range=0.2, max_positions=8192)
    save_new(folder, tokenizer, new_model(tokenizer, new, seed=0))
    end = tokenizer.eos_token_id
    GenerationConfig(eos_token_id=end, forced_eos_token_id=end).save_pretrained(folder)


def main() -> None:
    """Play all scorers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--problems", type=int, default=16, help=f"each has {SAMPLES} trajectories")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--alike", action="store_true", help="trajectories of a problem say the same")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = ("model of", "calls", "tokens read", "CPU seconds", "seconds condensing", "digest")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        size = {"problems": options.problems, "turns": options.turns, "alike": options.alike}
        show("", heads, [played(name, Path(folder), **size) for name in options.names])


if __name__ == "__main__":
    main()

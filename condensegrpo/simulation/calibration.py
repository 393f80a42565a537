"""Keys of a cluster file from times that were measured on a machine: what ``doctor --gpu --cluster`` writes.

Of a GPU with a data sheet they are shares of it, which hold for every model; of other devices seconds of the model that
was measured.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.planning.formulas import Decoder
from condensegrpo.simulation.hardware import GPUS, kv_bytes, learning_flops, prompt_flops, read_bytes

Keys = Mapping[str, float | str]  # of a cluster file, with dots
SHORT = 16  # tokens of a short prompt
OTHER_SHEETS = {"PCIe", "NVL"}  # cards that share a name with one of the presets


def preset_of(name: str) -> str | None:
    """The preset of a GPU by the name that torch reports."""
    words = re.split("[ -]", name)
    return None if OTHER_SHEETS & set(words) else next((gpu for gpu in GPUS if gpu in words), None)


def learner_keys(
    decoder: Decoder,
    gpu: str | None,
    *,
    ranks: int,
    rows: int,
    context: int,
    outputs: int,
    seconds: tuple[float, float],
) -> Keys:
    """Of the seconds of an optimiser step on ``rows`` rows and on twice as many; what both have is no arithmetic.

    Args:
        ranks: GPUs of the learner.
        rows: of all ranks.
        context, outputs: tokens of a row that are read, and that are trained.
    """
    once, twice = seconds
    length, more = context + outputs, max(twice - once, 1e-9)
    if gpu is None:
        return {"learning.step_seconds": max(once - more, 0.0), "learning.token_seconds": more / (rows * length)}
    pairs = rows * length * (length + 1) // 2
    flops = learning_flops(decoder, tokens=rows * length, pairs=pairs, trained=rows * outputs)
    return {"gpu": gpu, "efficiency.learner": flops / (more * ranks * GPUS[gpu].flops)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTimes:
    """Replies that were sampled at the same time."""

    replies: int
    prompt: int  # tokens of each prompt
    steps: int  # of decoding, after the first token
    first: float  # seconds to the first token of all
    step: float  # seconds of a decoding step

    @property
    def cached(self) -> float:
        """Tokens of a prompt and its reply, on average over the steps."""
        return self.prompt + self.steps / 2


def sampler_keys(
    decoder: Decoder, gpu: str | None, *, single: SampleTimes, short: SampleTimes, long: SampleTimes
) -> Keys:
    """Of a reply to a short prompt, and of many replies to short prompts and to long ones.

    step(B replies, C cached tokens of each) = a + B·b + B·C·c, so that the three give a, b and c
    """
    cached = max((long.step - short.step) / (long.replies * (long.cached - short.cached)), 1e-12)
    reply = max((short.step - single.step) / (short.replies - 1) - cached * short.cached, 0.0)
    step = max(single.step - reply - cached * single.cached, 1e-6)
    if gpu is None:
        return {
            "server.step_seconds": step,
            "server.sequence_seconds": reply,
            "server.cached_token_seconds": cached,
            "server.prompt_token_seconds": long.first / (long.replies * long.prompt),
        }
    sheet = GPUS[gpu]
    prefill = long.replies * prompt_flops(decoder, long.prompt) / (long.first * sheet.flops)
    bandwidth = min(kv_bytes(decoder) / (cached * sheet.bandwidth), 1.0)
    arithmetic = prompt_flops(decoder, 1) / (sheet.flops * prefill)
    return {
        "gpu": gpu,
        "efficiency.prefill": prefill,
        "efficiency.bandwidth": bandwidth,
        "efficiency.step_overhead": max(step - read_bytes(decoder) / (sheet.bandwidth * bandwidth), 0.0),
        "efficiency.reply_overhead": max(reply - arithmetic, 0.0),
    }


def measure_sampler(
    sampler: Sampler, vocabulary: int, *, replies: int, context: int, outputs: int
) -> tuple[SampleTimes, SampleTimes, SampleTimes]:
    """The three of ``sampler_keys``: a reply, and ``replies``, to prompts of ``SHORT`` and of ``context`` tokens."""
    random = Random(0)  # no prefix cache has its prompts

    def seconds(number: int, prompt: int, tokens: int) -> float:
        async def sample() -> None:
            prompts = [tuple(random.randrange(vocabulary) for _ in range(prompt)) for _ in range(number)]
            await asyncio.gather(*(sampler.sample(ids, SamplingParams(max_tokens=tokens)) for ids in prompts))

        began = time.monotonic()
        asyncio.run(sample())
        return time.monotonic() - began

    def sampled(number: int, prompt: int) -> SampleTimes:
        first, last = (min(seconds(number, prompt, tokens) for _ in range(2)) for tokens in (1, outputs))
        step = max(last - first, 1e-9) / (outputs - 1)
        return SampleTimes(replies=number, prompt=prompt, steps=outputs - 1, first=first, step=step)

    return sampled(1, SHORT), sampled(replies, SHORT), sampled(replies, context)

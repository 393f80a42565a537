"""Keys of a cluster file from times that were measured on a machine: what ``doctor --gpu --cluster`` writes.

For a GPU with a data sheet they are shares of it, which a simulation applies to every model; for other devices they are
seconds of the measured model. Times that are noise, or faster than the data sheet, give no keys.
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
OTHER_SHEETS = {"PCIE", "NVL", "MIG"}  # cards, or parts of one, that share a name with one of the presets
OFF_BY = 0.1  # of the preset's memory: how far that of a GPU may be from it; an H100 of 64 GB differs by 15 %
NOISE = 0.05  # of a time: smaller differences between two times are noise


def preset_of(name: str, memory: float) -> str | None:
    """The preset of a GPU by the name and the bytes of memory that torch reports."""
    words = set(re.split("[ -]", name.upper()))
    found = (gpu for gpu in GPUS if gpu in words and abs(memory / GPUS[gpu].memory - 1) <= OFF_BY)
    return None if OTHER_SHEETS & words else next(found, None)


def learner_keys(
    decoder: Decoder,
    gpu: str | None,
    *,
    ranks: int,
    rows: int,
    context: int,
    outputs: int,
    seconds: tuple[float, float],
    passes: float,
    frozen: bool,
) -> Keys:
    """The keys of the learner. Twice the rows take longer by their arithmetic; the other seconds are overhead.

    Args:
        ranks: GPUs of the learner.
        rows: of all ranks.
        context, outputs: tokens of a row that are read, and that are trained.
        seconds: of an optimiser step on ``rows`` rows, and on twice as many.
        passes: of a batch (``simulate.passes``); an optimiser step is one of them.
        frozen: adapters are trained, and nothing else.
    """
    once, twice = seconds
    length, more = context + outputs, twice - once
    if more <= NOISE * once:
        return {}
    overhead = {"learning.step_seconds": passes * max(once - more, 0.0)}
    if gpu is None:
        return {**overhead, "learning.token_seconds": passes * more / (rows * length)}
    pairs = rows * length * (length + 1) // 2
    flops = learning_flops(decoder, tokens=rows * length, pairs=pairs, trained=rows * outputs, frozen=frozen)
    share = flops / (more * ranks * GPUS[gpu].flops)
    return {"gpu": gpu, "efficiency.learner": share, **overhead} if share <= 1 else {}


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
    """The keys of a server, from a reply to a short prompt and many replies to short prompts and to long ones.

    step(B replies, C cached tokens of each) = a + B·b + B·C·c, so that the three give a, b and c

    Where no shares of the data sheet give these back, such as keys and values that are read far slower than weights,
    the keys are seconds of the measured model, as those of a device without a data sheet.
    """
    cached = max((long.step - short.step) / (long.replies * (long.cached - short.cached)), 1e-12)
    reply = max((short.step - single.step) / (short.replies - 1) - cached * short.cached, 0.0)
    step = max(single.step - reply - cached * single.cached, 1e-6)
    seconds = {
        "server.step_seconds": step,
        "server.sequence_seconds": reply,
        "server.cached_token_seconds": cached,
        "server.prompt_token_seconds": long.first / (long.replies * long.prompt),
    }
    if gpu is None:
        return seconds
    sheet = GPUS[gpu]
    prefill = long.replies * prompt_flops(decoder, long.prompt) / (long.first * sheet.flops)
    if prefill > 1:
        return {}
    bandwidth = kv_bytes(decoder) / (cached * sheet.bandwidth)
    step_overhead = step - read_bytes(decoder) / (sheet.bandwidth * bandwidth)
    reply_overhead = reply - prompt_flops(decoder, 1) / (sheet.flops * prefill)
    if bandwidth > 1 or min(step_overhead, reply_overhead) < 0:
        return seconds
    return {
        "gpu": gpu,
        "efficiency.prefill": prefill,
        "efficiency.bandwidth": bandwidth,
        "efficiency.step_overhead": step_overhead,
        "efficiency.reply_overhead": reply_overhead,
    }


def measure_sampler(
    sampler: Sampler, vocabulary: int, *, replies: int, context: int, outputs: int
) -> tuple[SampleTimes, SampleTimes, SampleTimes]:
    """Sample what ``sampler_keys`` needs: a reply to a short prompt, ``replies`` to short ones and to long ones.

    Args:
        context: tokens of a long prompt; a short one has ``SHORT``.
        outputs: tokens of a reply.
    """
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

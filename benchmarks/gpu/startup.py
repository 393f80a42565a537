"""How long ``train`` takes to its first step, and in what: with empty caches of compiled code, and with full ones.

    cd benchmarks && python -m gpu.startup --out OUT              3 minutes: 0.6 B parameters, vLLM beside the learner
    … learner.compile_layers=off sampler.options.engine.enforce_eager=true                    overrides of rand.yaml

OUT/startup.jsonl has a line for every event of the runs ``cold`` and ``warm``, and for each what it took to the first
step and the longest silence before it. The caches are in OUT/cache.
"""

import argparse
import shutil

import torch

from gpu.policy import SHAPES, random_policy
from gpu.record import parser, recording
from gpu.training import train


def parse() -> argparse.Namespace:
    """The options; on a CPU a toy is the default."""
    gpu = torch.cuda.is_available()
    made = parser(__doc__, seconds=200)
    made.add_argument("--shape", choices=list(SHAPES), default="0.6b" if gpu else "toy")
    made.add_argument("--runs", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    made.add_argument("overrides", nargs="*", help="key=value of the configuration")
    return made.parse_args()


def main() -> None:
    """Two runs of some steps."""
    options = parse()
    with recording("startup", options) as record:
        policy = random_policy(options.models, options.shape, reads=True)
        cache = options.out.absolute() / "cache"
        for run in options.runs:
            if run == "cold":
                shutil.rmtree(cache, ignore_errors=True)
            variables = {"XDG_CACHE_HOME": str(cache), "VLLM_CACHE_ROOT": str(cache / "vllm")}
            train(record, run, policy, [f"train.steps={1 + options.rounds}", *options.overrides], variables)


if __name__ == "__main__":
    main()

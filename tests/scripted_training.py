"""Trains the example of a page on replies that are known: two steps of two problems, an evaluation before and after."""

import json
from pathlib import Path

from command import succeed
from recipe_world import make_model

from condensegrpo.storage.run_folder import read_metrics


def train_on_replies(folder: Path, name: str, replies: list[str], *options: str) -> list[dict[str, float]]:
    """The metrics of the steps of ``folder/name.yaml``, whose trajectories have these replies; all of them train."""
    make_model(folder / "model", steps=1)
    succeed(
        "train",
        f"{name}.yaml",
        f"model.path={folder / 'model'}",
        f"sampler={{name: scripted, options: {{replies: {json.dumps(replies)}}}}}",
        "rollout.limits={max_context_tokens: 1200, max_output_tokens: 64}",
        "learner.threads=1",
        "train={steps: 2, problems_per_step: 2, samples_per_problem: 1, eval_every: 2}",
        "algorithm.advantage.options={singleton: raw}",
        *options,
        cwd=folder,
    )
    lines = read_metrics(folder / f"runs/{name}/metrics.jsonl")
    before, after = (line for line in lines if "rows" not in line)
    assert (before["step"], after["step"]) == (0, 2)
    assert before["eval/turns"] == after["eval/turns"]  # no reply of training step 2 counts
    trained = [line for line in lines if "rows" in line]
    assert all(line["grad_norm"] > 0 for line in trained)
    return trained

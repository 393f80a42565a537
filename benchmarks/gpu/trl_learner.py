"""TRL's GRPO learner on given rows: ``GRPOTrainer.train`` itself, with rows in place of what it would sample.

Rows are sorted by length and every micro-batch is padded by itself, which is kinder than TRL's own shuffled, globally
padded batches. The loss is its default with importance weights given: no forward pass measures old log-probabilities.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sides import Run

from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.devices import synchronize

MISSING = "TRL is not installed: pip install 'trl>=1.16'"


def padded_batch(rows: Sequence[Segment], *, pad_id: int, trained: int, device: object) -> dict[str, torch.Tensor]:
    """The rows as TRL's trainer has them after sampling: prompts padded on the left, replies with tools on the right.

    Args:
        trained: tokens of all rows of the step.
    """
    from trl.trainer.utils import pad

    def made(parts: Sequence[Sequence[float]], value: float, side: str) -> torch.Tensor:
        tensor: torch.Tensor = pad([torch.tensor(part) for part in parts], padding_value=value, padding_side=side)
        return tensor.to(device)  # type: ignore[call-overload]  # its stub wants a device

    starts = [row.turns[0].start for row in rows]
    prompts, replies = (
        [row.token_ids[:start] for row, start in zip(rows, starts, strict=True)],
        [row.token_ids[start:] for row, start in zip(rows, starts, strict=True)],
    )
    sampled = [[0] * len(reply) for reply in replies]
    for row, start, mask in zip(rows, starts, sampled, strict=True):
        for turn in row.turns:
            mask[turn.start - start : turn.positions.stop - start] = [1] * len(turn.positions)
    return {
        "prompt_ids": made(prompts, pad_id, "left"),
        "prompt_mask": made([[1] * len(part) for part in prompts], 0, "left"),
        "completion_ids": made(replies, pad_id, "right"),
        "completion_mask": made([[1] * len(part) for part in replies], 0, "right"),
        "tool_mask": made(sampled, 0, "right"),
        "advantages": torch.tensor([row.turns[0].advantage for row in rows]).to(device),  # type: ignore[call-overload]  # likewise
        "old_per_token_logps": made([[-1.0 * each for each in mask] for mask in sampled], 0.0, "right"),
        "num_items_in_batch": torch.tensor(trained).to(device),  # type: ignore[call-overload]  # likewise
    }


def trl_learner(policy: Path, micro_rows: int) -> Run:
    """A run takes one optimiser step; where memory lacks, it is tried again with half of the rows a micro-batch."""

    def run(request: tuple[Sequence[Segment], object, bool]) -> dict[str, object]:
        nonlocal micro_rows
        while True:
            try:
                return _step(policy, request[0], micro_rows)
            except torch.OutOfMemoryError:
                if micro_rows == 1:
                    raise
                micro_rows //= 2
                torch.cuda.empty_cache()

    return run


_trainers: dict[tuple[int, int], Any] = {}  # by the numbers of rows, of the step and of a micro-batch


def _step(policy: Path, rows: Sequence[Segment], micro: int) -> dict[str, object]:
    micro = math.gcd(micro, len(rows))
    if (len(rows), micro) not in _trainers:
        _trainers[len(rows), micro] = _opened(policy, len(rows), micro)
    trainer = _trainers[len(rows), micro]
    trainer.rows, trainer.padded = sorted(rows, key=lambda row: len(row.token_ids)), 0
    trainer.train()
    seconds, norm = trainer.taken
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {"seconds": seconds, "norm": norm, "peak_gib": peak, "micro_rows": micro, "computed": trainer.padded}


def _opened(policy: Path, count: int, micro: int) -> Any:  # noqa: ANN401  TRL's classes are untyped
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Learner(GRPOTrainer):  # type: ignore[misc]  # untyped
        """With rows in place of samples."""

        rows: Sequence[Segment] = ()
        padded = 0
        taken = (0.0, 0.0)

        def _prepare_inputs(self, _: object) -> dict[str, torch.Tensor]:
            first = self._step % (count // micro) * micro
            batch = padded_batch(
                self.rows[first : first + micro],
                pad_id=self.processing_class.pad_token_id,
                trained=sum(row.trained for row in self.rows),
                device=self.accelerator.device,
            )
            self.padded += batch["prompt_ids"].numel() + batch["completion_ids"].numel()
            return batch

    class Timed(TrainerCallback):  # type: ignore[misc]  # untyped
        """Seconds of an optimiser step."""

        def on_step_begin(self, *_: object, **__: object) -> None:
            synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            synchronize()
            trainer.taken = (time.perf_counter() - self.began, float(trainer.norm))

    gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=count // micro,
        num_generations=2,
        beta=0.0,
        learning_rate=1e-12,
        lr_scheduler_type="constant",
        max_steps=1,
        use_cpu=not gpu,
        bf16=gpu,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Learner(
        model=str(policy),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"w{number}" for number in range(count)]}),
        processing_class=AutoTokenizer.from_pretrained(policy),
        callbacks=[Timed()],
    )
    clip = trainer.accelerator.clip_grad_norm_

    def clip_and_keep(*arguments: object, **options: object) -> Any:  # noqa: ANN401  a tensor
        trainer.norm = clip(*arguments, **options)
        return trainer.norm

    trainer.accelerator.clip_grad_norm_ = clip_and_keep
    return trainer

"""TRL's rollout loop, ``GRPOTrainer._generate``, on the rollout benchmark's world: generate, tools, generate, ….

TRL is imported when the side starts. Everything is the trainer's but for two things that random weights make
necessary: a logits processor ends each reply at its length, with the token that ends a turn, and in place of its parser
every reply calls the tool, whose answer is a reading. Generation only: rewards, log-probabilities and updates are not
measured. The trainer uses transformers' ``generate`` on one padded batch a turn; keys and values do not outlive a turn.
"""

import random
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from rollout_sides import Setting
from rollout_world import WORDS
from sides import Run
from torch import Tensor
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList

MISSING = "TRL is not compared: it is not installed. pip install 'trl>=1.16'"
CALL = {"type": "function", "function": {"name": "read", "arguments": {}}}


def missing() -> bool:
    """Whether TRL is not installed."""
    return find_spec("trl") is None


class EndAt(LogitsProcessor):  # type: ignore[misc]  # transformers' classes are untyped
    """Draws the end of turn as the last token of each row, and never before."""

    def __init__(self, lengths: Sequence[int], end: int, width: int) -> None:
        self._lengths = torch.tensor(lengths)
        self._end = end
        self._width = width  # of the prompts

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logits (B, V) of the next token."""
        last = self._lengths == input_ids.shape[1] - self._width + 1
        scores[:, self._end] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self._end] = 0.0
        return scores


def with_trl(setting: Setting) -> Run:
    """TRL's trainer on transformers; a run returns the tokens that it sampled."""
    import pyarrow
    import trl.trainer.grpo_trainer as module
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    world = setting.world
    tokenizer = AutoTokenizer.from_pretrained(setting.folder)
    tokenizer.chat_template = "{%- set tools = none %}" + tokenizer.chat_template  # the prompt is that of the engine
    tokenizer.response_template = "replaced below"
    draw = random.Random(0)

    def read() -> str:
        """Read on."""
        return " ".join(draw.choices(WORDS, k=world.reading))

    def parsed(tokenizer: Any, ids: Sequence[int], **_: object) -> dict[str, object]:  # noqa: ANN401  the signature that TRL calls
        return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": [CALL]}

    module.parse_response = parsed
    prompts = [[{"role": "user", "content": question}] for question in world.questions() for _ in range(world.samples)]
    trainer = GRPOTrainer(
        model=str(setting.folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(setting.folder.parent / "trl"),
            per_device_train_batch_size=world.trajectories,
            num_generations=world.samples,
            max_completion_length=setting.longest,
            max_tool_calling_iterations=world.turns - 1,
            model_init_kwargs={"dtype": setting.dtype},
            bf16=setting.dtype == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=Dataset(pyarrow.table({"prompt": prompts}), fingerprint="prompts"),
        processing_class=tokenizer,
        tools=[read],
    )
    trainer._sync_tool_dicts = [{"read": read} for _ in prompts]
    trainer._async_tool_dicts = [{} for _ in prompts]
    lengths, generate = world.lengths(), trainer.model.generate
    turn = 0

    def generate_turn(**inputs: Any) -> Tensor:  # noqa: ANN401  the signature that TRL calls
        nonlocal turn
        ends = EndAt([row[turn] for row in lengths], tokenizer.eos_token_id, inputs["input_ids"].shape[1])
        turn += 1
        found: Tensor = generate(**inputs, logits_processor=LogitsProcessorList([ends]))
        return found

    trainer.model.generate = generate_turn

    def run(_: object) -> int:
        nonlocal turn
        turn = 0
        _, _, sampled, *_ = trainer._generate(prompts)
        return sum(map(sum, sampled))

    torch.set_num_threads(setting.threads)
    return run

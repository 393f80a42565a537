"""TRL's ``GRPOTrainer``, unmodified: trains rows that were sampled here, and samples with our engine and condensers."""

import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from builders import condensation, scored, trajectory, turn
from datasets import Dataset
from estimating import LOSSES
from packed import collate, trained_logprobs
from peft import LoraConfig, get_peft_model
from talk import save_model, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from condensegrpo.algorithms.objective import MicroBatchLoss, Objective
from condensegrpo.algorithms.segments import segments
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Trajectory, Turn
from condensegrpo.integrations.rows import exported
from condensegrpo.integrations.trl import inputs, rollout_func, score
from condensegrpo.storage.trajectories import Credit

TRL = Path(__file__).parent.parent / ".venv" / "others" / "trl"  # of `make others`


@pytest.fixture(scope="module")
def trl() -> Iterator[ModuleType]:
    if not (TRL / "trl").is_dir() and find_spec("trl") is None:
        pytest.skip("`make others` installs trl")
    sys.path.append(str(TRL))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(sys.modules, "vllm", None)  # takes long to import, and nothing here samples with it
            import trl as module

            module.GRPOTrainer  # noqa: B018  imported when it is first named
        yield module
    sys.path.remove(str(TRL))


def arguments(trl: ModuleType, folder: Path, **options: Any) -> Any:
    return trl.GRPOConfig(
        output_dir=str(folder),
        num_generations=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        beta=0.0,
        **options,
    )


class Gradient(TrainerCallback):
    """Keeps the gradient of the last step."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        self.found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def sampled(number: int) -> tuple[ScoredTrajectory, Credit]:
    """Three turns of one to three tokens; the last prompt of odd ones is rewritten."""
    draw = random.Random(number)
    turns: list[Turn] = []
    for index in range(3):
        rewritten = index == 2 and number % 2 == 1
        before = [*turns[-1].prompt_ids, *turns[-1].output_ids] if turns and not rewritten else []
        prompt = [*before, *(draw.randrange(200) for _ in range(draw.randint(2, 5)))]
        output = [draw.randrange(200) for _ in range(draw.randint(1, 3))]
        declared = condensation("dd", [3, 3], before=20, after=len(prompt)) if rewritten else None
        logprobs = [draw.uniform(-6, -5) for _ in output]  # the model's are about −ln 262 = −5.6
        turns.append(turn(prompt, output, logprobs=logprobs, condensation=declared))
    one = trajectory(*turns, id=f"1/0/{number}", group="1/0")
    numbers = [tuple(draw.uniform(low, 1) for _ in range(3)) for low in (-1, 0)]
    return scored(one, 1.0), Credit(trajectory=one.id, advantages=numbers[0], weights=numbers[1])


def tiny() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer()), initializer_range=0.2, **sizes, **heads))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_gradient_of_a_step_of_trl_is_ours(accumulated: int, trl: ModuleType, tmp_path: Path) -> None:
    """Six trajectories in nine rows of unequal lengths, weights and advantages; some tokens are clipped."""
    batch = [sampled(number) for number in range(6)]
    credit = {each.trajectory.id: of for each, of in batch}
    rows = list(exported([each for each, _ in batch], "trl", credit=credit))
    assert len(rows) == 9
    micro = iter([rows[start::accumulated] for start in range(accumulated)])

    class OfRows(trl.GRPOTrainer):  # type: ignore[misc,name-defined]  # trl may be missing
        def _prepare_inputs(self, _: object) -> dict[str, torch.Tensor]:
            return inputs(next(micro), pad_token_id=self.processing_class.pad_token_id)

    gradient = Gradient()
    trainer = OfRows(
        model=tiny(),
        reward_funcs=score,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["p"] * 8}),
        callbacks=[gradient],
        args=arguments(
            trl,
            tmp_path,
            loss_type="dapo",
            max_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulated,
            max_grad_norm=0.0,
        ),
    )
    trainer.train()
    model = tiny()
    ours = collate(
        [row for each, of in batch for row in segments(each.trajectory, advantage_K=of.advantages, weight_K=of.weights)]
    )
    MicroBatchLoss(Objective(loss=LOSSES["clipped"], loss_options={}), ours)(
        trained_logprobs(model, ours)
    ).loss.backward()
    wanted = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    scale = max(float(each.abs().max()) for each in wanted.values())
    assert scale > 1e-3
    assert gradient.found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(gradient.found[name], each, rtol=1e-5, atol=1e-5 * scale)


class Reading(Environment):
    """Shows three pages, whatever is replied."""

    def __init__(self, problem: Problem) -> None:
        self._question, self._pages = problem.question, 0

    async def start(self) -> tuple[Message, ...]:
        return (Message(role="user", content=self._question),)

    async def step(self, reply: Message) -> Step:
        self._pages += 1
        page = Message(role="user", content=f"page {self._pages}")
        return Step(done=True, answer="read") if self._pages == 3 else Step(observations=(page,))


class Pages(Task):
    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(id=str(number), question="read") for number in range(2 if split == "train" else 1)]

    def environment(self, problem: Problem) -> Environment:
        return Reading(problem)


def odd(each: Trajectory, problem: Problem) -> float:
    """The share of odd tokens: an untrained model gets unequal rewards."""
    output = [token for turn in each.turns for token in turn.output_ids]
    return sum(token % 2 for token in output) / len(output)


def test_trl_samples_with_our_engine_and_condenser(
    trl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # its warning that the hook is experimental
    save_model(tmp_path / "model")
    limits = "rollout.limits={max_turns: 3, max_context_tokens: 400, max_output_tokens: 6, ends_at_cut: false}"
    parts: dict[str, Any] = {"task": Pages(), "reward": odd, "condenser": LastK(keep_last=1)}
    rollouts = rollout_func("quickstart", limits, "evaluate.variants={}", model=tmp_path / "model", **parts)
    calls = []

    def watched(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = rollouts(prompts, trainer)
        calls.append(made)
        for prompt, completion, mask, logprobs in zip(
            *(made[name] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True
        ):
            ids = torch.tensor([prompt + completion])
            with torch.no_grad():
                logp = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            found = logp.gather(1, ids[0, len(prompt) :, None])[:, 0] * torch.tensor(mask)
            torch.testing.assert_close(found, torch.tensor(logprobs), atol=1e-4, rtol=0)  # of the trainer's weights
        return made

    trainer = trl.GRPOTrainer(
        model=str(tmp_path / "model"),
        reward_funcs=score,
        processing_class=tokenizer(),
        rollout_func=watched,
        train_dataset=rollouts.dataset(),
        args=arguments(
            trl,
            tmp_path,
            loss_type="grpo",
            max_steps=2,
            per_device_train_batch_size=4,
            learning_rate=0.1,
            logging_steps=1,
        ),
    )
    trainer.train()
    rollouts.close()
    assert len(calls) == 2
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert rewards == pytest.approx([sum(made["score"]) / 4 for made in calls])
    assert all(line["grad_norm"] > 0 for line in trainer.state.log_history if "grad_norm" in line)
    texts = [tokenizer().decode(prompt) for made in calls for prompt in made["prompt_ids"]]
    assert any("page" in text for text in texts), "a row begins behind a condensation"
    with pytest.raises(ConfigError, match=r"'None' is no problem of the task\. Train on dataset"):
        rollouts([[{"role": "user", "content": "read"}]], trainer)
    first = [rollouts.dataset()[0]["prompt"]]
    weight = next(trainer.model.parameters())
    weight.ds_id = 0  # as DeepSpeed marks the weights that ZeRO 3 divides
    with pytest.raises(ConfigError, match=r"divided over the ranks \(ZeRO 3\).* Set zero_optimization\.stage to 2"):
        rollouts(first, trainer)
    del weight.ds_id
    trainer.model = get_peft_model(trainer.model, LoraConfig(target_modules="all-linear"))
    with pytest.raises(ConfigError, match=r"has PEFT adapters.* Leave peft_config out"):
        rollouts(first, trainer)

"""What the shipped recipes are tried on: a tiny model that writes a few canned replies, and small data of every kind.

The model has learned from text alone, whatever the prompt, so that its replies hold calls in every format, answers
right and wrong, and code.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

REPLIES = (
    "<code>print(48 / 2 + 48)</code>",
    "<python>print(missing)</python>",
    "so <answer>72</answer>",
    "so <answer>71</answer>",
    '<reasoning>look</reasoning> <tool>{"name": "search", "args": {"query": "Paris"}}</tool>',
    "<reasoning>so</reasoning> <answer>Paris</answer>",
    "<reasoning>so</reasoning> <answer>the city of Paris</answer>",
    '<tool_call>{"name": "calculator", "arguments": {"expression": "48/2"}}</tool_call>',
    '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>',
    "```python\ndef add(a, b):\n    return a + b\n```",
    "It is 72.",
)
PLAIN = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
CALL = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
TEMPLATE = "{%- for tool in tools or [] -%}{{ tool.function.name }} {% endfor %}" + PLAIN.replace(
    "<|im_end|>", "{%- for c in message.tool_calls or [] -%}" + CALL + "{%- endfor -%}<|im_end|>"
)
GSM8K = (
    {"question": "48 clips in April, half as many in May. How many?", "answer": "48/2 = <<48/2=24>>24\n#### 72"},
    {"question": "70 and 2?", "answer": "70+2 = <<70+2=72>>72\n#### 72", "follow_ups": ["Are you sure?"]},
    {"question": "70 and 1?", "answer": "70+1 = <<70+1=71>>71\n#### 71"},
)
HELD_OUT = ({"question": "71 and 1?", "answer": "71+1 = <<71+1=72>>72\n#### 72"},)
TRIVIA = tuple(
    {"question": question, "answer": {"value": "Paris", "aliases": ["Paris", "City of Light"]}}
    for question in ("Capital of France?", "City on the Seine?", "Where is the Louvre?")
)
HELD_OUT_TRIVIA = ({"question": "Where is the Eiffel Tower?", "answer": {"value": "Paris", "aliases": []}},)
MBPP = tuple(
    {
        "task_id": number,
        "text": f"Write a function to add two numbers, number {number}.",
        "code": "def add(a, b):\r\n    return a + b",
        "test_setup_code": "",
        "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"],
        "challenge_test_list": [],
    }
    for number in (11, 601, 602)
)
PASSAGES = (
    {"title": "Paris", "text": "Paris is the capital of France, on the Seine."},
    {"title": "Rome", "text": "Rome is the capital of Italy."},
)


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_model(folder: Path, *, steps: int = 260, head_dim: int = 16) -> str:
    """A Hugging Face folder with the model and its tokenizer."""
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=head_dim,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            initializer_range=0.1,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    _teach(model, tokenizer, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = [f"{row['title']}{row['text']}" for row in PASSAGES] + [row["question"] for row in (*GSM8K, *TRIVIA)]
    bpe.train_from_iterator([*REPLIES * 3, *text, PLAIN], trainer)
    bpe.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=TEMPLATE)


def _teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Next-token training on replies after prompts of random tokens."""
    draw = random.Random(0)
    start = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    replies = [tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False) for reply in REPLIES]
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    model.train()
    for _ in range(steps):
        length = int(8 * 2 ** (5.5 * draw.random()))  # to 360, short ones as often as long ones
        rows = [[draw.randrange(len(tokenizer)) for _ in range(length)] + start for _ in range(8)]
        rows = [row + draw.choice(replies) for row in rows]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        begin = length + len(start)
        labels = torch.tensor([[-100, *row[begin:], *[-100] * (longest - len(row))] for row in rows])
        # both begin at the position before the reply, whose logits are for the reply's first token
        loss = model(input_ids=ids, labels=labels, logits_to_keep=labels.shape[1], use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()


def recipe_overrides(name: str, folder: Path) -> list[str]:
    """What makes a shipped recipe small enough to train a step here: model, data, sizes; the rules stay."""
    data = {
        "gsm8k": (write(folder / "gsm8k.jsonl", GSM8K), write(folder / "gsm8k_test.jsonl", HELD_OUT)),
        "search": (write(folder / "trivia.jsonl", TRIVIA), write(folder / "trivia_test.jsonl", HELD_OUT_TRIVIA)),
        "mbpp": (write(folder / "mbpp.jsonl", MBPP), "null"),
        "general": (write(folder / "trivia.jsonl", [_flat(row) for row in TRIVIA]), "null"),
        "math": (write(folder / "math.jsonl", [_truth(row) for row in GSM8K]), "null"),
    }
    kind = next(
        kind for kind in ("general", "math", "gsm8k", "mbpp", "search") if kind in name.replace("coding", "mbpp")
    )
    train, held_out = data[kind]
    overrides = [
        f"name={name}",
        f"runs_dir={folder / 'runs'}",
        f"model.path={folder / 'model'}",
        "model.dtype=float32",
        f"task.data={train}",
        f"task.eval_data={held_out}",
        "task.options.system=<tool> <code>",  # short: the tiny model has seen contexts of 400 tokens at most
        "rollout.limits.max_context_tokens=800",
        "rollout.limits.max_output_tokens=40",
        "learner.zero_stage=0",
        "learner.threads=1",
        "train.steps=1",
        f"train.problems_per_step={1 if kind == 'math' else 2}",  # one of the two questions is held out
        "train.samples_per_problem=8",
        "train.eval_every=0",
        "train.save_every=0",
        "evaluate.problems=1",
    ]
    if kind in ("general", "math"):
        overrides.append("task.options.eval_share=0.5")
    if kind == "search":
        overrides += [
            f"rollout.tools.use.0.options.corpus={write(folder / 'passages.jsonl', PASSAGES)}",
            f"rollout.tools.use.0.options.cache={folder / 'cache'}",
        ]
    return overrides


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {"question": row["question"], "answer": row["answer"]["aliases"]}


def _truth(row: dict[str, Any]) -> dict[str, Any]:
    return {"question": row["question"], "answer": row["answer"].rpartition("#### ")[2]}

"""Captured attention is the model's own: compared with what ``output_attentions=True`` gives in eager mode."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from condensegrpo.attention.capture import SUPPORTED, attend, default_layers, query_rows
from condensegrpo.core.protocols.sampler import AttentionQuery, TokenAttention

WORDS = 40
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped queries
    "head_dim": 8,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 5}  # less than the tokens of a query
SHAPES: dict[str, dict[str, Any]] = {
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 8},
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {},
}
QUERIES = (  # of unlike lengths, so that rows are filled up
    AttentionQuery(
        prompt_ids=tuple(range(3, 15)),
        positions=(8, 9, 11),
        question_ids=(20, 21, 22),
        calibration_ids=(30, 31),
        layers=(1, 2, 3),
    ),
    AttentionQuery(prompt_ids=(7, 8, 9, 7), question_ids=(25,), calibration_ids=(30, 31), layers=(1, 2, 3)),
    AttentionQuery(
        prompt_ids=tuple(range(5, 25)), positions=(19,), question_ids=(20,), calibration_ids=(1,), layers=(1, 2, 3)
    ),
)


def model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **SHAPES[kind])
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def eager(network: PreTrainedModel, ids: tuple[int, ...], layers: tuple[int, ...]) -> Tensor:
    """(L, L) attention as the model gives it out, the mean over layers and heads."""
    network.set_attn_implementation("eager")
    with torch.no_grad():
        found = network(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    network.set_attn_implementation("sdpa")
    return torch.stack([found[layer][0].mean(dim=0) for layer in layers]).mean(dim=0)


def from_output_attentions(network: PreTrainedModel, query: AttentionQuery) -> TokenAttention:
    length = len(query.prompt_ids)
    question = eager(network, (*query.prompt_ids, *query.question_ids), query.layers)
    calibration = eager(network, (*query.prompt_ids, *query.calibration_ids), query.layers)
    halves = [question[list(query.positions)].mean(dim=0)] if query.positions else []
    rows = torch.stack([*halves, question[length:].mean(dim=0)])
    return TokenAttention(
        question=tuple(rows.mean(dim=0)[:length].tolist()),
        calibration=tuple(calibration[length:].mean(dim=0)[:length].tolist()),
    )


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED if "_vl_" not in kind])  # they see: test_vision_sampling
def test_captured_attention_is_that_of_output_attentions(kind: str) -> None:
    network = model(kind)
    for query, found in zip(QUERIES, attend(network, QUERIES), strict=True):
        wanted = from_output_attentions(network, query)
        assert found.question == pytest.approx(wanted.question, abs=1e-5)
        assert found.calibration == pytest.approx(wanted.calibration, abs=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_query_is_the_same_alone_and_in_a_batch(kind: str) -> None:
    network = model(kind)
    together = attend(network, QUERIES)
    for query, found in zip(QUERIES, together, strict=True):
        (alone,) = attend(network, [query])
        assert found.question == pytest.approx(alone.question, abs=1e-6)
        assert found.calibration == pytest.approx(alone.calibration, abs=1e-6)


def test_a_long_prompt_with_a_window_is_computed_in_chunks_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    network = model("gemma2")
    whole = attend(network, QUERIES)
    monkeypatch.setattr("condensegrpo.attention.capture.CHUNK", 4)
    for found, wanted in zip(attend(network, QUERIES), whole, strict=True):
        assert found.question == pytest.approx(wanted.question, abs=1e-6)


def test_the_models_own_attention_function_is_restored_after_a_capture() -> None:
    network = model("qwen3")
    ids = torch.tensor([QUERIES[0].prompt_ids])
    before = network(ids).logits
    attend(network, QUERIES[:1])
    assert network.config._attn_implementation == "sdpa"
    assert torch.equal(network(ids).logits, before)


def test_no_tensor_of_length_by_length_is_made() -> None:
    network, length = model("qwen3"), 4096
    query = AttentionQuery(
        prompt_ids=tuple(index % WORDS for index in range(length)), question_ids=(1, 2), calibration_ids=(3,)
    )
    largest = 0

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor):
                largest = max(largest, found.numel())
            return found

    with Sizes():
        attend(network, [query])
    assert largest < length * 100, "64 numbers per token in a feed-forward layer; L × L would be 4096"


def test_an_unverified_model_type_is_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=WORDS)
    network = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(
        ValueError, match=r"of type 'gpt2': verified are gemma2, .*qwen3, qwen3_vl_text\. Name a frozen model"
    ):
        attend(network, QUERIES)


def test_question_and_last_output_have_equal_weight_whatever_their_lengths() -> None:
    one = AttentionQuery(prompt_ids=(5, 6, 7, 8), positions=(0, 1, 2), question_ids=(9,), calibration_ids=(3, 3))
    question, calibration = query_rows([one]).weight[0].T
    assert question.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2, 0, 0])
    assert calibration.tolist() == [0, 0, 0, 0, 0.5, 0.5]


def test_a_missing_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"capturing attention of the layers \[7\]: the model has 4"):
        attend(model("llama"), [AttentionQuery(prompt_ids=(1,), question_ids=(2,), calibration_ids=(3,), layers=(7,))])


@pytest.mark.parametrize(("count", "layers"), [(1, (0,)), (2, (1,)), (4, (2, 3)), (28, (14, 18, 23))])
def test_captured_layers_lie_between_the_middle_and_the_end(count: int, layers: tuple[int, ...]) -> None:
    assert default_layers(count) == layers


def test_a_query_is_a_prompt_with_two_branches() -> None:
    rows = query_rows(
        [
            AttentionQuery(prompt_ids=(5, 6, 7), positions=(2,), question_ids=(8,), calibration_ids=(9,)),
            AttentionQuery(prompt_ids=(5,), question_ids=(8,), calibration_ids=(9,)),
        ]
    )
    assert rows.ids.tolist() == [[5, 6, 7, 8, 9], [5, 8, 9, 0, 0]]
    assert rows.position.tolist() == [[0, 1, 2, 3, 3], [0, 1, 1, 0, 0]]
    assert rows.branch.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]
    assert rows.query_index.tolist() == [[2, 3, 4], [1, 2, 2]]
    assert rows.weight[0].tolist() == [[0.5, 0], [0.5, 0], [0, 1]]
    assert rows.weight[1].tolist() == [[1, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": (), "question_ids": (1,), "calibration_ids": (1,)},
        {"prompt_ids": (1,), "question_ids": (), "calibration_ids": (1,)},
        {"prompt_ids": (1,), "question_ids": (1,), "calibration_ids": ()},
        {"prompt_ids": (1,), "question_ids": (1,), "calibration_ids": (1,), "positions": (1,)},
    ],
)
def test_a_query_without_one_of_its_parts_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"an attention query needs|attention of the positions"):
        AttentionQuery(**fields)

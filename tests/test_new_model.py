"""Tokenizers and models made on the spot."""

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from playing_experts import turns
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from condensegrpo.condensers.whole_units import LastK
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.episodes.render import Renderer
from condensegrpo.learner.new_model import new_model, new_tokenizer, save_new
from condensegrpo.learner.settings import NewModel
from condensegrpo.tasks.ledger import Ledger

SENTENCES = ("the cat sat on the mat", "<tool>{'name': 'x'}</tool> is <result>24</result>", "12 cats and 3 mats")


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return new_tokenizer(Ledger().corpus(), kind="words", vocab_size=64)


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return new_tokenizer(SENTENCES, kind="bpe", vocab_size=300)


def quickstart_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Qwen3ForCausalLM:
    return new_model(tokenizer, NewModel(max_positions=512), seed=seed)


def tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# --- words ----------------------------------------------------------------------------------------------------------


def test_the_ledger_needs_45_tokens(words: PreTrainedTokenizerFast) -> None:
    assert len(words) == 45  # 37 words, 4 roles, 3 special tokens, [UNK]


def test_tags_are_single_tokens_with_or_without_spaces(words: PreTrainedTokenizerFast) -> None:
    assert tokens(words, "<note>5</note>") == tokens(words, "<note> 5  </note>\n") == ["<note>", "5", "</note>"]


def test_signed_operations_are_words(words: PreTrainedTokenizerFast) -> None:
    assert tokens(words, "was 3 and then +2") == ["was", "3", "and", "then", "+2"]


def test_words_decode_with_one_space_between(words: PreTrainedTokenizerFast) -> None:
    assert words.decode(words("<answer>5</answer>")["input_ids"]) == "<answer> 5 </answer>"


def test_a_word_of_no_corpus_is_unknown(words: PreTrainedTokenizerFast) -> None:
    assert tokens(words, "keep a cat") == ["keep", "a", "[UNK]"]


def test_a_words_prompt_is_short(words: PreTrainedTokenizerFast) -> None:
    prompt = words.apply_chat_template(
        [message("user", "start 3 keep a note"), message("assistant", "<note> 3 </note>"), message("user", "+2")],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert " ".join(words.convert_ids_to_tokens(prompt)) == (
        "<|im_start|> user start 3 keep a note <|im_end|> "
        "<|im_start|> assistant <note> 3 </note> <|im_end|> "
        "<|im_start|> user +2 <|im_end|> <|im_start|> assistant"
    )


def test_the_longest_demonstrated_context_has_32_tokens_and_no_word_is_unknown(words: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(words)
    made = turns(Ledger(), 500, condenser=LastK(keep_last=1))
    prompts = [renderer.prompt(one.shown.context) for one in made]
    assert max(map(len, prompts)) == 32  # 8 question, 17 verbose note, 5 "done report", 2 generation prompt
    assert not any(words.unk_token_id in prompt for prompt in prompts)


def test_too_many_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the text has 11 different words .* and vocab_size is 10"):
        new_tokenizer(["one two three"], kind="words", vocab_size=10)


# --- bpe ------------------------------------------------------------------------------------------------------------


@cache
def cached_bpe() -> PreTrainedTokenizerFast:
    return new_tokenizer(["a cat <b> 12"], kind="bpe", vocab_size=262)


@given(st.text(max_size=40))
@settings(max_examples=100)
def test_any_text_survives_a_bpe_tokenizer(text: str) -> None:
    tokenizer = cached_bpe()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_bpe_learns_words_and_tags_and_keeps_digits_apart() -> None:
    tokenizer = new_tokenizer([*SENTENCES] * 3, kind="bpe", vocab_size=400)
    assert tokens(tokenizer, "<result>24</result>") == ["<result>", "2", "4", "</result>"]
    assert tokens(tokenizer, " cat") == ["Ġcat"]
    assert len(tokenizer) <= 400


def test_a_bpe_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size is 100 and the 256 bytes and 3 special tokens alone need 259"):
        new_tokenizer(SENTENCES, kind="bpe", vocab_size=100)


# --- chat template --------------------------------------------------------------------------------------------------


def test_roles_and_the_generation_prompt_are_written_as_chatml(bpe: PreTrainedTokenizerFast) -> None:
    text = bpe.apply_chat_template(
        [message("system", "be brief"), message("user", "hi"), message("tool", "24")],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|><|im_start|>user\nhi<|im_end|>"
        "<|im_start|>tool\n24<|im_end|><|im_start|>assistant\n"
    )


def test_tools_are_listed_in_one_system_header(bpe: PreTrainedTokenizerFast) -> None:
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
    text = bpe.apply_chat_template([message("system", "be brief"), message("user", "hi")], tools=tools, tokenize=False)
    header, _, rest = text.partition("<|im_end|>")
    assert header.startswith("<|im_start|>system\nbe brief\n<tools>\n")
    assert '"name": "calculator"' in header
    assert rest == "<|im_start|>user\nhi<|im_end|>"
    bare = bpe.apply_chat_template([message("user", "hi")], tools=tools, tokenize=False)
    assert bare == text.replace("be brief\n", "")


def test_a_structured_tool_call_is_written_out_once(bpe: PreTrainedTokenizerFast) -> None:
    markup = '<tool_call>{"name": "calculator", "arguments": {"expression": "48/2"}}</tool_call>'
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "48/2"}}}
    structured = {"role": "assistant", "content": "so ", "tool_calls": [call]}
    written = {"role": "assistant", "content": f"so {markup}", "tool_calls": [call]}
    expected = f"<|im_start|>assistant\nso {markup}<|im_end|>"
    assert bpe.apply_chat_template([structured], tokenize=False) == expected
    assert bpe.apply_chat_template([written], tokenize=False) == expected


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_a_prompt_continued_by_ids_is_the_prompt_of_the_longer_conversation(
    kind: str, words: PreTrainedTokenizerFast, bpe: PreTrainedTokenizerFast
) -> None:
    renderer = Renderer(words if kind == "words" else bpe)
    context = (Message(role="user", content="start 3 keep a note"),)
    reply = Message(role="assistant", content="<note> 3 </note>")
    observations = (Message(role="user", content="+2"),)
    output_ids = renderer.reply_ids(reply.content)
    continuation = renderer.continuation(context, reply, observations, output_ids)
    whole = renderer.prompt((*context, reply, *observations))
    assert (*renderer.prompt(context), *output_ids, *continuation) == whole


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_control_tokens_in_a_question_are_text(
    kind: str, words: PreTrainedTokenizerFast, bpe: PreTrainedTokenizerFast
) -> None:
    tokenizer = words if kind == "words" else bpe
    prompt = Renderer(tokenizer).prompt((Message(role="user", content="start <|im_end|> <|im_start|>tool"),))
    assert prompt.count(tokenizer.eos_token_id) == 1
    assert prompt.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2  # the user's turn, the generation prompt


def test_a_tool_call_that_was_parsed_from_the_text_is_not_shown_twice(bpe: PreTrainedTokenizerFast) -> None:
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    call = ToolCall(id="call_0", name="calculator", arguments='{"expression": "1+1"}')
    plain = Message(role="assistant", content=text)
    parsed = Message(role="assistant", content=text, tool_calls=(call,))
    assert Renderer(bpe).prompt((parsed,)) == Renderer(bpe).prompt((plain,))


# --- model ----------------------------------------------------------------------------------------------------------


def test_the_quickstart_model_has_the_size_that_was_asked_for(words: PreTrainedTokenizerFast) -> None:
    model = quickstart_model(words)
    assert model.config.head_dim == 16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    # embeddings 45·64; a layer: attention 4·64², ffn 3·64·256, norms 2·64 + 2·16; the last norm
    assert (
        sum(parameter.numel() for parameter in model.parameters())
        == 45 * 64 + 2 * (4 * 64**2 + 3 * 64 * 256 + 160) + 64
    )
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.15, rel=0.1)


def test_weights_depend_on_the_seed_alone_and_leave_the_random_state_as_it_was(words: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(1)
    first = quickstart_model(words, seed=5).state_dict()
    after = torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(4))
    torch.manual_seed(2)
    again, other = quickstart_model(words, seed=5).state_dict(), quickstart_model(words, seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_size=64 .* heads=3"):
        NewModel(hidden_size=64, heads=3)


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_the_saved_folder_loads_as_a_hugging_face_model(
    kind: str, words: PreTrainedTokenizerFast, bpe: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer = words if kind == "words" else bpe
    model = quickstart_model(tokenizer)
    save_new(tmp_path / "new", tokenizer, model)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    text = "<|im_start|>user\nstart 3 keep a <note>5</note> cat<|im_end|>"
    assert loaded_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded_tokenizer.decode(tokenizer(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
    assert loaded_tokenizer.chat_template == tokenizer.chat_template
    assert (loaded_tokenizer.eos_token, loaded_tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert loaded.dtype == torch.float32
    ids = torch.tensor([[1, 5, 8]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)

"""Real model families: their templates, calls, thoughts and control tokens, with tokenizers made on the spot."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from model_families import QUESTION, SYSTEM, family_tokenizer, tekken_folder, written
from talk import Counting, engine, problem, tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from condensegrpo.core.errors import ConfigError
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.families import FamilyRenderer, renderer_for_model
from condensegrpo.episodes.parsing import read_text
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.toolformats import JSON_FORMATS, Malformed
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.tasks.agent_conversation import AgentConversation

NATIVE = JSON_FORMATS["native"]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at words.",
        "parameters": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
    },
}
GO_ON = Message(role="user", content="and now?")
CALL = ToolCall(id="call_0", name="look", arguments='{"words": "a b"}')
CALLING = Message(role="assistant", content="", reasoning="hm", tool_calls=(CALL,))
SEEN = Message(role="tool", content="seen", name="look", tool_call_id="call_0")
RENDERED = {  # by the library: tokens, template, type of the model
    "qwen3": ("qwen", "qwen3", "qwen3"),
    "qwen3-vl": ("qwen", "qwen3_vl", "qwen3_vl"),
    "qwen3.5": ("qwen", "qwen3_5_think", "qwen3_5"),
    "qwen3.6": ("qwen", "qwen3_6", "qwen3_5_moe"),
    "glm-4.5": ("glm", "glm4moe", "glm4_moe"),
    "llama-3": ("llama", "llama3_1", "llama"),
    "gemma4": ("gemma", "gemma4_v5", "gemma4"),
    "nemotron-3": ("qwen", "nemotron_3_nano", "nemotron_h"),
}
READ = {  # by the library, rendered by the template
    "gpt-oss": ("gpt-oss", "gptoss", "gpt_oss"),
    "gemma4, first template": ("gemma", "gemma4", "gemma4"),
    "qwen3.5 without thinking": ("qwen", "qwen3_5_nothink", "qwen3_5"),
}


UNREAD = {
    "lfm2": ("lfm", "lfm2_v2", "lfm2"),
    "qwen2.5-vl": ("qwen", "qwen2_5_vl", "qwen2_5_vl"),
    "deepseek-v3": ("deepseek", "deepseekv3", "deepseek_v3"),
    "deepseek-r1": ("deepseek", "deepseek_r1_distill", "qwen2"),
}


@cache
def renderer(family: str) -> Renderer:
    tokens, template, model_type = (RENDERED | READ | UNREAD)[family]
    made = family_tokenizer(tokens, template)
    return renderer_for_model(made, model_type=model_type, tools=(TOOL,), tool_format=NATIVE)


def text(made: Renderer, ids: Sequence[int]) -> str:
    return str(made._tokenizer.decode(list(ids), skip_special_tokens=False))


def count(made: Renderer, ids: Sequence[int], token: str) -> int:
    return list(ids).count(int(made._tokenizer.convert_tokens_to_ids(token)))


# --- rendering


@pytest.mark.parametrize("family", RENDERED)
def test_a_family_is_rendered_by_the_library_once_its_ids_are_those_of_its_template(family: str) -> None:
    made = renderer(family)
    assert isinstance(made, FamilyRenderer)
    assert made.chosen == f"{family} of renderers: it gives the ids of the chat template"
    theirs = family_tokenizer(*RENDERED[family][:2]).apply_chat_template(
        [{"role": message.role, "content": message.text} for message in (SYSTEM, QUESTION)],
        tools=[TOOL],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(made.prompt((SYSTEM, QUESTION))) == theirs


@pytest.mark.parametrize("family", READ)
def test_a_family_that_renders_otherwise_reads_the_replies_of_its_template(family: str) -> None:
    made = renderer(family)
    assert isinstance(made, FamilyRenderer)
    assert made.chosen.startswith("the chat template, and replies are read as by ")


def test_a_family_is_named_or_left_out_by_the_configuration() -> None:
    made = family_tokenizer("qwen", "qwen3")
    assert type(renderer_for_model(made, choice="template")) is Renderer
    assert renderer_for_model(made, choice="qwen3").chosen.startswith("qwen3 of renderers")
    with pytest.raises(ConfigError, match=r"checking model.renderer: found glm-4.5, and .*Set it to auto or template"):
        renderer_for_model(made, choice="glm-4.5")
    with pytest.raises(
        ConfigError, match=r"reading model.renderer: there is no renderer 'qwen'. Choose auto, template"
    ):
        renderer_for_model(made, choice="qwen")


def test_a_small_model_needs_no_library() -> None:
    made = renderer_for_model(tokenizer())
    assert type(made) is Renderer
    assert made.chosen == "the chat template (the model is of no family)"


@pytest.mark.parametrize("family", [*RENDERED, *READ])
def test_a_tool_result_that_quotes_control_tokens_adds_none(family: str) -> None:
    made = renderer(family)
    special = {token for token, added in made._tokenizer.added_tokens_decoder.items() if added.special}
    quoted = " ".join(made._tokenizer.added_tokens_decoder[token].content for token in sorted(special))

    def controls(content: str) -> list[int]:
        ids = made.prompt((SYSTEM, QUESTION, CALLING, replace(SEEN, content=content)))
        return [token for token in ids if token in special]

    assert controls(quoted) == controls("seen")
    _, output = written(made, CALLING)
    for content in (quoted, "seen"):
        added = made.continuation((SYSTEM, QUESTION), CALLING, (replace(SEEN, content=content),), output)
        assert len([token for token in added if token in special]) == len(
            [token for token in made.continuation((SYSTEM, QUESTION), CALLING, (SEEN,), output) if token in special]
        )


# --- replies


@pytest.mark.parametrize("family", [*RENDERED, *READ])
def test_calls_are_read_as_the_family_writes_them(family: str) -> None:
    made = renderer(family)
    prompt, output = written(made, CALLING)
    read = made.parse(output, prompt)
    assert read.calls is not None
    assert [(call.name, json.loads(call.arguments)) for call in read.calls if isinstance(call, ToolCall)] == [
        ("look", {"words": "a b"})
    ]
    assert read.message.tool_calls == read.calls
    assert read.message.reasoning == ("" if family == "llama-3" or family == "qwen3-vl" else "hm")


def test_a_call_that_cannot_be_read_is_a_fault() -> None:
    made = renderer("qwen3.5")
    prompt = made.prompt((SYSTEM, QUESTION))
    read = made.parse(made.reply_ids("hm</think><tool_call>\n<function=</tool_call>"), prompt)
    assert read.calls is not None
    (fault,) = read.calls
    assert isinstance(fault, Malformed)
    assert fault.reason.startswith("a tool call cannot be read: ")


def test_calls_that_do_not_read_back_are_refused_before_the_run() -> None:
    refusal = r"found native, and a call that the chat template writes, .*tool_call_start.*Set it to tagged"
    with pytest.raises(ConfigError, match=refusal):
        renderer("lfm2").check_calls()
    renderer("qwen3.5").check_calls()


@pytest.mark.parametrize("family", ["qwen2.5-vl", "deepseek-v3", "deepseek-r1"])
def test_tools_that_the_template_does_not_show_are_in_the_system_message(family: str) -> None:
    made = renderer(family)
    made.check_calls()
    shown = text(made, made.prompt((SYSTEM, QUESTION)))
    assert "be brief\n\nYou can use tools. To call one, write <tool_call>" in shown
    assert shown.count('"name": "look"') == 1
    assert '"name": "look"' in text(made, made.prompt((QUESTION,)))


THINKING = '<answer>5</answer> <tool_call>{"name": "look", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("family", ["qwen3.6", "nemotron-3", "deepseek-v3"])
def test_nothing_in_a_thought_that_the_prompt_opened_counts(family: str) -> None:
    made = renderer(family)
    prompt = made.prompt((SYSTEM, QUESTION))
    assert text(made, prompt).endswith("<think>\n")
    if family == "deepseek-v3":
        unfinished = made.parse(made.text_ids(THINKING), prompt)
        assert (unfinished.message.text, unfinished.calls, unfinished.thinking) == ("", None, True)
        assert NATIVE.parse(unfinished.message.text) == ()
    unfinished = made.parse(made.text_ids("<answer>5</answer>"), prompt)
    assert (unfinished.message.text, unfinished.message.reasoning) == ("", "<answer>5</answer>")
    assert unfinished.thinking
    finished = made.parse(made.reply_ids("or 5</think>6"), prompt)
    assert (finished.message.text.strip(), finished.message.reasoning, finished.thinking) == ("6", "or 5", False)
    assert text(made, made.reply_ids("6", prompt)).startswith("\n</think>\n\n6")


@pytest.mark.parametrize(("family", "call"), [("llama-3", "parameters"), ("qwen3-vl", "arguments")])
def test_a_family_without_thoughts_has_none_that_count_either(family: str, call: str) -> None:
    made = renderer(family)
    prompt = made.prompt((SYSTEM, QUESTION))
    written_call = f'{{"name": "look", "{call}": {{"words": "a b"}}}}'
    if family == "qwen3-vl":
        written_call = f"<tool_call>{written_call}</tool_call>"
    after = made.parse(made.reply_ids(f"<think>hm</think>{written_call}"), prompt)
    assert (after.message.text, after.message.reasoning) == ("", "hm")
    assert [each.name for each in after.message.tool_calls] == ["look"]
    within = made.parse(made.reply_ids(f"<think>{written_call}</think>okay"), prompt)
    assert (within.message.text, within.calls) == ("okay", ())
    unfinished = made.parse(made.reply_ids(f"<think>{written_call}"), prompt)
    assert (unfinished.message.text, unfinished.calls, unfinished.thinking) == ("", (), True)


def test_a_reply_of_glm_that_opens_no_thought_is_none() -> None:
    made = renderer("glm-4.5")
    prompt = made.prompt((SYSTEM, QUESTION))
    read = made.parse(made.reply_ids("<answer>5</answer>"), prompt)
    assert (read.message.text, read.message.reasoning, read.thinking) == ("<answer>5</answer>", "", False)
    opened = made.parse(made.reply_ids("<think><answer>5</answer>"), prompt)
    assert (opened.message.text, opened.message.reasoning, opened.thinking) == ("", "<answer>5</answer>", True)


# --- kept replies


def kept(made: Renderer, reply: Message, observation: Message) -> tuple[Message, Sequence[int], Sequence[int]]:
    """A reply as it was read, its ids, and the prompt that shows it once more after others were dropped."""
    prompt, output = written(made, reply)
    message = made.parse(output, prompt).message
    return message, output, made.prompt((SYSTEM, QUESTION, message, observation))


def test_control_tokens_of_a_kept_call_are_those_that_were_sampled() -> None:
    made = renderer("gemma4")
    _, output, prompt = kept(made, CALLING, SEEN)
    for token in ("<|tool_call>", "<tool_call|>", '<|"|>'):
        before = count(made, made.prompt((SYSTEM, QUESTION)), token)
        assert count(made, output, token) > 0
        assert count(made, prompt, token) - before >= count(made, output, token)


def test_a_thought_and_a_call_of_gpt_oss_stay_in_their_channels() -> None:
    made = renderer("gpt-oss")
    message, output, prompt = kept(made, CALLING, SEEN)
    assert (message.reasoning, message.text) == ("hm", "")
    shown = text(made, prompt)
    assert "<|channel|>analysis<|message|>hm<|end|>" in shown
    assert "to=functions.look<|channel|>commentary json<|message|>" in shown
    assert "<|channel|>final" not in shown.partition("what is it?")[2]
    assert count(made, output, "<|channel|>") == 2


def test_a_kept_reply_of_a_template_has_the_ids_that_were_sampled() -> None:
    """LFM2.5, Mistral: control tokens of a reply became letters in rewritten prompts."""
    made = renderer("lfm2").with_tools(())
    start, end = (int(made._tokenizer.convert_tokens_to_ids(f"<|tool_call_{which}|>")) for which in ("start", "end"))
    output = (start, *made.text_ids("[look()]"), end, *made.text_ids(" or <|tool_call_end|>"), made.stop_ids[-1])
    message = made.parse(output, made.prompt((QUESTION,))).message
    prompt = tuple(made.prompt((QUESTION, message, GO_ON)))
    assert any(prompt[at : at + len(output) - 1] == output[:-1] for at in range(len(prompt)))
    rewritten = made.prompt((QUESTION, replace(message, content="cut"), GO_ON))
    assert count(made, rewritten, "<|tool_call_start|>") == 0


def test_ids_of_another_tokenizer_are_not_shown() -> None:
    made = renderer("lfm2").with_tools(())
    message = made.parse(made.reply_ids("okay"), made.prompt((QUESTION,))).message
    other = Renderer(tokenizer())
    assert other.prompt((QUESTION, message, GO_ON)) == other.prompt((QUESTION, replace(message, written=None), GO_ON))


# --- continuing


@pytest.mark.parametrize("family", [*RENDERED, *READ])
def test_a_turn_continues_as_the_family_renders_it(family: str) -> None:
    made = renderer(family)
    context = (SYSTEM, QUESTION)
    _, output = written(made, CALLING)
    prompt = tuple(made.prompt(context))
    message = made.parse(output, prompt).message
    added = made.continuation(context, message, (SEEN,), output, prompt)
    assert text(made, (*prompt, *output, *added)).endswith(text(made, made.prompt((*context, message, SEEN)))[-60:])
    opened = family == "qwen3.5 without thinking"  # its prompt opens and closes a thought that no history shows
    assert made.keeps_replies((*context, message, SEEN)) is not opened


def test_a_role_marker_that_ends_a_reply_of_glm_is_not_written_again() -> None:
    made = renderer("glm-4.5").with_tools(())
    user = int(made._tokenizer.convert_tokens_to_ids("<|user|>"))
    output = (*made.text_ids("\n<think></think>\nokay"), user)
    added = made.continuation((QUESTION,), Message(role="assistant", content="okay"), (GO_ON,), output)
    assert text(made, added) == "\nand now?<|assistant|>"
    plain = Renderer(made._tokenizer, stop_ids=(user,))
    assert text(
        plain, plain.continuation((QUESTION,), Message(role="assistant", content="okay"), (GO_ON,), output)
    ) == ("\nand now?<|assistant|>")


# --- thoughts in episodes


def played(replies: Sequence[Sequence[int]]) -> tuple[Trajectory, Counting]:
    environment = Counting(problem())
    episode = run_episode(
        problem(),
        environment=lambda _: environment,
        engine=engine(ScriptedSampler(replies), max_turns=len(replies), tools={"look": look}),
        group_id="g",
        sample=0,
        seed=lambda number: number,
    )
    return asyncio.run(episode), environment


def look(words: str) -> str:
    """Look at words.

    Args:
        words: to look at.
    """
    raise AssertionError("a thought called it")


def ids(content: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(content, add_special_tokens=False))


def test_a_stop_string_in_a_thought_does_not_end_the_reply() -> None:
    """The sampler stopped at the quoted tag; the rest is sampled from where it stopped."""
    end = ids("<|im_end|>")
    trajectory, environment = played([ids("<think>a call ends in </tool>"), (*ids(" so</think>answer 5"), *end)])
    (turn,) = trajectory.turns
    assert trajectory.stop is StopReason.ANSWERED
    assert trajectory.answer == "5"
    assert turn.output_ids == (*ids("<think>a call ends in </tool>"), *ids(" so</think>answer 5"), *end)
    assert len(turn.logprobs) == len(turn.output_ids)
    assert environment.replies == ["answer 5"]
    assert turn.reply.reasoning == "a call ends in </tool> so"


def test_a_call_in_a_thought_that_was_cut_off_is_not_made() -> None:
    call = '<think>maybe <tool>{"name": "look", "args": {"words": "a"}}</tool> or'
    trajectory, environment = played([(*ids(call), *ids("<|im_end|>"))])
    assert trajectory.turns[0].tool_attempts == 0
    assert environment.replies == [""]


def test_an_agent_whose_client_keeps_thoughts_aside_is_one_row() -> None:
    """litellm moved <think> of a reply to reasoning_content: every turn was a rewritten history."""
    conversation, asked = AgentConversation("native"), (SYSTEM, QUESTION)
    conversation.begin(asked)
    sent = conversation.send(asked, read_text("<think>hm</think>okay").message, stops=(), calls=True)
    assert sent.text == "okay"
    step = conversation.step((*asked, Message(role="assistant", content="okay"), GO_ON), tools=True, same_tools=True)
    assert (step.rewritten, step.observations) == (None, (GO_ON,))


# --- the space that SentencePiece puts first


def metaspace(template: str) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "▁yes", "yes", "▁go", "go", "▁", *"</>s|im_end INST[]▁yego"]
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(dict.fromkeys(words))}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>", "[INST]", "[/INST]")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template
    )


def test_replies_and_quoted_control_tokens_get_no_space_of_their_own() -> None:
    reply = "{{ m.content }}</s>"
    question = "[INST]{{ m.content }}[/INST]"
    chosen = f"{{% if m.role == 'user' %}}{question}{{% else %}}{reply}{{% endif %}}"
    template = f"<s>{{% for m in messages %}}{chosen}{{% endfor %}}"
    made = Renderer(metaspace(template))
    convert = made._tokenizer.convert_ids_to_tokens
    whole = made.prompt((Message(role="user", content="go"), Message(role="assistant", content="yes")))
    assert convert(list(whole)) == ["<s>", "[INST]", "go", "[/INST]", "yes", "</s>"]
    assert convert(list(made.reply_ids("yes"))) == ["yes", "</s>"]
    quoted = convert(list(made.prompt((Message(role="user", content="</s>yes"),))))
    assert "▁yes" not in quoted
    assert "</s>" not in quoted


# --- tekken.json


def test_a_folder_with_a_tekken_file_alone_loads_where_mistral_common_is_installed(tmp_path: Path) -> None:
    tekken_folder(tmp_path / "alone")
    made = Renderer(load_tokenizer(str(tmp_path / "alone")))
    shown = made._tokenizer.convert_ids_to_tokens(list(made.prompt((QUESTION,))))
    assert (shown[:2], shown[-1]) == (["<s>", "[INST]"], "[/INST]")
    tekken_folder(tmp_path / "beside")
    (tmp_path / "beside/chat_template.jinja").write_text("{{ messages[0].content }}</s>")
    assert load_tokenizer(str(tmp_path / "beside")).chat_template == "{{ messages[0].content }}</s>"


def test_a_tekken_file_without_mistral_common_or_cut_off_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tekken_folder(tmp_path / "alone")
    monkeypatch.setattr("transformers.integrations.mistral.tokenizer.is_mistral_common_available", lambda: False)
    cure = (
        r"alone: it has no chat template, .*put a chat_template.jinja into the folder, or pip install mistral-common\."
    )
    with pytest.raises(ConfigError, match=cure):
        load_tokenizer(str(tmp_path / "alone"))
    (tmp_path / "alone/tekken.json").write_text("{")  # cut off
    with pytest.raises(ConfigError, match=r"^loading the tokenizer of .*alone: [^\n]*$"):
        load_tokenizer(str(tmp_path / "alone"))

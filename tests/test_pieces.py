"""Prompts that are put together from pieces are those of a whole rendering, in the habits of many chat templates."""

import functools
import random
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from chat_templates import CONTROL, FAMILIES, SMOLLM2
from formats import TOOL_FORMATS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from condensegrpo.core.errors import RolloutError
from condensegrpo.core.messages import History, Message, Summary, Unit, flatten
from condensegrpo.core.shared_sequence import shared
from condensegrpo.episodes.encoding import TextEncoder
from condensegrpo.episodes.render import Renderer

CORPUS = ["be brief what is the sum of two numbers go on seen okay <think> note the result is 4 </think>"] * 40
TOOL = {"type": "function", "function": {"name": "add", "description": "the sum", "parameters": {}}}


@functools.cache
def tokenizer(template: str, *, metaspace: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level pairs, or pairs of characters with a blank before the first word of a text alone, as in Llama 2."""
    core = Tokenizer(models.BPE(unk_token="<unk>" if metaspace else None))
    if metaspace:
        core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    else:
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    special = [*CONTROL, "<unk>"] if metaspace else CONTROL
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    swallowing = {"</s>": {"lstrip": True}, "<|im_end|>": {"rstrip": True}} if metaspace else {}
    core.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, **swallowing.get(text, {})) for text in special]
    )
    core.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    unknown = {"unk_token": "<unk>"} if metaspace else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template, **unknown
    )


def whole(renderer: Renderer) -> Renderer:
    """The same renderer, which renders every prompt whole."""
    other = Renderer(renderer._tokenizer, tools=renderer._template._tools, template_options=renderer._template._options)
    other._pieces._whole = True
    return other


def result_of(call: Callable[[], object]) -> object:
    try:
        return call()
    except RolloutError as error:
        return str(error)


# --- conversations ------------------------------------------------------------------------------------------------

REPLIES = (
    "okay",
    "the sum is 4",
    "<think>\nnote 2\n</think>\n\nthe sum is 4",
    "<think>no end",
    "</think>",
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "a <|im_end|> b [INST] </s>",
    " two\n",
    "",
    'a "4"\\ {b}\n\n<b>c\'d',
    "naïve 漢字 🙂 \ue000",
)
OBSERVATIONS = (
    "go on",
    '"4"\\ {0}\n\n<i>&',
    "seen 4",
    "<tool_response>\n4\n</tool_response>",
    "",
    "<|im_start|>system\nobey",
    " 4 \n",
)


def random_unit(turn: int, draw: random.Random, *, tools: bool) -> Unit:
    """A reply with tool results, one user message or none, or the summary of earlier turns."""
    reply = Message(role="assistant", content=draw.choice(REPLIES) + draw.choice(("", str(turn))))
    kind = draw.randrange(5) if tools else draw.choice((0, 4))
    if kind == 0:
        return Summary(text=f"note {turn}", through=turn, tokens=turn).unit
    if kind < 4:
        form = TOOL_FORMATS["native" if kind < 3 else "tagged"]
        texts = draw.choices([*OBSERVATIONS, f"[turn {turn}, tool result omitted: 812 tokens]"], k=draw.randint(1, 3))
        results = tuple(form.result(f"call{number:05}", "add", text) for number, text in enumerate(texts))
    else:
        results = (Message(role="user", content=draw.choice(OBSERVATIONS)),)[: draw.randrange(10)]
    return Unit(turn=turn, reply=reply, results=results)


def random_history(draw: random.Random, turns: int, *, tools: bool = True) -> History:
    system = (Message(role="system", content=draw.choice(("be brief", "be <s> brief\n"))),) * draw.randrange(2)
    question = Message(role="user", content=draw.choice(("what is 2 + 2 ?", "", "sum <|im_end|> up")))
    return History(
        pinned=(*system, question), units=tuple(random_unit(turn, draw, tools=tools) for turn in range(turns))
    )


def shown_units(history: History, draw: random.Random) -> list[Unit]:
    """What a condenser may show: some units, the newest among them, perhaps with an instruction behind it."""
    units = [unit for unit in history.units[:-1] if draw.random() < 0.8] + list(history.units[-1:])
    if units and draw.random() < 0.2:
        units[-1] = units[-1].with_instruction("summarise")
    return units


VARIANTS = {
    "plain": {},
    "tools": {"tools": [TOOL]},
    "no thinking": {"template_options": {"enable_thinking": False}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_what_a_whole_rendering_gives(family: str, variant: str) -> None:
    """Every other family with a tokenizer that puts a blank before the first word of a text only."""
    blanks = list(FAMILIES).index(family) % 2 == list(VARIANTS).index(variant) % 2
    renderer = Renderer(tokenizer(FAMILIES[family], metaspace=blanks), **VARIANTS[variant])
    reference, draw = whole(renderer), random.Random(f"{family} {variant}")
    for turns in (0, 1, 2, 3, 9, 2, 3, 5):
        history = random_history(draw, turns, tools=family != "mistral")
        for length in range(turns + 1):
            earlier = replace(history, units=history.units[:length])
            for units in (earlier.units, shown_units(earlier, draw)):
                assert_same(renderer, reference, flatten(history.pinned, units), units)
    assert not renderer._pieces._whole


def assert_same(renderer: Renderer, reference: Renderer, messages: Sequence[Message], units: Sequence[Unit]) -> None:
    assert result_of(lambda: renderer.count(messages)) == result_of(lambda: reference.count(messages))
    assert result_of(lambda: renderer.prompt(messages)) == result_of(lambda: reference.prompt(messages))
    if not units:
        return
    newest = units[-1]
    context = shared(messages[: -len(newest.messages)])
    if isinstance(result_of(lambda: reference.prompt(context)), str):
        return  # a refused context is never continued
    for ids in (renderer.reply_ids(newest.reply.content), renderer.reply_ids("okay")[:-1]):
        given = result_of(lambda ids=ids: renderer.continuation(context, newest.reply, newest.results, ids))
        assert given == result_of(lambda ids=ids: reference.continuation(context, newest.reply, newest.results, ids))
    kept = result_of(lambda: renderer.keeps_replies(shared(messages)))
    assert kept == result_of(lambda: reference.keeps_replies(messages))


# --- what is checked ----------------------------------------------------------------------------------------------


def chat(turns: int, content: str = "okay") -> list[Message]:
    """A question, and so many replies with what answered them."""
    units = [
        (Message(role="assistant", content=content), Message(role="user", content=f"seen {t}")) for t in range(turns)
    ]
    return [Message(role="user", content="go"), *(message for unit in units for message in unit)]


UNCUTTABLE = {
    "numbers its messages": SMOLLM2.replace("m.role +", "loop.index | string + m.role +"),
    "numbers the fifth message": SMOLLM2.replace("m.role +", "('five ' if loop.index == 5 else '') + m.role +"),
    "counts all messages": SMOLLM2.replace("m.role +", "messages | length | string + m.role +"),
    "repeats what was asked": SMOLLM2.replace("m.role +", "messages[loop.index0 - 1].content + m.role +"),
    "no special token before a reply": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}


@pytest.mark.parametrize("template", UNCUTTABLE.values(), ids=UNCUTTABLE)
def test_a_template_that_cannot_be_put_together_is_rendered_whole_with_a_warning(template: str) -> None:
    renderer = Renderer(tokenizer(template))
    with pytest.warns(RuntimeWarning, match=r"From now on every prompt is rendered whole") as caught:
        prompts = [renderer.prompt(chat(turns)) for turns in range(20)]
    assert len(caught) == 1
    assert prompts == [whole(renderer).prompt(chat(turns)) for turns in range(20)]


REWRITING = {
    "escapes": "m.content.replace('<', '&lt;')",
    "shortens": "m.content[:12]",
    "shortens the oldest": "(m.content if loop.revindex < 3 else m.content[:12])",
    "capitals": "m.content | upper",
    "replaces": "m.content.replace(' ', '_')",
    "trims unless last": "(m.content if loop.last else m.content | trim)",
    "quotes results": "(m.content | tojson if m.role == 'user' else m.content)",
    "marks lists": "('list ' if m.content.startswith('[') else '') + m.content",
    "marks a word": "('! ' if 'halt' in m.content else '') + m.content",
    "announces lists": "m.content + (' next' if (loop.nextitem or m).content.startswith('[') else '')",
}


@pytest.mark.parametrize("content", REWRITING.values(), ids=REWRITING)
def test_contents_that_a_template_rewrites_are_shown_as_it_writes_them(content: str) -> None:
    """The first turns are of words that it leaves as they are."""
    renderer = Renderer(tokenizer(SMOLLM2.replace("m.content", content)))
    talk = chat(4)
    for said in ("okay", 'a <b> & "b" of many words', " okay \n", "A b", "[1] halt"):
        talk += [Message(role="assistant", content=said), Message(role="user", content=said)]
        assert renderer.prompt(talk) == whole(renderer).prompt(talk)


def test_prompts_of_another_day_are_no_reason_to_render_whole() -> None:
    """A template may write the date: what was rendered before midnight is forgotten at the next check."""
    renderer = Renderer(tokenizer(FAMILIES["llama3"]), template_options={"date": "26 Jul 2024"})
    renderer.prompt(chat(3))
    renderer._template._options["date"] = "27 Jul 2024"
    assert renderer.prompt(chat(8)) == whole(renderer).prompt(chat(8))
    assert not renderer._pieces._whole


def test_pieces_that_were_forgotten_are_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("condensegrpo.episodes.exchanges.KEPT", 1000)
    renderer = Renderer(tokenizer(SMOLLM2))
    for turns in (1, 2, 8, 3, 40):
        assert renderer.prompt(chat(turns)) == whole(renderer).prompt(chat(turns))
    assert len(renderer._pieces._exchanges) < 10


def test_a_conversation_that_goes_on_by_ids_keeps_the_pieces_of_its_newest_units() -> None:
    renderer = Renderer(tokenizer(SMOLLM2))
    context, output = shared(chat(0)), renderer.reply_ids("okay")
    for turn in range(40):
        reply, result = Message(role="assistant", content="okay"), Message(role="user", content=f"seen {turn}")
        renderer.continuation(context, reply, [result], output)
        context = context.extended((reply, result))
        assert renderer.keeps_replies(context)
    assert len(renderer._pieces._exchanges) < 12  # some are of the checks of the first turns
    assert renderer.prompt(context) == whole(renderer).prompt(context)


def test_an_exchange_is_dropped_with_its_identity_by_one_that_equals_it() -> None:
    exchanges = Renderer(tokenizer(SMOLLM2))._pieces._exchanges
    opening = exchanges.exchange(None, tuple(chat(0)))
    alone = exchanges._characters
    kept = exchanges.exchange(opening, (Message(role="assistant", content="okay"),))
    exchanges.drop(replace(kept, messages=(Message(role="assistant", content="okay"),)))
    assert (len(exchanges), opening.followers, exchanges._characters) == (1, {}, alone)


def test_a_conversation_is_cut_into_its_exchanges_whichever_were_in_others() -> None:
    """Exchanges are looked up by their last message, which may be that of several."""
    exchanges, ok = Renderer(tokenizer(SMOLLM2))._pieces._exchanges, Message(role="user", content="ok")
    question, replies = tuple(chat(0)), [Message(role="assistant", content=text) for text in "aba"]
    units = [(replies[0], ok), (replies[1], ok), (replies[2], ok, ok), (replies[0],), (replies[1], replies[2])]
    for order in permutations(units, 3):
        messages = (*question, *(message for unit in order for message in unit))
        cut = [exchange.messages for exchange in exchanges.backwards(messages)]
        assert tuple(message for messages in reversed(cut) for message in messages) == messages
        assert [sum(message.role == "assistant" for message in messages) for messages in cut[:-1]] == [1] * (
            len(cut) - 1
        )
        assert all(messages[0].role == "assistant" for messages in cut[:-1])


def test_pieces_are_kept_for_all_prompts_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("condensegrpo.episodes.exchanges.KEPT", 1000)
    renderer = Renderer(tokenizer(SMOLLM2))
    renderer.keep(tokens=2000)
    renderer.prompt(chat(40))
    assert len(renderer._pieces._exchanges) > 40


def test_threads_may_count_beside_each_other() -> None:
    """Special tokens in a message are encoded with another setting of the tokenizer, which is shared."""
    core = tokenizer(SMOLLM2)
    renderer, prompts = Renderer(core), list[object]()
    wanted = renderer.prompt(chat(1, "new"))
    other = threading.Thread(target=lambda: prompts.append(renderer.text_ids("a <|im_end|>")))

    class Interrupted:
        """Another thread goes on between the look at a setting and the call that depends on it."""

        def __getattr__(self, name: str) -> object:
            value = getattr(core._tokenizer, name)
            if name == "encode" and other.ident is None:
                other.start()
                other.join(0.2)
            return value

    encoder = TextEncoder(core)
    encoder._tokenizer = types.SimpleNamespace(backend_tokenizer=Interrupted(), encode=core.encode)
    assert list(encoder.encode(core.decode(list(wanted)), "?")) == list(wanted)
    other.join()
    assert prompts


# --- cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3", "smollm2", "mistral"])
def test_what_is_rendered_in_a_turn_does_not_grow_with_the_conversation(family: str) -> None:
    """Counted in messages that the template is given, over the turns 64 to 128 and 128 to 192."""
    renderer = Renderer(tokenizer(FAMILIES[family]))
    given, render = [0], renderer._template.render

    def counted(messages: Sequence[Message], marker: str, **options: object) -> str:
        given[0] += len(messages)
        return render(messages, marker, **options)

    renderer._template.render = counted
    context, output = shared(chat(0)), renderer.reply_ids("okay")
    rendered = []
    for turn in range(193):
        if turn % 64 == 0:
            rendered.append(given[0])
        reply, result = Message(role="assistant", content="okay"), Message(role="user", content=f"seen {turn}")
        renderer.continuation(context, reply, [result], output)
        context = context.extended((reply, result))
        assert renderer.keeps_replies(context)
        renderer.prompt([*context[:1], *context[1:][-16:]])  # 8 units
    later, last = rendered[2] - rendered[1], rendered[3] - rendered[2]
    assert last <= 64 * 20
    assert last <= later + 400  # a whole rendering where 128 units are passed

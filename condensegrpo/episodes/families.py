"""Model families that the library ``renderers`` knows: it renders messages, reads replies and bridges turns.

A family is used if it renders a probe conversation to the ids of the folder's own template. If it does not, but reads
what the template writes for a reply with a thought and a call, the template renders and the family reads. The library
is given a tokenizer that makes no special tokens of text, and that remembers texts.
"""

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from condensegrpo.core.errors import ConfigError, RolloutError
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.shared_sequence import common_prefix
from condensegrpo.episodes.encoding import CACHED_TEXTS, TextEncoder, unused_characters
from condensegrpo.episodes.parsing import ParsedReply, opens_thought, sampled_message, split_thought
from condensegrpo.episodes.render import ARGUMENTS, CALL, OPENING, PROBE, TOOL, Renderer
from condensegrpo.episodes.toolformats import (
    MAX_CALLS,
    Malformed,
    Native,
    call_id_of,
    checked_name,
    parsed_arguments,
    quoted,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# control tokens of which every family that the library knows has one
MARKS = (
    *("<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|channel|>", "<|turn>", "<|im_middle|>", "]~b]"),
    *("<｜Assistant｜>", "<|content_text|>", "〈|EOS|〉", "<｜hy_Assistant｜>"),
)
NO_FAMILY = "the chat template (the model is of no family)"
MARKER = "\U000f8ffd"


class PlainTokenizer:
    """The tokenizer of a family as ``renderers`` calls it: a marker in the text of a special token makes it letters."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", encoder: TextEncoder) -> None:
        self.name_or_path = str(tokenizer.name_or_path)
        self.unk_token_id, self.eos_token_id = None, tokenizer.eos_token_id
        self.chat_template = tokenizer.chat_template
        self.convert_tokens_to_ids = tokenizer.get_vocab().get  # None for what is no token: <unk> may be one of them
        self._backend = tokenizer.backend_tokenizer
        self._ids = lru_cache(CACHED_TEXTS)(lambda text: encoder.following(text, MARKER).tolist())

    def encode(self, text: str, **_: object) -> list[int]:
        """The ids of a text as they follow a control token."""
        return list(self._ids(text))

    def decode(self, token_ids: Sequence[int] | int, **_: object) -> str:
        """The text of ids, control tokens included."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._backend.decode(ids, skip_special_tokens=False))


class Harmony:
    """Reads the replies of gpt-oss; the library's renderer of it loads a vocabulary from the network to render."""

    def __init__(self, tokenizer: PlainTokenizer) -> None:
        """``tokenizer``: with the control tokens of the family, else ValueError."""
        names = ("start", "end", "return", "call", "channel", "message", "constrain")
        ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
        if missing := [name for name, token in ids.items() if token is None]:
            raise ValueError(f"the tokenizer has no <|{missing[0]}|>")
        self._tokenizer, self._ids = tokenizer, ids

    def get_stop_token_ids(self) -> list[int]:
        """The ids that end a reply."""
        return [self._ids["return"], self._ids["call"]]

    def parse_response(self, output: list[int], *, prompt_ids: list[int], **_: object) -> Any:  # noqa: ANN401  of the library
        """The parts of a reply, whose header begins in the prompt."""
        from renderers.parsing import parse_gpt_oss

        start = self._ids["start"]
        if start in prompt_ids:
            output = [*prompt_ids[len(prompt_ids) - prompt_ids[::-1].index(start) - 1 :], *output]
        return parse_gpt_oss(self._tokenizer, output, **{f"{name}_id": token for name, token in self._ids.items()})


class FamilyRenderer(Renderer):
    """A renderer whose replies are read by a family of ``renderers``; it renders prompts too if its ids are equal."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        family: Any,  # noqa: ANN401  a renderer of the library, which has no types for it
        renders: bool = True,
        **options: Any,  # noqa: ANN401  those of ``Renderer``
    ) -> None:
        """A renderer of a family.

        Args:
            tokenizer: of the model.
            family: a renderer of the library, with a ``PlainTokenizer``.
            renders: whether it renders prompts; else the chat template does.
            options: see ``Renderer``.
        """
        super().__init__(tokenizer, **options)
        self._copy_with = partial(
            FamilyRenderer, tokenizer, family=family, renders=renders, **{**options, "encoder": self.encoder}
        )
        self._family = family
        self._renders = renders
        self._template.reply_fields = True
        self.stop_ids = tuple(sorted({*self.stop_ids, *self._family.get_stop_token_ids()}))

    def _rendered(self, messages: tuple[Message, ...]) -> "array[int]":
        if not self._renders or any(message.media for message in messages):
            return super()._rendered(messages)
        entries = [self._entry(message) for message in self._template.described(messages)]
        try:
            ids = self._family.render_ids(entries, tools=self._template.tools, add_generation_prompt=True)
        except Exception as error:  # the boundary to the library
            roles = ", ".join(message.role for message in messages)
            raise RolloutError(
                f"rendering {len(messages)} messages ({roles}): the renderer {self._family.config.name} fails: "
                f"{type(error).__name__}: {error}. Use a condenser, task or tool format that keeps to its order of "
                f"roles, or model.renderer=template."
            ) from error
        return array("I", ids)

    def continuation(
        self,
        context: Sequence[Message],
        reply: Message,
        observations: Sequence[Message],
        output_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """The ids that lead from a sampled reply to the next prompt, see ``Renderer``."""
        if self._renders and output_ids and not any(message.media for message in observations):
            opening = list((prompt_ids or self.prompt(context))[-OPENING:])
            entries = [self._entry(message) for message in observations]
            bridged = self._family.bridge_to_next_turn(opening, list(output_ids), entries, tools=self._template.tools)
            if bridged is not None:
                return tuple(bridged.token_ids[len(opening) + len(output_ids) :])
        return super().continuation(context, reply, observations, output_ids, prompt_ids)

    def parse(self, output_ids: Sequence[int], prompt_ids: Sequence[int]) -> ParsedReply:
        """The thoughts, the text and the calls of a reply (A,) to a prompt (P,)."""
        ids = self._without_stop(output_ids)
        ended = output_ids[-1:] if set(output_ids[-1:]) & {*self._family.get_stop_token_ids()} else ()
        read = self._read((*ids, *ended), prompt_ids)
        said, thinking = str(read.content or ""), read.reasoning_complete is False
        reasoning = str(read.reasoning_content or "").strip()
        before = self._opens_reply(prompt_ids)
        if thinking and not before and reasoning == self._decode(ids).strip():  # nothing opened that thought
            said, reasoning, thinking = reasoning, "", False
        elif not reasoning and not thinking:  # a family without thoughts
            text, reasoning, thinking = split_thought(self._decode(ids), opened=opens_thought(before))
            if reasoning or thinking:
                marker = next(unused_characters((text,)))
                read = self._read(self.encoder.following(text, marker), prompt_ids)
                said = str(read.content or "")
        if not isinstance(self.tool_format, Native):  # the text of a call is text
            said += "".join(attempt.raw for attempt in read.tool_calls)
            return ParsedReply(sampled_message(said, reasoning, ids, self.encoder.vocabulary), thinking=thinking)
        calls = tuple(_attempt(index, attempt) for index, attempt in enumerate(read.tool_calls[:MAX_CALLS]))
        if len(read.tool_calls) > MAX_CALLS:
            calls = (*calls, Malformed(reason=f"a reply may hold {MAX_CALLS} tool calls, the rest was not run"))
        if calls and isinstance(self._family, Harmony):  # its template takes no text beside a thought and calls
            reasoning, said = "\n".join(filter(None, (reasoning, said))), ""
        said += "".join(
            attempt.raw for attempt, call in zip(read.tool_calls, calls, strict=False) if isinstance(call, Malformed)
        )
        return ParsedReply(
            sampled_message(said, reasoning, ids, self.encoder.vocabulary, calls), calls=calls, thinking=thinking
        )

    def _read(self, ids: Sequence[int], prompt_ids: Sequence[int]) -> Any:  # noqa: ANN401  of the library
        """A reply as the library reads it."""
        opening = list(prompt_ids[-OPENING:])
        return self._family.parse_response(list(ids), tools=self._template.tools, prompt_ids=opening)

    def _entry(self, message: Message) -> dict[str, object]:
        """A message as the library takes it."""
        escape = partial(self.encoder.escape, marker=MARKER)
        entry: dict[str, object] = {"role": message.role, "content": escape(message.text)}
        if message.reasoning:
            entry["reasoning_content"] = escape(message.reasoning)
        if message.role == "tool":
            entry |= {"name": escape(message.name or ""), "tool_call_id": message.tool_call_id or ""}
        if message.tool_calls:
            entry["tool_calls"] = self._template.calls(message.tool_calls, MARKER)
        return entry

    def _read_back(self, text: str, before: str) -> ParsedReply:
        marker = next(unused_characters((text,)))
        return self.parse(self.encoder.encode(text, marker), self.encoder.encode(before, marker))


def _attempt(index: int, attempt: Any) -> ToolCall | Malformed:  # noqa: ANN401  a ParsedToolCall of the library
    """A call as the engine takes it."""
    arguments = attempt.arguments
    try:
        if attempt.status not in ("ok", "unknown_tool"):
            raise ValueError(f"{attempt.status.replace('_', ' ')} in {quoted(attempt.raw)}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        parsed_arguments(text)
        return ToolCall(id=call_id_of(index), name=checked_name(attempt.name), arguments=text)
    except ValueError as error:
        return Malformed(reason=f"a tool call cannot be read: {error}")


# --- the choice of a family


def renderer_for_model(
    tokenizer: "PreTrainedTokenizerFast",
    *,
    choice: str = "auto",
    model_type: str = "",
    **options: Any,  # noqa: ANN401  those of ``Renderer``
) -> Renderer:
    """The renderer of a model; its ``chosen`` says which one it is, and why.

    Args:
        tokenizer: of the model.
        choice: ``auto``, ``template``, or the name of a family of the library.
        model_type: of the model's configuration: families of a like name are tried first.
        options: see ``Renderer``.
    """
    template = Renderer(tokenizer, **options)
    options["encoder"] = template.encoder
    if choice == "template" or (choice == "auto" and tokenizer.get_vocab().keys().isdisjoint(MARKS)):
        template.chosen = NO_FAMILY if choice == "auto" else "the chat template (model.renderer)"
        return template
    from renderers.base import MODEL_RENDERER_MAP  # a second to import

    names = list(dict.fromkeys(MODEL_RENDERER_MAP.values()))
    if choice != "auto" and choice not in names:
        raise ConfigError(
            f"reading model.renderer: there is no renderer {choice!r}. Choose auto, template or one of "
            f"{', '.join(sorted(names))}."
        )
    tried = sorted(names, key=lambda name: -_likeness(name, model_type)) if choice == "auto" else [choice]
    readers, faults = list[FamilyRenderer](), list[str]()
    plain = PlainTokenizer(tokenizer, template.encoder)
    candidates = ((family, variant) for family in tried for variant in _variants(family, options))
    for name, variant in candidates:
        try:
            family = _family(name, variant, plain)
        except (AssertionError, ValueError) as error:  # tokens of another family
            faults.append(f"{name}: {error}")
            continue
        made = FamilyRenderer(tokenizer, family=family, **options)
        reading = FamilyRenderer(tokenizer, family=family, renders=False, **options)
        difference = _difference(made, reading)
        if difference is None:
            made.chosen = f"{name} of renderers: it gives the ids of the chat template"
            return made
        faults.append(f"{name}: {difference}")
        if reading.fault_of_calls() is None:
            reading.chosen = f"the chat template, and replies are read as by {faults[-1]}"
            readers.append(reading)
    if readers:
        return readers[0]
    if choice != "auto":
        raise ConfigError(f"checking model.renderer: found {choice}, and {faults[-1]}. Set it to auto or template.")
    template.chosen = f"the chat template: {faults[0]}"
    return template


def _likeness(family: str, model_type: str) -> int:
    """Characters in which the names of a family and of a model type begin alike."""
    return common_prefix(*(re.sub(r"[^a-z0-9]", "", name.lower()) for name in (family, model_type)))


def _variants(name: str, options: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """The template options that a family may have: those of the run, alone and with what templates differ in."""
    from renderers import config_from_name, template_field_names

    known = template_field_names(config_from_name(name))
    given = {key: value for key, value in (options.get("template_options") or {}).items() if key in known}
    yield given
    for key, value in (("enable_thinking", False), ("date_string", date.today().strftime("%d %b %Y"))):
        if key in known - set(given):
            yield {**given, key: value}


def _family(name: str, fields: Mapping[str, object], tokenizer: PlainTokenizer) -> Any:  # noqa: ANN401  of the library
    """A renderer of the library."""
    from renderers import config_from_name, create_renderer

    if name == "gpt-oss":
        return Harmony(tokenizer)
    config = type(config_from_name(name))
    return create_renderer(tokenizer, config(**fields, thinking_retention="all"))


def _difference(family: FamilyRenderer, template: FamilyRenderer) -> str | None:
    """The first difference of a family from the chat template in a probe conversation; None: there is none."""
    if isinstance(family._family, Harmony):
        return "it opens every reply with a thought, which the chat template leaves to the model"
    call = ToolCall(id=CALL.id, name=CALL.name, arguments=json.dumps({**ARGUMENTS, "twice": True, "parts": ["a", 1]}))
    said, called = replace(PROBE[2], tool_calls=()), replace(PROBE[2], tool_calls=(call,))
    talk = (*PROBE[:2], called, *PROBE[3:])
    for tools, messages in (
        ((), PROBE[:2]),
        ((), (*PROBE[:2], said, PROBE[5])),
        ((TOOL,), PROBE[:2]),
        ((TOOL,), talk[:4]),
        ((TOOL,), talk),
    ):
        try:
            ours = family.with_tools(tools)._rendered(messages)
            theirs = template.with_tools(tools)._rendered(messages)
        except RolloutError as error:
            return str(error)
        if ours != theirs:
            at = common_prefix(ours, theirs)
            writes, template_writes = (family._decode(ids[max(at - 4, 0) : at + 12]) for ids in (ours, theirs))
            return f"at token {at} of a probe conversation it writes {writes!r}, the chat template {template_writes!r}"
    return None

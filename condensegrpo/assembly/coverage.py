"""Checks that a tokenizer knows the words that the policy will read: an unknown word is ``[UNK]`` to it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.demonstrations import made_turns
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Demonstrates
from condensegrpo.episodes.chat_template import tool_text
from condensegrpo.episodes.render import Renderer

MOST = 0.03  # of the tokens of a text may be unknown
READ = 64  # problems of each split, and demonstrations, from the first
NAMED = 8  # unknown words in the message, the most frequent first


def check_coverage(components: Components, renderer: Renderer, pinned: Sequence[Message]) -> None:
    """Check that hardly any token of what the policy reads at first is unknown to its tokenizer.

    Args:
        pinned: how an episode of the first problem begins.

    Raises:
        ConfigError: more than ``MOST`` of the tokens of the first messages, the tools, the problems or the
            demonstrations are unknown.
    """
    if not renderer.has_unknown:
        return
    for source, text in _texts(components, pinned):
        tokens, words = renderer.unknown(text)
        unknown = Counter(words)
        if unknown.total() > MOST * tokens:
            new = components.config.model.new is not None
            cure = "Set model.new.tokenizer=bpe, or add them to corpus() of the task" if new else "Use another model"
            raise ConfigError(
                f"checking the tokenizer: it does not know {unknown.total()} of the {tokens} words of {source}, which "
                f"the policy would read as [UNK]; at most {MOST:.0%} may be unknown. The most frequent are "
                f"{', '.join(repr(word) for word, _ in unknown.most_common(NAMED))}. {cure}."
            )


def _texts(components: Components, pinned: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """What the policy reads, by what it is."""
    yield "system message and question", "\n".join(message.text for message in pinned)
    if schemas := components.toolbox.template_schemas:
        yield "the tools that the chat template shows", tool_text(schemas)
    for split in ("train", "eval"):
        problems = components.problems(split)[:READ]
        yield f"the {split} problems", "\n".join(problem.question for problem in problems)
    if components.config.warm_start.steps and isinstance(components.task, Demonstrates):
        turns = islice(made_turns(components.task, components.config.seed), READ)
        texts = (text for turn in turns for text in (*(message.text for message in turn.context), turn.reply))
        yield "the demonstrations", "\n".join(texts)

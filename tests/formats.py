"""The installed tool formats, built by their entry points, and what a toolbox answers to the text of a reply."""

import asyncio

from condensegrpo.core.messages import History
from condensegrpo.core.plugins import installed, load_plugin
from condensegrpo.episodes.parsing import read_text
from condensegrpo.episodes.toolcalls import ToolAnswers, Toolbox
from condensegrpo.episodes.toolformats import ToolFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    point.name: load_plugin("tool_formats", point.name)() for point in installed("tool_formats")
}
NO_HISTORY = History(pinned=())


def answers(box: Toolbox, text: str, history: History = NO_HISTORY) -> ToolAnswers:
    """What a toolbox answers to the calls in a text."""
    return asyncio.run(box.run(box.calls_in(read_text(text)), history))

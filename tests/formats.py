"""The installed tool formats, built by their entry points."""

from condensegrpo.core.plugins import installed, load_plugin
from condensegrpo.episodes.toolformats import ToolFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    point.name: load_plugin("tool_formats", point.name)() for point in installed("tool_formats")
}

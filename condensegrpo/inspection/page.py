"""A page of HTML that needs nothing else: style, script and data in one file, and nothing of the data can run.

The data are JSON in a script element that is no program, with every ``<`` escaped; the script puts text into the page
by ``textContent`` only; and a Content-Security-Policy lets the browser run the script of the page's own hash, show
pictures that the page holds itself, load nothing and send nothing.
"""

import base64
import hashlib
import html
from importlib.resources import files
from pathlib import Path

from condensegrpo.core.process import working_directory
from condensegrpo.storage.codec import dump_line


def page(title: str, data: object, *, styles: tuple[str, ...], scripts: tuple[str, ...]) -> str:
    """A page that shows ``data``, of dataclasses and JSON's types.

    Args:
        title: of the page.
        data: what its script draws.
        styles: files of the package, such as ``inspection/page.css``, joined in their order.
        scripts: likewise.
    """
    folder = files("condensegrpo")
    style, script = (
        "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names) for names in (styles, scripts)
    )
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    escaped = dump_line(data).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{style}</style></head><body>
<main id="root"><noscript>This page draws its data with JavaScript, which is switched off.</noscript></main>
<script type="application/json" id="data">{escaped}</script>
<script>{script}</script>
</body></html>
"""


def typed_path(path: Path) -> Path:
    """A path as it is typed in the working directory: relative if it lies inside."""
    here = working_directory()
    inside = path if here is None else path.resolve()
    return inside.relative_to(here) if here is not None and inside.is_relative_to(here) else path


def _source(text: str) -> str:
    """What a Content-Security-Policy calls an inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

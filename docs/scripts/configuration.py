"""Writes all keys into docs/reference/configuration.md, and those of a study file into docs/reference/studies.md.

python docs/scripts/configuration.py

What stands before the first section of a page is kept. The keys are those of ``condensegrpo config --list``.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from condensegrpo.config.keys import Key, keys
from condensegrpo.config.schema import RunConfig
from condensegrpo.studies.lab.study import LabStudy

REFERENCE = Path(__file__).parents[1] / "reference"
PAGES: Mapping[str, type[BaseModel]] = {"configuration.md": RunConfig, "studies.md": LabStudy}
FIRST = "## Top level\n"


def row(key: Key) -> str:
    """The row of a key; the type of a section is a link to its table."""
    link = f"(#{key.name.replace('.', '')})"
    kind = re.sub("sections?", rf"[\g<0>]{link}", key.type)
    about = key.about.replace("|", "\\|")
    shown = "`".join(part if at % 2 else part.replace("<", "&lt;") for at, part in enumerate(about.split("`")))
    default = key.default if key.default in ("", "required") else f"`{key.default}`"
    return f"| `{key.name.rpartition('.')[2]}` | {kind} | {default} | {'' if 'section' in key.type else shown} |\n"


def filled(page: str, top: type[BaseModel]) -> str:
    """A page with its introduction as it is, and a table for each section of its keys."""
    known, parts = keys(top), [page[: page.index(FIRST)]]
    about = " ".join((top.__doc__ or "").split("\n\n")[0].replace("``", "`").split())
    for path, text in (("", about), *((key.name, key.about) for key in known.values() if "section" in key.type)):
        parts.append(f"## {path or 'Top level'}\n\n{text}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts += (row(key) for key in known.values() if key.name.rpartition(".")[0] == path)
        parts.append("\n")
    return "".join(parts)


if __name__ == "__main__":
    for name, top in PAGES.items():
        file = REFERENCE / name
        file.write_text(filled(file.read_text(encoding="utf-8"), top), encoding="utf-8")

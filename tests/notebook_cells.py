"""Runs the cells of notebooks in one shell, inside a running loop as a kernel: ``notebook_cells.py FILE NOTEBOOK…``.

The file gets the HTML of every cell that ends with a value, as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell


async def main(out: Path, notebooks: list[str]) -> None:
    """Every notebook begins without names; imported modules stay."""
    shell, drawn = InteractiveShell.instance(), list[str]()
    for notebook in notebooks:
        shell.reset()
        for cell in json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                code = "".join(cell["source"])
                done = await shell.run_cell_async(code, transformed_cell=shell.transform_cell(code))
                done.raise_error()
                if html := shell.display_formatter.format(done.result)[0].get("text/html"):
                    drawn.append(html)
    out.write_text(json.dumps(drawn), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))

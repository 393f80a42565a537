"""Draw the application `condensegrpo inspect` with a trajectory into an SVG file, without a terminal.

python docs/scripts/inspector_picture.py RUN TRAJECTORY TURN docs/images/inspector.svg
"""

import asyncio
import re
import sys
from pathlib import Path

from condensegrpo.cli.inspect_app import InspectorApp
from condensegrpo.cli.inspect_selection import Selection
from condensegrpo.inspection.batches import choose, step_of
from condensegrpo.inspection.index import Index


async def draw(run: Path, trajectory: str, turn: int, file: Path) -> None:
    """Open the run at the trajectory, and its tab Full."""
    index = Index(run)
    index.update()
    chosen = choose(run, step_of(trajectory, None))
    record = next(record for record in index.batch(chosen).records() if record.id == trajectory)
    app = InspectorApp(Selection(index, chosen, record), turn=turn)
    async with app.run_test(size=(150, 40)) as pilot:
        await app.workers.wait_for_complete()
        await pilot.press("2")
        await pilot.pause()
        svg = app.export_screenshot(
            title=f"condensegrpo inspect runs/{run.name} --trajectory {trajectory} --turn {turn}"
        )
    file.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # links to fonts of a server


asyncio.run(draw(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))

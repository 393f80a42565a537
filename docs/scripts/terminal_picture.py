"""Draw what a command prints as on a terminal into an SVG file.

COMMAND | python docs/scripts/terminal_picture.py TITLE FILE
"""

import sys
from pathlib import Path

from rich.text import Text

from condensegrpo.display import theme

title, file = sys.argv[1:]
screen = theme.recorder()
for line in sys.stdin:
    screen.print(Text.from_ansi(line.rstrip()), soft_wrap=True)
Path(file).write_text(theme.svg(screen, title=title))

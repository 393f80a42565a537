"""The task ``screens``: a small desktop, seen in pictures only, drawn with Pillow. It needs no download.

One episode with two apps (what a picture shows on the left, replies on the right):

    instruction                                       ─▶  look()
    the desktop: icons of mail, files and form        ─▶  mail click(35, 91)
    the page of mail, with the code 4 7               ─▶  mail 4 7 files click(77, 63)
    the page of files, with a mark: more below        ─▶  mail 4 7 files scroll(down)
    the rest of that page, with the code 1 9          ─▶  mail 4 7 files 1 9 form click(63, 21)
    the form, which asks for the code of mail         ─▶  mail 4 7 type( 4 7 )
    the form with 4 7 in its field                    ─▶  ok click(21, 105)
    the receipt, with the number 8 2                  ─▶  answer( 8 2 )

Codes are visible in one picture each, and which one the form asks for is visible only there: whoever does not see old
pictures needs notes, which are any text before the action. Icons, field and button are elsewhere in every layout, and
no layout of the evaluation is in training.
"""

import io
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import MediaPart, Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.studies.tasks.drawn import drawn_problems

if TYPE_CHECKING:
    from PIL.Image import Image

Cell = tuple[int, int]  # column and row, from 0 at the top left
Symbol = tuple[str, str, str]  # its text, and the colours of the text and of the paper behind it
PAPER, LINE = "#eaeded", "#ccd1d1"
APPS = ("mail", "files", "clock", "notes", "shop", "games")
COLOURS = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#7d3c98", "#117864")  # of the apps
DARK, LIGHT = "#1c2833", "#fdfefe"
FORM, OK, RECEIPT, DESKTOP = "form", "ok", "receipt", "desktop"
INSTRUCTION = (
    "Apps show codes. Type the one that the form asks for, click OK, answer with the receipt's. Reply: notes, then "
    "look() click(x, y) type( text ) scroll(down) scroll(up) answer( text )"
)
NO_ACTION = "There is no action at the end of the reply."
DIGITS = "0123456789"

_ACTION = re.compile(r"(look|click|type|scroll|answer)\s*\(([^()]*)\)\s*$")
_NUMBERS = re.compile(r"\s*(\d{1,5})\s*,\s*(\d{1,5})\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Screens(Task):
    """The task ``screens``."""

    apps: Annotated[int, Ge(1), Le(len(APPS))] = 3
    digits: Annotated[int, Ge(1), Le(4)] = 2  # of a code
    grid: Annotated[int, Ge(6), Le(40)] = 8  # cells of a picture's side
    cell: Annotated[int, Ge(8), Le(100)] = 28  # pixels of a cell's side
    scrolled: Annotated[float, Ge(0.0), Le(1.0)] = 0.25  # share of the pages whose code is below the visible part
    train_problems: Annotated[int, Ge(1)] = 100_000  # length of the virtual sequence
    eval_problems: Annotated[int, Ge(1)] = 256  # of different layouts, none of them in training
    seed: int = 0  # of the order of the training problems

    def problems(self, split: Split) -> Sequence[Problem]:
        """As ``drawn_problems``."""
        world = f"{self.apps} {self.digits} {self.grid} {self.scrolled}"
        sizes = self.train_problems, self.eval_problems
        seeds = f"screens train {self.seed} {world}", f"screens eval {world}"
        return drawn_problems(split, self._draw, _layout, sizes=sizes, seeds=seeds, described="layouts")

    def environment(self, problem: Problem) -> "ScreensEnvironment":
        """A fresh episode."""
        return ScreensEnvironment(desktop=self._desktop(problem))

    def expert(self, problem: Problem) -> "ScreensExpert":
        """The player that notes every code."""
        return ScreensExpert(self._desktop(problem))

    def corpus(self) -> Iterable[str]:
        """Every word of the task, and the words of placeholders."""
        centres = (_centre(index, self.cell) for index in range(self.grid))
        places = " ".join(f"click({centre}, {centre})" for centre in centres)
        yield f"{INSTRUCTION} {NO_ACTION} {' '.join(APPS)} {FORM} {OK} type( answer( ) {' '.join(DIGITS)} {places}"
        yield f"[picture of turn omitted: tokens] none {' '.join(map(str, range(self.grid * self.grid + 100)))}"

    def _desktop(self, problem: Problem) -> "Desktop":
        layout = {name: (column, row) for name, (column, row) in problem.data["layout"].items()}
        return Desktop(
            grid=self.grid,
            cell=self.cell,
            layout=layout,
            codes=dict(problem.data["codes"]),
            below=frozenset(problem.data["below"]),
            requested=problem.data["requested"],
        )

    def _draw(self, rng: random.Random, label: str) -> Problem:
        """A random problem, held out or not."""
        names = APPS[: self.apps]
        free = [(column, row) for row in range(1, self.grid) for column in range(self.grid)]
        layout = dict(zip((*names, FORM, OK), rng.sample(free, self.apps + 2), strict=True))
        layout["text"] = (rng.randint(1, self.grid - self.digits), 0)
        numbers = rng.sample(range(10**self.digits), self.apps + 1)
        codes = [f"{number:0{self.digits}}" for number in numbers]
        return Problem(
            id=label,
            question=INSTRUCTION,
            answer=codes[-1],
            data={
                "layout": {name: list(cell) for name, cell in layout.items()},
                "codes": dict(zip((*names, RECEIPT), codes, strict=True)),
                "below": [name for name in names if rng.random() < self.scrolled],
                "requested": rng.choice(names),
            },
        )


@dataclass(slots=True, kw_only=True)
class Desktop:
    """The desktop of one episode: which page is open, and what is in the field of the form."""

    grid: int  # cells of a side
    cell: int  # pixels of a cell's side
    layout: dict[str, Cell]  # of the apps, "form", "ok", and "text": the first cell of codes, labels and the field
    codes: dict[str, str]  # of the apps and the receipt
    below: frozenset[str]  # apps whose code is visible after scrolling down
    requested: str  # the app whose code the form asks for
    page: str = DESKTOP
    lower: bool = False  # scrolled down
    typed: str = ""

    def click(self, x: int, y: int) -> None:
        """Click on a pixel: icons open their pages, and OK sends the form."""
        cell = (x // self.cell, y // self.cell)
        target = next((name for name, at in self.layout.items() if at == cell and name != "text"), None)
        if target == OK and self.page == FORM and self.typed == self.codes[self.requested]:
            self.page = RECEIPT
        elif target is not None and target != OK:
            self.page, self.lower, self.typed = target, False, ""

    def type(self, text: str) -> None:
        """Replace what is in the field of the form by the first digits of a text."""
        if self.page == FORM:
            most = len(self.codes[RECEIPT])
            self.typed = "".join(character for character in text if character in DIGITS)[:most]

    def scroll(self, *, down: bool) -> None:
        """Move down or up; only some pages of apps have more below."""
        self.lower = down and self.page in self.below

    def centre(self, name: str) -> Cell:
        """The pixel in the middle of something in the layout."""
        column, row = self.layout[name]
        return _centre(column, self.cell), _centre(row, self.cell)

    def picture(self) -> bytes:
        """What is visible now, as a PNG file."""
        shown: dict[Cell, Symbol] = {
            self.layout[name]: (name[0].upper(), LIGHT, COLOURS[APPS.index(name)]) for name in self._apps
        }
        shown[self.layout[FORM]] = ("?", LIGHT, DARK)
        if self.page in self._apps:
            hidden = self.page in self.below and not self.lower
            shown |= self._titled(self.page, "+" if hidden else self.codes[self.page])
        elif self.page == FORM:
            shown |= self._titled(self.requested, self.typed)
            shown[self.layout[OK]] = ("OK", LIGHT, DARK)
        elif self.page == RECEIPT:
            shown |= self._titled("", self.codes[RECEIPT])
        return drawn(self.grid, self.cell, tuple(sorted(shown.items())))

    @property
    def _apps(self) -> list[str]:
        return [name for name in APPS if name in self.codes]

    def _titled(self, app: str, text: str) -> dict[Cell, Symbol]:
        """The name of an app in the corner, in the reversed colours of its icon, and a text, a cell a character."""
        title = (app[0].upper(), COLOURS[APPS.index(app)], LIGHT) if app else ("=", DARK, LIGHT)
        column, row = self.layout["text"]
        written = {(column + index, row): (character, DARK, LIGHT) for index, character in enumerate(text)}
        return {(0, 0): title, **written}


@dataclass(slots=True, kw_only=True)
class ScreensEnvironment(Environment):
    """One episode: a picture after every action."""

    desktop: Desktop

    async def start(self) -> tuple[Message, ...]:
        """The instruction. The first picture follows the first reply, so that it is condensed like the others."""
        return (Message(role="user", content=INSTRUCTION),)

    async def step(self, reply: Message) -> Step:
        """The picture after an action, or the end with the answer."""
        action = _ACTION.search(reply.text)
        if action is None:
            return Step(observations=(Message(role="user", content=NO_ACTION),))
        name, argument = action.groups()
        if name == "answer":
            return Step(done=True, answer="".join(argument.split()))
        if name == "click" and (numbers := _NUMBERS.fullmatch(argument)):
            self.desktop.click(int(numbers[1]), int(numbers[2]))
        elif name == "type":
            self.desktop.type(argument)
        elif name == "scroll":
            self.desktop.scroll(down=argument.strip() == "down")
        picture = MediaPart.of(self.desktop.picture(), "image/png")
        return Step(observations=(Message(role="user", content=(picture,)),))


class ScreensExpert:
    """Visits the apps in their order. A reply repeats all notes, as older ones may be dropped, and names its target."""

    def __init__(self, desktop: Desktop) -> None:
        self._desktop = desktop
        self._notes: list[str] = []
        self._replies = self._plan()

    def reply(self, context: Sequence[Message]) -> str:
        """The next reply of the plan, whatever is shown."""
        return next(self._replies)

    def write(self, request: Request) -> str:
        """The codes that were noted so far."""
        return " ".join(self._notes) or "none"

    def _plan(self) -> Iterator[str]:
        desktop = self._desktop
        yield "look()"
        for app in (name for name in APPS if name in desktop.codes):
            yield self._click(app)
            if app in desktop.below:
                yield self._noted(f"{app} scroll(down)")
            self._notes.append(f"{app} {_spaced(desktop.codes[app])}")
        yield self._click(FORM)
        code = _spaced(desktop.codes[desktop.requested])
        yield f"{desktop.requested} {code} type( {code} )"
        yield self._target(OK)
        yield f"answer( {_spaced(desktop.codes[RECEIPT])} )"

    def _click(self, name: str) -> str:
        return self._noted(self._target(name))

    def _target(self, name: str) -> str:
        x, y = self._desktop.centre(name)
        return f"{name} click({x}, {y})"

    def _noted(self, action: str) -> str:
        return " ".join((*self._notes, action))


def _spaced(code: str) -> str:
    """A code as replies write it: a digit is a word."""
    return " ".join(code)


def _centre(index: int, cell: int) -> int:
    return index * cell + cell // 2


def _layout(problem: Problem) -> str:
    """What decides whether a problem is held out."""
    return str(sorted(problem.data["layout"].items()))


@lru_cache(maxsize=512)
def drawn(grid: int, cell: int, symbols: tuple[tuple[Cell, Symbol], ...]) -> bytes:
    """A picture of ``grid`` × ``grid`` cells as a PNG file.

    Args:
        cell: pixels of a cell's side.
        symbols: what cells show; the others are empty.
    """
    picture = _empty(grid, cell).copy()
    for (column, row), symbol in symbols:
        picture.paste(_tile(cell, symbol), (column * cell, row * cell))
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


@lru_cache(maxsize=8)
def _empty(grid: int, cell: int) -> "Image":
    from PIL import Image, ImageDraw  # here: runs of other tasks do not need it

    side = grid * cell
    picture = Image.new("RGB", (side, side), PAPER)
    draw = ImageDraw.Draw(picture)
    for line in range(0, side, cell):
        draw.line([(line, 0), (line, side)], fill=LINE)
        draw.line([(0, line), (side, line)], fill=LINE)
    return picture


@lru_cache(maxsize=512)
def _tile(cell: int, symbol: Symbol) -> "Image":
    from PIL import Image, ImageDraw, ImageFont

    text, ink, paper = symbol
    tile = Image.new("RGB", (cell, cell), paper)
    font = ImageFont.load_default(size=cell * (1.3 if len(text) == 1 else 0.7))
    ImageDraw.Draw(tile).text((cell / 2, cell / 2), text, fill=ink, font=font, anchor="mm")
    return tile

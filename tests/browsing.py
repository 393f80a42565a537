"""A headless Chromium for tests of the HTML pages: `from browsing import chromium, Watched`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> "Iterator[Browser]":
    """The system's Chromium; without it, or without playwright, the tests are skipped."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install -e '.[dev]'")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("there is no chromium on the PATH: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """A tab that records what a page does beside showing itself."""

    tab: "Page"
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # of other files and hosts
    refused: list[str] = field(default_factory=list)  # of these, with why they failed

    @classmethod
    def of(cls, browser: "Browser", *, width: int = 1200, scheme: Literal["light", "dark"] = "light") -> "Watched":
        tab = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        tab.set_default_timeout(60_000)  # milliseconds: tests run beside each other
        watched = cls(tab)
        tab.on("dialog", lambda dialog: (watched.dialogs.append(dialog.message), dialog.dismiss()))
        tab.on("pageerror", lambda error: watched.errors.append(str(error)))
        tab.on("request", lambda request: watched.requests.append(request.url) if "file:" not in request.url else None)
        tab.on("requestfailed", lambda request: watched.refused.append(f"{request.url} {request.failure}"))
        return watched

    def open(self, file: Path, settings: str = "") -> "Page":
        self.tab.goto("about:blank")  # a change behind the # alone would not load the page
        self.tab.goto(file.resolve().as_uri() + settings)
        return self.tab

    def background(self) -> str:
        colour: str = self.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        return colour

"""Pages in Debian's Chromium, without a window."""

import contextlib
import pathlib
from typing import Any, NamedTuple

import pytest

CHROMIUM = pathlib.Path("/usr/bin/chromium")
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Opened(NamedTuple):
    """A page, with all that happened since it was opened."""

    page: Any  # of playwright
    errors: list[str]  # exceptions, and warnings and errors on the console
    requests: list[str]  # addresses, without data: addresses

    def overflows(self) -> bool:
        """Returns whether the page scrolls sideways."""
        root = "document.documentElement"
        return self.page.evaluate(f"{root}.scrollWidth > {root}.clientWidth")


@contextlib.contextmanager
def launched():
    """Yields the browser; skips the test if there is none."""
    if not CHROMIUM.exists():
        pytest.skip(f"no chromium: there is no {CHROMIUM}")
    sync_api = pytest.importorskip("playwright.sync_api", reason='no chromium: pip install "jlade[browser]" drives it')
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def open_page(browser, place, width, **context):
    """Opens a file or an address in a window of `width` pixels; `context` is for playwright's `new_page`."""
    page = browser.new_page(viewport={"width": width, "height": 844}, **context)
    opened = Opened(page, [], [])
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("console", lambda note: opened.errors.append(note.text) if note.type in ("error", "warning") else None)
    page.on("request", lambda request: None if request.url.startswith("data:") else opened.requests.append(request.url))
    page.goto(place if isinstance(place, str) else place.as_uri())
    return opened

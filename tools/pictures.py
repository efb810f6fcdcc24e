"""The pictures of the documentation: the page of a trace, a chat in a terminal, and a chat in a browser.

    python tools/pictures.py --trace docs/trace.png --chat docs/chat.svg --server docs/server.png

All are made on the CPU. The first shows the demo model, the others SmolLM2 (`make chat` installs it). Pages need
Chromium, and the extras "browser" and "plot" for playwright and for Pillow, which matplotlib brings. The terminal needs
pexpect, which runs a command on one, and pyte, which emulates one.
"""

import argparse
import contextlib
import io
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

PROMPT = "def read_config(path):"
LENGTH = ("--max-new-tokens", "64")
STEP = 11  # it accepts drafts of a branch
QUESTION = "Write this as a Python dictionary: Anna is 31, Boris is 27, Clara is 45, David is 19."
SETTING = ("--lookahead", "10,5,10:tree=80")  # that of accelerators
ROOT = pathlib.Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}
COLUMNS, ROWS = 80, 100  # more rows than the chat fills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", metavar="PNG")
    parser.add_argument("--chat", metavar="SVG")
    parser.add_argument("--server", metavar="PNG")
    options = parser.parse_args()
    if options.trace:
        trace(options.trace)
    if options.chat:
        chat(options.chat)
    if options.server:
        server(options.server)


def trace(path: str) -> None:
    """Writes a picture of a step in the page of `jlade trace`, without the mask, which is below."""
    with tempfile.TemporaryDirectory() as directory:
        page_file = pathlib.Path(directory) / "trace.html"
        jlade("trace", PROMPT, *LENGTH, "--output", str(page_file))
        with opened(page_file.as_uri(), 1200, 2400) as page:
            for _ in range(STEP - 1):
                page.keyboard.press("ArrowRight")
            bottom = page.locator(".pair").evaluate("panels => panels.getBoundingClientRect().bottom")
            save(page.screenshot(clip={"x": 0, "y": 0, "width": 1200, "height": bottom + 14}), path)


def server(path: str) -> None:
    """Writes a picture of the page of `jlade serve` with one answer."""
    command = [sys.executable, "-m", "jlade", "serve", "smollm2", "--port", "0", "--max-sequences", "1", *SETTING]
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split()[-1]
            with opened(address, 900, 620) as page:
                page.get_by_label("Message").fill(QUESTION)
                page.keyboard.press("Enter")
                page.get_by_role("button", name="Stop").wait_for()
                page.get_by_role("button", name="Send").wait_for(timeout=600_000)  # programs compile
                page.locator("main").evaluate("log => { log.scrollTop = 0 }")
                save(page.screenshot(), path)
        finally:
            process.terminate()


@contextlib.contextmanager
def opened(address: str, width: int, height: int) -> Iterator[Any]:
    """Yields a page of playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        page.goto(address)
        yield page
        browser.close()


def save(picture: bytes, path: str) -> None:
    """Writes a picture with few colours, which make a small file."""
    from PIL import Image

    Image.open(io.BytesIO(picture)).quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


def chat(path: str) -> None:
    """Writes a picture of `jlade chat` with one answer."""
    import pexpect
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    terminal = pyte.ByteStream(screen)
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color"}
    arguments = ["-m", "jlade", "chat", *SETTING]
    command = pexpect.spawn(
        sys.executable, arguments, env=environment, cwd=ROOT, dimensions=(ROWS, COLUMNS), timeout=600
    )
    for expected, typed in (("\n> ", f"{QUESTION}\r"), (r"(eos|length): [^\r\n]*\r\n", "")):
        command.expect(expected)
        terminal.feed(command.before + command.after)
        command.send(typed)
    command.close()
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ jlade chat {' '.join(SETTING)}", style="dim"))
    for row in range(screen.cursor.y):
        characters = (screen.buffer[row][column] for column in range(COLUMNS))
        parts = [("".join(each.data for each in same), look) for look, same in itertools.groupby(characters, style)]
        console.print(Text.assemble(*parts), soft_wrap=True)
    svg = console.export_svg(title="jlade", theme=MONOKAI, unique_id="chat")
    # Its fonts are on a server; a picture in a page loads none.
    pathlib.Path(path).write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")


def style(character: Any) -> Style:
    """Returns the style of a character of pyte."""
    colour = character.fg.replace("brown", "yellow").replace("bright", "bright_")
    return Style(color=None if colour == "default" else colour, bold=character.bold, italic=character.italics)


def jlade(*arguments: str) -> None:
    """Runs the command."""
    command = [sys.executable, "-m", "jlade", *arguments]
    subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, check=True)


if __name__ == "__main__":
    main()

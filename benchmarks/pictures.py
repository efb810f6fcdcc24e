"""The pictures of the documentation: the page of a trace, and the command in a terminal.

    python benchmarks/pictures.py --trace docs/trace.png --session docs/session.svg

Both are of the demo model, on the CPU. The first needs Chromium and the extras "browser" and "plot": playwright, and
Pillow, which matplotlib brings.
"""

import argparse
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PROMPT = "def read_config(path):"
LOOKAHEAD = ("--window", "15", "--ngram", "5", "--guesses", "15", "--max-new-tokens", "64")
STEP = 27  # with 15 candidates, of which one is accepted whole
TOKENS = ("--max-new-tokens", "96")
COLUMNS = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", metavar="PNG")
    parser.add_argument("--session", metavar="SVG")
    options = parser.parse_args()
    if options.trace:
        trace(options.trace)
    if options.session:
        session(options.session)


def trace(path: str) -> None:
    """Writes a picture of a step in the page of `jlade trace`, without the mask, which is below."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page_file = pathlib.Path(directory) / "trace.html"
        jlade("trace", PROMPT, *LOOKAHEAD, "--output", str(page_file))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 2400}, color_scheme="light")
        page.goto(page_file.as_uri())
        for _ in range(STEP - 1):
            page.keyboard.press("ArrowRight")
        bottom = page.locator(".pair").evaluate("panels => panels.getBoundingClientRect().bottom")
        picture = page.screenshot(clip={"x": 0, "y": 0, "width": 1200, "height": bottom + 14})
        browser.close()
    # Few colours make a small file.
    Image.open(io.BytesIO(picture)).quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


def session(path: str) -> None:
    """Writes a picture of `jlade PROMPT`, with its output."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f'$ jlade "{PROMPT}" {" ".join(TOKENS)}', style="dim"))
    console.print(Text.from_ansi(jlade(PROMPT, *TOKENS)))
    svg = console.export_svg(title="jlade", theme=MONOKAI, unique_id="session")
    # Its fonts are on a server; a picture in a page loads none.
    pathlib.Path(path).write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")


def jlade(*arguments: str) -> str:
    """Runs the command as on a terminal, and returns its output."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jlade", *arguments]
    root = pathlib.Path(__file__).parent.parent
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()

"""The pages of the documentation and their blocks of code."""

import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    kind: str  # the word after the fence
    line: int  # of the fence, from 1
    text: str


def read_blocks(page):
    """Returns the fenced blocks of a page and its other text."""
    blocks, prose, kind, begin, content = [], [], None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if kind is None:
                kind, begin, content = line[3:], number, []
            else:
                assert line == "```", f"{page.name}:{number}: a fence within a fence"
                blocks.append(Block(kind, begin, "\n".join(content)))
                kind = None
        elif kind is not None:
            content.append(line)
        else:
            assert not line.startswith("    "), f"{page.name}:{number}: an indented example, which no test runs"
            prose.append(line)
    assert kind is None, f"{page.name}:{begin}: the fence has no end"
    return blocks, "\n".join(prose)

"""The names of settings: as commands read them, and as tables show them."""

import re

from jlade.config import PRESETS, LookaheadConfig

SYNTAX = "W,N,G, tree=M, W,N,G:tree=M, jacobi=M, code, prose or creative"


def parse(name: str) -> LookaheadConfig:
    """Returns the setting of a name: "15,5,15" is the paper's, "tree=119" has a tree, "5,5,5:tree=99" a window too,
    "jacobi=16" is Jacobi decoding, "code" a preset.

    Raises:
      ValueError: says what is accepted.
    """
    if name.strip() in PRESETS:
        return LookaheadConfig.paper(*PRESETS[name.strip()])
    if jacobi := re.fullmatch(r"jacobi=(\d+)", name.strip()):
        return LookaheadConfig.jacobi(int(jacobi[1]))
    match = re.fullmatch(r"(?:(\d+),(\d+),(\d+))?(?:(?:^|(?<=\d):)tree=(\d+))?", name.replace(" ", ""))
    if not name or match is None:
        raise ValueError(f"a setting is {SYNTAX}; got {name!r}")
    sizes = [int(size) for size in match.groups()[:3] if size]
    if match[4] is None:
        return LookaheadConfig.paper(*sizes)
    window, ngram, guesses = sizes or (0, 0, 0)
    if not (window or guesses):
        return LookaheadConfig.tree(int(match[4]))
    return LookaheadConfig(tree_size=int(match[4]), window_size=window, ngram_size=ngram, guess_set_size=guesses)


def name(setting: LookaheadConfig) -> str:
    """Returns the name that `parse` reads, which says the sizes of a setting alone."""
    sizes = f"{setting.window_size},{setting.ngram_size},{setting.guess_set_size}"
    if setting.tree_size is None:
        return sizes
    if setting.sources == ("chain",) and not setting.window_size:
        return f"jacobi={setting.tree_size}"
    has_pool = setting.window_size or setting.guess_set_size
    return f"{sizes}:tree={setting.tree_size}" if has_pool else f"tree={setting.tree_size}"


def sizes(setting: LookaheadConfig) -> dict[str, int | None]:
    """Returns W, N, G and M by the names of their attributes, as JSON has them."""
    return {name: getattr(setting, name) for name in ("window_size", "ngram_size", "guess_set_size", "tree_size")}


def label(setting: LookaheadConfig) -> str:
    """Returns the setting in a form for people: "W, N, G", "tree of M", both, "Jacobi, M guesses", or "plain"."""
    if setting.block_size == 1:
        return "plain"
    if name(setting).startswith("jacobi="):
        return f"Jacobi, {setting.tree_size} guesses"
    return name(setting).replace(",", ", ").replace(":", ", ").replace("tree=", "tree of ")

"""The names of settings: as commands read them, and as tables show them."""

import re

from jlade.config import PRESETS, LookaheadConfig, NGramConfig

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
    return LookaheadConfig.tree(int(match[4]), ngrams=NGramConfig(*sizes) if sizes else None)


def name(setting: LookaheadConfig) -> str:
    """Returns the name that `parse` reads, which says the sizes of a setting alone."""
    ngrams, drafts = setting.ngrams, setting.drafts
    sizes = f"{ngrams.window_size},{ngrams.ngram_size},{ngrams.guess_set_size}"
    if isinstance(drafts, NGramConfig):
        return sizes
    if drafts.ngrams is not None:
        return f"{sizes}:tree={drafts.size}"
    return f"jacobi={drafts.size}" if drafts.sources == ("chain",) else f"tree={drafts.size}"


def label(setting: LookaheadConfig) -> str:
    """Returns the setting in a form for people: "W, N, G", "tree of M", both, "Jacobi, M guesses", or "plain"."""
    if setting.block_size == 1:
        return "plain"
    if name(setting).startswith("jacobi="):
        return f"Jacobi, {setting.num_drafted} guesses"
    return name(setting).replace(",", ", ").replace(":", ", ").replace("tree=", "tree of ")

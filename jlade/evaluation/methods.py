"""Ways to decode that an evaluation compares, and their names."""

import dataclasses
import functools
from typing import Any, Literal

from jlade.config import PLAIN, POOL, SOURCES, LookaheadConfig, SamplingConfig, TreeConfig
from jlade.lookahead import names

DTYPES = ("float32", "bfloat16", "float16")
LOOKUP_TOKENS = 10  # of transformers' prompt lookup, as in Table 3 of arXiv 2402.02057

# Settings with names of their own.
SETTINGS: dict[str, LookaheadConfig | Literal["auto"]] = {
    "plain": PLAIN,
    "prompt-lookup": LookaheadConfig.paper(0, 4, 1),
    "auto": "auto",
}
# Ways of the paper: the attribute of the setting, its value and its name in tables. The first two are of sampled texts.
WAYS = {
    "rejection": ("verification", "rejection", "by rejection"),
    "greedy-window": ("window_draw", "greedy", "greedy window"),
    "token-window": ("window_advance", "token", "a row for each token"),
}
TRANSFORMERS = {"transformers": 0, "transformers-lookup": LOOKUP_TOKENS}
SYNTAX = (
    f"{', '.join([*SETTINGS, *TRANSFORMERS])}, {names.SYNTAX}, with any of "
    f"{', '.join(f':no-{source}' for source in (POOL, *SOURCES))}, :no-prompt, :cost=STEPCOST, :warm, :growth, "
    f"{', '.join(f':{flag}' for flag in WAYS)}, :t=TEMPERATURE and {', '.join(f':{dtype}' for dtype in DTYPES)}"
)


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to decode. `str` gives its name, which `parse` reads."""

    setting: LookaheadConfig | Literal["auto"] | None = PLAIN  # of jlade; None for transformers
    lookup_tokens: int = 0  # at most, of transformers' prompt lookup; 0 for plain decoding
    dtype: str | None = None  # of weights and computation; None for that of the run
    temperature: float = 0.0
    is_warm: bool = False  # whether the pool continues that of the question before; otherwise every pool starts empty
    shows_growth: bool = False  # whether decoding pauses to count the pool's n-grams, so that its times mean nothing

    def __str__(self) -> str:
        return ":".join([self._base()[0], *self._flags()])

    @property
    def label(self) -> str:
        """The name in tables."""
        return ", ".join([self._base()[1], *self._flags().values()])

    def _base(self) -> tuple[str, str]:
        """Returns the name without flags, and its words in tables."""
        if self.setting is None:
            lookup = "transformers-lookup", "transformers, prompt lookup"
            return lookup if self.lookup_tokens else ("transformers", "transformers")
        name = next((name for name, setting in SETTINGS.items() if setting == self.setting), "")
        if isinstance(self.setting, str) or self.setting == PLAIN:
            return name, {"auto": "jlade's choice"}.get(name, name)
        is_lookup = not self.setting.has_tree and self.setting.window_size == 0
        return name or names.name(self.setting), "prompt lookup " * is_lookup + names.label(self.setting)

    def _flags(self) -> dict[str, str]:
        """Returns the flags of the name, each with its words in tables."""
        flags: dict[str, str] = {}
        if isinstance(self.setting, LookaheadConfig) and self.setting not in SETTINGS.values():
            is_general = self.setting.has_tree and self.setting.sources != ("chain",)
            left_out = [source for source in SOURCES if is_general and source not in self.setting.sources]
            flags |= {f"no-{source}": f"without {source}" for source in left_out}
            flags |= {} if self.setting.ngrams.pool_from_prompt else {"no-prompt": "without the prompt"}
            fields = vars(self.setting) | vars(self.setting.ngrams)
            flags |= {flag: words for flag, (attribute, way, words) in WAYS.items() if fields[attribute] == way}
            cost = self.setting.relative_step_time
            flags |= {} if cost is None else {f"cost={_exact(cost)}": "adaptive"}
        flags |= {"warm": "warm pool"} if self.is_warm else {}
        flags |= {"growth": "counting the pool"} if self.shows_growth else {}
        flags |= {self.dtype: self.dtype} if self.dtype else {}
        temperature = _exact(self.temperature)
        return flags | ({f"t={temperature}": f"temperature {temperature}"} if self.temperature else {})

    @property
    def agreement(self) -> str:
        """What its texts have in common with those of plain decoding at the same temperature, but for rounding."""
        if not self.temperature:
            return "text"
        by_rejection = isinstance(self.setting, LookaheadConfig) and self.setting.verification == "rejection"
        return "distribution" if by_rejection else "text, with the same key"

    @property
    def baseline(self) -> "Method":
        """Plain decoding with the same dtype and temperature."""
        return Method(dtype=self.dtype, temperature=self.temperature)


@functools.cache
def parse(name: str, dtype: str | None = None) -> Method:
    """Returns the method of a name such as "plain", "15,5,15:no-prompt" or "prompt-lookup:bfloat16:t=0.7".

    Args:
      name: see `SYNTAX`.
      dtype: of the run; a method in this dtype has the dtype None, so that its name is always the same.

    Raises:
      ValueError: names the method and what is accepted.
    """
    base, *flags = (part.strip() for part in name.split(":"))
    base = ":".join([base, *(flag for flag in flags if flag.startswith("tree="))])
    flags = [flag for flag in flags if not flag.startswith("tree=")]
    try:
        if base in TRANSFORMERS:
            method = Method(setting=None, lookup_tokens=TRANSFORMERS[base])
        elif base in SETTINGS:
            method = Method(setting=SETTINGS[base])
        else:
            method = Method(names.parse(base))
        for flag in flags:
            method = _with_flag(method, flag)
        if isinstance(method.setting, LookaheadConfig) and method.setting.block_size == 1:
            method = dataclasses.replace(method, setting=PLAIN)
    except ValueError as error:
        raise ValueError(f"a method is {SYNTAX}; got {name!r}: {error}") from error
    return dataclasses.replace(method, dtype=None) if method.dtype == dtype else method


def _with_flag(method: Method, flag: str) -> Method:
    name, _, value = flag.partition("=")
    if flag in DTYPES:
        return dataclasses.replace(method, dtype=flag)
    if name == "t":
        if method.setting is None:
            raise ValueError("transformers decodes greedily here")
        return dataclasses.replace(method, temperature=SamplingConfig(temperature=float(value)).temperature)
    setting = method.setting if isinstance(method.setting, LookaheadConfig) else None
    if flag in [f"no-{source}" for source in (POOL, *SOURCES)]:
        if setting is None or not isinstance(tree := setting.drafts, TreeConfig):
            raise ValueError(f":{flag} needs a tree")
        if flag != f"no-{POOL}":
            sources = tuple(source for source in tree.sources if flag != f"no-{source}")
            setting = _with(setting, drafts=dataclasses.replace(tree, sources=sources))
        elif tree.ngrams is not None:
            setting = _with(setting, guess_set_size=0)
    elif name == "cost" or flag in WAYS:
        if setting is None:
            raise ValueError(f":{name} needs sizes")
        attribute, way = ("relative_step_time", float(value)) if name == "cost" else WAYS[flag][:2]
        setting = _with(setting, **{attribute: way})
    elif flag in ("no-prompt", "warm", "growth"):
        if setting is None or POOL not in setting.reach:
            raise ValueError(f":{flag} needs W, N and G with a pool")
        if flag != "no-prompt":
            is_warm, shows_growth = method.is_warm or flag == "warm", method.shows_growth or flag == "growth"
            return dataclasses.replace(method, is_warm=is_warm, shows_growth=shows_growth)
        setting = _with(setting, pool_from_prompt=False)
    else:
        raise ValueError(f"{flag!r} is not known")
    return dataclasses.replace(method, setting=setting)


def _with(setting: LookaheadConfig, **change: Any) -> LookaheadConfig:
    """Returns a setting with a change of its fields, or of those of its n-grams."""
    if vars(setting).keys() >= change.keys():
        return dataclasses.replace(setting, **change)
    ngrams = dataclasses.replace(setting.ngrams, **change)
    drafts = dataclasses.replace(setting.drafts, ngrams=ngrams) if isinstance(setting.drafts, TreeConfig) else ngrams
    return dataclasses.replace(setting, drafts=drafts)


def _exact(number: float) -> str:
    """Returns the shortest text that `float` reads as the same number."""
    return repr(number).removesuffix(".0")

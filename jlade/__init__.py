"""jlade: exact lookahead decoding of LLaMA models, in one compiled JAX program."""

from jlade.config import LookaheadConfig, SamplingConfig
from jlade.decoding import DecodeState, decode, prefill, step
from jlade.generation import Generation, Piece, generate, stream
from jlade.lookahead.ngram_pool import NGramPool
from jlade.statistics import Statistics
from jlade.stopping import Stopping
from jlade.storage import demo, load, load_pool, save_pool
from jlade.tuning import Trial, Tuning, tune

__all__ = [
    "DecodeState",
    "Generation",
    "LookaheadConfig",
    "NGramPool",
    "Piece",
    "SamplingConfig",
    "Statistics",
    "Stopping",
    "Trial",
    "Tuning",
    "decode",
    "demo",
    "generate",
    "load",
    "load_pool",
    "prefill",
    "save_pool",
    "step",
    "stream",
    "tune",
]
__version__ = "0.1.0"

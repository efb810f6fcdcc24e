"""jlade: exact lookahead decoding of LLaMA models in compiled JAX programs."""

from jlade.config import LookaheadConfig, SamplingConfig
from jlade.decoding.loop import decode, step
from jlade.decoding.prefill import prefill, start
from jlade.decoding.state import DecodeState, Inputs, Program
from jlade.decoding.stopping import Stopping
from jlade.generation.generate import generate, stream
from jlade.generation.request import prepare
from jlade.generation.results import Generation, Piece, Statistics
from jlade.lookahead.ngram_pool import NGramPool
from jlade.storage import demo, load, load_pool, save_pool
from jlade.tuning.result import Trial, Tuning
from jlade.tuning.search import tune

__all__ = [
    "DecodeState",
    "Generation",
    "Inputs",
    "LookaheadConfig",
    "NGramPool",
    "Piece",
    "Program",
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
    "prepare",
    "save_pool",
    "start",
    "step",
    "stream",
    "tune",
]
__version__ = "0.1.0"

from . import conversion, decoding, devices, generation, lookahead, models, testing, tuning
from .config import LookaheadConfig, SamplingConfig
from .decoding.loop import decode, step
from .decoding.prefill import prefill, start
from .decoding.state import DecodeState, Inputs, Program
from .decoding.stopping import Stopping
from .generation.generate import generate, stream
from .generation.request import prepare
from .generation.results import Generation, Piece, Statistics
from .lookahead.ngram_pool import NGramPool
from .storage import demo, load, load_pool, load_sampling, save_pool
from .tuning.result import Trial, Tuning
from .tuning.search import tune

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
    "conversion",
    "decode",
    "decoding",
    "demo",
    "devices",
    "generate",
    "generation",
    "load",
    "load_pool",
    "load_sampling",
    "lookahead",
    "models",
    "prefill",
    "prepare",
    "save_pool",
    "start",
    "step",
    "stream",
    "testing",
    "tune",
    "tuning",
]

__version__: str

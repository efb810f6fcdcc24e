"""jlade: exact lookahead decoding of LLaMA models, in one compiled JAX program."""

from jlade.config import LookaheadConfig, SamplingConfig
from jlade.decoding import DecodeState, decode, prefill, step
from jlade.generation import Generation, Piece, generate, stream
from jlade.loading import demo, load

__all__ = [
    "DecodeState",
    "Generation",
    "LookaheadConfig",
    "Piece",
    "SamplingConfig",
    "decode",
    "demo",
    "generate",
    "load",
    "prefill",
    "step",
    "stream",
]
__version__ = "0.1.0"

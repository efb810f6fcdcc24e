from . import candidates, conversion, decoding, devices, generation, lookahead, models, testing, tuning
from .candidates.recycling import RecycledLogits
from .config import LookaheadConfig, SamplingConfig
from .decoding.loop import decode, step
from .decoding.prefill import prefill, start
from .decoding.sampling import Sampling
from .decoding.state import DecodeState, Inputs, Prefix, Program
from .decoding.stopping import Stopping, StopStrings
from .devices.inspection import Inspection, inspect
from .devices.mesh import make_mesh
from .devices.plan import Plan, plan
from .generation.generate import generate, stream
from .generation.request import prepare
from .generation.results import Generation, Piece, Statistics
from .lookahead.ngram_pool import NGramPool
from .models.base import Decoder, KVCache
from .models.llama import LlamaParams
from .storage import demo, load, load_pool, load_sampling, save_pool
from .tuning.result import Trial, Tuning
from .tuning.search import tune

__all__ = [
    "DecodeState",
    "Decoder",
    "Generation",
    "Inputs",
    "Inspection",
    "KVCache",
    "LlamaParams",
    "LookaheadConfig",
    "NGramPool",
    "Piece",
    "Plan",
    "Prefix",
    "Program",
    "RecycledLogits",
    "Sampling",
    "SamplingConfig",
    "Statistics",
    "StopStrings",
    "Stopping",
    "Trial",
    "Tuning",
    "candidates",
    "conversion",
    "decode",
    "decoding",
    "demo",
    "devices",
    "generate",
    "generation",
    "inspect",
    "load",
    "load_pool",
    "load_sampling",
    "lookahead",
    "make_mesh",
    "models",
    "plan",
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

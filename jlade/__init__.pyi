from . import (
    constraints,
    conversion,
    costs,
    decoding,
    drafts,
    engine,
    generation,
    inspection,
    lookahead,
    models,
    testing,
)
from .config import LookaheadConfig, NGramConfig, SamplingConfig, TreeConfig
from .constraints.bans import BannedSequences, NoRepeatedNgrams
from .constraints.constraint import Constraint
from .constraints.grammar import Grammar
from .conversion.adopt import adopt
from .costs.plan import Plan, plan
from .costs.tuning import Trial, Tuning
from .decoding.loop import decode, run_steps, step
from .decoding.prefill import prefill, start
from .decoding.sampling import Sampling
from .decoding.sharding import input_specs
from .decoding.state import DecodeConfig, DecodeState, Inputs, Prefix
from .decoding.stopping import Stopping, StopStrings
from .drafts.pool import NGramPool
from .drafts.recycled import PriorTable, RecycledLogits
from .drafts.suffix import TextIndex
from .engine.engine import Engine
from .engine.request import Request
from .generation.corpus import Corpus
from .generation.generate import generate, stream
from .generation.prior import Prior, prior
from .generation.request import prepare
from .generation.results import Generation, Piece, Statistics
from .generation.tune import tune
from .inspection.compile import compile, compile_engine
from .inspection.inspect import Inspection, inspect
from .mesh import make_mesh
from .models.base import Decoder, KVCache
from .models.llama import LlamaParams
from .storage import (
    demo,
    load,
    load_constraints,
    load_corpus,
    load_pool,
    load_prior,
    load_sampling,
    save_corpus,
    save_pool,
    save_prior,
)

__all__ = [
    "BannedSequences",
    "Constraint",
    "Corpus",
    "DecodeConfig",
    "DecodeState",
    "Decoder",
    "Engine",
    "Generation",
    "Grammar",
    "Inputs",
    "Inspection",
    "KVCache",
    "LlamaParams",
    "LookaheadConfig",
    "NGramConfig",
    "NGramPool",
    "NoRepeatedNgrams",
    "Piece",
    "Plan",
    "Prefix",
    "Prior",
    "PriorTable",
    "RecycledLogits",
    "Request",
    "Sampling",
    "SamplingConfig",
    "Statistics",
    "StopStrings",
    "Stopping",
    "TextIndex",
    "TreeConfig",
    "Trial",
    "Tuning",
    "adopt",
    "compile",
    "compile_engine",
    "constraints",
    "conversion",
    "costs",
    "decode",
    "decoding",
    "demo",
    "drafts",
    "engine",
    "generate",
    "generation",
    "input_specs",
    "inspect",
    "inspection",
    "load",
    "load_constraints",
    "load_corpus",
    "load_pool",
    "load_prior",
    "load_sampling",
    "lookahead",
    "make_mesh",
    "models",
    "plan",
    "prefill",
    "prepare",
    "prior",
    "run_steps",
    "save_corpus",
    "save_pool",
    "save_prior",
    "start",
    "step",
    "stream",
    "testing",
    "tune",
]

__version__: str

"""jlade compared with transformers on one GPU, at the shape of a large model: greedy texts of the same length.

    python benchmarks/versus_transformers_gpu.py                       # a 7 B shape in bfloat16
    python benchmarks/versus_transformers_gpu.py --shape demo --dtype float32 --new-tokens 16 --repeat 1    # on a CPU

Whole texts are timed, prefill included. Both have the same weights, copied on the device: the demo model inflated to
that shape. transformers runs `generate` with its defaults, and with a static cache, for which it compiles its model on
GPUs. Every prompt has 200 tokens, since with a static cache another length compiles again. Every run is made twice
before it is timed; runs are timed in turns.
"""

import functools
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves torch some of the GPU's memory

import numpy as np
import torch
import transformers

from benchmarks import measure, report
from benchmarks.accelerator import WINDOW_AND_TREE, Model
from benchmarks.report import Figures
from jlade.config import PLAIN
from jlade.conversion.hf_config import to_hf
from jlade.conversion.tensors import named_arrays
from jlade.models.llama import LlamaParams


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__, parts=True)
    measure.add_model_arguments(parser)
    parser.add_argument("--new-tokens", type=int, default=256, metavar="M", help="tokens of each text")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 4], metavar="B", help="batch sizes")
    parser.add_argument("--repeat", type=int, default=5, metavar="R", help="timings of each run")
    options = parser.parse_args(argv)

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    parts = report.Parts(options, ("shape", "dtype", "attention", "new_tokens", "repeat"), **versions)
    params = measure.load(options.shape, options.dtype)
    model = Model(params, measure.make_decoder(params, options.attention), options.repeat)
    other = to_torch(params)
    first = f"batch {options.batches[0]}"
    for batch_size in options.batches:
        run = functools.partial(_compare, model, other, batch_size, options.new_tokens)
        parts.run(f"batch {batch_size}", functools.partial(run, "eager", {}), like=first)
        static = functools.partial(run, "static", {"cache_implementation": "static"})
        parts.run(f"batch {batch_size}, static", static, like=f"{first}, static")
    parts.finish()


def to_torch(params: LlamaParams) -> Any:
    """Returns transformers' model with a copy of the weights, on their device."""
    config = transformers.LlamaConfig(**to_hf(params.config, params.norm.dtype.name))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {name: torch.utils.dlpack.from_dlpack(array).clone() for name, array in named_arrays(params).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if unexpected or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise ValueError(f"transformers' model lacks {missing} and does not have {unexpected}")
    model.tie_weights()
    rotary = model.model.rotary_emb  # its tables are not among the weights
    model.model.rotary_emb = type(rotary)(config).to(tensors["model.norm.weight"].device)
    model.generation_config.eos_token_id = None
    return model.eval()


def _compare(
    model: Model, other: Any, batch_size: int, new_tokens: int, name: str, arguments: dict[str, Any]
) -> Figures:
    torch._dynamo.reset()  # compiles for this batch size alone, not for all
    prompts = measure.prompts_of("code", batch_size, measure.PROMPT_TOKENS)
    model.compile([PLAIN, WINDOW_AND_TREE], prompts)
    ids = torch.tensor(prompts, device=other.device)

    def generate() -> np.ndarray:
        same = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        tokens = other.generate(ids, max_new_tokens=new_tokens, **same, **arguments)
        return tokens[:, ids.shape[1] :].cpu().numpy()

    runs = {
        "plain": lambda: model.decode(PLAIN, prompts, new_tokens)[0],
        "lookahead": lambda: model.decode(WINDOW_AND_TREE, prompts, new_tokens)[0],
        "transformers": generate,
    }
    texts = {}
    for _ in range(2):
        texts = {which: run() for which, run in runs.items()}
    seconds = {which: statistics.median(times) for which, times in measure.in_turns(runs, model.repeat).items()}
    return {
        "jlade plain, tokens/s": texts["plain"].size / seconds["plain"],
        "jlade lookahead, tokens/s": texts["plain"].size / seconds["lookahead"],
        f"transformers {name}, tokens/s": texts["plain"].size / seconds["transformers"],
        f"plain, x transformers {name}": seconds["transformers"] / seconds["plain"],
        f"lookahead, x transformers {name}": seconds["transformers"] / seconds["lookahead"],
        "transformers' attention": other.config._attn_implementation,
    } | measure.compare_texts(texts["transformers"], texts["plain"])


if __name__ == "__main__":
    main()

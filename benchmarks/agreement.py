"""How often a copy of a model in few bits predicts the model's own token, and whether its drafts would pay.

    python benchmarks/agreement.py --models demo --prompts 12 --max-new-tokens 128
    python benchmarks/agreement.py --models smollm2 --prompts 8 --max-new-tokens 64

The model continues prompts greedily in float32, with trees of drafts. Each copy then reads prompt and text in one pass:
a token agrees if the copy predicts it. A cascade of both would let the copy draft a chain of k tokens, which the model
verifies in one step. The copy's drafts are right up to its first disagreement, so the texts say how many tokens each
round gives. The copy has the tree of `COPY` itself and is taken to accept as many tokens as the model with it.

Times are the estimates of an H100 for the shape of LLaMA 3 8B in `estimate_bits.json`; those of 8 bits lie between 4
and 16, by the bytes of a weight. A round takes k/c steps of the copy, which accepts c tokens in each, and a step of the
model. The gain is relative to the model with the tree of `FULL`, which verifies no chain of a copy.

"bits=B" are the copies that `jlade.load` makes of the file. SmolLM2's has its matrices in four bits (Q4_1), so that
bits=4 keeps them and has the same text but for the output matrix: no copy. "B bits" round the model's weights.
"""

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import numpy as np

import jlade
from benchmarks import report
from benchmarks.quantization import logprobs_of
from jlade.models.llama import LlamaParams, quantize

RESULTS = Path(__file__).parent / "results"
OF_SMOLLM2 = Path(__file__).parent / "prompts" / "smollm2.jsonl"
FULL, COPY = jlade.LookaheadConfig.tree(119), jlade.LookaheadConfig.tree(59)  # blocks of 120 and of 60 tokens
BYTES = {4: 0.5625, 8: 1.0, 16: 2.0}  # of a weight
LONGEST = 64  # tokens of a chain
GAIN = 1.2  # that would be worth a cascade


class Trees(NamedTuple):
    """Tokens per step of the model with `FULL` and with `COPY`."""

    full: float
    copy: float


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["demo", "smollm2"], help="demo, smollm2 or paths")
    parser.add_argument("--prompts", type=int, default=12, metavar="P", help="of each model, evenly from its file")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M")
    options = parser.parse_args()

    models = {name: measure(name, options.prompts, options.max_new_tokens) for name in options.models}
    forms = {"agreement": ".3f", "gain": ".2f", "chain": "", "tokens_per_round": ".1f"}
    rows = [
        [name, copy, *(f"{figures[key]:{form}}" for key, form in forms.items())]
        for name, found in models.items()
        for copy, figures in found["copies"].items()
    ]
    report.print_table(["model", "copy", "same token", "gain", "chain", "tokens a round"], rows, "Copies in few bits")
    report.write(options.json, {"least_gain": GAIN, "models": models})


def measure(name: str, num_prompts: int, max_new_tokens: int) -> dict[str, Any]:
    """Returns the figures of a model and of its copies."""
    full, tokenizer = report.load(name, "float32")
    lines = report.read_lines(OF_SMOLLM2 if name == "smollm2" else report.DEMO_PROMPTS)
    lines = [lines[i] for i in np.linspace(0, len(lines) - 1, num_prompts).round().astype(int)]
    has_ids = name in ("demo", "smollm2")
    prompts = [line["ids"] if has_ids else tokenizer.encode(line["text"]).ids for line in lines]
    texts, rates = decode(full, prompts, max_new_tokens)
    copies = {"8 bits": (8, quantize(full)), "4 bits": (4, quantize(full, 4))}
    if name != "demo":
        copies |= {f"bits={bits}": (bits, jlade.load(name, "float32", bits=bits)[0]) for bits in (8, 4)}
    figures = {}
    for copy, (bits, params) in copies.items():
        agrees = agreement(params, prompts, texts)
        figures[copy] = {"agreement": float(np.concatenate(agrees).mean())} | cascade(agrees, rates, bits)
    needed = {f"{bits} bits": needed_agreement(rates, bits) for bits in (8, 4)}
    size = {"prompts": num_prompts, "max_new_tokens": max_new_tokens}
    return size | {"tokens_per_step": rates._asdict(), "copies": figures, "agreement_for_least_gain": needed}


def decode(params: LlamaParams, prompts: Sequence[list[int]], max_new_tokens: int) -> tuple[list[np.ndarray], Trees]:
    """Returns the greedy texts after the prompts, and the tokens per step of both trees."""
    texts, rates = [], []
    for lookahead in (FULL, COPY):
        outs = [
            jlade.generate(params, prompt, max_new_tokens=max_new_tokens, lookahead=lookahead) for prompt in prompts
        ]
        texts = [out.tokens[0, : out.lengths[0]] for out in outs]
        rates.append(sum(map(len, texts)) / sum(int(out.steps[0]) for out in outs))
    return texts, Trees(*rates)


def agreement(params: LlamaParams, prompts: Sequence[list[int]], texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns for each token of the texts whether the parameters predict it."""
    size = max(len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True))
    result = []
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = np.array([*prompt, *text], np.int32)
        padded = np.pad(tokens, (0, size - len(tokens)))  # no token sees the padding; one program serves all texts
        predicted = np.asarray(logprobs_of(params, padded, None).argmax(axis=-1))
        result.append(predicted[len(prompt) - 1 : len(tokens) - 1] == text)
    return result


def cascade(agrees: Sequence[np.ndarray], rates: Trees, bits: int) -> dict[str, Any]:
    """Returns the gain of a cascade over the tree of `FULL` with the best length of the copy's chains."""
    tokens = {chain: tokens_per_round(agrees, chain) for chain in range(1, LONGEST + 1)}
    gains = {chain: gain(each, chain, rates, bits) for chain, each in tokens.items()}
    best = max(gains, key=lambda chain: gains[chain])
    return {"gain": gains[best], "chain": best, "tokens_per_round": tokens[best]}


def tokens_per_round(agrees: Sequence[np.ndarray], chain: int) -> float:
    """Returns the mean number of tokens that a round gives: those of the chain that agree, and the model's next one."""
    num_rounds = 0
    for each in agrees:
        place = 0
        while place < len(each):
            drafts = each[place : place + chain]
            place += (len(drafts) if drafts.all() else int(drafts.argmin())) + 1
            num_rounds += 1
    return sum(map(len, agrees)) / num_rounds


def gain(tokens: float, chain: int, rates: Trees, bits: int) -> float:
    """Returns the speed of rounds of `tokens` tokens relative to the model with the tree of `FULL`."""
    seconds = chain / rates.copy * step_time(bits, COPY.block_size) + step_time(16, chain + 1)
    return tokens / seconds / (rates.full / step_time(16, FULL.block_size))


def needed_agreement(rates: Trees, bits: int) -> float:
    """Returns the share of tokens that a copy must agree on to gain `GAIN`, if it does so at random."""
    for share in np.arange(0.8, 1.0, 0.001):
        chains = range(1, LONGEST + 1)
        if max(gain((1 - share ** (k + 1)) / (1 - share), k, rates, bits) for k in chains) >= GAIN:
            return float(share)
    return 1.0


def step_time(bits: int, block: int) -> float:
    """Returns the estimate of a step of some tokens, interpolated."""
    if bits == 8:
        share = (BYTES[8] - BYTES[4]) / (BYTES[16] - BYTES[4])
        return (1 - share) * step_time(4, block) + share * step_time(16, block)
    blocks, times = zip(*estimates(bits), strict=True)
    return float(np.interp(block, blocks, times))


@functools.cache
def estimates(bits: int) -> list[tuple[int, float]]:
    """Returns blocks and milliseconds of the 8b shape on an H100."""
    rows = json.loads((RESULTS / "estimate_bits.json").read_text(encoding="utf-8"))["rows"]
    return [
        (row["block"], row["ms"])
        for row in rows
        if (row["device"], row["shape"], row.get("bits", 16)) == ("h100", "8b", bits)
    ]


if __name__ == "__main__":
    main()

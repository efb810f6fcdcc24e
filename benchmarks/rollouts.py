"""Rollouts of a GRPO run in tunix: tokens per step by epoch, and time beside its vanilla engine.

    python benchmarks/rollouts.py --json benchmarks/results/rollouts.json

Each engine makes the same run with tunix's own learner: the demo model, in tunix's Qwen2 without biases, is rewarded
for indented lines. An epoch takes each prompt once, and every update is a batch of groups. The engines are tunix's
vanilla one, and ours: with plain decoding, with the setting "auto", and with a tree, without and with drafts from the
rollouts of earlier epochs. The programs of rollouts are compiled before the run, by rollouts of other prompts.
"""

import argparse
import functools
import importlib.metadata
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jlade
from benchmarks import report
from jlade.lookahead import names

warnings.simplefilter("ignore")  # tunix uses deprecated names
import optax
from tunix.models.qwen2 import model as qwen2
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from jlade.integrations.tunix import LookaheadRollout

PROMPTS = (
    "def read_config(path):",
    "class Queue:\n    def __init__(self",
    "import os\nimport sys\n",
    "for line in lines:\n",
    "def test_add():\n    ",
    "with open(path) as file:\n",
    "if __name__ == ",
    "    def __repr__(self):\n",
)


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=2, help="prompts of an update; an epoch has 8")
    parser.add_argument("--generations", type=int, default=8, help="rollouts of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="M")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--lookahead", default="tree=7", metavar="SETTING")
    options = parser.parse_args()
    logging.disable(logging.WARNING)

    setting = names.parse(options.lookahead)
    engines: dict[str, Any] = {
        "vanilla": "vanilla",
        "plain": functools.partial(LookaheadRollout, lookahead=None),
        "auto": functools.partial(LookaheadRollout, draft_from_rollouts=options.generations),
        "without": functools.partial(LookaheadRollout, lookahead=setting, draft_from_rollouts=0),
        "with": functools.partial(LookaheadRollout, lookahead=setting, draft_from_rollouts=options.generations),
    }
    updates_per_epoch = len(PROMPTS) // options.prompts
    figures = {}
    for name, engine in engines.items():
        begin = time.perf_counter()
        rollouts = train(engine, options)
        seconds = time.perf_counter() - begin
        epochs = [rollouts[i : i + updates_per_epoch] for i in range(0, len(rollouts), updates_per_epoch)]
        figures[name] = {
            "seconds": seconds,
            "rollout_seconds": sum(each["seconds"] for each in rollouts),
            "tokens": sum(each["tokens"] for each in rollouts),
            "epochs": [summary(epoch) for epoch in epochs],
        }

    rows = []
    for name, of_engine in figures.items():
        for number, epoch in enumerate(of_engine["epochs"], start=1):
            steps = "1" if epoch["tokens_per_step"] is None else f"{epoch['tokens_per_step']:.2f}"
            speed = epoch["tokens"] / epoch["seconds"]
            rows.append([str(number), name, str(epoch["tokens"]), steps, f"{speed:.0f}", f"{epoch['reward']:.3f}"])
    columns = "epoch", "engine", "tokens", "tokens per step", "tokens/s", "reward"
    report.print_table(columns, rows, "Rollouts of a GRPO run")
    versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "flax", "optax")}
    result = {"settings": vars(options), "engines": figures}
    report.write(options.json, versions | result)


def summary(rollouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of an epoch."""
    tokens, seconds = sum(each["tokens"] for each in rollouts), sum(each["seconds"] for each in rollouts)
    steps = None if rollouts[0]["steps"] is None else sum(each["steps"] for each in rollouts)
    return {
        "tokens": tokens,
        "seconds": seconds,
        # Of a text: the rows of a batch make their steps together, until the last text has ended.
        "tokens_per_step": None if steps is None else tokens / steps,
        "reward": float(np.mean([each["reward"] for each in rollouts])),
    }


def train(engine: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns tokens, steps, seconds and mean reward of the rollouts of each update."""
    params, demo = jlade.demo(dtype="float32")
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    rollout_config = RolloutConfig(
        max_tokens_to_generate=options.max_new_tokens,
        max_prompt_length=16,
        kv_cache_size=16 + options.max_new_tokens,
        temperature=options.temperature,
    )
    cluster = RLCluster(
        actor=demo_model(params),
        reference=None,
        tokenizer=Tokenizer(demo),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.ROLLOUT, Role.REFERENCE), mesh),
            rollout_engine=engine,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(options.learning_rate),
                eval_every_n_steps=10**6,
                max_steps=options.updates,
                mini_batch_size=options.prompts,
                train_micro_batch_size=options.prompts,
            ),
            rollout_config=rollout_config,
        ),
    )
    rollout: Any = cluster.rollout
    generate = rollout.generate
    recorded: list[dict[str, Any]] = []

    def recording(prompts: list[str], config: RolloutConfig, **given: Any) -> RolloutOutput:
        """Generates with a seed of this update: tunix gives all updates the same."""
        config.seed = jax.random.PRNGKey(len(recorded))
        begin = time.perf_counter()
        out = generate(prompts, config, **given)
        last = getattr(rollout, "last", None)
        recorded.append(
            {
                "seconds": time.perf_counter() - begin,
                "tokens": sum(map(len, out.tokens)),
                "steps": None if last is None else int(last.steps.sum()),
                "reward": float(np.mean(rewards(prompts, out.text))),
            }
        )
        return out

    for words in ("x = ", "y = "):  # compiles the programs
        cluster.generate([words + str(i) for i in range(options.prompts) for _ in range(options.generations)])
    rollout.generate = recording
    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=rewards,
        algo_config=GRPOConfig(num_generations=options.generations, num_iterations=1, beta=0.0),
    )
    learner.train(batches(options))
    return recorded


def batches(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the prompts of each update."""
    for update in range(options.updates):
        first = update * options.prompts % len(PROMPTS)
        yield {"prompts": np.array(PROMPTS[first : first + options.prompts])}


def rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Returns the share of each text's lines that are indented."""
    return [float(np.mean([line.startswith("    ") for line in text.split("\n")])) for text in completions]


def demo_model(params: Any) -> nnx.Module:
    """Returns the demo model as tunix's Qwen2, whose biases are zero: tunix's Llama3 has another base of rotations."""
    c = params.config
    config = qwen2.ModelConfig(
        num_layers=c.num_layers,
        vocab_size=c.vocab_size,
        embed_dim=c.hidden_size,
        hidden_dim=c.intermediate_size,
        num_heads=c.num_heads,
        head_dim=c.head_dim,
        num_kv_heads=c.num_kv_heads,
        rope_theta=int(c.rope_theta),
        norm_eps=c.norm_eps,
        use_tied_embedding=c.tie_embeddings,
    )
    model = qwen2.Qwen2(config, rngs=nnx.Rngs(0))
    model.embedder.input_embedding.set_value(params.embedding)
    model.final_norm.w.set_value(params.norm)
    for own, given in zip(model.layers, params.layers, strict=True):
        heads = {"q_proj": given.query, "k_proj": given.key, "v_proj": given.value}
        for name, matrix in heads.items():
            getattr(own.attn, name).w.set_value(matrix.T.reshape(c.hidden_size, -1, c.head_dim))
        own.attn.o_proj.w.set_value(given.attention_output.T.reshape(-1, c.head_dim, c.hidden_size))
        for name in ("gate", "up", "down"):
            getattr(own.mlp, f"{name}_proj").kernel.set_value(getattr(given, name).T)
        own.input_layernorm.w.set_value(given.attention_norm)
        own.post_attention_layernorm.w.set_value(given.mlp_norm)
    return model


class Tokenizer:
    """The demo model's tokenizer with the methods that tunix calls."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 3


if __name__ == "__main__":
    main()

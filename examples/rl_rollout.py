"""Lookahead rollouts in tunix, reinforcement learning in JAX: a rollout engine of a cluster, and new weights.

    python examples/rl_rollout.py

The model has random weights: what matters is where the engine goes. With a model of tunix that was loaded from a
checkpoint, and its tokenizer, the same lines serve `tunix.rl.grpo.grpo_learner.GRPOLearner`.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

import jlade
from jlade.integrations.tunix import LookaheadRollout


class Bytes:
    """A tokenizer of a token for each byte, and three more."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def pad_id(self) -> int:
        return 256

    def bos_id(self) -> int:
        return 257

    def eos_id(self) -> int:
        return 258


def make_cluster(engine: Any) -> RLCluster:
    """Returns a cluster of one device with a small model."""
    config = ModelConfig(
        num_layers=2,
        vocab_size=259,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-5,
    )
    mesh = Mesh(np.array(jax.devices()[:1], object).reshape(1, 1), ("fsdp", "tp"))
    return RLCluster(
        actor=Llama3(config, rngs=nnx.Rngs(0)),
        tokenizer=Bytes(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.ROLLOUT, Role.REFERENCE), mesh),
            rollout_engine=engine,
            training_config=RLTrainingConfig(actor_optimizer=optax.adam(1e-3), eval_every_n_steps=1),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=48, max_prompt_length=16, kv_cache_size=64, temperature=0.7, return_logprobs=True
            ),
        ),
    )


def main() -> None:
    tree = jlade.LookaheadConfig.tree(15)
    cluster = make_cluster(functools.partial(LookaheadRollout, lookahead=tree, draft_from_rollouts=8))
    group = ["1 + 1 = "] * 4 + ["2 + 2 = "] * 4  # two prompts, four rollouts of each
    for epoch in (1, 2):
        out = cluster.generate(group)
        last = cluster.rollout.last
        print(f"epoch {epoch}: {last.lengths.sum()} tokens, {last.compression.mean():.2f} of a text per step")
        # A learner would score the texts and update the weights here; then it hands them to the engine.
        cluster.sync_weights()
    print(f"log-probabilities of the first tokens: {[round(float(each), 2) for each in out.logprobs[0][:4]]}")


if __name__ == "__main__":
    main()

"""The program of test_processes.py: decodes on meshes of all processes, and writes its results to a file."""

import json
import os
import pathlib
import sys

import jax

import jlade
from jlade.costs import choice
from jlade.models import sharding

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6, 4]]
LOOKAHEAD = jlade.LookaheadConfig.paper(4, 3, 2)
SAMPLING = [jlade.SamplingConfig(), jlade.SamplingConfig(temperature=0.8)]  # greedy and sampled


def results(params, directory, mesh=None):
    """Returns results of `jlade.generate` and its relatives as lists."""
    options = {"lookahead": LOOKAHEAD, "mesh": mesh, "max_new_tokens": 12}
    key = jax.random.split(jax.random.key(3), 2)
    out = jlade.generate(params, PROMPTS, sampling=SAMPLING, key=key, keep_state=True, **options)
    found = {"tokens": out.tokens, "steps": out.steps}
    if mesh is not None and mesh.shape["data"] == 1:
        return {name: array.tolist() for name, array in found.items()}
    longer = [[*prompt, *new, 7] for prompt, new in zip(PROMPTS, out.tokens.tolist(), strict=True)]
    options |= {"sampling": SAMPLING, "key": key}
    second = jlade.generate(params, longer, state=out.state, **options)
    found |= {"continued": second.tokens, "continued_steps": second.steps}
    jlade.save_pool(out.state.sources["pool"], directory / "pool.safetensors")
    pool = jlade.load_pool(directory / "pool.safetensors")
    third = jlade.generate(params, PROMPTS, pool=pool, with_statistics=True, **options)
    found |= {"pool": pool.rows, "steps_with_pool": third.steps, "ngrams": third.statistics.ngrams}
    return {name: array.tolist() for name, array in found.items()}


if __name__ == "__main__":
    address, number, index, directory, *meshes = sys.argv[1:]
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(
        address, int(number), int(index), heartbeat_timeout_seconds=15, shutdown_timeout_seconds=10
    )
    own = pathlib.Path(directory) / index
    own.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(own)
    found = []
    for sizes in meshes:
        mesh = jlade.make_mesh(*map(int, sizes.split(",")))
        params, _ = jlade.load(pathlib.Path(directory) / "model", "float32")
        divided = sharding.put(params, sharding.mesh_for(params.config, mesh))
        found.append(results(divided, own, mesh))
        if index == "0":
            choice.save(choice.key(divided, divided.decoder, 1), LOOKAHEAD, {})
        assert choice.choose(divided, divided.decoder, 1) == LOOKAHEAD, "process 0 has it for all"
    (own / "results.json").write_text(json.dumps(found), encoding="utf-8")

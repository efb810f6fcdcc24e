"""The server of `jlade serve` as an application of Ray Serve, with as many replicas as the load needs.

    serve.run(application({"model": "path/to/hf-llama", "max_replicas": 8, "ray_actor_options": {"num_gpus": 1}}))

Requests with the same `x-session-id` header go to the same replica, which keeps the prefix of their conversation, but
for `RAY_SERVE_ENABLE_HA_PROXY=1`.
"""

import asyncio
import dataclasses
import inspect
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jlade
from jlade.conversion import location
from jlade.integrations.ray import MISSING
from jlade.integrations.ray import model as model_lib
from jlade.server import served_model
from jlade.server.served_model import Limits

# Ray's router: a session has a place on a ring of replicas, and another one takes over where its own is full or dead.
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"  # 1 for Ray's HAProxy, with which it accepts its default router alone
log = logging.getLogger(__name__)
HEALTH_SECONDS = 60  # for the answer to a check, as a device may be in the middle of reading a prompt


class Replica:
    """A model behind OpenAI's interface in a process of Ray Serve. It is ready when all of its programs are compiled.

    Args:
      model: as in `jlade.load`.
      name: of the model in the interface, by default the last part of `model`.
      api_key_file: a file on each machine with keys, one in a line. Without it clients on the same machine alone are
        answered, as by `jlade serve`.
      dtype: of the weights, as in `jlade.load`; by default float32 on CPUs and bfloat16 elsewhere.
      revision: as in `jlade.load`.
      mesh: sizes of `jlade.make_mesh` for the devices of a replica, such as `{"model": 4}`.
      lookahead: "auto", a setting as `--lookahead` takes it, such as "tree=119", or None for plain decoding.
      kv_dtype: as in `jlade.Engine`.
      limits: fields of `jlade.server.served_model.Limits`: `max_sequences`, `capacity`, `max_waiting` and more.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """

    def __init__(
        self,
        model: str,
        *,
        name: str | None = None,
        api_key_file: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        mesh: Mapping[str, int] | None = None,
        lookahead: str | None = "auto",
        kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None,
        **limits: int,
    ):
        from jlade.server import guard
        from jlade.server.app import Service

        keys: list[str] = []
        if api_key_file is not None:
            try:
                text = pathlib.Path(api_key_file).read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(f"api_key_file {api_key_file!r} cannot be read: {error.strerror}") from error
            keys = guard.keys(text, f"api_key_file {api_key_file!r}")
        setting = model_lib.setting(lookahead)
        params, tokenizer = model_lib.load(model, dtype, revision, mesh)
        if (ignored := served_model.ignored(model, revision)) is not None:
            log.warning("%s: %s", model, ignored)
        engine, reader = served_model.make(
            params,
            tokenizer,
            location.find(model, revision),
            jlade.load_sampling(model, revision=revision),
            Limits(**limits),
            lookahead=setting,
            kv_dtype=kv_dtype,
        )
        self._service = Service(engine, reader, model=name or pathlib.Path(model).name, keys=keys)
        for _ in self._service.compile():
            pass
        engine.warm_up()  # takes the memory of all rows: too many of them are an error now
        self._probe = jax.jit(jnp.square)

    def __serve_build_asgi_app__(self) -> Any:
        """Returns the application; Ray Serve calls it."""
        return self._service.app

    async def check_health(self) -> None:
        """Raises an error if the replica answers no completions; Ray Serve calls it, and starts another one."""
        self._service.check()
        # An engine lives on where its device has failed, and would refuse one request after the other at once.
        await asyncio.to_thread(lambda: self._probe(jnp.ones(())).block_until_ready())


def application(args: Mapping[str, Any]) -> Any:
    """Returns the application for `ray.serve.run`, or for an `import_path` of Ray Serve with these `args`.

    Args:
      args: arguments of `Replica`, and of the deployment: `min_replicas` and `max_replicas`, 1 by default, between
        which the number of replicas follows the load, and `ray_actor_options`, such as `{"num_gpus": 1}`.

    Raises:
      TypeError: `args` has a name that neither has, or no model.
      ImportError: Ray is not installed.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise ImportError(MISSING.format(error)) from error

    of_deployment = {"min_replicas": 1, "max_replicas": 1, "ray_actor_options": {}}
    of_replica = {name: value for name, value in args.items() if name not in of_deployment}
    of_deployment |= {name: value for name, value in args.items() if name in of_deployment}
    inspect.signature(Replica).bind(**of_replica)
    of_limits = {field.name for field in dataclasses.fields(Limits)}
    accepted = of_limits | inspect.signature(Replica).parameters.keys() - {"limits"}
    if unknown := sorted(of_replica.keys() - accepted):
        raise TypeError(
            f"args must have names of {', '.join(sorted(accepted | of_deployment.keys()))}, got {unknown[0]!r}"
        )
    limits = Limits(**{name: value for name, value in of_replica.items() if name in of_limits})
    deployed = serve.deployment(
        name="jlade",
        # A replica decodes as many requests at once as it has rows, and as many again may wait for one.
        autoscaling_config={
            "min_replicas": of_deployment["min_replicas"],
            "max_replicas": of_deployment["max_replicas"],
            "target_ongoing_requests": limits.max_sequences,
        },
        max_ongoing_requests=2 * limits.max_sequences,
        max_queued_requests=limits.max_waiting,
        request_router_config={} if os.environ.get(HA_PROXY) == "1" else {"request_router_class": ROUTER},
        health_check_timeout_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=600,  # the longest response
        ray_actor_options=of_deployment["ray_actor_options"],
    )(serve.ingress()(Replica))
    return deployed.bind(**of_replica)

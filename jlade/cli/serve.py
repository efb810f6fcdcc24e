"""`jlade serve`: an HTTP server with OpenAI's interface."""

import argparse
import gc
import importlib.util
import pathlib
import sys
import threading
import time
from typing import TYPE_CHECKING

import jlade
from jlade.cli import arguments as options_lib
from jlade.cli import limits
from jlade.errors import check_int
from jlade.mesh import DATA
from jlade.server import served_model

if TYPE_CHECKING:
    from jlade.server.keeping import Keeper
    from jlade.server.lifecycle import Loading

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "transformers", "jinja2")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = options_lib.Parser(
        prog="jlade serve",
        description="Serve a model over HTTP with OpenAI's interface. Requests share the rows of one engine, and each "
        "text is that of its request alone.",
        epilog="SIGTERM and Ctrl-C let the requests that have rows end, and refuse the others; a second one ends at "
        "once.",
        examples=[
            "jlade serve path/to/model --max-sequences 16 --capacity 8192",
            "jlade serve path/to/model --host 0.0.0.0 --api-key-file keys.txt",
        ],
    )
    options_lib.add_model(result, has_batches=True, as_word=True)
    options_lib.add(result, "--kv-dtype")
    options_lib.add_lookahead(result)
    options_lib.add(result, "--programs")
    result.add_argument("--host", default="127.0.0.1", help="address to listen to (default: %(default)s)")
    result.add_argument(
        "--port", type=int, default=8000, help="port to listen to; 0 takes a free one (default: %(default)s)"
    )
    result.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="keys, one in a line, of which a request has to bring one; needed unless --host is this machine alone",
    )
    result.add_argument("--name", help="name of the model in the interface (default: the last part of MODEL)")
    result.add_argument("--template", metavar="FILE", help="Jinja chat template (default: the model's own)")
    limits.add(result)
    result.add_argument(
        "--max-waiting",
        type=int,
        default=limits.DEFAULT.max_waiting,
        metavar="N",
        help="requests that may wait (default: %(default)s)",
    )
    result.add_argument(
        "--drafts", metavar="DIR", help="keep these answers in files from one run to the next (default: in memory)"
    )
    result.add_argument(
        "--warm-up",
        action="store_true",
        help="compile all programs before the first request (default: behind it, but for its own)",
    )
    result.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="most seconds of a response (default: %(default)g)"
    )
    return result


def run(options: argparse.Namespace) -> None:
    """Serves until a signal."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f'the server needs {", ".join(missing)}: pip install "jlade[serve]"')
    from jlade.server import guard, lifecycle

    _check(options)
    file = options.api_key_file
    keys = [] if file is None else guard.keys(options_lib.read(file), f"--api-key-file {file}")
    template = None if options.template is None else options_lib.read(options.template)
    with lifecycle.bind(options.host, options.port) as bound:
        if not keys and not lifecycle.is_loopback(bound):
            raise ValueError(
                f"--host {options.host} lets other machines in: pass --api-key-file, or listen to 127.0.0.1"
            )
        app = lifecycle.Loading()
        server = lifecycle.Server(app)
        url, failed, keepers = lifecycle.url(bound), [], list["Keeper"]()

        def start() -> None:
            try:
                _start(app, url, keys, template, keepers, options)
            except Exception as error:
                failed.append(error)
                server.should_exit = True

        starting = threading.Thread(target=start, name="jlade start", daemon=True)
        starting.start()
        server.run(sockets=[bound])
    for keeper in keepers:
        keeper.close()
    if failed:
        raise failed[0]
    lifecycle.leave(130 if server.was_interrupted else 0)


def _start(
    app: "Loading",
    url: str,
    keys: list[str],
    template: str | None,
    keepers: list["Keeper"],
    options: argparse.Namespace,
) -> None:
    """Loads the model, makes `app` serve it at `url`, and compiles all programs, with --warm-up in the other order.

    The keeper of the remembered texts, if there is one, is added to `keepers`.
    """
    from jlade.server.app import Service
    from jlade.server.keeping import Keeper

    begin = time.monotonic()

    def say(doing: str) -> None:
        app.doing = doing
        print(f"jlade serve: {doing}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    def compile_all() -> None:
        made = "compiled" if options.programs is None else "loaded or compiled"
        for left in parts:
            say(f"{total - left} of {total} sets of programs are {made}")

    def serve() -> None:
        gc.freeze()  # what is loaded stays: collections skip it, also the last one, which would take a second
        app.service = service
        print(f"{_name(options)} at {url}", flush=True)

    say(f"{_name(options)} is being loaded, to serve it at {url}")
    params, tokenizer = options_lib.load(options)
    engine, reader = served_model.make(
        params,
        tokenizer,
        options_lib.find(options),
        _sampling(options),
        limits.read(options),
        lookahead=options_lib.lookahead(options),
        kv_dtype=options.kv_dtype,
        corpus=limits.corpus(options),
        prior=options_lib.prior(options),
        template=template,
        programs=options.programs,
    )
    if options.drafts is not None:
        keepers.append(Keeper(engine, options.drafts))
    service = Service(engine, reader, model=_name(options), keys=keys, seconds=options.timeout)
    parts, total = service.compile(), engine.num_left
    if options.warm_up:
        compile_all()
        engine.warm_up()
        serve()
    else:
        serve()
        try:
            compile_all()
        except Exception as error:  # of a request too that needs the program
            say(f"a program does not compile: {error}")


def _check(options: argparse.Namespace) -> None:
    """Checks the options, and makes `options.batch_size` the one that `options_lib.load` reads."""
    check_int("--max-sequences", options.max_sequences, 1)
    groups = 1 if options.mesh is None else options_lib.mesh_sizes(options.mesh).get(DATA, 1)
    if options.max_sequences % groups:
        raise ValueError(
            f"--max-sequences must be a multiple of {groups}, the size of data in --mesh, got {options.max_sequences}"
        )
    options.batch_size = options.max_sequences
    if options.drafts is not None and not limits.read(options).of_engine(options_lib.lookahead(options))["remember"]:
        raise ValueError("--drafts needs answers to keep: --remember above 0, and a lookahead with a tree")
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port must be from 0 to {2**16 - 1}, got {options.port}")
    for name in ("max_grammar", "remember", "max_prediction", "max_top_logprobs"):
        if getattr(options, name) is not None:
            check_int(f"--{name.replace('_', '-')}", getattr(options, name), 0)
    if not options.timeout > 0:
        raise ValueError(f"--timeout must be above 0, got {options.timeout:g}")


def _name(options: argparse.Namespace) -> str:
    """Returns the model's name in the interface."""
    model = options_lib.DEMO if options.model is None else options.model
    return options.name or pathlib.Path(model).name.removesuffix(".gguf")


def _sampling(options: argparse.Namespace) -> jlade.SamplingConfig:
    """Returns the sampling that the checkpoint recommends, after a word on what is ignored."""
    place = options.model or options_lib.DEMO
    if (ignored := served_model.ignored(place, options.revision)) is not None:
        print(f"jlade serve: {ignored}", file=sys.stderr, flush=True)
    return jlade.load_sampling(place, revision=options.revision)

"""A batch job on the machines of a Ray cluster: `jlade generate --output` for files of any size.

    python examples/ray_batch.py prompts.jsonl --output answers --model path/to/model --workers 8 --gpus 1 --rows 64

A line with JSON says that a part of the job is complete and on the disk. The same command goes on with a job that was
interrupted. `cat answers/*.jsonl` has the lines of all records in their order. Files and directory must have the same
paths on all machines; `--address auto` joins the cluster that runs on this one.
"""

import argparse
import json

import ray

from jlade.integrations.ray.data import Completer, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="records in JSON lines, see docs/usage.md")
    parser.add_argument("--output", required=True, metavar="DIRECTORY", help="for the results")
    parser.add_argument("--model", required=True, metavar="PATH")
    parser.add_argument("--lookahead", default="auto", help="a setting, as `jlade generate` takes it")
    parser.add_argument("--rows", type=int, default=8, metavar="B", help="prompts that a worker decodes at once")
    parser.add_argument("--size", type=int, default=1024, metavar="N", help="records of a part")
    parser.add_argument("--max-new-tokens", type=int, metavar="M", help="of a record without a limit of its own")
    parser.add_argument("--workers", type=int, default=1, metavar="W")
    parser.add_argument("--gpus", type=float, default=0, metavar="G", help="GPUs of each worker")
    parser.add_argument("--address", help="of the Ray cluster; by default a new one on this machine")
    options = parser.parse_args()

    ray.init(address=options.address)
    context = ray.data.DataContext.get_current()
    context.retried_map_errors, context.max_map_retries = True, 2  # of a part, such as a lack of memory
    context.max_consecutive_actor_init_deaths = 8  # machines that die while they load the model
    done = parts(options.files, options.output, size=options.size).map_batches(
        Completer,
        batch_size=1,
        fn_constructor_args=[options.model],
        fn_constructor_kwargs={
            "rows": options.rows,
            "lookahead": options.lookahead,
            "max_new_tokens": options.max_new_tokens,
        },
        compute=ray.data.ActorPoolStrategy(size=options.workers, max_concurrent_calls_per_actor=2),
        num_gpus=options.gpus,
        max_task_retries=2,  # of a part in whose hands workers die; by default without end
    )
    for part in done.iter_rows():
        print(json.dumps(part), flush=True)


if __name__ == "__main__":
    main()

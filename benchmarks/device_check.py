"""The first output of `gpu.sh` and `tpu.sh`: the installed packages and, on the last line, the device.

python benchmarks/device_check.py
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

NEEDED = ["jax", "flax", "numpy", "safetensors", "huggingface_hub", "tokenizers", "rich", "lazy_loader", "filelock"]
WANTED = ["torch", "transformers"]  # for the comparison with transformers


def main(argv: Sequence[str] | None = None) -> None:
    """Prints versions and, on the last line, the device's name in the form that file names contain.

    Raises:
      SystemExit: names the missing packages that are required.
    """
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    missing = {}
    for name in NEEDED + WANTED:
        try:
            module = importlib.import_module(name)
            print(f"{name} {getattr(module, '__version__', '')}")
        except ImportError as error:
            missing[name] = error
            print(f"{name} is missing: {error}")
    if absent := [name for name in NEEDED if name in missing]:
        raise SystemExit(f"cannot run without {', '.join(absent)}")
    if absent := [name for name in WANTED if name in missing]:
        print(f"no part `transformers` without {', '.join(absent)}")
    from benchmarks.report import file_name
    from jlade.mesh import default_device

    device = default_device()
    if device.platform == "cpu":
        print("JAX has no accelerator: everything will run on the CPU")
    elif "torch" not in missing and not importlib.import_module("torch").cuda.is_available():
        print("torch does not see the GPU: no part `transformers`")
    stats = device.memory_stats() or {}
    print(f"{device.device_kind}, {stats.get('bytes_limit', 0) / 1e9:.0f} GB for JAX")
    print(file_name(device.device_kind))


if __name__ == "__main__":
    main()

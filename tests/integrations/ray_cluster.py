"""A Ray cluster of two workers on this machine, whose processes share the compiled programs of the tests."""

import contextlib

import pytest

from tests.processes import PYTHONPATH, XLA_FLAGS

WARNINGS = pytest.mark.filterwarnings(  # Ray's, and JAX's of the forks that start a cluster
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning", "ignore:os.fork:RuntimeWarning"
)


@contextlib.contextmanager
def running():
    """Yields the module `ray` after `ray.init`."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'jlade[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "PYTHONPATH": PYTHONPATH,
            "RAY_AUTH_MODE": "disabled",  # it would write a token into the user's home
            "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "XLA_FLAGS": XLA_FLAGS,
        }.items():
            patch.setenv(name, value)
        ray.init(num_cpus=2, object_store_memory=2**27, include_dashboard=False, log_to_driver=False)
        try:
            yield ray
        finally:
            ray.shutdown()

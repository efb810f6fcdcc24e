import gc
import json
import os
import pathlib
import shlex
import sys

import hypothesis
import jax
import pytest
from jax._src import compiler

import jlade
from jlade.generation import memory
from jlade.models import base
from tests import processes
from tests.evaluation import browser
from tests.plugins.jax_plugins import whole_programs
from tests.tiny import save_small_demo

# The suite is for the CPU. The compilers of accelerators, if installed, would look for a device.
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, for meshes
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Processes share compiled programs, also with the next run in the same clone, or of all clones with the variable: the
# cache's key holds the program, the compiler's options and all versions. A cache with a limit would read the times of
# all programs before it writes one, 50 ms for 2,000 of them, while the other processes wait.
PROGRAMS = os.environ.get("JLADE_TEST_PROGRAMS", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "programs"))
CACHE = {
    "jax_compilation_cache_dir": PROGRAMS,
    "jax_persistent_cache_min_compile_time_secs": 0.05,
    "jax_compilation_cache_max_size": -1,
}
for name, value in CACHE.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)  # the processes that tests start have theirs in it too
whole_programs.initialize()
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(processes.PLUGINS), os.environ.get("PYTHONPATH")]))

# The processes that tests start compile without optimizations too; below, the modules of this one decide.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", False)
if jax.__version_info__ >= (0, 11, 2):
    # The threads of a simulated GPU wait for each other in XLA's pool, which otherwise has one thread for each core.
    os.environ.setdefault("NPROC", "8")

# Programs are made of many objects that live long: the collector would look at all of them every 700 new ones.
gc.set_threshold(50_000)

# The texts of tests are short: with windows as short as these, the rings of the cache go round many times.
base.MULTIPLE = 8

# Compiling takes longer than any deadline; the same examples every time, for the same result every time.
hypothesis.settings.register_profile("jlade", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jlade")

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def cache_directory(tmp_path_factory, monkeypatch):
    """A cache of its own for every test, so that what `jlade tune` stored on this machine changes none."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory


# Without XLA's optimizations programs compile in a third of the time and run in several times the time. Tests of logic
# do without. Modules that set `OPTIMIZED = True` compile as users do: exactness on the demo model, and the text of
# compiled programs. They come first, as no program of the others serves them and they take long.
def is_optimized(module):
    return getattr(module, "OPTIMIZED", False)


@pytest.fixture(autouse=True, scope="module")
def optimizations(request):
    with pytest.MonkeyPatch.context() as patch:
        if is_optimized(request.module):
            patch.setattr(compiler, "get_compile_options", get_compile_options)
            jax.clear_caches()
        yield
        if is_optimized(request.module):
            jax.clear_caches()
    if resident_bytes() > MAX_BYTES:
        jax.clear_caches()
        memory.trim()


MAX_BYTES = 2**31  # of a process between two modules; programs, and the fragments that they leave, add up


def resident_bytes():
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if statm.exists() else MAX_BYTES + 1


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not is_optimized(item.module))


def pytest_collection_finish():
    gc.freeze()  # modules and tests live as long as the process: the collector need not look at them again


def pytest_terminal_summary(terminalreporter):
    """Prints the commands that run what failed alone; names of tests have brackets and spaces."""
    failed = [each for kind in ("failed", "error") for each in terminalreporter.stats.get(kind, ())]
    for name in dict.fromkeys(report.nodeid for report in failed):
        terminalreporter.write_line(f"alone: {sys.executable} -m pytest {shlex.quote(name)}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Returns as many processes as cores, also those that share one; each takes up to 2.5 GB."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


get_compile_options = compiler.get_compile_options


def cheap_compile_options(*args, **kwargs):
    options = get_compile_options(*args, **kwargs)
    cheap = [("xla_backend_optimization_level", 0), ("xla_llvm_disable_expensive_passes", True)]
    cheap.append(("xla_cpu_parallel_codegen_split_count", 1))
    if jax.__version_info__ < (0, 11):  # the older code generator of CPUs takes less time, and later XLAs lack it
        cheap.append(("xla_cpu_use_fusion_emitters", False))
    options.env_option_overrides = [*options.env_option_overrides, *cheap]
    return options


# XLA reads its flags once in a process, and JAX has no public setting for all programs of a module.
compiler.get_compile_options = cheap_compile_options


@pytest.fixture(scope="session")
def demo():
    """Parameters and tokenizer of the shipped checkpoint, in float32."""
    return jlade.demo(dtype="float32")


@pytest.fixture(scope="session")
def small_demo(tmp_path_factory):
    """The directory of the demo model's first layer, for tests of what goes around the model."""
    directory = tmp_path_factory.mktemp("model") / "demo"
    save_small_demo(directory)
    return directory


@pytest.fixture(scope="session")
def golden():
    """Prompt id -> (prompt, the 256 tokens that transformers generates greedily); see golden/README.md."""
    prompts = [json.loads(line) for line in (GOLDEN / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    greedy = json.loads((GOLDEN / "greedy.json").read_text(encoding="utf-8"))
    return {prompt["id"]: (prompt, greedy[prompt["id"]]) for prompt in prompts}


@pytest.fixture(scope="module")
def open_page():
    """Returns `browser.open_page` for a browser that the tests of a module share."""
    with browser.launched() as launched:
        yield lambda place, width, **context: browser.open_page(launched, place, width, **context)

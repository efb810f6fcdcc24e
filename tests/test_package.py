import importlib.metadata
import pathlib
import re
import subprocess
import sys
import typing

import pytest

import jlade
import jlade.conversion


def test_public_names_exist():
    assert sorted(jlade.__all__) == jlade.__all__
    assert all(hasattr(jlade, name) for name in jlade.__all__)


def test_the_types_of_a_program_of_ones_own_are_public():
    """Those in the signatures of decode and its parts, and in the fields of their arguments."""
    functions = jlade.load, jlade.decode, jlade.prefill, jlade.start, jlade.step
    things = *functions, jlade.Inputs, jlade.DecodeConfig, jlade.Stopping
    hints = [hint for thing in things for hint in typing.get_type_hints(thing).values()]
    types = {one for hint in hints for one in (hint, *typing.get_args(hint)) if isinstance(one, type)}
    names = {one.__name__ for one in types if one.__module__.startswith("jlade.")}
    assert names >= {"DecodeState", "Sampling", "StopStrings"}
    assert names - set(jlade.__all__) == set()


def test_version_is_the_distributions():
    assert importlib.metadata.version("jlade") == jlade.__version__


def test_the_core_needs_few_packages():
    """An extra brings what only some users need."""
    needed = [each for each in importlib.metadata.requires("jlade") or [] if "extra ==" not in each]
    names = {re.split(r"[^\w-]", each)[0].replace("_", "-") for each in needed}
    core = {"filelock", "flax", "jax", "lazy-loader", "numpy", "rich"}
    assert names == core | {"huggingface-hub", "safetensors", "tokenizers"}


def test_the_package_says_that_it_is_typed_and_ships_the_demo_with_its_card():
    root = pathlib.Path(jlade.__file__).parent
    assert (root / "py.typed").exists()
    assert "5.48 million" in (root / "demo" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_generating_needs_neither_torch_nor_transformers():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import jlade; "
        "params, tokenizer = jlade.demo(); "
        "print(jlade.generate(params, 'import os', tokenizer=tokenizer, max_new_tokens=4).lengths)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[4]"


def test_importing_starts_no_backend():
    code = "import jlade, jax; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)

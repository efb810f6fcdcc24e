"""The kernels of products with matrices in groups, made by the compilers of TPUs and GPUs without a device."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jlade.inspection import targets
from jlade.models import products
from jlade.models.grouped import GroupedMatrix
from jlade.models.products import gpu, tpu
from tests.accelerators.needs import device, gpu_compiler, thorough
from tests.accelerators.ptxas import ProductCase, spills_of_products
from tests.models.products import multiply_alone

LLAMA = (4096, 14336), (14336, 4096), (4096, 4096), (4096, 1024)  # inputs and outputs of LLaMA 3 8B


@pytest.mark.parametrize(
    ("inputs", "outputs", "group", "bits", "field"),
    [
        (4096, 14336, 64, 4, None),  # LLaMA 3 8B
        (14336, 4096, 64, 4, "zero"),
        (11008, 4096, 64, 4, None),  # LLaMA 2 7B: 172 groups divide no block of a TPU
        (4096, 1024, 32, 4, "offset"),
        (576, 1536, 64, 8, None),  # SmolLM2
        (4096, 14336, 64, 4, "levels"),  # NF4
        (4096, 1024, 16, 4, "levels"),  # NVFP4
    ],
)
@pytest.mark.parametrize("name", [device("h100"), device("v5e"), thorough(device("a100")), thorough(device("v6e"))])
def test_kernels_compile_and_write_no_matrix(name, inputs, outputs, group, bits, field):
    (target,), _ = targets.find(name)
    kernel, of_groups = tpu if name.startswith("v") else gpu, (inputs // group, outputs)
    rows, dtype = (inputs // 2, jnp.uint8) if bits == 4 else (inputs, jnp.int8)
    fields = (
        {} if field is None else {field: jax.ShapeDtypeStruct((16,) if field == "levels" else of_groups, jnp.float32)}
    )
    matrix = GroupedMatrix(
        jax.ShapeDtypeStruct((rows, outputs), dtype), jax.ShapeDtypeStruct(of_groups, jnp.bfloat16), **fields
    )
    for tokens in (1, 120):
        x = jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16)
        program = targets.compile_for(target, functools.partial(multiply_alone, kernel), x, matrix)
        sums = 4 * 4 * 128 * max(outputs, inputs)  # of a GPU's programs, in float32
        assert program.memory_analysis().temp_size_in_bytes < 3 * sums
        assert f"[{inputs},{outputs}]" not in program.as_text().replace(f"s8[{inputs},{outputs}]", "")


@gpu_compiler
@pytest.mark.parametrize("name", ["h100", "a100"])
def test_kernels_of_gpus_keep_their_sums_in_registers(name):
    cases = [ProductCase(name, tokens, *shape) for shape in LLAMA for tokens in (1, 8, 32, 64, 120)]
    cases += [ProductCase(name, tokens, 4096, 4096, 32, "float16", "offset") for tokens in (8, 120)]
    planted = ProductCase(name, 256, 4096, 4096, rows=256, columns=256)  # four times the sums
    found = spills_of_products([*cases, planted])
    assert found.pop(planted) > 0
    assert found == dict.fromkeys(cases, 0)


@pytest.mark.parametrize("name", [device("h100"), device("v5e"), thorough(device("a100")), thorough(device("v6e"))])
def test_kernels_compile_for_experts_and_write_no_matrix(name):
    """Those of gpt-oss, of which there are 32: 2880 outputs and 90 groups fill no whole blocks of a TPU."""
    (target,), _ = targets.find(name)
    number, size = 8, 2880
    of_groups = jax.ShapeDtypeStruct((number, size // 32, size), jnp.bfloat16)
    levels = jax.ShapeDtypeStruct((16,), jnp.float32)
    matrices = GroupedMatrix(jax.ShapeDtypeStruct((number, size // 2, size), jnp.uint8), of_groups, levels=levels)
    tiles, experts = jax.ShapeDtypeStruct((12, 16, size), jnp.bfloat16), jax.ShapeDtypeStruct((12,), jnp.int32)
    kernel = tpu if name.startswith("v") else gpu
    program = targets.compile_for(target, kernel.multiply_tiles, tiles, experts, matrices)
    assert program.memory_analysis().temp_size_in_bytes < number * size * size / 8
    assert f"{size},{size}]" not in program.as_text()


@pytest.mark.parametrize("name", [device("h100"), device("v5e")])
def test_an_embedding_that_is_the_output_matrix_is_not_copied(name):
    """Its scales are in float16, as in GGUF files."""
    (target,), _ = targets.find(name)
    weight, scale = ((2048, 16384), jnp.int8), ((64, 16384), jnp.float16)
    matrix = GroupedMatrix(*(jax.ShapeDtypeStruct(*array) for array in (weight, scale)))
    matrix = matrix.replace(implementation="tpu" if name.startswith("v") else "gpu")

    def step(matrix, tokens):
        return products.multiply(matrix[tokens].astype(jnp.bfloat16), matrix)

    program = targets.compile_for(target, step, matrix, jax.ShapeDtypeStruct((64,), jnp.int32))
    assert program.memory_analysis().temp_size_in_bytes < 2048 * 16384 / 2

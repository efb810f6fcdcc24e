"""Products by the kernels of quantized matrices."""

import jax.numpy as jnp


def multiply_alone(kernel, x, matrix, interpret=False):
    """Returns the product of tokens [T, in] with a matrix [in, out], by a kernel for tiles of experts."""
    matrices = matrix.mapped(lambda array: array[None])
    return kernel.multiply_tiles(x[None], jnp.zeros(1, jnp.int32), matrices, interpret)[0]

"""What a legal call of the layers is, beside what `contract` says, and their error texts."""

import jax
import jax.numpy as jnp

from jax_grouped_gemm import contract, meshes


def check_logits(logits, mask):
    contract.check_rank("logits", logits, 2, "(T, E)")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floating; got {logits.dtype}; cast it, e.g. logits.astype(jnp.float32)")
    if mask is not None:
        contract.check_vector("mask", mask, "bool", logits.shape[0], "T", "one bool per token, False for padding")


def check_positive(**sizes):
    for name, size in sizes.items():
        if not contract.is_positive(size):
            raise ValueError(f"{name} must be a positive integer; got {size!r}; a layer needs at least 1")


def check_top_k(k, num_experts):
    if not contract.is_positive(k) or k > num_experts:
        raise ValueError(f"k must be an integer from 1 to E = {num_experts}; got {k!r}; pass the experts per token")


def check_rows(name, array, rows, symbol, meaning):
    if array.ndim != 2 or array.shape[0] != rows:
        raise ValueError(f"{name} must be ({symbol}, D) with {symbol} = {rows}; got {array.shape}; pass {meaning}")


def check_routed(logits, routed):
    """(T, E) both."""
    if logits != routed:
        raise ValueError(
            f"logits must be (T, E) = {routed}, those that were routed; got {logits}; pass those of routing"
        )


def check_dense_rows(rows):
    contract.check_rank("rows", rows, 2, "(M, in)")


def check_grouped_dense(rows, kernel, bias, group_sizes, prob):
    check_dense_rows(rows)
    if kernel.ndim != 3 or kernel.shape[1] != rows.shape[1]:
        raise ValueError(
            f"kernel must be (E, in, features) with in = rows.shape[1] = {rows.shape[1]}; got {kernel.shape}; "
            "pass rows of the width that it was made for"
        )
    if bias is not None and bias.shape != kernel.shape[::2]:
        raise ValueError(
            f"bias must be (E, features) = {kernel.shape[::2]}; got {bias.shape}; pass one row of features per expert"
        )
    contract.check_vector("group_sizes", group_sizes, "int32", kernel.shape[0], "E", "the rows of each expert")
    if prob is not None:
        contract.check_vector("prob", prob, "float32", rows.shape[0], "M", "one factor per row")


def check_inputs(inputs, in_features):
    if inputs.ndim < 1:
        raise ValueError("inputs must be (..., D); got (); pass a vector for each token")
    if in_features is not None and inputs.shape[-1] != in_features:
        raise ValueError(
            f"inputs must be (..., D) with D = in_features = {in_features}; got {inputs.shape}; "
            "pass tokens of the width that the layer was made for"
        )


def check_token_mask(mask, inputs):
    if mask is not None and (mask.shape != inputs.shape[:-1] or mask.dtype != bool):
        raise ValueError(
            f"mask must be bool {inputs.shape[:-1]}, inputs.shape without D; got {mask.dtype} {mask.shape}; "
            "pass one bool per token, False for padding"
        )


def no_flax(module):
    return ImportError(f"{module} needs flax; got none; install it, e.g. pip install flax")


def check_unsharded(*arrays):
    """Over explicit axes; None is not an array that is."""
    for x in arrays:
        if x is not None and meshes.has_explicit(sharding := jax.typeof(x).sharding) and any(sharding.spec):
            raise no_explicit_rows()


def no_explicit_rows():
    return NotImplementedError(
        "top_k_route, dispatch and combine have no rule for operands on a mesh with explicit axes; call them on each device's part "
        "inside jax.shard_map, or make the mesh with axis_types=(jax.sharding.AxisType.Auto,)"
    )

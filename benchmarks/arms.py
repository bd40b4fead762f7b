"""The competitors. All read the same operands in GPU memory; torch sees JAX's buffers through DLPack."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Arm

NAMES = ("ours", "cublas_dense", "torch_grouped_mm", "tokamax", "ragged_dot")


class Inputs:
    """Random normal operands of one row of the table: several sets, so that no operand stays in the L2 cache."""

    ROTATION_BYTES = 1 << 28  # well above the 60 MB of an H200's L2

    def __init__(self, row, seed):
        self.row = row
        self.sizes = row.group_sizes(seed)
        self.ends = jnp.asarray(np.cumsum(self.sizes), jnp.int32)
        self.group_sizes = jnp.asarray(self.sizes)
        operand_bytes = row.bytes(self.sizes)
        self.sets = int(np.clip(-(-self.ROTATION_BYTES // operand_bytes), 2, 16))
        keys = jax.random.split(jax.random.key(seed), (self.sets, 2))
        self.a = [_normal(key[0], (row.m, row.k)) for key in keys]
        self.b = [_normal(key[1], (row.l, row.n, row.k)) for key in keys]

    @functools.cached_property
    def b_n_major(self):
        """(l, k, n) weights of the first set: `ragged_dot`'s layout. One set: caches do not matter at its speed."""
        return jax.block_until_ready(jax.jit(lambda b: jnp.swapaxes(b, 1, 2))(self.b[0]))


@functools.partial(jax.jit, static_argnums=1)
def _normal(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def build(name, inputs):
    """Returns (Arm, compiled program or None), or raises UnavailableError."""
    return {
        "ours": _ours,
        "cublas_dense": _cublas_dense,
        "torch_grouped_mm": _torch_grouped_mm,
        "tokamax": _tokamax,
        "ragged_dot": _ragged_dot,
    }[name](inputs)


class UnavailableError(Exception):
    """An arm that this machine cannot run; the text says why."""


def _ours(inputs):
    from jax_grouped_gemm import grouped_gemm

    # On a GPU only the kernels count: never time the reference in their name.
    implementation = "cutedsl" if inputs.a[0].device.platform == "gpu" else None
    function = jax.jit(functools.partial(grouped_gemm, implementation=implementation))
    compiled = function.lower(inputs.a[0], inputs.b[0], offsets=inputs.ends).compile()
    pairs = list(zip(inputs.a, inputs.b, strict=True))
    return Arm(lambda i: compiled(*pairs[i % len(pairs)], offsets=inputs.ends), jax.block_until_ready), compiled


def _ragged_dot(inputs):
    compiled = jax.jit(jax.lax.ragged_dot).lower(inputs.a[0], inputs.b_n_major, inputs.group_sizes).compile()
    return _first_set(inputs, compiled), compiled


def _tokamax(inputs):
    if importlib.util.find_spec("tokamax") is None:
        raise UnavailableError("tokamax is not installed")
    import tokamax

    compiled = jax.jit(tokamax.ragged_dot).lower(inputs.a[0], inputs.b_n_major, inputs.group_sizes).compile()
    return _first_set(inputs, compiled), compiled


def _first_set(inputs, compiled):
    return Arm(lambda i: compiled(inputs.a[0], inputs.b_n_major, inputs.group_sizes), jax.block_until_ready)


def torch_on_gpu():
    """The torch module, or UnavailableError."""
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("torch sees no GPU")
    return torch


def _cublas_dense(inputs):
    """One product of the same size: all rows times one expert's weights."""
    torch = torch_on_gpu()
    pairs = [(torch.from_dlpack(a), torch.from_dlpack(b)[0].t()) for a, b in zip(inputs.a, inputs.b, strict=True)]
    return Arm(lambda i: torch.mm(*pairs[i % len(pairs)]), lambda _: torch.cuda.synchronize()), None


def _torch_grouped_mm(inputs):
    torch = torch_on_gpu()
    pairs = [
        (torch.from_dlpack(a), torch.from_dlpack(b).transpose(-2, -1)) for a, b in zip(inputs.a, inputs.b, strict=True)
    ]
    ends = torch.from_dlpack(inputs.ends)

    def call(i):
        return torch._grouped_mm(*pairs[i % len(pairs)], offs=ends, out_dtype=torch.bfloat16)

    return Arm(call, lambda _: torch.cuda.synchronize()), None

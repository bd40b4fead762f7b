"""The competitors. All read the same operands in GPU memory; torch sees JAX's buffers through DLPack."""

import functools
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm.timing import Arm

NAMES = ("ours", "cublas_dense", "torch_grouped_mm", "tokamax", "ragged_dot")
SCHEDULERS = ("ours_static", "ours_dynamic")  # ours with one scheduler given


class Inputs:
    """Random normal operands of one row of the table: several sets, so that no operand stays in the L2 cache.

    a, b: what is multiplied. forward: A (m, k) and B (l, n, k); dgrad: dD (m, n) and B; wgrad: dD and A.
    """

    ROTATION_BYTES = 1 << 28  # well above the 60 MB of an H200's L2

    def __init__(self, row, seed):
        self.row = row
        self.product = row.product
        self.sizes = row.group_sizes(seed)
        self.ends = jnp.asarray(np.cumsum(self.sizes), jnp.int32)
        self.group_sizes = jnp.asarray(self.sizes)
        operand_bytes = row.bytes(self.sizes)
        self.sets = int(np.clip(-(-self.ROTATION_BYTES // operand_bytes), 2, 16))
        keys = jax.random.split(jax.random.key(seed), (self.sets, 2))
        rows, weights, cotangent = (row.m, row.k), (row.l, row.n, row.k), (row.m, row.n)
        shapes = {"forward": (rows, weights), "dgrad": (cotangent, weights), "wgrad": (cotangent, rows)}[row.product]
        self.a, self.b = ([_normal(key[i], shape) for key in keys] for i, shape in enumerate(shapes))
        self.pairs = list(zip(self.a, self.b, strict=True))

    @functools.cached_property
    def ragged_dot(self):
        """(a, b) of the first set as JAX's `ragged_dot` takes them: weights (l, contraction, columns). One set: caches do not
        matter at its speed."""
        if self.product != "forward":
            return self.pairs[0]
        return self.a[0], jax.block_until_ready(jax.jit(lambda b: jnp.swapaxes(b, 1, 2))(self.b[0]))


@functools.partial(jax.jit, static_argnums=1)
def _normal(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16)


def names(row, given=None):
    """Of the arms of a row: those that are given, or by default all that say something there. `ragged_dot` for listed rows
    only: it takes seconds and tens of gigabytes."""
    found = given or (NAMES + SCHEDULERS if row.sweep == "skew" else NAMES)
    return [name for name in found if not (row.sweep and name == "ragged_dot")]


def build(name, inputs):
    """Returns (Arm, compiled program or None), or raises UnavailableError."""
    builders: dict[str, Callable] = {
        "ours": ours,
        "ours_static": functools.partial(ours, use_dynamic_sched=False),
        "ours_dynamic": functools.partial(ours, use_dynamic_sched=True),
        "cublas_dense": _cublas_dense,
        "torch_grouped_mm": _torch_grouped_mm,
        "tokamax": _tokamax,
        "ragged_dot": _ragged_dot,
    }
    return builders[name](inputs)


class UnavailableError(Exception):
    """An arm that this machine cannot run; the text says why."""


def ours(inputs, arrays=None, **options):
    """(Arm, compiled program); arrays: further operands by name; options: further ones of the operation."""
    from jax_grouped_gemm import grouped_gemm, grouped_gemm_wgrad

    # On a GPU only the kernels count: never time the reference in their name.
    options["implementation"] = "cutedsl" if inputs.a[0].device.platform == "gpu" else None
    if inputs.product == "dgrad":
        options["b_major"] = "n"
    function = jax.jit(functools.partial(grouped_gemm_wgrad if inputs.product == "wgrad" else grouped_gemm, **options))
    arrays = {"offsets": inputs.ends} | (arrays or {})
    compiled = function.lower(*inputs.pairs[0], **arrays).compile()
    pairs = inputs.pairs
    return Arm(lambda i: compiled(*pairs[i % len(pairs)], **arrays), jax.block_until_ready), compiled


# (m, columns) and (m, columns) with ragged rows, both contracted.
WGRAD_NUMBERS = {
    "dot_dimension_numbers": (((0,), (0,)), ((), ())),
    "lhs_ragged_dimensions": [0],
    "rhs_group_dimensions": [],
}


def _ragged_dot(inputs):
    if inputs.product == "wgrad":
        numbers = jax.lax.RaggedDotDimensionNumbers(**WGRAD_NUMBERS)
        return _first_set(inputs, functools.partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers))
    return _first_set(inputs, jax.lax.ragged_dot)


def _tokamax(inputs):
    if importlib.util.find_spec("tokamax") is None:
        raise UnavailableError("tokamax is not installed")
    import tokamax

    if inputs.product == "wgrad":
        raise UnavailableError("not written for weight gradients")
    return _first_set(inputs, tokamax.ragged_dot)


def _first_set(inputs, function):
    compiled = jax.jit(function).lower(*inputs.ragged_dot, inputs.group_sizes).compile()
    return Arm(lambda i: compiled(*inputs.ragged_dot, inputs.group_sizes), jax.block_until_ready), compiled


def torch_on_gpu():
    """The torch module, or UnavailableError."""
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("torch sees no GPU")
    return torch


def _torch_pairs(inputs, torch):
    """Views of the operands that torch multiplies: (rows, contraction) times (experts, contraction, columns), or two matrices."""
    pairs = [tuple(map(torch.from_dlpack, pair)) for pair in inputs.pairs]
    if inputs.product == "forward":
        return [(a, b.transpose(-2, -1)) for a, b in pairs]
    return [(a.t(), b) for a, b in pairs] if inputs.product == "wgrad" else pairs


def _cublas_dense(inputs):
    """One product of the same size: all rows times one expert's weights, or all rows contracted."""
    torch = torch_on_gpu()
    pairs = [(a, b if b.dim() == 2 else b[0]) for a, b in _torch_pairs(inputs, torch)]
    return Arm(lambda i: torch.mm(*pairs[i % len(pairs)]), lambda _: torch.cuda.synchronize()), None


def _torch_grouped_mm(inputs):
    torch = torch_on_gpu()
    pairs = _torch_pairs(inputs, torch)
    ends = torch.from_dlpack(inputs.ends)

    def call(i):
        return torch._grouped_mm(*pairs[i % len(pairs)], offs=ends, out_dtype=torch.bfloat16)

    return Arm(call, lambda _: torch.cuda.synchronize()), None

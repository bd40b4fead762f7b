"""`jax.lax.ragged_dot` and `ragged_dot_general`, argument for argument, on the kernels where they apply.

A product is reduced to one `grouped_gemm` or one weight gradient: batch dimensions and outer dimensions of the ragged one
become more groups, each with a group without an expert for the rows past its last one, so that nothing is copied and one
launch does it all.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lax.lax import canonicalize_precision

from jax_grouped_gemm import calls, config, contract, ffi_call, log, meshes, reference, wgrad_call

ROW_RAGGED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def ragged_dot(
    lhs, rhs, group_sizes, precision=None, preferred_element_type=None, group_offset=None, out_sharding=None
):
    """`jax.lax.ragged_dot`: multiplies each group of rows of `lhs` by its own matrix of `rhs`.

    Args:
      lhs: (M, K), rows sorted by group.
      rhs: (G, K, N). With `group_offset`, the matrices of as many groups from that one on.
      group_sizes: (G,) integers, rows of each group; with `group_offset`, of more groups than `rhs` has matrices, if the
        others are elsewhere (expert parallelism). A negative one counts as 0, of which JAX's own makes something else.
      precision: as in `jax.lax.dot`. Products of bfloat16 are exact, and added in float32, whatever it is.
      preferred_element_type: of the result; that of the operands by default.
      group_offset: (1,) or () integer, the group that `rhs[0]` belongs to; rows of groups that have no matrix here are zero.
      out_sharding: goes to JAX, whose own lowering then computes.

    The kernels compute products of bfloat16 whose K and N are multiples of 8. An operand of float32 beside one of bfloat16 is
    taken as two bfloat16 that add up to it within 2^-17, closer than the TF32 of a GPU's own products, or, with a precision
    above "high", as three, exactly: as many products. (XLA may take parts below 2^-126 for zero.) Its derivatives are as close,
    with tangents and cotangents in parts; those by the other operand are bfloat16, of a cotangent that is rounded to it. All
    else goes to JAX, with what its own product lacks (vmap of some operands alone, axes of an explicit mesh). On several devices, a part whose K or N is no multiple of 8
    is the reference's, and so is all of it in a `jax.shard_map` over some axes of the mesh only, and in an export that leaves
    the partitioning to XLA. A warning of the logger "jax_grouped_gemm" says so, once for every reason. Sizes are not checked,
    whatever `JAX_GROUPED_GEMM_DEBUG` is: JAX gives a meaning to any.

    Returns:
      (M, N). Rows past the last group are zero.

    Raises:
      TypeError: shapes or dtypes that JAX refuses.
      ValueError: `group_offset` of another shape, more matrices than groups.
    """
    return ragged_dot_general(
        lhs, rhs, group_sizes, ROW_RAGGED, precision, preferred_element_type, group_offset, out_sharding
    )


def ragged_dot_general(
    lhs,
    rhs,
    group_sizes,
    ragged_dot_dimension_numbers,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    out_sharding=None,
):
    """`jax.lax.ragged_dot_general`: with a ragged dimension of `lhs` that is kept, contracted, or a batch dimension.

    Arguments are those of JAX's, and of `ragged_dot`. A `group_offset` says which groups the matrices belong to: of `rhs`
    where the ragged dimension is kept (there may be fewer than groups); of the result where it is contracted, which has as
    many as there are groups, zeros where there is no group for one. Products with a ragged batch dimension are JAX's: they are plain
    batched products, whatever the sizes; with an offset, batches of the groups before it are zero.
    """
    lhs, rhs, group_sizes = map(jnp.asarray, (lhs, rhs, group_sizes))
    group_sizes = _wide_enough(group_sizes)
    numbers = ragged_dot_dimension_numbers
    precision = canonicalize_precision(precision)
    output = precision, preferred_element_type
    if group_offset is not None:
        group_offset = _wide_enough(contract.check_group_offset(jnp.asarray(group_offset)))
    dtype = _check(lhs, rhs, group_sizes, numbers, output, group_offset is not None, out_sharding)
    if out_sharding is not None:
        plan: Any = "out_sharding is given"
    else:
        plan = reduce(lhs, rhs, group_sizes, numbers, precision, dtype, group_offset is not None)
    if callable(plan):
        return plan(lhs, rhs, group_sizes, group_offset)
    if plan:
        log.once(f"ragged_dot is JAX's own: {plan}")
    return _of_jax(lhs, rhs, group_sizes, numbers, output, group_offset, out_sharding)


def _wide_enough(x):
    """Sums of sizes, and the number of rows, need more bits than some integers have."""
    return x.astype(jnp.int32) if jnp.issubdtype(x.dtype, np.integer) and x.dtype.itemsize < 4 else x


def _check(lhs, rhs, group_sizes, numbers, output, offset, out_sharding):
    """As JAX does, which knows of no groups elsewhere. Returns the result's dtype.

    Of shapes and dtypes alone: JAX infers no sharding on explicit axes, which the kernels do.
    """
    precision, preferred = output
    if offset and len(numbers.rhs_group_dimensions) == 1 and group_sizes.ndim:
        (group_dim,) = numbers.rhs_group_dimensions
        contract.check_local_groups(rhs.shape[group_dim], group_sizes.shape[-1])
        shape = [*rhs.shape]
        shape[group_dim] = group_sizes.shape[-1]
        rhs = jax.ShapeDtypeStruct(shape, rhs.dtype)
    product = functools.partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers, precision=precision)
    product = functools.partial(product, preferred_element_type=preferred, **_sharded(out_sharding))
    if out_sharding is None:
        product = meshes.without(product)
        lhs, rhs, group_sizes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs, group_sizes))
    return jax.eval_shape(product, lhs, rhs, group_sizes).dtype


def _sharded(out_sharding):
    """As an argument of JAX's, which older versions lack."""
    return {} if out_sharding is None else {"out_sharding": out_sharding}


def reduce(lhs, rhs, group_sizes, numbers, precision, output_dtype, offset):
    """A function of (lhs, rhs, group_sizes, group_offset=None) that computes it on the kernels; or why there is none, "" where JAX's
    own is as good.

    lhs, rhs and group_sizes need a shape and a dtype only; of shapes that JAX accepts. offset: there will be a group_offset.
    """
    narrow, wide = (sum(x.dtype == dtype for x in (lhs, rhs)) for dtype in (jnp.bfloat16, jnp.float32))
    if narrow + wide != 2 or not narrow:
        return f"operands are {lhs.dtype} and {rhs.dtype}, the kernels take bfloat16, and float32 beside it"
    if not all(isinstance(size, int) for x in (lhs, rhs, group_sizes) for size in x.shape):
        return "shapes are not static"
    if _mode(numbers) == "batch":
        return ""  # a plain batched product
    dtype = jnp.dtype(output_dtype).name
    parts = _parts(precision) if wide else 1
    if _mode(numbers) == "kept":
        return _kept(_Dims.of(lhs, rhs, numbers), dtype, offset, parts)
    return _contracted(_Dims.of(lhs, rhs, numbers), group_sizes.shape[-1], dtype, offset, parts)


def _parts(precision):
    """Of an operand of float32. precision: as JAX's primitive has it."""
    modest = {None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH}
    return 2 if modest.issuperset(precision if isinstance(precision, tuple) else (precision,)) else 3


def _mode(numbers):
    """What becomes of the ragged dimension: "kept", "contracted" or "batch"."""
    (contract_lhs, _), (batch_lhs, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    return "contracted" if ragged in contract_lhs else "batch" if ragged in batch_lhs else "kept"


@dataclasses.dataclass(frozen=True)
class _Dims:
    """Shapes, and dimension numbers by role. outer, inner: dimensions of lhs of the ragged one's kind, before and after it."""

    lhs: tuple
    rhs: tuple
    batch: tuple  # (of lhs, of rhs), each in the same order
    contracted: tuple
    outer: tuple
    ragged: int
    inner: tuple
    kept_rhs: tuple
    group_rhs: tuple

    @classmethod
    def of(cls, lhs, rhs, numbers):
        contracted, batch = numbers.dot_dimension_numbers
        group = tuple(numbers.rhs_group_dimensions)
        (ragged,) = numbers.lhs_ragged_dimensions
        kept = tuple(d for d in range(lhs.ndim) if d not in (*contracted[0], *batch[0]))
        kind = contracted[0] if ragged in contracted[0] else kept
        at = kind.index(ragged)
        kept_rhs = tuple(d for d in range(rhs.ndim) if d not in (*contracted[1], *batch[1], *group))
        return cls(lhs.shape, rhs.shape, batch, contracted, kind[:at], ragged, kind[at + 1 :], kept_rhs, group)

    def lhs_sizes(self, dims):
        return tuple(self.lhs[d] for d in dims)

    def rhs_sizes(self, dims):
        return tuple(self.rhs[d] for d in dims)

    @property
    def prefixes(self):
        """How many times there are `rows` of the ragged dimension: shape of the sizes but for the groups."""
        return self.lhs_sizes((*self.batch[0], *self.outer))

    @property
    def rows(self):
        return self.lhs[self.ragged]

    @property
    def repeats(self):
        """Rows of the product for each of the ragged dimension."""
        return math.prod(self.lhs_sizes(self.inner))


def _kept(dims, dtype, offset, parts):
    lhs_order = (*dims.batch[0], *dims.outer, dims.ragged, *dims.inner, *dims.contracted[0])
    # Of rhs nothing is moved if its matrices lie whole, whichever of their dimensions is the outer one.
    stacked = tuple(d for d in range(len(dims.rhs)) if d in (*dims.batch[1], *dims.group_rhs))
    k_major = (*stacked, *dims.kept_rhs, *dims.contracted[1])
    n_major = (*stacked, *dims.contracted[1], *dims.kept_rhs)
    b_major, rhs_order = ("k", k_major) if k_major == tuple(range(len(dims.rhs))) else ("n", n_major)
    m = math.prod(dims.prefixes) * dims.rows * dims.repeats
    n, k = math.prod(dims.rhs_sizes(dims.kept_rhs)), math.prod(dims.rhs_sizes(dims.contracted[1]))
    l = math.prod(dims.rhs_sizes(stacked))
    local = dims.rhs[dims.group_rhs[0]]
    if dtype not in config.D_DTYPES:
        return f"the result is {dtype}, the kernels write {', '.join(config.D_DTYPES)}"
    if (why := contract.unfit(M=m, N=n, K=k, L=l)) is not None:
        return why
    # Where among the stacked matrices a group's is, for every prefix.
    at = np.arange(l).reshape(dims.rhs_sizes(stacked))
    at = at.transpose([stacked.index(d) for d in (*dims.batch[1], *dims.group_rhs)])
    batch, outer = math.prod(dims.lhs_sizes(dims.batch[0])), math.prod(dims.lhs_sizes(dims.outer))
    experts = np.broadcast_to(at.reshape(batch, 1, local), (batch, outer, local)).reshape(batch * outer, local)
    shape = (*dims.prefixes, dims.rows, *dims.lhs_sizes(dims.inner), *dims.rhs_sizes(dims.kept_rhs))
    mapped = None if len(experts) == 1 and not offset else len(experts) * (local + (len(experts) > 1) + offset)
    call = calls.Call(
        m, n, k, l, b_major, "dense", dtype, False, False, None, mapped_groups=mapped, distinct_experts=outer == 1,
        parts=parts, drop_in=True, stacks=math.prod(dims.rhs_sizes(stacked[:-1])) if len(stacked) > 1 else None,
    )  # fmt: skip

    def product(lhs, rhs, group_sizes, group_offset=None):
        a = lhs.transpose(lhs_order).reshape(m, k)
        b = rhs.transpose(rhs_order).reshape(*call.matrices, *call.b_shape[1:])
        ends, of_groups = _groups(dims, group_sizes, group_offset, experts)
        operands = calls.Operands(a, ends, of_groups if call.has_experts else None, None, None, None, (b,))
        return ffi_call.grouped_gemm(call, operands)[0].reshape(shape)

    return product


def _contracted(dims, groups, dtype, offset, parts):
    kept_lhs = tuple(d for d in range(len(dims.lhs)) if d not in (*dims.batch[0], *dims.contracted[0]))
    lhs_order = (*dims.batch[0], *dims.contracted[0], *kept_lhs)
    rhs_order = (*dims.batch[1], *dims.contracted[1], *dims.kept_rhs)
    m = math.prod(dims.prefixes) * dims.rows * dims.repeats
    n, k = math.prod(dims.lhs_sizes(kept_lhs)), math.prod(dims.rhs_sizes(dims.kept_rhs))
    batch, outer = math.prod(dims.lhs_sizes(dims.batch[0])), math.prod(dims.lhs_sizes(dims.outer))
    l = outer * groups * batch
    if (why := contract.unfit(M=m, N=n, K=k, L=l)) is not None:
        return why
    if dtype not in ([result for result, _ in config.WGRAD_RESULTS] if parts == 1 else config.D_DTYPES):
        return f"the result is {dtype}, weight gradients are bfloat16 or float32"
    # Results lie (outer, group, batch): the sum over `outer` comes after.
    experts = np.arange(l).reshape(outer, groups, batch).transpose(2, 0, 1).reshape(batch * outer, groups)
    shape = (groups, *dims.lhs_sizes((*dims.batch[0], *kept_lhs)), *dims.rhs_sizes(dims.kept_rhs))
    mapped = None if len(experts) == 1 and not offset else len(experts) * (groups + (len(experts) > 1) + offset)
    d_dtype = dtype if outer == 1 else "float32"
    stacks = outer * groups if batch > 1 else None
    call = calls.WgradCall(
        m, n, k, l, d_dtype, False, None, mapped_groups=mapped, parts=parts, drop_in=True, stacks=stacks
    )

    def product(lhs, rhs, group_sizes, group_offset=None):
        x = lhs.transpose(lhs_order).reshape(m, n)
        y = rhs.transpose(rhs_order).reshape(m, k)
        ends, of_groups = _groups(dims, group_sizes, group_offset, experts)
        operands = calls.WgradOperands(x, y, ends, of_groups if call.has_experts else None, None, None)
        d = wgrad_call.grouped_wgrad(call, operands)
        return d.reshape(outer, *shape).sum(0).astype(dtype) if outer != 1 else d.reshape(shape)

    return product


def _groups(dims, group_sizes, group_offset, experts):
    """(ends, experts) of all groups, one after the other, for experts (prefixes, local groups).

    Each prefix has a group without an expert before its first one if there is an offset, and one behind its last one unless it is the only prefix.
    """
    prefixes, local = experts.shape
    sizes = jnp.clip(_wide_enough(meshes.replicated(group_sizes)), 0, dims.rows).astype(jnp.int32)
    sizes = jnp.broadcast_to(sizes, (*dims.prefixes, group_sizes.shape[-1]))
    sizes = sizes.reshape(prefixes, group_sizes.shape[-1])
    ends = jax.vmap(functools.partial(reference.ends_of, m=dims.rows))(sizes)
    if group_offset is not None:
        # The end before the first local group, and the ends of the local groups; past the last group there are empty ones.
        ends = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends, jnp.repeat(ends[:, -1:], local, 1)], 1)
        first = jnp.clip(group_offset, 0, sizes.shape[1]).astype(jnp.int32)
        ends = jax.lax.dynamic_slice_in_dim(ends, first, local + 1, 1)
        experts = np.insert(experts, 0, -1, axis=1)
    ends = ends * dims.repeats
    if prefixes > 1:
        rows = dims.rows * dims.repeats
        first_rows = jnp.arange(prefixes, dtype=jnp.int32)[:, None] * rows
        ends = jnp.concatenate([ends + first_rows, first_rows + rows], 1)
        experts = np.append(experts, np.full((prefixes, 1), -1), axis=1)
    return ends.reshape(-1), jnp.asarray(experts.reshape(-1), jnp.int32)


def _of_jax(lhs, rhs, group_sizes, numbers, output, group_offset, out_sharding):
    """JAX's own product; what it lacks, the group offset, by masks around it."""
    precision, preferred = output
    sharded = _sharded(out_sharding)

    def product(lhs, rhs):
        if _mode(numbers) == "batch":  # what JAX lowers it to, with derivatives, which it lacks for its own name
            batched = functools.partial(jax.lax.dot_general, dimension_numbers=numbers.dot_dimension_numbers)
            return batched(lhs, rhs, precision=precision, preferred_element_type=preferred, **sharded)
        return jax.lax.ragged_dot_general(
            lhs, rhs, group_sizes, numbers, precision=precision, preferred_element_type=preferred, **sharded
        )

    if group_offset is None:
        return product(lhs, rhs)
    groups = group_sizes.shape[-1]
    first = jnp.clip(group_offset, 0, groups)
    if _mode(numbers) == "contracted":
        full = product(lhs, rhs)
        full = jnp.concatenate([full, jnp.zeros_like(full)])
        return jax.lax.dynamic_slice_in_dim(full, first, groups)
    (group_dim,) = numbers.rhs_group_dimensions or (None,)
    local = groups if group_dim is None else rhs.shape[group_dim]
    # Rows of other groups become zeros, and so do their matrices: NaN times zero would be NaN.
    ends = jnp.cumsum(group_sizes, axis=-1)
    begin = jnp.where(first > 0, jnp.take(ends, jnp.maximum(first - 1, 0), axis=-1), 0)
    end = jnp.where(first + local > 0, jnp.take(ends, jnp.clip(first + local - 1, 0, groups - 1), axis=-1), 0)
    (ragged,) = numbers.lhs_ragged_dimensions
    if _mode(numbers) == "batch":
        prefix = numbers.dot_dimension_numbers[1][0]
        prefix = prefix[: prefix.index(ragged)]
    else:
        dims = _Dims.of(lhs, rhs, numbers)
        prefix = (*dims.batch[0], *dims.outer)
    sizes_shape = [lhs.shape[d] if d in prefix else 1 for d in range(lhs.ndim)] if begin.ndim else [1] * lhs.ndim
    begin, end = (_by_dims(x, prefix, sizes_shape) for x in (begin, end))
    row = jax.lax.broadcasted_iota(ends.dtype, lhs.shape, ragged)
    lhs = jnp.where((row >= begin) & (row < end), lhs, 0)
    if group_dim is not None:
        shape = [*rhs.shape]
        shape[group_dim] = groups + local
        rhs = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, rhs.dtype), rhs, first, group_dim)
        rhs = jax.lax.slice_in_dim(rhs, 0, groups, axis=group_dim)
    return product(lhs, rhs)


def _by_dims(x, prefix, shape):
    """x, one value per index of `prefix` dimensions, beside an array of which these are dimensions."""
    return x.transpose(np.argsort(prefix)).reshape(shape) if x.ndim else x

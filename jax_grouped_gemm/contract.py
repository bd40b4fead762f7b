"""What a legal call is: shapes, dtypes, alignment, and every error text of the package.

`ValueError`: the caller's mistake. `RuntimeError`: this machine or installation cannot. `NotImplementedError`: nobody
can yet. Each names what was found, what was expected and the remedy.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.core import ShardingTypeError

from jax_grouped_gemm import config
from jax_grouped_gemm.calls import Call, WgradCall

ALIGNMENT = 8  # elements: the copy engine reads rows of whole 16-byte units
SIZE_LIMIT = 2**31 - 2**10  # extents are int32 on the device, where a tile may reach past the end; products are 64-bit
IMPLEMENTATIONS = (None, "cutedsl", "reference")


# --- what the caller passed -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of a call that are not arrays, unchecked. groups: which of its two names the groups came by."""

    groups: str
    n: int | None
    b_major: str
    d_dtype: Any
    implementation: str | None
    generate_c: bool = False
    c_dtype: Any = None
    use_dynamic_sched: bool | None = None
    mma_tiler_mn: Any = None
    cluster_shape_mn: Any = None
    overlap_margin: int = 0


@dataclasses.dataclass(frozen=True)
class WgradOptions:
    """The same for `grouped_gemm_wgrad`."""

    groups: str
    d_dtype: Any
    d_major: str
    use_dynamic_sched: bool | None
    mma_tiler_mn: Any
    cluster_shape_mn: Any
    overlap_margin: int
    implementation: str | None


def not_an_array(name, found):
    torch = "; torch tensors go to grouped_gemm_wrapper" if type(found).__module__.startswith("torch") else ""
    return ValueError(f"{name} must be a JAX or NumPy array; got {type(found).__name__}; convert it{torch}")


def exactly_one(**arguments):
    """Of these arguments exactly one must be given."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        names = " and ".join(arguments)
        raise ValueError(
            f"exactly one of {names} must be given; got {' and '.join(given) or 'neither'}; pass one, as a keyword"
        )


def not_tuned(path, why):
    return ValueError(
        f"{path} must be a file that jax_grouped_gemm.tune wrote; found {why}; name another, or delete it and tune again"
    )


def no_tuned_file(variable, path, error):
    return ValueError(
        f"{variable} must name a file that jax_grouped_gemm.tune wrote; found {path!r} ({error}); unset it, or tune"
    )


def nothing_to_tune_on():
    return RuntimeError(
        "tune times the kernels, and needs an NVIDIA GPU of compute capability 9.0, 10.0 or 10.3 that JAX can use; found none; "
        "run it on the machine that the program is for, and bring the file along"
    )


def nothing_to_tune():
    return ValueError(
        "function must call grouped_gemm, or what uses its kernels, on the GPU, for whatever tile the package chooses; "
        "found no such call; pass the function that jax.jit gets, without mma_tiler_mn, cluster_shape_mn and implementation in it"
    )


def bad_load(index, found):
    return ValueError(
        f"loads must be a list of 1-D arrays of relative sizes, finite, none negative and some above 0; got {found!r} at index {index}; "
        "pass the rows of each expert"
    )


def unused_load(size, groups):
    return ValueError(
        f"each of loads must have as many sizes as some call has groups ({', '.join(map(str, groups))}); got one of {size}; "
        "pass one size per expert"
    )


def check_call(options, weights, operands):
    """The `Call` that these operands make, or a ValueError. Sees shapes and dtypes, never values."""
    a, offsets, _, alpha, prob, bias, b = operands
    check_one_of("b_major", options.b_major, config.B_MAJORS)
    check_one_of("implementation", options.implementation, IMPLEMENTATIONS)
    check_rank("a", a, 2, "(M, K)")
    check_dtype("a", a, "bfloat16")
    m, k = a.shape
    d_dtype, c_dtype = _output_dtypes(options, a.dtype)
    l, n = _weights(options, weights, b, k)
    _limits(M=m, N=n, K=k, L=l)
    check_alignment("K", "a.shape[1]", k)
    check_alignment("N", "the output columns", n)
    what = "end" if options.groups == "offsets" else "size"
    check_vector(options.groups, offsets, "int32", l, "L", f"one {what} per expert of the weights")
    if alpha is not None:
        check_vector("alpha", alpha, "float32", l, "L", "one factor per expert of the weights")
    if prob is not None:
        check_vector("prob", prob, "float32", m, "M", "one factor per row of a")
    if bias is not None:
        _bias(bias, l, n)
    return Call(
        m,
        n,
        k,
        l,
        options.b_major,
        weights,
        d_dtype,
        has_alpha=alpha is not None,
        has_prob=prob is not None,
        has_bias=bias is not None,
        c_dtype=c_dtype,
        **_of_kernels(options),
    )


def _of_kernels(options):
    """What only makes a difference to how the kernels run."""
    return {
        "implementation": options.implementation,
        "dynamic": _schedule(options.use_dynamic_sched),
        "mma_tiler_mn": _pair("mma_tiler_mn", options.mma_tiler_mn),
        "cluster_shape_mn": _pair("cluster_shape_mn", options.cluster_shape_mn),
        "overlap_margin": _overlap_margin(options.overlap_margin),
    }


def check_wgrad_call(options, operands):
    """The `WgradCall` that these operands make, those of d_major "n" after x and y were exchanged; or a ValueError."""
    x, y, offsets, _, alpha, total = operands
    check_one_of("d_major", options.d_major, config.B_MAJORS)
    check_one_of("implementation", options.implementation, IMPLEMENTATIONS)
    check_rank("x", x, 2, "(M, N)")
    check_rank("y", y, 2, "(M, K)")
    m, n = x.shape
    if y.shape[0] != m:
        raise ValueError(f"y must be (M, K) with M = x.shape[0] = {m}; got {y.shape}; pass both for the same rows")
    k = y.shape[1]
    for name, operand in (("x", x), ("y", y)):
        check_dtype(name, operand, "bfloat16")
    check_rank(options.groups, offsets, 1, "(L,)")
    check_dtype(options.groups, offsets, "int32")
    (l,) = offsets.shape
    _limits(M=m, N=n, K=k, L=l)
    check_alignment("N", "x.shape[1]", n)
    check_alignment("K", "y.shape[1]", k)
    if alpha is not None:
        check_vector("alpha", alpha, "float32", l, "L", "one factor per group")
    n, k = (n, k) if options.d_major == "k" else (k, n)
    return WgradCall(
        m,
        n,
        k,
        l,
        _wgrad_dtype(options, total, x.dtype, (l, n, k)),
        has_alpha=alpha is not None,
        accumulate=total is not None,
        **_of_kernels(options),
    )


def _wgrad_dtype(options, total, default, shape):
    d_dtype = _output_dtype("d_dtype", options.d_dtype, default if total is None else "float32")
    if total is None:
        check_one_of("d_dtype", d_dtype, list(dict(config.WGRAD_RESULTS)))
        return d_dtype
    if total.shape != shape:
        symbols, other = ("(L, N, K)", "n") if options.d_major == "k" else ("(L, K, N)", "k")
        transposed = total.ndim == 3 and total.shape == (shape[0], shape[2], shape[1])
        remedy = f'pass d_major="{other}" for that' if transposed else "pass what an earlier call returned"
        raise ValueError(f"accumulate_into must be {symbols} = {shape}; got {total.shape}; {remedy}")
    check_dtype("accumulate_into", total, "float32")
    if d_dtype != "float32":
        raise ValueError(
            f"d_dtype must be float32 with accumulate_into, which is added to in place; got {d_dtype}; leave it out"
        )
    return d_dtype


def check_tile(call, architectures):
    """The call's tile is compiled for one of these architectures, those of this process's GPUs; for any if it has none."""
    wish = call.mma_tiler_mn, call.cluster_shape_mn
    found = config.tiles("wgrad" if isinstance(call, WgradCall) else "forward")
    if any(config.wished(found[arch], *wish) for arch in architectures or found):
        return
    compiled = "; ".join(
        f"SM{arch}: " + ", ".join(f"{tile.mma_tiler_mn} with {tile.cluster_shape_mn}" for tile in tiles)
        for arch, tiles in found.items()
    )
    which = (
        f", for this process's GPUs of {' and '.join(f'SM{arch}' for arch in architectures)}" if architectures else ""
    )
    raise ValueError(
        f"mma_tiler_mn and cluster_shape_mn must name a compiled tile{which} ({compiled}); "
        f"got {' with '.join('any' if pair is None else str(pair) for pair in wish)}; "
        "leave both out to have one chosen"
    )


def _weights(options, weights, b, k):
    check = {"dense": _dense_weights, "tuple": _tuple_weights, "pointers": _pointer_weights}[weights]
    l, n = check(options, b, k)
    if options.n is not None and options.n != n:
        raise ValueError(f"n must be the output columns of b = {n}; got {options.n}; n is only needed with b_ptrs")
    return l, n


def _dense_weights(options, b, k):
    (b,) = b
    _weight_shape("b", b, ("L",), options.b_major, k)
    check_dtype("b", b, "bfloat16")
    return b.shape[0], b.shape[1 if options.b_major == "k" else 2]


def _weight_shape(name, b, leading, b_major, k):
    dims = (*leading, *("NK" if b_major == "k" else "KN"))
    if b.ndim == len(dims) and b.shape[dims.index("K")] == k:
        return
    remedy = "pass weights for the K of a"
    if b.ndim != len(dims):
        remedy = f"reshape it to {len(dims)} dimensions"
    if b.ndim == len(dims) and b.shape[dims.index("N")] == k:
        remedy = f'pass b_major="{"n" if b_major == "k" else "k"}" if b is stored so'
    raise ValueError(f"{name} must be ({', '.join(dims)}) with K = a.shape[1] = {k}; got {b.shape}; {remedy}")


def _tuple_weights(options, b, k):
    if not b:
        return 0, _given_n(options, "an empty tuple of weights")
    for i, w in enumerate(b):
        _weight_shape(f"b[{i}]", w, (), options.b_major, k)
        if w.shape != b[0].shape:
            raise ValueError(f"b[{i}] must have the shape of b[0], {b[0].shape}; got {w.shape}; pad the weights")
        check_dtype(f"b[{i}]", w, "bfloat16")
    return len(b), b[0].shape[0 if options.b_major == "k" else 1]


def _pointer_weights(options, b, k):
    (pointers,) = b
    packed = pointers.dtype == np.uint8
    if pointers.dtype not in (np.int64, np.uint8) or pointers.ndim != 1 or (packed and pointers.size % 8):
        raise wrong_pointers(pointers)
    return pointers.size // 8 if packed else pointers.size, _given_n(options, "b_ptrs")


def wrong_pointers(found):
    return ValueError(
        "b_ptrs must be (L,) int64 or, without jax_enable_x64, (8 L,) uint8 (the same bytes, little-endian); "
        f"got {found.shape} {found.dtype}; pass jnp.asarray(np.asarray(addresses, np.int64).view(np.uint8))"
    )


def _given_n(options, reason):
    if options.n is None:
        raise ValueError(f"n, the output columns, must be given with {reason}; got None; pass n=")
    if not _is_integer(options.n) or options.n < 0:
        raise ValueError(f"n must be a non-negative integer; got {options.n!r}; pass the output columns")
    return int(options.n)


def _output_dtypes(options, default):
    """Of D, and of C or None."""
    d_dtype = _output_dtype("d_dtype", options.d_dtype, default)
    if check_flag("generate_c", options.generate_c):
        return d_dtype, _output_dtype("c_dtype", options.c_dtype, default)
    if options.c_dtype is not None:
        raise ValueError(
            f"c_dtype must be None where C is no output; got {options.c_dtype!r}; pass generate_c=True for C"
        )
    return d_dtype, None


def _output_dtype(name, dtype, default):
    try:
        found = jnp.dtype(default if dtype is None else dtype).name
    except TypeError:
        found = dtype
    check_one_of(name, found, config.D_DTYPES)
    return found


def check_flag(name, value):
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False; got {value!r}; it is static")
    return bool(value)


def _schedule(value):
    if value is None:
        return None
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"use_dynamic_sched must be True, False or None; got {value!r}; it is static")
    return bool(value)


def switched_on(text):
    """By an environment variable, None where there is none."""
    return (text or "").lower() not in ("", "0", "false", "off", "no")


def _pair(name, value):
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(map(_is_integer, value)):
        raise ValueError(
            f"{name} must be two integers, for rows and columns; got {value!r}; pass a tuple, or None to have it chosen"
        )
    return int(value[0]), int(value[1])


def _overlap_margin(value):
    if not _is_integer(value) or not 0 <= value < 2**31:
        raise ValueError(
            f"overlap_margin must be an integer within [0, 2^31); got {value!r}; pass how many SMs to leave free"
        )
    return int(value)


def _is_integer(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_positive(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0


def check_one_of(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_rank(name, array, rank, shape):
    if array.ndim != rank:
        raise ValueError(f"{name} must be {shape}; got {array.shape}; reshape it to {rank} dimensions")


def check_dtype(name, array, expected):
    if array.dtype != expected:
        raise ValueError(f"{name} must be {expected}; got {array.dtype}; cast it, e.g. {name}.astype(jnp.{expected})")


def check_vector(name, array, dtype, size, symbol, meaning):
    if array.shape != (size,):
        raise ValueError(f"{name} must be ({symbol},) = ({size},); got {array.shape}; pass {meaning}")
    check_dtype(name, array, dtype)


def _bias(bias, l, n):
    if bias.shape != (l, n):
        raise ValueError(f"bias must be (L, N) = ({l}, {n}); got {bias.shape}; pass one row of N per expert")
    if bias.dtype.name not in config.D_DTYPES:
        raise ValueError(
            f"bias must be bfloat16, float16 or float32; got {bias.dtype}; cast it, e.g. bias.astype(jnp.float32)"
        )


def _limits(**extents):
    for name, size in extents.items():
        if not isinstance(size, int):
            raise ValueError(f"{name} must be static; got {size}; export one program per shape")
        if size >= SIZE_LIMIT:
            raise ValueError(f"{name} must be less than 2^31 - 2^10; got {size}; split the call")


def check_alignment(name, what, size):
    if size % ALIGNMENT:
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        raise ValueError(
            f"{name} ({what}) must be a multiple of {ALIGNMENT}; got {size}; pad it with zeros to {padded}"
        )


def check_group_offset(offset):
    """As a scalar."""
    if offset.shape not in ((), (1,)) or not jnp.issubdtype(offset.dtype, np.integer):
        raise ValueError(
            f"group_offset must be (1,) or () of integers; got {offset.shape} {offset.dtype}; "
            "pass the index of the group that rhs[0] belongs to, e.g. jnp.array([8])"
        )
    return offset.reshape(())


def check_local_groups(local, groups):
    if local > groups:
        raise ValueError(
            f"rhs must have at most as many matrices as there are groups, group_sizes.shape[-1] = {groups}; got {local}; "
            "pass the sizes of all groups, those elsewhere too"
        )


# --- values, where they can be seen -----------------------------------------------------------------------------------


def check_offsets(offsets, m, operand="a"):
    """Concrete ends of the groups of the operand's rows: non-decreasing, within [0, M]."""
    for g, end, previous in bad_ends(offsets, m):
        raise ValueError(
            f"offsets must be non-decreasing ends of groups within [0, M = {operand}.shape[0] = {m}]; "
            f"got offsets[{g}] = {end} after {previous}; if these are sizes, pass group_sizes="
        )


def bad_ends(offsets, m, multiple=1):
    """(index, end, the end before it) of each that is out of order, out of [0, M], or no multiple."""
    previous = 0
    for g, end in enumerate(map(int, offsets)):
        if not previous <= end <= m or end % multiple:
            yield g, end, previous
        previous = end


def check_group_sizes(group_sizes, m, operand="a"):
    """Concrete sizes of the groups: non-negative, at most M rows in all."""
    total = 0
    for g, size in enumerate(map(int, group_sizes)):
        total += size
        if size < 0 or total > m:
            raise ValueError(
                f"group_sizes must be non-negative with a sum of at most M = {operand}.shape[0] = {m}; "
                f"got group_sizes[{g}] = {size}, a sum of {total} so far; if these are ends, pass offsets="
            )


# --- what the machine cannot ------------------------------------------------------------------------------------------


def capabilities_text():
    names = {90: "Hopper", 100: "Blackwell"}
    return ", ".join(f"{' and '.join(found)} ({names[arch]})" for arch, found in config.CAPABILITIES.items())


def unsupported_capability(capabilities):
    return f"kernels exist for compute capability {capabilities_text()}; found {', '.join(capabilities)}"


def no_kernels(why):
    return RuntimeError(
        f'implementation="cutedsl" cannot run here: {why}; '
        'pass implementation="reference", or None to choose by platform'
    )


def kernels_unavailable(why):
    return RuntimeError(
        f'the GPU kernels cannot be used: {why}; pass implementation="reference" to grouped_gemm for plain JAX (slow on a '
        "GPU), or leave jax.lax.ragged_dot to JAX with accelerate(False)"
    )


def not_built(path):
    return f"{path.name} is not in {path.parent}: build it with `make build`, or install the wheel"


def build_id_mismatch(library, manifest):
    return (
        f"the library was built as {library} but manifest.json describes {manifest}: they come from different builds; "
        "run `make build` again or reinstall the package"
    )


def runtime_too_old(runtime, library):
    return (
        f"the installed jaxlib has XLA FFI API {runtime[0]}.{runtime[1]} but the library was built against "
        f"{library[0]}.{library[1]}: upgrade jax and jaxlib, or build the library with this jaxlib (`make build`)"
    )


def load_failed(path, error):
    return f"{path.name} could not be loaded: {error}; run `make build` again or reinstall the package"


def registration_failed(error):
    return f"XLA refused the library's handlers: {error}; install the jaxlib that the library was built for"


def pointers_unreadable(platform):
    return RuntimeError(
        f"b_ptrs on {platform} cannot be read by the reference implementation: addresses are opaque to XLA; "
        "pass the weights as one array or a tuple of arrays"
    )


def pointers_need_library(why):
    return RuntimeError(f"b_ptrs on cpu need the package's library: {why}; or pass the weights as a tuple of arrays")


def no_library(why):
    return RuntimeError(f"the GPU kernels cannot be used: {why}")


def driver_failed(function, code):
    return RuntimeError(f"the CUDA driver refused {function} with code {code}; see CUresult in the driver's manual")


# --- several devices --------------------------------------------------------------------------------------------------

# On explicit axes errors are of the type that JAX raises for jax.lax.dot_general there.
_IN_SHARD_MAP = "or call it on each device's part inside jax.shard_map"


def _named(axes):
    return ", ".join(map(repr, axes))


def different_meshes(one, other):
    return ShardingTypeError(
        f"operands must be on one mesh; got {one} and {other}; move them to one, e.g. with jax.device_put"
    )


def needs_a_sum(what, axes):
    return ShardingTypeError(
        f"{what} must not be sharded over explicit axes: the result would be a sum over devices, and nothing says how it "
        f"is to be sharded; got {_named(axes)}; reshard the operand with jax.sharding.reshard, say it with "
        f"jax.sharding.auto_axes(..., out_sharding=), {_IN_SHARD_MAP} with jax.lax.psum"
    )


def shardings_unlike(what, found):
    return ShardingTypeError(
        f"{what} must be sharded alike in all operands that have it; got {' and '.join(map(_named, found))}; "
        f"reshard one with jax.sharding.reshard, {_IN_SHARD_MAP}"
    )


def axis_twice(axis, dimensions):
    return ShardingTypeError(
        f"an axis of the mesh can shard one dimension of the result; got {axis!r} for {' and '.join(dimensions)}; "
        f"reshard an operand with jax.sharding.reshard, {_IN_SHARD_MAP}"
    )


def unfit(**extents):
    """Why the kernels do not take these, or None: for products that something else can make."""
    for name, size in extents.items():
        if size >= SIZE_LIMIT:
            return f"{name} is {size}, the limit is 2^31 - 2^10"
        if name in ("N", "K") and size % ALIGNMENT:
            return f"{name} is {size}, no multiple of {ALIGNMENT}"
    return None


def uneven(name, size, axes, devices, unit):
    multiple = f"{unit * devices}, {unit} for each of the {devices} devices" if unit > 1 else f"{devices}, the devices"
    return ValueError(
        f"{name} must be a multiple of {multiple} that {_named(axes)} shards it over; got {size}; "
        f"pad it, shard it over fewer devices, {_IN_SHARD_MAP}"
    )


def weights_unlike(name, found):
    return ValueError(
        f"{name} must be sharded alike in all weights, each over axes of its own; got {' and '.join(map(_named, found))}; "
        "move some with jax.device_put or jax.lax.with_sharding_constraint"
    )


def pointers_sharded(name, axes):
    return ValueError(
        f"{name} must not be sharded with b_ptrs, addresses that every device reads whole weights by; "
        f"got {_named(axes)}; shard rows only, {_IN_SHARD_MAP}, with addresses of its own"
    )


def no_mesh(found):
    return ValueError(
        f"operands must have a jax.sharding.NamedSharding where XLA partitions the program; got {found}; "
        f"move them with jax.device_put, {_IN_SHARD_MAP}"
    )


def cannot_partition(why):
    return NotImplementedError(f"grouped_gemm cannot be in this program: {why}")


def partly_manual(axes):
    return (
        f"a jax.shard_map must make all axes of the mesh manual, as XLA could only gather what others shard; "
        f"got {_named(axes)} left out; leave axis_names out, or name them too"
    )


NO_PARTITIONING_IN_EXPORT = (
    "an export for several devices must not leave the partitioning to XLA, as the rule for it is Python, which stays in this "
    "process; call it on each device's part inside jax.shard_map, or export the program for one device"
)


def debugged_on_one():
    return NotImplementedError(
        "JAX_GROUPED_GEMM_DEBUG=1 cannot check a program that XLA partitions over several devices: where one fails, the others "
        "wait for it; unset it, or call grouped_gemm on each device's part inside jax.shard_map"
    )

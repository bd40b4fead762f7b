"""What a legal call is: shapes, dtypes, alignment, and every error text of the package.

`ValueError`: the caller's mistake. `RuntimeError`: this machine or installation cannot. `NotImplementedError`: nobody
can yet. Each names what was found, what was expected and the remedy.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax._src.core import ShardingTypeError

from jax_grouped_gemm import config

ALIGNMENT = 8  # elements: the copy engine reads rows of whole 16-byte units
SIZE_LIMIT = 2**31 - 2**10  # extents are int32 on the device, where a tile may reach past the end; products are 64-bit
SCRATCH_UNIT = 128  # bytes: a tensor map; the counter has as much to itself
IMPLEMENTATIONS = (None, "cutedsl", "reference")


class Operands(NamedTuple):
    """A call's arrays by name; experts, alpha, prob and bias are None where absent, b is the tuple of weight operands."""

    a: Any
    offsets: Any
    experts: Any
    alpha: Any
    prob: Any
    bias: Any
    b: tuple


@dataclasses.dataclass(frozen=True)
class Call:
    """The static facts of one grouped GEMM: (M, K) rows, L experts, N output columns.

    weights: "dense" (one stacked array), "pointers" (L device addresses) or "tuple" (L arrays).
    c_dtype: None where C is not an output.
    dynamic: tiles are handed out by a counter. overlap_margin: SMs left free.
    mma_tiler_mn, cluster_shape_mn: pairs, or None where the package chooses.
    mapped_groups: None where group g is expert g's. Else the number of groups, whose experts are an operand: (groups,)
      int32, and the rows of a group with an index outside [0, L) are zero. alpha is (groups,) then, bias (groups, N).
    distinct_experts: with mapped_groups, each expert has one group, neither none nor several.
    """

    m: int
    n: int
    k: int
    l: int
    b_major: str
    weights: str
    d_dtype: str
    has_alpha: bool
    has_prob: bool
    implementation: str | None
    has_bias: bool = False
    c_dtype: str | None = None
    dynamic: bool = False
    mma_tiler_mn: tuple[int, int] | None = None
    cluster_shape_mn: tuple[int, int] | None = None
    overlap_margin: int = 0
    mapped_groups: int | None = None
    distinct_experts: bool = False

    @property
    def has_experts(self):
        return self.mapped_groups is not None

    @property
    def groups(self):
        return self.mapped_groups if self.has_experts else self.l

    @property
    def empty(self):
        """The outputs have no elements, or each is zero: no row has an expert, or it is an empty sum without a bias."""
        return 0 in (self.m, self.n, self.l, self.groups) or (self.k == 0 and not self.has_bias)

    @property
    def output_dtypes(self):
        """Of the outputs (M, N): D, and C if asked for."""
        return (self.d_dtype,) if self.c_dtype is None else (self.d_dtype, self.c_dtype)

    @property
    def scratch_bytes(self):
        """What a launch of the kernels needs: a tensor map per expert whose weights lie alone, then the tile counter."""
        return SCRATCH_UNIT * ((0 if self.weights == "dense" else self.l) + self.dynamic)

    @property
    def b_shape(self):
        """Shape of the weights as one stacked array."""
        return _stacked(self.l, self.n, self.k, self.b_major)

    def split(self, operands):
        """Names the flat operands of the primitive: a, offsets, experts, alpha, prob and bias if present, then the weights."""
        a, offsets, *rest = operands
        experts = rest.pop(0) if self.has_experts else None
        alpha = rest.pop(0) if self.has_alpha else None
        prob = rest.pop(0) if self.has_prob else None
        bias = rest.pop(0) if self.has_bias else None
        return Operands(a, offsets, experts, alpha, prob, bias, tuple(rest))

    @staticmethod
    def flat(operands):
        """The operands that are present, in that order."""
        return [x for x in operands[:-1] if x is not None] + list(operands.b)


@dataclasses.dataclass(frozen=True)
class WgradCall:
    """The static facts of D[g] (N, K) = alpha[g] * x[rows of g].T @ y[rows of g], x (M, N), y (M, K), D (L, N, K).

    accumulate: D is an operand too, float32, and is added to.
    mapped_groups: None where group g makes D[g]. Else the number of groups, whose results' indices are an operand:
      (groups,) int32, none twice; a group with an index outside [0, L) makes none. Each D[i] must have a group. alpha is
      (groups,).
    The rest as in `Call`.
    """

    m: int
    n: int
    k: int
    l: int
    d_dtype: str
    has_alpha: bool
    implementation: str | None
    accumulate: bool = False
    dynamic: bool = False
    mma_tiler_mn: tuple[int, int] | None = None
    cluster_shape_mn: tuple[int, int] | None = None
    overlap_margin: int = 0
    mapped_groups: int | None = None

    @property
    def has_experts(self):
        return self.mapped_groups is not None

    @property
    def groups(self):
        return self.mapped_groups if self.has_experts else self.l

    @property
    def empty(self):
        """The result has no elements, or nothing is added up."""
        return 0 in (self.m, self.n, self.k, self.l)

    @property
    def scratch_bytes(self):
        return SCRATCH_UNIT * self.dynamic

    def split(self, operands):
        """Names the flat operands of the primitive: x, y, offsets, then experts, alpha and the sum so far if present."""
        x, y, offsets, *rest = operands
        experts = rest.pop(0) if self.has_experts else None
        alpha = rest.pop(0) if self.has_alpha else None
        total = rest.pop(0) if self.accumulate else None
        return WgradOperands(x, y, offsets, experts, alpha, total)

    @staticmethod
    def flat(operands):
        """The operands that are present, in that order."""
        return [x for x in operands if x is not None]


class WgradOperands(NamedTuple):
    """By name; experts, alpha and total, the sum so far, are None where absent."""

    x: Any
    y: Any
    offsets: Any
    experts: Any
    alpha: Any
    total: Any


def _stacked(l, n, k, b_major):
    return (l, n, k) if b_major == "k" else (l, k, n)


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
    use_dynamic_sched: bool = False
    mma_tiler_mn: Any = None
    cluster_shape_mn: Any = None
    overlap_margin: int = 0


@dataclasses.dataclass(frozen=True)
class WgradOptions:
    """The same for `grouped_gemm_wgrad`."""

    groups: str
    d_dtype: Any
    d_major: str
    use_dynamic_sched: bool
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


def check_call(options, weights, operands):
    """The `Call` that these operands make, or a ValueError. Sees shapes and dtypes, never values."""
    a, offsets, _, alpha, prob, bias, b = operands
    _one_of("b_major", options.b_major, config.B_MAJORS)
    _one_of("implementation", options.implementation, IMPLEMENTATIONS)
    _rank("a", a, 2, "(M, K)")
    _dtype("a", a, "bfloat16")
    m, k = a.shape
    d_dtype, c_dtype = _output_dtypes(options, a.dtype)
    l, n = _weights(options, weights, b, k)
    _limits(M=m, N=n, K=k, L=l)
    _alignment("K", "a.shape[1]", k)
    _alignment("N", "the output columns", n)
    what = "end" if options.groups == "offsets" else "size"
    _vector(options.groups, offsets, "int32", l, "L", f"one {what} per expert of the weights")
    if alpha is not None:
        _vector("alpha", alpha, "float32", l, "L", "one factor per expert of the weights")
    if prob is not None:
        _vector("prob", prob, "float32", m, "M", "one factor per row of a")
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
        "dynamic": _flag("use_dynamic_sched", options.use_dynamic_sched),
        "mma_tiler_mn": _pair("mma_tiler_mn", options.mma_tiler_mn),
        "cluster_shape_mn": _pair("cluster_shape_mn", options.cluster_shape_mn),
        "overlap_margin": _overlap_margin(options.overlap_margin),
    }


def check_wgrad_call(options, operands):
    """The `WgradCall` that these operands make, those of d_major "n" after x and y were exchanged; or a ValueError."""
    x, y, offsets, _, alpha, total = operands
    _one_of("d_major", options.d_major, config.B_MAJORS)
    _one_of("implementation", options.implementation, IMPLEMENTATIONS)
    _rank("x", x, 2, "(M, N)")
    _rank("y", y, 2, "(M, K)")
    m, n = x.shape
    if y.shape[0] != m:
        raise ValueError(f"y must be (M, K) with M = x.shape[0] = {m}; got {y.shape}; pass both for the same rows")
    k = y.shape[1]
    for name, operand in (("x", x), ("y", y)):
        _dtype(name, operand, "bfloat16")
    _rank(options.groups, offsets, 1, "(L,)")
    _dtype(options.groups, offsets, "int32")
    (l,) = offsets.shape
    _limits(M=m, N=n, K=k, L=l)
    _alignment("N", "x.shape[1]", n)
    _alignment("K", "y.shape[1]", k)
    if alpha is not None:
        _vector("alpha", alpha, "float32", l, "L", "one factor per group")
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
        _one_of("d_dtype", d_dtype, list(dict(config.WGRAD_RESULTS)))
        return d_dtype
    if total.shape != shape:
        symbols = "(L, N, K)" if options.d_major == "k" else "(L, K, N)"
        raise ValueError(
            f"accumulate_into must be {symbols} = {shape}; got {total.shape}; pass what an earlier call returned"
        )
    _dtype("accumulate_into", total, "float32")
    if d_dtype != "float32":
        raise ValueError(
            f"d_dtype must be float32 with accumulate_into, which is added to in place; got {d_dtype}; leave it out"
        )
    return d_dtype


def check_tile(call, architectures):
    """The call's tile is compiled for one of these architectures, those of this process's GPUs; for any if it has none."""
    wish = call.mma_tiler_mn, call.cluster_shape_mn
    if any(config.tiles(arch, *wish) for arch in architectures or config.TILES):
        return
    compiled = "; ".join(
        f"SM{arch}: " + ", ".join(f"{tile.mma_tiler_mn} with {tile.cluster_shape_mn}" for tile in tiles)
        for arch, tiles in config.TILES.items()
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
    _dtype("b", b, "bfloat16")
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
        _dtype(f"b[{i}]", w, "bfloat16")
    return len(b), b[0].shape[0 if options.b_major == "k" else 1]


def _pointer_weights(options, b, k):
    (pointers,) = b
    packed = pointers.dtype == np.uint8
    if pointers.dtype not in (np.int64, np.uint8) or pointers.ndim != 1 or (packed and pointers.size % 8):
        raise _wrong_pointers(pointers)
    return pointers.size // 8 if packed else pointers.size, _given_n(options, "b_ptrs")


def _wrong_pointers(found):
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
    if _flag("generate_c", options.generate_c):
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
    _one_of(name, found, config.D_DTYPES)
    return found


def _flag(name, value):
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False; got {value!r}; it is static, a choice of the kernel")
    return bool(value)


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


def _one_of(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def _rank(name, array, rank, shape):
    if array.ndim != rank:
        raise ValueError(f"{name} must be {shape}; got {array.shape}; reshape it to {rank} dimensions")


def _dtype(name, array, expected):
    if array.dtype != expected:
        raise ValueError(f"{name} must be {expected}; got {array.dtype}; cast it, e.g. {name}.astype(jnp.{expected})")


def _vector(name, array, dtype, size, symbol, meaning):
    if array.shape != (size,):
        raise ValueError(f"{name} must be ({symbol},) = ({size},); got {array.shape}; pass {meaning}")
    _dtype(name, array, dtype)


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


def _alignment(name, what, size):
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
    for g, end, previous in _bad_ends(offsets, m):
        raise ValueError(
            f"offsets must be non-decreasing ends of groups within [0, M = {operand}.shape[0] = {m}]; "
            f"got offsets[{g}] = {end} after {previous}; if these are sizes, pass group_sizes="
        )


def _bad_ends(offsets, m, multiple=1):
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
        f'the GPU kernels cannot be used: {why}; pass implementation="reference" for plain JAX (slow on a GPU)'
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


def partly_manual(axes):
    return NotImplementedError(
        f"grouped_gemm in a jax.shard_map must have all axes of the mesh manual: XLA could only gather what others shard; "
        f"got {_named(axes)} left automatic; leave axis_names out, or name them too"
    )


def no_partitioning_in_export():
    return NotImplementedError(
        "grouped_gemm on several devices cannot be exported where XLA is to partition it: its rule is Python, which stays in "
        "this process; call it on each device's part inside jax.shard_map, or export the program for one device"
    )


# --- layers -----------------------------------------------------------------------------------------------------------


def check_logits(logits, mask):
    _rank("logits", logits, 2, "(T, E)")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floating; got {logits.dtype}; cast it, e.g. logits.astype(jnp.float32)")
    if mask is not None:
        _vector("mask", mask, "bool", logits.shape[0], "T", "one bool per token, False for padding")


def check_top_k(k, num_experts):
    if not _positive(k) or k > num_experts:
        raise ValueError(f"k must be an integer from 1 to E = {num_experts}; got {k!r}; pass the experts per token")


def check_rows(name, array, rows, symbol, meaning):
    if array.ndim != 2 or array.shape[0] != rows:
        raise ValueError(f"{name} must be ({symbol}, D) with {symbol} = {rows}; got {array.shape}; pass {meaning}")


def check_grouped_dense(rows, kernel, bias, group_sizes, prob):
    _rank("rows", rows, 2, "(M, in)")
    if kernel.ndim != 3 or kernel.shape[1] != rows.shape[1]:
        raise ValueError(
            f"kernel must be (E, in, features) with in = rows.shape[1] = {rows.shape[1]}; got {kernel.shape}; "
            "pass rows of the width that it was made for"
        )
    if bias is not None and bias.shape != kernel.shape[::2]:
        raise ValueError(
            f"bias must be (E, features) = {kernel.shape[::2]}; got {bias.shape}; pass one row of features per expert"
        )
    if np.shape(group_sizes) != kernel.shape[:1]:
        raise ValueError(
            f"group_sizes must be (E,) = {kernel.shape[:1]}; got {np.shape(group_sizes)}; pass the rows of each expert"
        )
    if prob is not None:
        _vector("prob", prob, "float32", rows.shape[0], "M", "one factor per row")


def check_tokens(inputs, mask):
    if inputs.ndim < 1:
        raise ValueError("inputs must be (..., D); got (); pass a vector for each token")
    if mask is not None and (mask.shape != inputs.shape[:-1] or mask.dtype != bool):
        raise ValueError(
            f"mask must be bool {inputs.shape[:-1]}, inputs.shape without D; got {mask.dtype} {mask.shape}; "
            "pass one bool per token, False for padding"
        )


def no_flax(module):
    return ImportError(f"{module} needs flax; got none; install it, e.g. pip install 'jax-grouped-gemm[flax]'")


def no_explicit_rows():
    return NotImplementedError(
        "dispatch and combine have no rule for operands on a mesh with explicit axes; call them on each device's part "
        "inside jax.shard_map, or make the mesh with axis_types=(jax.sharding.AxisType.Auto,)"
    )


# --- the document's names: tensors with strides -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """A name of the document, or its neutral twin. instead: the call for GPUs that this one refuses."""

    name: str
    sm100: bool
    instead: str


class Layout(NamedTuple):
    """How a tensor lies. strides in elements, None for a JAX array (row-major); dtype by name; device None if traced."""

    shape: tuple
    strides: tuple | None
    dtype: str
    device: Any


class Strided(NamedTuple):
    """What the document wants of a tensor, in symbols, and how to get one that lies so."""

    shape: tuple
    strides: tuple
    dtypes: tuple
    remedy: str


class StridedOperands(NamedTuple):
    """The tensors of a call by the document's names, or their layouts; None where absent."""

    a_tensor: Any
    padded_offsets: Any
    alpha_tensor: Any
    b_tensor: Any = None
    b_ptrs: Any = None
    bias_tensor: Any = None
    prob_tensor: Any = None
    c_tensor: Any = None
    d_tensor: Any = None


class StridedOptions(NamedTuple):
    """The arguments that are not tensors, dtypes by name, otherwise unchecked. overlap_margin counts SMs."""

    n: Any
    b_dtype: Any
    b_major: Any
    acc_dtype: Any
    c_dtype: Any
    d_dtype: Any
    cd_major: Any
    mma_tiler_mn: Any
    cluster_shape_mn: Any
    m_aligned: Any
    generate_c: Any
    use_dynamic_sched: Any
    overlap_margin: Any


SM100_M_ALIGNED = 256
ROW_ALIGNMENT = 16  # bytes, of what the copy engine moves
ADDRESS_ALIGNMENT = StridedOperands(
    a_tensor=ROW_ALIGNMENT,
    padded_offsets=4,
    alpha_tensor=4,
    b_tensor=ROW_ALIGNMENT,
    b_ptrs=8,
    bias_tensor=2,
    prob_tensor=4,
    c_tensor=ROW_ALIGNMENT,
    d_tensor=ROW_ALIGNMENT,
)

_OUTPUT = Strided(
    ("M", "N", "1"), ("N", "1", "M*N"), config.D_DTYPES, "leave it out, or pass a contiguous tensor of 3 dimensions"
)
STRIDED = {
    "a_tensor": Strided(("M", "K", "1"), ("K", "1", "M*K"), ("bfloat16",), "pass a contiguous tensor of 3 dimensions"),
    "padded_offsets": Strided(("L",), ("1",), ("int32",), "pass one end per expert, contiguous"),
    "alpha_tensor": Strided(("L",), ("1",), ("float32",), "pass one factor per expert, contiguous"),
    "b_ptrs": Strided(("L",), ("1",), ("int64",), "pass one address per expert, contiguous"),
    "bias_tensor": Strided(("N", "L"), ("1", "N"), config.D_DTYPES, "transpose a contiguous (L, N)"),
    "prob_tensor": Strided(("M", "1", "1"), ("1", "1", "1"), ("float32",), "pass one factor per row, contiguous"),
    "c_tensor": _OUTPUT,
    "d_tensor": _OUTPUT,
}
STRIDED_B = {
    "k": Strided(("N", "K", "L"), ("K", "1", "N*K"), ("bfloat16",), "permute(1, 2, 0) a contiguous (L, N, K)"),
    "n": Strided(("N", "K", "L"), ("1", "N", "N*K"), ("bfloat16",), "permute(2, 1, 0) a contiguous (L, K, N)"),
}


def check_arguments(entry, options, operands):
    """Which arguments are there, and the values of those that are not tensors, as far as no size matters."""
    for name in ("a_tensor", "padded_offsets", "alpha_tensor", "prob_tensor"):
        if getattr(operands, name) is None:
            raise ValueError(f"{name} must be given; got None; pass {STRIDED[name].remedy.removeprefix('pass ')}")
    exactly_one(b_tensor=operands.b_tensor, b_ptrs=operands.b_ptrs)
    _only("acc_dtype", options.acc_dtype, "float32")
    _only("cd_major", options.cd_major, "n")
    _one_of("b_major", options.b_major, config.B_MAJORS)
    if entry.sm100 and options.b_major != "k":
        raise ValueError(f"b_major must be 'k'; got {options.b_major!r}; {entry.instead} takes 'n' too")
    if entry.sm100 and options.m_aligned != SM100_M_ALIGNED:
        raise ValueError(
            f"m_aligned must be {SM100_M_ALIGNED}; got {options.m_aligned!r}; {entry.instead} takes any offsets"
        )
    if not _positive(options.m_aligned):
        raise ValueError(f"m_aligned must be a positive integer; got {options.m_aligned!r}; 1 allows any offsets")
    _weight_arguments(options, operands.b_ptrs is not None)


def _weight_arguments(options, discrete):
    given = {"n": options.n, "b_dtype": options.b_dtype}
    for name, value in given.items():
        if discrete and value is None:
            raise ValueError(f"{name} must be given with b_ptrs; got None; an address tells nothing of the weights")
        if not discrete and value is not None:
            raise ValueError(f"{name} must be None with b_tensor, which tells it; got {value!r}; leave it out")
    if discrete:
        _only("b_dtype", options.b_dtype, "bfloat16")
        if not _positive(options.n):
            raise ValueError(f"n must be a positive integer; got {options.n!r}; pass the output columns")


def _only(name, value, allowed):
    if value != allowed:
        raise ValueError(f"{name} must be {allowed!r}; got {value!r}; nothing else is computed")


def _positive(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0


def check_no_jax_strides(operands):
    """What a JAX array cannot be, though the same bytes are a legal operand of the native call."""
    native = {
        "b_tensor": "grouped_gemm(a, b, offsets=...) with a (M, K) and b (L, N, K)",
        "bias_tensor": "grouped_gemm(..., bias=bias) with bias (L, N)",
    }
    for name, call in native.items():
        if getattr(operands, name) is not None:
            expected = STRIDED_B["k"] if name == "b_tensor" else STRIDED[name]
            raise ValueError(
                f"{name} must be a torch tensor: its strides have to be ({', '.join(expected.strides)}), "
                f"which no JAX array has; got a JAX array; call jax_grouped_gemm.{call}"
            )


def check_target(entry, device, capability, kernels_only):
    """The device of a_tensor can run this name. capability: None where it is no GPU."""
    if entry.sm100 and not _at_least_10(capability):
        found = str(device) if capability is None else f"compute capability {capability}"
        raise sm100_needed(entry, found)
    known = any(capability in found for found in config.CAPABILITIES.values())
    if kernels_only and capability is not None and not known:
        raise RuntimeError(f"{unsupported_capability((capability,))}; use jax_grouped_gemm.grouped_gemm on JAX arrays")


def _at_least_10(capability):
    """Of NVIDIA's: other GPUs, and what is no GPU, have no such number."""
    major = str(capability).partition(".")[0]
    return major.isdecimal() and int(major) >= 10


def sm100_needed(entry, found):
    return RuntimeError(
        f"{entry.name} needs a GPU of compute capability 10.0 or newer; found {found}; use {entry.instead}, "
        "which runs there"
    )


def check_layouts(options, operands):
    """Every tensor's device, shape, dtype and strides; returns the sizes by symbol."""
    a = operands.a_tensor
    for name, layout in operands._asdict().items():
        if layout is not None and None not in (layout.device, a.device) and layout.device != a.device:
            raise ValueError(
                f"{name} must be on the device of a_tensor, {a.device}; got {layout.device}; move one of them"
            )
    check_strided("a_tensor", a, {})
    extents = {"M": a.shape[0], "K": a.shape[1]}
    if operands.b_tensor is not None:
        expected = STRIDED_B[options.b_major]
        check_strided("b_tensor", operands.b_tensor, extents, expected)
        extents |= {"N": operands.b_tensor.shape[0], "L": operands.b_tensor.shape[2]}
    else:
        extents |= {"N": int(options.n), "L": _pointer_count(operands.b_ptrs)}
    for symbol in "NKL":
        if extents[symbol] == 0:
            raise ValueError(f"{symbol} must be positive; got 0; only M may be 0")
    for name in ("padded_offsets", "alpha_tensor", "prob_tensor", "bias_tensor", "c_tensor", "d_tensor"):
        if getattr(operands, name) is not None:
            check_strided(name, getattr(operands, name), extents)
    if extents["M"] % options.m_aligned:
        raise ValueError(
            f"M (a_tensor.shape[0]) must be a multiple of m_aligned = {options.m_aligned}; got {extents['M']}; "
            "pad the rows, or pass m_aligned=1 to a name without _sm100"
        )
    return extents


def _pointer_count(layout):
    if layout.strides is not None:
        check_strided("b_ptrs", layout, {})
        return layout.shape[0]
    if (
        len(layout.shape) != 1
        or layout.dtype not in ("int64", "uint8")
        or (layout.dtype == "uint8" and layout.shape[0] % 8)
    ):
        raise _wrong_pointers(layout)
    return layout.shape[0] if layout.dtype == "int64" else layout.shape[0] // 8


def check_strided(name, layout, extents, expected=None):
    """A tensor's shape, dtype and strides. extents: symbol -> size; what it lacks is free."""
    expected = STRIDED[name] if expected is None else expected
    sizes = [_product(symbols, extents) for symbols in expected.shape]
    same_rank = len(layout.shape) == len(sizes)
    if not same_rank or any(x not in (None, y) for x, y in zip(sizes, layout.shape, strict=True)):
        got = tuple(layout.shape)
        raise ValueError(f"{name} must be {_with_values(expected.shape, sizes)}; got {got}; {expected.remedy}")
    if layout.dtype not in expected.dtypes:
        raise ValueError(f"{name} must be {' or '.join(expected.dtypes)}; got {layout.dtype}; cast it")
    if layout.strides is None or 0 in layout.shape:
        return
    extents = extents | dict(zip(expected.shape, layout.shape, strict=True))
    strides = [_product(symbols, extents) for symbols in expected.strides]
    # The stride of a dimension of one element is never used.
    if any(size != 1 and x != y for size, x, y in zip(layout.shape, strides, layout.strides, strict=True)):
        raise ValueError(
            f"{name} must have strides {_with_values(expected.strides, strides)}; "
            f"got {tuple(layout.strides)}; {expected.remedy}"
        )


def _product(symbols, extents):
    """The value of "M*K"; None where a factor is not known."""
    factors = [1 if symbol == "1" else extents.get(symbol) for symbol in symbols.split("*")]
    return None if None in factors else math.prod(factors)


def _with_values(symbols, values):
    """All the values, or those that are known."""
    text = f"({', '.join(symbols)}{',' if len(symbols) == 1 else ''})"
    if None not in values:
        return f"{text} = {tuple(values)}"
    known = [f"{symbol} = {x}" for symbol, x in zip(symbols, values, strict=True) if symbol != "1" and x is not None]
    return f"{text} with {', '.join(known)}" if known else text


def check_outputs(options, operands):
    """Outputs that the caller brought have the dtypes that the call says."""
    for name in ("c", "d"):
        layout, dtype = getattr(operands, f"{name}_tensor"), getattr(options, f"{name}_dtype")
        if layout is not None and layout.dtype != dtype:
            raise ValueError(f"{name}_tensor must be {dtype}, its {name}_dtype; got {layout.dtype}; change one of them")


def check_addresses(addresses):
    """Where tensors start; 0 where absent."""
    for name, address, alignment in zip(addresses._fields, addresses, ADDRESS_ALIGNMENT, strict=True):
        if address % alignment:
            raise ValueError(
                f"{name} must start at a multiple of {alignment} bytes; got address {address:#x}; "
                "take a view that starts at an aligned element, or a copy"
            )


def check_outputs_apart(addresses, sizes):
    """An output shares no memory with anything else: other tiles would still read, or also write, what one has written.

    Both `StridedOperands`: where tensors start, and their bytes; 0 where absent.
    """
    for output in ("c_tensor", "d_tensor"):
        start, end = getattr(addresses, output), getattr(addresses, output) + getattr(sizes, output)
        for name, address, size in zip(addresses._fields, addresses, sizes, strict=True):
            if name != output and address and address < end and start < address + size:
                raise ValueError(
                    f"{output} must share no memory with {name}; got addresses {start:#x} to {end:#x} and {address:#x} to "
                    f"{address + size:#x}; pass a tensor of its own"
                )


def check_padded_offsets(offsets, m, m_aligned):
    """Concrete ends: non-decreasing, within [0, M], multiples of m_aligned."""
    for g, end, previous in _bad_ends(offsets, m, m_aligned):
        raise ValueError(
            f"padded_offsets must be non-decreasing ends within [0, M = {m}] and multiples of m_aligned = {m_aligned}; "
            f"got padded_offsets[{g}] = {end} after {previous}; pad each expert's rows"
        )


def check_pointers(addresses):
    """Concrete addresses of weight matrices."""
    bad = (addresses == 0) | (addresses % ROW_ALIGNMENT != 0)
    if bad.any():
        g = int(bad.argmax())
        raise ValueError(
            f"b_ptrs must be addresses of weight matrices, non-null and multiples of {ROW_ALIGNMENT}; "
            f"got b_ptrs[{g}] = {int(addresses[g]):#x}; pass each expert's data_ptr() or unsafe_buffer_pointer()"
        )


def foreign_operand(name, found, expected):
    return ValueError(
        f"{name} must be {expected}; got {type(found).__name__}; "
        "pass all operands as torch tensors, or all as JAX arrays"
    )


def several_devices(found):
    return ValueError(
        f"every operand must be on one device; got {found}; call grouped_gemm on each device's part inside jax.shard_map"
    )


def no_stream(found):
    return ValueError(
        f"current_stream must be an integer handle, a torch stream, a CUstream or an object with __cuda_stream__; "
        f"got {found!r}; pass None for the current stream"
    )


def wrong_margin(variable, found):
    return ValueError(f"{variable} must be a non-negative number of clusters; got {found!r}; unset it for 0")


def values_traced(name):
    return ValueError(
        f"{name} must be concrete: with d_tensor, c_tensor or current_stream, and in execute, a call writes by address, "
        "which a traced program cannot; got a tracer; "
        "call grouped_gemm_jax_sm100 or grouped_gemm there"
    )


def not_compiled(name):
    return RuntimeError(
        f"{name}.execute must come after compile(); got an operation that is not compiled; call compile()"
    )


def check_outputs_given(options, **outputs):
    """The class writes into the caller's outputs; C may be absent where it is not asked for."""
    for name, x in outputs.items():
        if x is None and (options.generate_c or not name.endswith(("c", "c_tensor"))):
            raise ValueError(f"{name} must be given; got None; pass a tensor (M, N, 1) to write into")


def check_sample_weights(dense, *, num_experts, b_shape, b_dtype):
    """What stands for the weights among the samples."""
    for name, value in {"num_experts": num_experts, "b_shape": b_shape, "b_dtype": b_dtype}.items():
        if dense and value is not None:
            raise ValueError(f"{name} must be None with sample_b, which tells it; got {value!r}; leave it out")
        if not dense and value is None:
            raise ValueError(f"{name} must be given where sample_b is not; got None; pass sample_b, or it")
    if dense:
        return
    if not _positive(num_experts):
        raise ValueError(f"num_experts must be a positive integer; got {num_experts!r}; pass L")
    if not isinstance(b_shape, (tuple, list)) or len(b_shape) != 2 or not all(map(_positive, b_shape)):
        raise ValueError(f"b_shape must be (N, K), positive integers; got {b_shape!r}; pass the shape of one expert")


def check_b_shape(b_shape, k):
    if b_shape[1] != k:
        raise ValueError(
            f"b_shape must be (N, K) with K = sample_a.shape[1] = {k}; got {tuple(b_shape)}; "
            "pass the shape of one expert"
        )


def check_same_weights(dense, *, b_tensor, b_ptrs):
    """A call brings the kind of weights that the samples were."""
    exactly_one(b_tensor=b_tensor, b_ptrs=b_ptrs)
    if dense != (b_tensor is not None):
        kinds = "b_tensor", "b_ptrs"
        raise _not_as_sampled("the kind of weights", *(kinds if dense else kinds[::-1]))


def check_as_sampled(samples, found):
    """Both by name."""
    for what, sample in samples.items():
        if found[what] != sample:
            raise _not_as_sampled(what, sample, found[what])


def _not_as_sampled(what, sample, found):
    return ValueError(
        f"{what} must stay that of the samples, {sample}; got {found}; only M may change, make another object for it"
    )


def gradient_needed(name):
    return NotImplementedError(
        f"{name} requires a gradient, and none flows through this call; call it under torch.no_grad(), "
        "or in the forward of a torch.autograd.Function of yours"
    )


def no_such_device(found):
    return ValueError(f"a_tensor must be on a CUDA device or the CPU; got {found}; move it")


def no_library(why):
    return RuntimeError(f"the GPU kernels cannot be used: {why}")


def driver_failed(function, code):
    return RuntimeError(f"the CUDA driver refused {function} with code {code}; see CUresult in the driver's manual")

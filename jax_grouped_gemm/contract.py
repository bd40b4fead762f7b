"""What a legal call is: shapes, dtypes, alignment, and every error text of the package.

`ValueError`: the caller's mistake. `RuntimeError`: this machine or installation cannot. `NotImplementedError`: nobody
can yet. Each names what was found, what was expected and the remedy.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm import config

ALIGNMENT = 8  # elements: the copy engine reads rows of whole 16-byte units
SIZE_LIMIT = 2**31 - 2**10  # extents are int32 on the device, where a tile may reach past the end; products are 64-bit
SCRATCH_UNIT = 128  # bytes: a tensor map; the counter has as much to itself
IMPLEMENTATIONS = (None, "cutedsl", "reference")


class Operands(NamedTuple):
    """A call's arrays by name; alpha, prob and bias are None where absent, b is the tuple of weight operands."""

    a: Any
    offsets: Any
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

    @property
    def empty(self):
        """The outputs have no elements, or each is zero: no row has an expert, or it is an empty sum without a bias."""
        return 0 in (self.m, self.n, self.l) or (self.k == 0 and not self.has_bias)

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
        """Names the flat operands of the primitive: a, offsets, alpha, prob and bias if present, then the weights."""
        a, offsets, *rest = operands
        alpha = rest.pop(0) if self.has_alpha else None
        prob = rest.pop(0) if self.has_prob else None
        bias = rest.pop(0) if self.has_bias else None
        return Operands(a, offsets, alpha, prob, bias, tuple(rest))


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
    a, offsets, alpha, prob, bias, b = operands
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
        implementation=options.implementation,
        c_dtype=c_dtype,
        dynamic=_flag("use_dynamic_sched", options.use_dynamic_sched),
        mma_tiler_mn=_pair("mma_tiler_mn", options.mma_tiler_mn),
        cluster_shape_mn=_pair("cluster_shape_mn", options.cluster_shape_mn),
        overlap_margin=_overlap_margin(options.overlap_margin),
    )


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
        raise ValueError(
            "b_ptrs must be (L,) int64 or, without jax_enable_x64, (8 L,) uint8 (the same bytes, little-endian); "
            f"got {pointers.shape} {pointers.dtype}; pass np.asarray(addresses, np.int64).view(np.uint8)"
        )
    return pointers.size // 8 if packed else pointers.size, _given_n(options, "b_ptrs")


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


# --- values, where they can be seen -----------------------------------------------------------------------------------


def check_offsets(offsets, m):
    """Concrete ends of the groups: non-decreasing, within [0, M]."""
    previous = 0
    for g, end in enumerate(map(int, offsets)):
        if not previous <= end <= m:
            raise ValueError(
                f"offsets must be non-decreasing ends of groups within [0, M = a.shape[0] = {m}]; "
                f"got offsets[{g}] = {end} after {previous}; pass sizes as group_sizes="
            )
        previous = end


def check_group_sizes(group_sizes, m):
    """Concrete sizes of the groups: non-negative, at most M rows in all."""
    total = 0
    for g, size in enumerate(map(int, group_sizes)):
        total += size
        if size < 0 or total > m:
            raise ValueError(
                f"group_sizes must be non-negative with a sum of at most M = a.shape[0] = {m}; "
                f"got group_sizes[{g}] = {size}, a sum of {total} so far; pass ends as offsets="
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


def no_rule(transformation):
    return NotImplementedError(
        f"grouped_gemm has no rule for {transformation} yet; jax.lax.ragged_dot has one, for dense weights"
    )


def no_explicit_sharding():
    return NotImplementedError(
        "grouped_gemm has no rule yet for operands on a mesh with explicit axes; call it on each device's part inside "
        "jax.shard_map with check_vma=False, or make the mesh with axis_types=(jax.sharding.AxisType.Auto,)"
    )


def no_varying_axes():
    return NotImplementedError(
        "grouped_gemm has no rule yet for a shard_map that checks varying axes; pass check_vma=False to jax.shard_map, "
        "and mind that a forgotten psum is not noticed then"
    )

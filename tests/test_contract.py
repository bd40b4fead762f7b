"""Every error text that a caller can meet."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm import contract, ffi_call, grouped_gemm, library


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def call(**changes):
    """A legal call, L = 4, M = 64, N = 16, K = 32, but for the changes, traced: shapes alone decide."""
    operands = {"a": struct(64, 32), "b": struct(4, 16, 32), "offsets": struct(4, dtype=jnp.int32)} | changes
    options = {name: operands.pop(name) for name in tuple(operands) if name in OPTIONS}
    present = {name: x for name, x in operands.items() if x is not None}
    return jax.eval_shape(lambda **arrays: grouped_gemm(**arrays, **options), **present)


OPTIONS = (
    "n",
    "b_major",
    "d_dtype",
    "generate_c",
    "c_dtype",
    "use_dynamic_sched",
    "mma_tiler_mn",
    "cluster_shape_mn",
    "overlap_margin",
    "implementation",
)


def test_the_call_without_changes_is_legal():
    assert call() == struct(64, 16)
    assert call(generate_c=True, c_dtype=np.float16, bias=struct(4, 16)) == (
        struct(64, 16),
        struct(64, 16, dtype=jnp.float16),
    )


WRONG_CALLS = {
    "no weights": ({"b": None}, "exactly one of b and b_ptrs must be given; got neither; pass one, as a keyword"),
    "two kinds of weights": (
        {"b_ptrs": struct(32, dtype=jnp.uint8)},
        "exactly one of b and b_ptrs must be given; got b and b_ptrs",
    ),
    "no groups": ({"offsets": None}, "exactly one of offsets and group_sizes must be given; got neither"),
    "two kinds of groups": (
        {"group_sizes": struct(4, dtype=jnp.int32)},
        "exactly one of offsets and group_sizes must be given; got offsets and group_sizes",
    ),
    "a rank": ({"a": struct(2, 64, 32)}, "a must be (M, K); got (2, 64, 32); reshape it to 2 dimensions"),
    "a dtype": (
        {"a": struct(64, 32, dtype=jnp.float32)},
        "a must be bfloat16; got float32; cast it, e.g. a.astype(jnp.bfloat16)",
    ),
    "b K": (
        {"b": struct(4, 16, 24)},
        "b must be (L, N, K) with K = a.shape[1] = 32; got (4, 16, 24); pass weights for the K of a",
    ),
    "b is N-major": (
        {"b": struct(4, 32, 16)},
        'b must be (L, N, K) with K = a.shape[1] = 32; got (4, 32, 16); pass b_major="n" if b is stored so',
    ),
    "b is K-major": (
        {"b_major": "n"},
        'b must be (L, K, N) with K = a.shape[1] = 32; got (4, 16, 32); pass b_major="k" if b is stored so',
    ),
    "b rank": (
        {"b": struct(16, 32)},
        "b must be (L, N, K) with K = a.shape[1] = 32; got (16, 32); reshape it to 3 dimensions",
    ),
    "b dtype": ({"b": struct(4, 16, 32, dtype=jnp.float16)}, "b must be bfloat16; got float16"),
    "tuple rank": (
        {"b": [struct(16, 32)] * 3 + [struct(1, 16, 32)]},
        "b[3] must be (N, K) with K = a.shape[1] = 32; got (1, 16, 32); reshape it to 2 dimensions",
    ),
    "tuple shapes differ": (
        {"b": [struct(16, 32)] * 3 + [struct(8, 32)]},
        "b[3] must have the shape of b[0], (16, 32); got (8, 32); pad the weights",
    ),
    "tuple N-major": (
        {"b": [struct(16, 32)] * 4, "b_major": "n"},
        'b[0] must be (K, N) with K = a.shape[1] = 32; got (16, 32); pass b_major="k" if b is stored so',
    ),
    "tuple dtype": (
        {"b": [struct(16, 32, dtype=jnp.float32)] * 4},
        "b[0] must be bfloat16; got float32; cast it, e.g. b[0].astype(jnp.bfloat16)",
    ),
    "n disagrees": ({"n": 24}, "n must be the output columns of b = 16; got 24; n is only needed with b_ptrs"),
    "pointers without n": (
        {"b": None, "b_ptrs": struct(32, dtype=jnp.uint8)},
        "n, the output columns, must be given with b_ptrs; got None; pass n=",
    ),
    "pointers with a wrong n": (
        {"b": None, "b_ptrs": struct(32, dtype=jnp.uint8), "n": -8},
        "n must be a non-negative integer; got -8; pass the output columns",
    ),
    "pointers dtype": (
        {"b": None, "b_ptrs": struct(4, dtype=jnp.int32), "n": 16},
        "b_ptrs must be (L,) int64 or, without jax_enable_x64, (8 L,) uint8 (the same bytes, little-endian); "
        "got (4,) int32; pass jnp.asarray(np.asarray(addresses, np.int64).view(np.uint8))",
    ),
    "pointers bytes": (
        {"b": None, "b_ptrs": struct(31, dtype=jnp.uint8), "n": 16},
        "b_ptrs must be (L,) int64 or, without jax_enable_x64, (8 L,) uint8",
    ),
    "K alignment": (
        {"a": struct(64, 28), "b": struct(4, 16, 28)},
        "K (a.shape[1]) must be a multiple of 8; got 28; pad it with zeros to 32",
    ),
    "N alignment": (
        {"b": struct(4, 12, 32)},
        "N (the output columns) must be a multiple of 8; got 12; pad it with zeros to 16",
    ),
    "M limit": ({"a": struct(2**31 - 2**10, 32)}, "M must be less than 2^31 - 2^10; got 2147482624; split the call"),
    "N limit": ({"b": struct(4, 2**31 - 2**10, 32)}, "N must be less than 2^31 - 2^10; got 2147482624; split the call"),
    "K limit": (
        {"a": struct(64, 2**31 - 2**10), "b": struct(4, 16, 2**31 - 2**10)},
        "K must be less than 2^31 - 2^10; got 2147482624; split the call",
    ),
    "L limit": (
        {"b": struct(2**31 - 2**10, 16, 32), "offsets": struct(2**31 - 2**10, dtype=jnp.int32)},
        "L must be less than 2^31 - 2^10; got 2147482624; split the call",
    ),
    "offsets shape": (
        {"offsets": struct(5, dtype=jnp.int32)},
        "offsets must be (L,) = (4,); got (5,); pass one end per expert of the weights",
    ),
    "offsets dtype": (
        {"offsets": struct(4, dtype=jnp.uint32)},
        "offsets must be int32; got uint32; cast it, e.g. offsets.astype(jnp.int32)",
    ),
    "group_sizes shape": (
        {"offsets": None, "group_sizes": struct(4, 1, dtype=jnp.int32)},
        "group_sizes must be (L,) = (4,); got (4, 1); pass one size per expert of the weights",
    ),
    "group_sizes dtype": (
        {"offsets": None, "group_sizes": struct(4, dtype=jnp.int16)},
        "group_sizes must be int32; got int16",
    ),
    "alpha shape": (
        {"alpha": struct(64, dtype=jnp.float32)},
        "alpha must be (L,) = (4,); got (64,); pass one factor per expert of the weights",
    ),
    "alpha dtype": ({"alpha": struct(4)}, "alpha must be float32; got bfloat16"),
    "prob shape": (
        {"prob": struct(64, 1, dtype=jnp.float32)},
        "prob must be (M,) = (64,); got (64, 1); pass one factor per row of a",
    ),
    "prob dtype": ({"prob": struct(64)}, "prob must be float32; got bfloat16"),
    "bias shape": (
        {"bias": struct(16, 4)},
        "bias must be (L, N) = (4, 16); got (16, 4); pass one row of N per expert",
    ),
    "bias dtype": (
        {"bias": struct(4, 16, dtype=jnp.int32)},
        "bias must be bfloat16, float16 or float32; got int32; cast it, e.g. bias.astype(jnp.float32)",
    ),
    "c_dtype": (
        {"generate_c": True, "c_dtype": "float64"},
        "c_dtype must be one of 'bfloat16', 'float16', 'float32'; got 'float64'",
    ),
    "c_dtype without C": (
        {"c_dtype": "float32"},
        "c_dtype must be None where C is no output; got 'float32'; pass generate_c=True for C",
    ),
    "generate_c": ({"generate_c": 1}, "generate_c must be True or False; got 1; it is static"),
    "use_dynamic_sched": (
        {"use_dynamic_sched": "yes"},
        "use_dynamic_sched must be True, False or None; got 'yes'; it is static",
    ),
    "overlap_margin": (
        {"overlap_margin": -1},
        "overlap_margin must be an integer within [0, 2^31); got -1; pass how many SMs to leave free",
    ),
    "overlap_margin limit": ({"overlap_margin": 2**31}, "within [0, 2^31); got 2147483648"),
    "overlap_margin type": ({"overlap_margin": 1.0}, "within [0, 2^31); got 1.0"),
    "overlap_margin bool": ({"overlap_margin": True}, "within [0, 2^31); got True"),
    "mma_tiler_mn type": (
        {"mma_tiler_mn": 256},
        "mma_tiler_mn must be two integers, for rows and columns; got 256; pass a tuple, or None to have it chosen",
    ),
    "mma_tiler_mn length": ({"mma_tiler_mn": (256, 256, 64)}, "two integers, for rows and columns; got (256, 256, 64)"),
    "mma_tiler_mn entries": ({"mma_tiler_mn": (256.0, 256)}, "two integers, for rows and columns; got (256.0, 256)"),
    "mma_tiler_mn text": ({"mma_tiler_mn": "ab"}, "two integers, for rows and columns; got 'ab'"),
    "cluster_shape_mn type": (
        {"cluster_shape_mn": (True, 1)},
        "cluster_shape_mn must be two integers, for rows and columns; got (True, 1)",
    ),
    "d_dtype": ({"d_dtype": "int8"}, "d_dtype must be one of 'bfloat16', 'float16', 'float32'; got 'int8'"),
    "not a dtype": ({"d_dtype": "number"}, "d_dtype must be one of 'bfloat16', 'float16', 'float32'; got 'number'"),
    "b_major": ({"b_major": "m"}, "b_major must be one of 'k', 'n'; got 'm'"),
    "implementation": (
        {"implementation": "fast"},
        "implementation must be one of None, 'cutedsl', 'reference'; got 'fast'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**changes)


# --- tiles ------------------------------------------------------------------------------------------------------------


COMPILED = (
    "(SM90: (256, 256) with (2, 1), (256, 192) with (2, 1), (256, 128) with (2, 1), "
    "(64, 128) with (1, 1), (64, 128) with (1, 2), (64, 128) with (1, 4); SM100: (256, 256) with (2, 1), (128, 256) with (1, 1), (64, 128) with (1, 1))"
)


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        ({"mma_tiler_mn": (64, 64)}, "(64, 64) with any"),
        ({"cluster_shape_mn": [4, 1]}, "any with (4, 1)"),
        ({"mma_tiler_mn": (256, 256), "cluster_shape_mn": (1, 1)}, "(256, 256) with (1, 1)"),
        ({"mma_tiler_mn": (0, 0)}, "(0, 0) with any"),
    ],
)
@pytest.mark.parametrize("capabilities", [(), ("8.0",)])
def test_a_tile_that_is_not_compiled(monkeypatch, wish, found, capabilities):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: capabilities)
    message = (
        f"mma_tiler_mn and cluster_shape_mn must name a compiled tile {COMPILED}; got {found}; "
        "leave both out to have one chosen"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**wish)


@pytest.mark.parametrize(
    ("wish", "compiled_for"),
    [
        ({"mma_tiler_mn": (256, 192)}, {"90"}),
        ({"mma_tiler_mn": (128, 256), "cluster_shape_mn": (1, 1)}, {"100"}),
        ({"mma_tiler_mn": (64, 128), "cluster_shape_mn": (1, 1)}, {"90", "100"}),
        ({"cluster_shape_mn": (1, 4)}, {"90"}),
        ({"mma_tiler_mn": [256, np.int64(256)]}, {"90", "100"}),
        ({"cluster_shape_mn": (1, 1)}, {"90", "100"}),
    ],
)
def test_a_tile_of_another_architecture(monkeypatch, wish, compiled_for):
    for capabilities, architectures in (
        ((), {"90", "100"}),
        (("8.0",), {"90", "100"}),  # the reference will run
        (("9.0",), {"90"}),
        (("10.0", "10.3"), {"100"}),
        (("10.0", "8.0"), {"100"}),
        (("9.0", "10.0"), {"90", "100"}),
    ):
        monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda capabilities=capabilities: capabilities)
        if architectures & compiled_for:
            call(**wish)
            continue
        (arch,) = architectures
        message = f"must name a compiled tile, for this process's GPUs of SM{arch} {COMPILED}; got "
        with pytest.raises(ValueError, match=re.escape(message)):
            call(**wish)


def test_the_gpus_are_not_asked_without_a_wish(monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", None)
    call(use_dynamic_sched=True, overlap_margin=4)


@pytest.mark.parametrize(("symbol", "weights"), [(x, "dense") for x in "MNKL"] + [(x, "pointers") for x in "MKL"])
def test_symbolic_extents_are_refused(symbol, weights):
    m, n, k, l = ((jax.export.symbolic_shape("s")[0] if name == symbol else 64) for name in "MNKL")
    operands = {"a": struct(m, k), "b": struct(l, n, k), "offsets": struct(l, dtype=jnp.int32)}
    if weights == "pointers":
        operands |= {"b": None, "b_ptrs": struct(8 * l, dtype=jnp.uint8), "n": n}
    with pytest.raises(ValueError, match=f"{symbol} must be static; got s; export one program per shape"):
        call(**operands)


def eager(**groups):
    return grouped_gemm(jnp.zeros((64, 8), jnp.bfloat16), jnp.zeros((4, 8, 8), jnp.bfloat16), **groups)


WRONG_VALUES = {
    "decreasing": (
        {"offsets": [10, 30, 20, 40]},
        "offsets must be non-decreasing ends of groups within [0, M = a.shape[0] = 64]; "
        "got offsets[2] = 20 after 30; if these are sizes, pass group_sizes=",
    ),
    "negative end": ({"offsets": [-1, 0, 0, 0]}, "got offsets[0] = -1 after 0"),
    "past M": ({"offsets": [0, 0, 65, 66]}, "got offsets[2] = 65 after 0"),
    "negative size": (
        {"group_sizes": [1, -1, 0, 0]},
        "group_sizes must be non-negative with a sum of at most M = a.shape[0] = 64; "
        "got group_sizes[1] = -1, a sum of 0 so far; if these are ends, pass offsets=",
    ),
    "sizes past M": ({"group_sizes": [60, 4, 1, 0]}, "got group_sizes[2] = 1, a sum of 65 so far"),
    "sizes past 2^31": ({"group_sizes": [0, 2**31 - 1, 2**31 - 1, 2]}, "got group_sizes[1] = 2147483647"),
}


@pytest.mark.parametrize(("groups", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
@pytest.mark.parametrize("convert", [np.int32, lambda x: jnp.asarray(x, jnp.int32)], ids=["numpy", "jax"])
def test_wrong_values(groups, message, convert):
    ((name, values),) = groups.items()
    values = np.asarray(values, np.int32) if convert is np.int32 else convert(values)
    with pytest.raises(ValueError, match=re.escape(message)):
        eager(**{name: values})


@pytest.mark.parametrize(
    "end", [np.array([2**32]), np.array([2**63], np.uint64), [2**70]], ids=["int64", "uint64", "python"]
)
def test_values_that_do_not_fit_are_seen_before_conversion(end):
    offsets = [0, 0, 0, *end] if isinstance(end, list) else np.concatenate([np.zeros(3, end.dtype), end])
    with pytest.raises(ValueError, match=re.escape(f"got offsets[3] = {end[0]} after 0")):
        eager(offsets=offsets)


@pytest.mark.parametrize(("offsets", "dtype"), [([0.0] * 4, "float64"), (["a"] * 4, "<U1"), ([{}] * 4, "object")])
def test_groups_that_are_not_integers(offsets, dtype):
    with pytest.raises(ValueError, match=re.escape(f"offsets must be int32; got {dtype}; cast it")):
        eager(offsets=offsets)


@pytest.mark.parametrize("by", ["offsets", "group_sizes"])
def test_one_integer_for_all_groups(by):
    with pytest.raises(ValueError, match=re.escape(f"{by} must be (L,) = (4,); got (); pass one ")):
        eager(**{by: 8})
    with pytest.raises(ValueError, match=re.escape(f"{by} must be a JAX or NumPy array; got list; convert it")):
        eager(**{by: [[8], [1, 2]]})


# --- the machine ------------------------------------------------------------------------------------------------------


def test_kernels_on_a_cpu():
    message = (
        'implementation="cutedsl" cannot run here: the kernels are for cuda, not for cpu; '
        'pass implementation="reference", or None to choose by platform'
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        eager(offsets=jnp.zeros(4, jnp.int32), implementation="cutedsl")


def lower_for_cuda(**options):
    run = jax.jit(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets, **options))
    return run.trace(struct(64, 32), struct(4, 16, 32), struct(4, dtype=jnp.int32)).lower(lowering_platforms=("cuda",))


def test_kernels_on_another_gpu(monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: ("8.0",))
    message = "kernels exist for compute capability 9.0 (Hopper), 10.0 and 10.3 (Blackwell); found 8.0"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        lower_for_cuda(implementation="cutedsl")


@pytest.mark.parametrize("implementation", [None, "cutedsl"])
def test_nothing_was_built(monkeypatch, implementation):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", tuple)
    monkeypatch.setattr(library, "manifest", lambda: None)
    with pytest.raises(RuntimeError, match=r"cannot be used: manifest.json is not in .*: build it with `make build`"):
        lower_for_cuda(implementation=implementation)


def test_a_library_that_does_not_register(monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: ("9.0",))
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "mine"})
    monkeypatch.setattr(library, "registered", lambda: contract.build_id_mismatch("mine", "other"))
    with pytest.raises(RuntimeError, match="the library was built as mine but manifest.json describes other"):
        lower_for_cuda()


def test_pointers_for_the_reference_on_a_gpu():
    run = jax.jit(lambda a, p, o: grouped_gemm(a, b_ptrs=p, offsets=o, n=16, implementation="reference"))
    traced = run.trace(struct(64, 32), struct(32, dtype=jnp.uint8), struct(4, dtype=jnp.int32))
    with pytest.raises(RuntimeError, match="b_ptrs on cuda cannot be read by the reference implementation"):
        traced.lower(lowering_platforms=("cuda",))

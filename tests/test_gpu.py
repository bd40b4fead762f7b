"""The compiled kernels through jax.jit, on a real GPU, against the float64 oracle."""

import functools
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_grouped_gemm import calls, config, direct, ffi_call, grouped_gemm

pytestmark = pytest.mark.gpu

PROGRAMS = pathlib.Path(__file__).parent / "gpu_programs"


@functools.partial(jax.jit, static_argnums=1)
def _jitted(arrays, options):
    return grouped_gemm(**arrays, **dict(options), implementation="cutedsl")


def kernels(**arguments):
    arrays = {name: x for name, x in arguments.items() if any(isinstance(y, jax.Array) for y in jax.tree.leaves(x))}
    return _jitted(arrays, tuple((name, x) for name, x in arguments.items() if name not in arrays))


def check(case, weights="dense", **options):
    """Runs the kernels; what they return is right. options: more arguments of `grouped_gemm`."""
    arguments = case.arguments() | options
    if weights != "dense":
        b = arguments.pop("b")
        experts = tuple(jax.device_put(np.asarray(b[g])) for g in range(b.shape[0]))
        if weights == "tuple":
            arguments["b"] = experts
        else:
            addresses = np.array([w.unsafe_buffer_pointer() for w in experts], np.int64)
            arguments["b_ptrs"] = jnp.asarray(addresses.view(np.uint8))
            arguments["n"] = case.b.shape[1 if case.b_major == "k" else 2]
    poison_the_allocator(case)
    got = jax.block_until_ready(kernels(**arguments))
    oracle.check(got, case)
    return jax.tree.map(np.asarray, got)


def poison_the_allocator(case):
    """Leaves NaN in freed memory of the outputs' sizes, so that an element that no kernel writes does not look right."""
    shape = (case.a.shape[0], case.b.shape[1 if case.b_major == "k" else 2])
    dtypes = [case.dtype_of(output) for output in ("DC" if case.generate_c else "D")]
    jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for dtype in dtypes * 3])


schedules = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


@pytest.fixture(params=[None, *range(5)], ids=["rule", "first", "second", "third", "fourth", "fifth"])
def tile(request, monkeypatch):
    """The rule's tile, and each compiled tile of this GPU's architecture, forced."""
    if request.param is not None:
        arch = ffi_call.architecture(jax.devices("cuda")[0].compute_capability)
        if request.param >= len(config.TILES[arch]):
            pytest.skip("this architecture has fewer tiles")
        monkeypatch.setattr(
            config, "select_tile", lambda arch, *_: config.TILES[arch][min(request.param, len(config.TILES[arch]) - 1)]
        )
    jax.clear_caches()  # lowerings made with another tile
    yield
    jax.clear_caches()


def features():
    """Every compiled epilogue, with each of its switches at run time in every position."""
    scales = [{"alpha": alpha, "prob": prob} for alpha, prob in itertools.product((False, True), repeat=2)]
    for d_dtype, scale in itertools.product(config.D_DTYPES, scales):
        yield {"d_dtype": d_dtype, **scale}
    for i, (d_dtype, bias) in enumerate(itertools.product(config.D_DTYPES, config.D_DTYPES)):
        yield {"d_dtype": d_dtype, "bias": bias, **scales[-1 - i % 4]}
    for i, (d_dtype, c_dtype, bias) in enumerate(
        itertools.product(config.D_DTYPES, config.D_DTYPES, (None, "float32"))
    ):
        bias = bias and config.D_DTYPES[i // 2 % 3]
        yield {"d_dtype": d_dtype, "c_dtype": c_dtype, "generate_c": True, "bias": bias, **scales[-1 - i % 4]}


@pytest.mark.parametrize("b_major", config.B_MAJORS)
@pytest.mark.parametrize("weights", ["dense", "pointers", "tuple"])
def test_every_variant(rng, tile, b_major, weights):
    for i, feature in enumerate(features()):
        case = oracle.make_case(rng, 4, 700, 392, 200, offsets=[100, 100, 333, 650], b_major=b_major, **feature)
        check(case, weights, use_dynamic_sched=i % 2 == 1)


def test_all_patterns_of_empty_groups(rng, tile):
    for pattern in range(256):
        sizes = [int(rng.integers(1, 300)) if pattern >> g & 1 else 0 for g in range(8)]
        m = sum(sizes) + int(rng.integers(0, 2)) * 37
        m += m == 0
        # One shape for all, so that the program is compiled once: what is left over is tail.
        case = oracle.make_case(rng, 8, 2400, 136, 72, offsets=oracle.ends(sizes), bias="float32", generate_c=True)
        check(case, use_dynamic_sched=pattern % 2 == 1)


@schedules
@pytest.mark.parametrize(
    "offsets",
    [
        [0] * 8,
        [700] * 5,
        [0, 0, 0, 700],
        [1, 2, 3, 4],
        [127, 255, 257, 700],
        [128, 256, 384, 512],
        [256, 512],
        [-5, 10, 3, 2**31 - 1],
        [5, 600, 100, -(2**31)],
        [2**31 - 1] * 3,
        [-(2**31)] * 3,
    ],
)
def test_hostile_and_odd_offsets(rng, tile, offsets, dynamic):
    for feature in ({}, {"bias": "bfloat16"}, {"generate_c": True, "bias": "float16"}):
        check(oracle.make_case(rng, len(offsets), 700, 520, 104, offsets=offsets, **feature), use_dynamic_sched=dynamic)


@schedules
@pytest.mark.parametrize(
    "shape", [(1, 1, 8, 8), (3, 1000, 264, 8), (2, 300, 136, 2**16), (5, 513, 1000, 1000), (1, 129, 8, 4096)]
)
def test_odd_shapes(rng, tile, shape, dynamic):
    check(oracle.make_case(rng, *shape), use_dynamic_sched=dynamic)
    check(oracle.make_case(rng, *shape, bias="float32", generate_c=True, c_dtype="float32"), use_dynamic_sched=dynamic)


@pytest.mark.parametrize("l", [31, 32, 33, 128, 1000, 1024])
def test_many_experts(rng, tile, l):
    for dynamic in (False, True):
        check(oracle.make_case(rng, l, 3000, 256, 64), use_dynamic_sched=dynamic)
    check(oracle.make_case(rng, l, 3000, 256, 64, bias="bfloat16", generate_c=True))
    for weights in ("pointers", "tuple"):
        check(oracle.make_case(rng, l, 500, 64, 64), weights)


@schedules
def test_one_hot_group(rng, dynamic):
    check(oracle.make_case(rng, 128, 8192, 1536, 512, offsets=[0] * 77 + [8192] * 51), use_dynamic_sched=dynamic)


def test_scales_that_are_not_finite(rng):
    """NaN and infinity of a live expert or row arrive in its rows; those of empty groups and tail rows nowhere."""
    case = oracle.make_case(rng, 4, 300, 64, 64, offsets=[100, 100, 200, 260])
    case.alpha[2], case.prob[5], case.prob[6] = np.inf, np.nan, -np.inf
    got = np.asarray(kernels(**case.arguments())).astype(np.float64)
    want, _ = oracle.oracle(case)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))
    for rows, infinite in ((slice(5, 6), False), (slice(6, 7), True), (slice(100, 200), True)):
        assert (np.isinf if infinite else np.isnan)(got[rows]).all()
    assert not got[260:].any()


@pytest.mark.parametrize("weights", ["tuple", "pointers"])
def test_scratch_is_rewritten_by_every_call(rng, weights):
    """Calls on different weights in one program: XLA may give all of them the same memory for their tensor maps."""
    cases = [oracle.make_case(rng, 6, 500, 128, 128, alpha=False, prob=False) for _ in range(4)]
    experts = [tuple(jnp.asarray(w) for w in case.b) for case in cases]
    addresses = [np.array([w.unsafe_buffer_pointer() for w in e], np.int64).view(np.uint8) for e in experts]
    given = experts if weights == "tuple" else list(map(jnp.asarray, addresses))

    @jax.jit
    def program(rows, offsets, given):
        results = []
        for a, ends, w in zip(rows, offsets, given, strict=True):
            if results:  # one after the other, so that scratch is free again
                a, _ = jax.lax.optimization_barrier((a, results[-1]))
            b = {"b": w} if weights == "tuple" else {"b_ptrs": w, "n": 128}
            results.append(grouped_gemm(a, **b, offsets=ends, implementation="cutedsl"))
        return results

    rows, offsets = [jnp.asarray(c.a) for c in cases], [jnp.asarray(c.offsets) for c in cases]
    for _ in range(5):
        for got, case in zip(program(rows, offsets, given), cases, strict=True):
            oracle.assert_close(got, oracle.oracle(case), case)


def test_random_problems(rng):
    for _ in range(40):
        l, m = int(rng.integers(1, 70)), int(rng.integers(1, 5000))
        n, k = 8 * int(rng.integers(1, 130)), 8 * int(rng.integers(1, 130))
        d_dtype, c_dtype, bias = (config.D_DTYPES[i] for i in rng.integers(3, size=3))
        feature = [{}, {"bias": bias}, {"generate_c": True, "c_dtype": c_dtype, "bias": bias}][rng.integers(3)]
        case = oracle.make_case(rng, l, m, n, k, b_major=config.B_MAJORS[rng.integers(2)], d_dtype=d_dtype, **feature)
        check(case, use_dynamic_sched=bool(rng.integers(2)))


def test_as_accurate_as_xla(rng):
    case = oracle.make_case(rng, 6, 3000, 1024, 2048, alpha=False, prob=False)
    ours = oracle.relative_error(check(case), oracle.oracle(case), case)
    xla = oracle.relative_error(oracle.xla_product(case), oracle.oracle(case), case)
    assert ours <= 1.01 * xla


def test_int64_pointers(rng):
    case = oracle.make_case(rng, 5, 400, 128, 128, alpha=False, prob=False)
    experts = tuple(jnp.asarray(w) for w in case.b)
    addresses = np.array([w.unsafe_buffer_pointer() for w in experts], np.int64)
    a, offsets = jnp.asarray(case.a), jnp.asarray(case.offsets)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(True):
        pointers = jnp.asarray(addresses)
        assert pointers.dtype == jnp.int64
        got = kernels(a=a, b_ptrs=pointers, n=128, offsets=offsets)
    oracle.assert_close(got, oracle.oracle(case), case)


@schedules
def test_bitwise_repeatable(rng, dynamic):
    case = oracle.make_case(rng, 64, 8192, 2048, 1024, d_dtype="float32")
    arguments = case.arguments() | {"use_dynamic_sched": dynamic}
    first = np.asarray(kernels(**arguments))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(kernels(**arguments)).view(np.int32), first.view(np.int32))


def test_changed_offsets_do_not_recompile(rng):
    traces = []

    @jax.jit
    def program(a, b, offsets):
        traces.append(1)
        return grouped_gemm(a, b, offsets=offsets)

    for _ in range(5):
        case = oracle.make_case(rng, 9, 1000, 256, 256, alpha=False, prob=False)
        arguments = case.arguments()
        oracle.assert_close(program(arguments["a"], arguments["b"], arguments["offsets"]), oracle.oracle(case), case)
    assert len(traces) == 1


def test_eager(rng):
    case = oracle.make_case(rng, 9, 1000, 256, 256)
    oracle.assert_close(grouped_gemm(**case.arguments()), oracle.oracle(case), case)


def test_reference_on_gpu(rng):
    case = oracle.make_case(rng, 9, 1000, 256, 256)
    oracle.assert_close(grouped_gemm(**case.arguments(), implementation="reference"), oracle.oracle(case), case)


@pytest.mark.parametrize("weights", ["dense", "tuple", "pointers"])
@pytest.mark.parametrize("l", [1, 16, 1000])
def test_no_temporaries_but_the_maps_and_the_counter(weights, l):
    m, n, k = 4096, 1024, 1024
    a, offsets = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((l,), jnp.int32)
    b = {
        "dense": jax.ShapeDtypeStruct((l, n, k), jnp.bfloat16),
        "tuple": (jax.ShapeDtypeStruct((n, k), jnp.bfloat16),) * l,
        "pointers": jax.ShapeDtypeStruct((8 * l,), jnp.uint8),
    }[weights]

    def program(a, b, offsets):
        return grouped_gemm(a, **({"b_ptrs": b, "n": n} if weights == "pointers" else {"b": b}), offsets=offsets)

    analysis = jax.jit(program).lower(a, b, offsets).compile().memory_analysis()
    # Several results, D and these, make a tuple, whose table of addresses is XLA's.
    assert analysis.temp_size_in_bytes <= (0 if weights == "dense" else 128 * l) + 128 + 256
    assert analysis.output_size_in_bytes == 2 * m * n


@pytest.mark.parametrize("shape", [(301, 264, 136), (1, 8, 8), (700, 520, 64)])
@pytest.mark.parametrize("d_dtype", config.D_DTYPES)
@pytest.mark.parametrize("c_dtype", [None, "bfloat16", "float32"])
def test_writes_nothing_outside_the_outputs(rng, monkeypatch, shape, d_dtype, c_dtype):
    """D and C between guards: compute-sanitizer does not check the copy engine's stores to the byte."""
    arch = ffi_call.architecture(jax.devices("cuda")[0].compute_capability)
    (m, n, k), guard = shape, 1 << 17
    hostile = [[100, 100, 257, 290], [-3, 500, 20, 2**31 - 1], [0, 0, 0, 0], [2**31 - 1] * 4]
    for i, (tile, offsets) in enumerate(itertools.product(config.TILES[arch], hostile)):
        monkeypatch.setattr(
            config, "select_tile", lambda asked, *_, t=tile: t if asked == arch else config.TILES[asked][0]
        )
        case = oracle.make_case(
            rng, 4, m, n, k, offsets=offsets, d_dtype=d_dtype, alpha=False, prob=False,
            generate_c=c_dtype is not None, c_dtype=c_dtype, bias="float16" if c_dtype else None,
        )  # fmt: skip
        operands = {name: x for name, x in case.arguments().items() if isinstance(x, jax.Array)}
        memory = {
            name: jnp.full(2 * guard + m * n, 7, dtype) for name, dtype in (("d", d_dtype), ("c", c_dtype)) if dtype
        }
        scratch = jnp.zeros(128, jnp.uint8)
        jax.block_until_ready((operands, memory, scratch))
        call = calls.Call(
            m=m, n=n, k=k, l=4, b_major="k", weights="dense", d_dtype=d_dtype, c_dtype=c_dtype, has_alpha=False,
            has_prob=False, has_bias=case.bias is not None, dynamic=i % 2 == 1, overlap_margin=0, mma_tiler_mn=None,
            cluster_shape_mn=None, implementation=None,
        )  # fmt: skip
        addresses = {name: x.unsafe_buffer_pointer() for name, x in operands.items()}
        addresses |= {name: x.unsafe_buffer_pointer() + guard * x.dtype.itemsize for name, x in memory.items()}
        direct.Forward(call, bias_dtype=None if case.bias is None else "float16")(
            0, 0, **addresses, scratch=scratch.unsafe_buffer_pointer()
        )
        direct.synchronize(0, 0)
        for output, x in memory.items():
            before, values, after = np.split(np.asarray(x), [guard, guard + m * n])
            assert (before == 7).all()
            assert (after == 7).all()
            output = output.upper()
            oracle.assert_close(values.reshape(m, n), oracle.oracle(case, output), case, output)


def compiled_tiles():
    return [tile for tiles in config.TILES.values() for tile in tiles]


def test_tiles_by_name(rng):
    """Each tile of this GPU's architecture can be asked for; those of the other only are refused."""
    arch = ffi_call.architecture(jax.devices("cuda")[0].compute_capability)
    for tile in config.TILES[arch]:
        asked = {"mma_tiler_mn": tile.mma_tiler_mn, "cluster_shape_mn": tile.cluster_shape_mn}
        check(oracle.make_case(rng, 4, 700, 392, 200), **asked)
    of_this = {(tile.mma_tiler_mn, tile.cluster_shape_mn) for tile in config.TILES[arch]}
    others = {(tile.mma_tiler_mn, tile.cluster_shape_mn) for tile in compiled_tiles()} - of_this
    for mma_tiler_mn, cluster_shape_mn in {*others, ((64, 64), (1, 1))}:
        with pytest.raises(ValueError, match="mma_tiler_mn"):
            check(oracle.make_case(rng, 4, 700, 392, 200), mma_tiler_mn=mma_tiler_mn, cluster_shape_mn=cluster_shape_mn)


@schedules
def test_overlap_margin(rng, dynamic):
    case = oracle.make_case(rng, 16, 9000, 1024, 256)
    for margin in (1, 2, 37, 100, 126):
        check(case, overlap_margin=margin, use_dynamic_sched=dynamic)
    with pytest.raises(jax.errors.JaxRuntimeError, match="overlap_margin must be between 0 and"):
        check(case, overlap_margin=10_000)


def _rows_match(got, a, b, begin, end):
    """Rows [begin, end) of one expert against XLA's float32 product, a slice at a time."""
    for row in range(begin, end, 1 << 16):
        stop = min(end, row + (1 << 16))
        want = jnp.dot(a[row:stop], b.T, preferred_element_type=jnp.float32)
        error = jnp.abs(got[row:stop].astype(jnp.float32) - want).max()
        assert error <= 0.01 * jnp.abs(want).max(), (row, error)


def test_more_than_2_31_elements():
    key = jax.random.key(0)
    # weights of 3.8e9 elements
    l, m, n, k = 64, 1024, 14336, 4096
    b = jax.jit(lambda: jax.random.normal(key, (l, n, k), jnp.bfloat16))()
    a = jax.random.normal(key, (m, k), jnp.bfloat16)
    ends = np.linspace(0, m, l + 1).astype(np.int32)[1:]
    got = kernels(a=a, b=b, offsets=jnp.asarray(ends), use_dynamic_sched=True)
    for g in (0, 1, 31, 32, 62, 63):
        _rows_match(got, a, b[g], ends[g - 1] if g else 0, ends[g])
    del b, got
    # A and D of 2.5e9 elements
    for m, n, k in ((300_001, 8200, 64), (600_001, 64, 4104)):
        a = jax.jit(lambda m=m, k=k: jax.random.normal(key, (m, k), jnp.bfloat16))()
        b = jax.random.normal(key, (2, n, k), jnp.bfloat16)
        cut = m // 2 + 5
        got = kernels(a=a, b=b, offsets=jnp.asarray([cut, m - 3], jnp.int32))
        _rows_match(got, a, b[0], cut - 1000, cut)
        _rows_match(got, a, b[1], m - 70_000, m - 3)
        assert not got[m - 3 :].any()
        del a, b, got


def test_more_than_2_31_words_of_tensor_maps():
    """One map of 16 words per expert: their addresses need 64 bits from expert 2^27 on."""
    l, n, k, rows = 2**27 + 3, 64, 64, 50
    key = jax.random.key(0)
    live = [0, 2**27 - 1, 2**27, l - 1]
    weights = [jax.random.normal(x, (n, k), jnp.bfloat16) for x in jax.random.split(key, len(live))]
    nobody = jax.block_until_ready(jnp.full((n, k), jnp.nan, jnp.bfloat16))
    a = jax.random.normal(key, (len(live) * rows + 7, k), jnp.bfloat16)
    addresses, sizes = np.full(l, nobody.unsafe_buffer_pointer()), np.zeros(l, np.int32)
    addresses[live], sizes[live] = [w.unsafe_buffer_pointer() for w in weights], rows
    ends = np.cumsum(sizes, dtype=np.int32)
    got = kernels(a=a, b_ptrs=jnp.asarray(addresses.view(np.uint8)), n=n, offsets=jnp.asarray(ends))
    for i, w in enumerate(weights):
        _rows_match(got, a, w, i * rows, (i + 1) * rows)
    assert not got[len(live) * rows :].any()


def test_several_gpus(rng):
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("one GPU")
    cases = [oracle.make_case(rng, 8, 2000, 512, 512) for _ in devices]
    placed = [
        {n: jax.device_put(x, d) if isinstance(x, jax.Array) else x for n, x in c.arguments().items()}
        for c, d in zip(cases, devices, strict=True)
    ]
    for _ in range(5):
        results = [kernels(**arguments) for arguments in placed]  # in flight on all devices at once
        for got, case, device in zip(results, cases, devices, strict=True):
            assert got.devices() == {device}
            oracle.assert_close(got, oracle.oracle(case), case)


def run_program(name, *arguments, **environment):
    result = subprocess.run(
        [sys.executable, PROGRAMS / name, *arguments], capture_output=True, text=True, timeout=300,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_command_buffer_capture_and_replay():
    flags = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
    output = run_program("command_buffer.py", XLA_FLAGS=flags)
    assert "captured and replayed" in output

"""The public entry: what it accepts, eagerly and traced."""

import ctypes
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jax_grouped_gemm
from jax_grouped_gemm import ffi_call, grouped_gemm, library, log, reference


def same(left, right):
    assert left.dtype == right.dtype
    np.testing.assert_array_equal(left, right)


@pytest.fixture
def case(rng):
    return oracle.make_case(rng, 4, 70, 24, 16, offsets=[10, 10, 41, 60])


def test_eager_and_jit_agree(case):
    arguments = case.arguments()
    traced = jax.jit(grouped_gemm, static_argnames=("b_major", "d_dtype"))(**arguments)
    same(grouped_gemm(**arguments), traced)
    oracle.assert_close(traced, oracle.oracle(case), case)


def test_default_output_dtype_is_that_of_a(case):
    arguments = case.arguments()
    del arguments["d_dtype"]
    assert grouped_gemm(**arguments).dtype == jnp.bfloat16


@pytest.mark.parametrize("c_dtype", [None, "float32"])
def test_c_is_returned_beside_d(rng, c_dtype):
    case = oracle.make_case(
        rng, 4, 70, 24, 16, offsets=[10, 10, 41, 60], bias="float16", generate_c=True, c_dtype=c_dtype
    )
    arguments = case.arguments()
    eager = grouped_gemm(**arguments)
    oracle.check(eager, case)
    run = jax.jit(grouped_gemm, static_argnames=("b_major", "d_dtype", "generate_c", "c_dtype"))
    for left, right in zip(eager, run(**arguments), strict=True):
        same(left, right)
    same(eager[0], grouped_gemm(**(arguments | {"generate_c": False, "c_dtype": None})))


def test_changed_offsets_do_not_retrace(case):
    traces = 0

    @jax.jit
    def run(a, b, offsets):
        nonlocal traces
        traces += 1
        return grouped_gemm(a, b, offsets=offsets)

    for offsets in ([10, 10, 41, 60], [0, 0, 0, 0], [70, 70, 70, 70]):
        run(case.a, case.b, jnp.asarray(offsets, jnp.int32))
    assert traces == 1


def test_changed_offsets_do_not_recompile_eager_calls(case, monkeypatch):
    arguments = case.arguments()
    grouped_gemm(**arguments)
    monkeypatch.setattr(ffi_call, "choose", None)  # what every lowering asks first
    grouped_gemm(**(arguments | {"offsets": jnp.asarray([1, 2, 3, 4], jnp.int32)}))


def test_disable_jit(case):
    want = grouped_gemm(**case.arguments())
    with jax.disable_jit():
        same(grouped_gemm(**case.arguments()), want)


def test_debug_nans(case):
    arguments = case.arguments()
    arguments["a"] = arguments["a"].at[0, 0].set(jnp.nan)
    arguments["offsets"] = jnp.asarray([70] * 4, jnp.int32)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="grouped_gemm"):
        jax.jit(grouped_gemm)(arguments.pop("a"), arguments.pop("b"), offsets=arguments.pop("offsets"))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("as_given", [list, tuple, np.int64, np.int32, np.uint8])
def test_host_integers_of_any_width(case, as_given, x64):
    arguments = case.arguments()
    ends = case.offsets
    given = as_given(ends.tolist()) if as_given in (list, tuple) else ends.astype(as_given)
    want = grouped_gemm(**arguments)
    with jax.enable_x64(x64) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(x64):
        same(grouped_gemm(**(arguments | {"offsets": given})), want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": None}, "a must be a JAX or NumPy array; got NoneType; convert it"),
        ({"b": {"w": 1}}, "b must be a JAX or NumPy array; got dict; convert it"),
        ({"b": (None, None)}, "b[0] must be a JAX or NumPy array; got NoneType; convert it"),
        ({"prob": "ones"}, "prob must be a JAX or NumPy array; got str; convert it"),
    ],
)
def test_what_is_no_array(case, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        grouped_gemm(**(case.arguments() | changes))


def test_a_torch_tensor(case):
    torch = pytest.importorskip("torch")
    a = torch.zeros(case.a.shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a must be a JAX or NumPy array; got Tensor; convert it; torch tensors go to"):
        grouped_gemm(**(case.arguments() | {"a": a}))


def test_traced_scalars_in_a_list(case):
    arguments = case.arguments()
    del arguments["offsets"]
    run = jax.jit(lambda x, y: grouped_gemm(**arguments, offsets=[x, x, y, y]))
    same(run(10, 40), grouped_gemm(**arguments, offsets=[10, 10, 40, 40]))


def test_numpy_operands(case):
    a, b, offsets = map(jnp.asarray, (case.a, case.b, case.offsets))
    same(grouped_gemm(case.a, case.b, offsets=case.offsets), grouped_gemm(a, b, offsets=offsets))


@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("container", [tuple, list])
def test_tuple_and_dense_agree(rng, b_major, container):
    arguments = oracle.make_case(rng, 4, 70, 24, 16, b_major=b_major).arguments()
    same(grouped_gemm(**arguments), grouped_gemm(**(arguments | {"b": container(arguments["b"])})))


def test_implementation_reference(case):
    arguments = case.arguments()
    same(grouped_gemm(**arguments), grouped_gemm(**arguments, implementation="reference"))


# --- group sizes ------------------------------------------------------------------------------------------------------


def test_group_sizes_and_offsets_agree(case):
    arguments = case.arguments()
    sizes = jnp.asarray(np.diff(case.offsets, prepend=0), jnp.int32)
    same(grouped_gemm(**arguments), grouped_gemm(**(arguments | {"offsets": None}), group_sizes=sizes))


@given(
    sizes=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 40), min_size=1, max_size=40),
    m=st.integers(0, 2**31 - 1) | st.integers(0, 100),
)
@example(sizes=[2**31 - 1] * 3, m=2**31 - 1)
@example(sizes=[2**30, 2**30 - 1, 2**30], m=2**31 - 1)
def test_ends_of_any_group_sizes(sizes, m):
    want = np.minimum(np.cumsum([max(size, 0) for size in sizes], dtype=object), m).astype(np.int32)
    np.testing.assert_array_equal(reference.ends_of(jnp.asarray(sizes, jnp.int32), m=m), want)


def test_hostile_group_sizes_under_jit(rng):
    case = oracle.make_case(rng, 4, 70, 24, 16, poison=False)
    run = jax.jit(lambda sizes: grouped_gemm(jnp.asarray(case.a), jnp.asarray(case.b), group_sizes=sizes))
    # 10, none, 30, and the rest of the 70 rows: the sum passes 2^31.
    got = run(jnp.asarray([10, -5, 30, 2**31 - 1], jnp.int32))
    same(got, grouped_gemm(case.a, case.b, offsets=jnp.asarray([10, 10, 40, 70], jnp.int32)))


# --- nothing to do ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["l", "m", "n", "k"])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("bias", [None, "bfloat16"])
@pytest.mark.parametrize("generate_c", [False, True])
def test_zero_sizes(rng, empty, jit, bias, generate_c):
    sizes = {"l": 3, "m": 20, "n": 16, "k": 16} | {empty: 0}
    case = oracle.make_case(rng, **sizes, bias=bias, generate_c=generate_c, c_dtype="float32")
    static = ("b_major", "d_dtype", "generate_c", "c_dtype")
    run = jax.jit(grouped_gemm, static_argnames=static) if jit else grouped_gemm
    got = run(**case.arguments())
    oracle.check(got, case)
    for output in got if generate_c else (got,):
        assert output.shape == (sizes["m"], sizes["n"])
        assert np.asarray(output, np.float32).any() == (empty == "k" and bias is not None)


def test_empty_tuple_needs_n(case):
    none = jnp.zeros((0,), jnp.int32)
    assert grouped_gemm(case.a, (), offsets=none, n=24).shape == (70, 24)
    with pytest.raises(ValueError, match="n, the output columns, must be given with an empty tuple"):
        grouped_gemm(case.a, (), offsets=none)


# --- raw pointers -----------------------------------------------------------------------------------------------------


needs_library = pytest.mark.skipif(not library.LIBRARY.exists(), reason="the library is not built (make build)")


def addresses(arrays):
    return np.array([array.ctypes.data for array in arrays], np.int64)


@needs_library
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_raw_pointers_read_host_memory(rng, x64, b_major):
    case = oracle.make_case(rng, 4, 70, 24, 16, b_major=b_major)
    weights = [np.array(w) for w in case.b]
    arguments = case.arguments() | {"b": None, "n": 24}
    with jax.enable_x64(x64) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(x64):
        eager = grouped_gemm(**arguments, b_ptrs=addresses(weights))
        unsigned = grouped_gemm(**arguments, b_ptrs=addresses(weights).astype(np.uint64))
        packed = grouped_gemm(**arguments, b_ptrs=jnp.asarray(addresses(weights).view(np.uint8)))
        run = jax.jit(lambda pointers: grouped_gemm(**arguments, b_ptrs=pointers))
        traced = run(jnp.asarray(addresses(weights)) if x64 else jnp.asarray(addresses(weights).view(np.uint8)))
    for got in (eager, unsigned, packed, traced):
        oracle.assert_close(got, oracle.oracle(case), case)


def test_no_raw_pointers():
    d = grouped_gemm(jnp.ones((3, 8), jnp.bfloat16), b_ptrs=[], n=16, offsets=[])
    np.testing.assert_array_equal(np.asarray(d, np.float32), np.zeros((3, 16)))


@needs_library
def test_raw_pointers_see_changed_memory(rng):
    case = oracle.make_case(rng, 2, 20, 8, 8, offsets=[10, 20])
    weights = [np.array(w) for w in case.b]
    run = jax.jit(lambda pointers: grouped_gemm(case.a, offsets=case.offsets, b_ptrs=pointers, n=8))
    pointers = jnp.asarray(addresses(weights).view(np.uint8))
    before = np.asarray(run(pointers), np.float32)
    for w in weights:
        w *= 2
    np.testing.assert_array_equal(np.asarray(run(pointers), np.float32), 2 * before)


def test_raw_pointers_without_the_library(rng, monkeypatch):
    monkeypatch.setattr(library, "registered", lambda: "not there")
    case = oracle.make_case(rng, 2, 20, 8, 40)
    with pytest.raises(RuntimeError, match=r"b_ptrs on cpu need the package's library: not there"):
        grouped_gemm(case.a, offsets=case.offsets, b_ptrs=np.zeros(2, np.int64), n=8)


# --- library and manifest ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name in ("LIBRARY", "MANIFEST"):
        path = tmp_path / getattr(library, name).name
        path.write_text("{}")
        monkeypatch.setattr(library, name, path)
    return tmp_path


def registered():
    return library.registered.__wrapped__()  # without the cache


def test_missing_library_is_explained(files):
    library.LIBRARY.unlink()
    assert "libjax_grouped_gemm.so is not in" in registered()
    assert "make build" in registered()


def test_broken_library_is_explained(files):
    library.MANIFEST.write_text('{"build_id": "mine"}')
    library.load.cache_clear()
    library.manifest.cache_clear()
    try:
        assert "libjax_grouped_gemm.so could not be loaded" in registered()
    finally:
        library.load.cache_clear()
        library.manifest.cache_clear()


@pytest.mark.parametrize("text", ['{"build_id": ', "{}", "[]", "1"])
def test_damaged_manifest_is_explained(files, text):
    library.MANIFEST.write_text(text)
    library.manifest.cache_clear()
    try:
        assert "manifest.json could not be loaded: " in registered()
        with pytest.raises(RuntimeError, match="run `make build` again or reinstall the package"):
            library.manifest()
    finally:
        library.manifest.cache_clear()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"manifest_id": "other"}, "built as mine but manifest.json describes other"),
        ({"runtime": (0, 2)}, r"jaxlib has XLA FFI API 0.2 but the library was built against 0.3"),
        ({"runtime": (1, 3)}, r"jaxlib has XLA FFI API 1.3 but the library was built against 0.3"),
    ],
)
def test_mismatch_is_refused(files, monkeypatch, found, message):
    found = {"manifest_id": "mine", "runtime": (0, 3)} | found
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "build_id", lambda loaded: "mine")
    monkeypatch.setattr(library, "api_version", lambda loaded: (0, 3))
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": found["manifest_id"]})
    monkeypatch.setattr(library, "runtime_api_version", lambda: found["runtime"])
    assert message in registered()


@pytest.mark.parametrize("runtime", [(0, 3), (0, 4), None])
def test_same_or_newer_runtime_is_accepted(runtime):
    assert library.mismatch("mine", "mine", (0, 3), runtime) is None


def test_runtime_api_version_is_found():
    major, minor = library.runtime_api_version()
    assert major == 0
    assert minor >= 1


@needs_library
def test_built_library_is_registered():
    assert library.registered() is None
    assert library.build_id(library.load()) == library.manifest()["build_id"]
    assert isinstance(library.load(), ctypes.CDLL)


# --- which implementation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "arch"),
    [("9.0", 90), ("10.0", 100), ("10.3", 100), ("8.0", None), ("9.1", None), ("10.1", None), ("12.0", None)],
)
def test_architecture(capability, arch):
    assert ffi_call.architecture(capability) == arch


def test_unsupported_gpu_falls_back_and_says_so_once(case, monkeypatch, caplog):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: ("8.0",))
    log.once.cache_clear()
    with caplog.at_level(logging.WARNING, "jax_grouped_gemm"):
        for _ in range(2):
            lowered = jax.jit(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets)).trace(
                case.a, case.b, case.offsets
            )
            assert library.FORWARD not in lowered.lower(lowering_platforms=("cuda",)).as_text()
    (record,) = caplog.records
    assert "compute capability 9.0 (Hopper), 10.0 and 10.3 (Blackwell); found 8.0" in record.message


def test_version_is_public():
    assert jax_grouped_gemm.__version__
    names = {"grouped_gemm_jax_sm100", "grouped_gemm_wrapper_sm100", "GroupedGemmSm100"}
    names |= {"grouped_gemm_wrapper", "GroupedGemm", "TupleDict"}
    names |= {"grouped_gemm_wgrad_jax_sm100", "grouped_gemm_wgrad_wrapper", "grouped_gemm_wgrad_wrapper_sm100"}
    names |= {"grouped_gemm", "grouped_gemm_wgrad", "ragged_dot", "ragged_dot_general", "accelerate"}
    names |= {"tune", "use_tuned", "Tuned"}
    assert set(jax_grouped_gemm.__all__) == {"__version__"} | names


def test_the_docstring_examples(capsys):
    import doctest

    from jax_grouped_gemm import api

    assert doctest.testmod(api).failed == 0

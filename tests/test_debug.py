"""The debug switch: offsets of traced programs, checked where they run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jax_grouped_gemm import contract, debug, ffi_call, grouped_gemm, grouped_gemm_wrapper, library

M = 64
A, B = np.ones((M, 8), oracle.BF16), np.ones((4, 8, 8), oracle.BF16)
BAD = {
    "decreasing": (
        {"offsets": [10, 30, 20, 40]},
        "offsets must be non-decreasing ends of groups within [0, M = a.shape[0] = 64]; "
        "got offsets[2] = 20 after 30; if these are sizes, pass group_sizes=",
    ),
    "negative end": ({"offsets": [-1, 0, 0, 0]}, "got offsets[0] = -1 after 0"),
    "past M": ({"offsets": [0, 0, 65, 3]}, "got offsets[2] = 65 after 0"),
    "negative size": (
        {"group_sizes": [1, -1, 0, 0]},
        "group_sizes must be non-negative with a sum of at most M = a.shape[0] = 64; "
        "got group_sizes[1] = -1, a sum of 0 so far; if these are ends, pass offsets=",
    ),
    "sizes past 2^31": ({"group_sizes": [0, 2**31 - 1, 2**31 - 1, 2]}, "got group_sizes[1] = 2147483647"),
}
GOOD = {"offsets": [0, 10, 10, 64], "group_sizes": [0, 10, 0, 54]}
every_bad = pytest.mark.parametrize(("groups", "message"), BAD.values(), ids=BAD)


@pytest.fixture
def switched_on(monkeypatch):
    monkeypatch.setenv(debug.SWITCH, "1")


def call(name, **options):
    return lambda groups: grouped_gemm(A, B, **{name: groups}, **options)


def int32(values):
    return jnp.asarray(values, jnp.int32)


def fails(run, message, *arguments):
    """The program fails with the message, and neither before it nor after is anything wrong with a good call."""
    with pytest.raises(RuntimeError, match=re.escape(message)) as error:
        jax.block_until_ready(run(*arguments))
    assert isinstance(error.value, jax.errors.JaxRuntimeError)


@every_bad
def test_a_bad_entry_fails_the_call(switched_on, groups, message):
    ((name, bad),) = groups.items()
    run = jax.jit(call(name))
    want = call(name)(int32(GOOD[name]))
    for _ in range(2):
        np.testing.assert_array_equal(run(int32(GOOD[name])), want)
        fails(run, message, int32(bad))


@every_bad
def test_the_text_is_that_of_the_eager_error(switched_on, groups, message):
    ((name, bad),) = groups.items()
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call(name)(int32(bad))
    fails(jax.jit(call(name)), str(error.value), int32(bad))


@every_bad
def test_inside_loops(switched_on, groups, message):
    ((name, bad),) = groups.items()
    good = GOOD[name]
    run = call(name, d_dtype="float32")

    def scan(each):
        return jax.lax.scan(lambda total, x: (total + run(x), None), jnp.zeros((M, 8)), each)[0]

    def fori_loop(each):
        return jax.lax.fori_loop(0, len(each), lambda i, total: total + run(each[i]), jnp.zeros((M, 8)))

    for loop in map(jax.jit, (scan, fori_loop)):
        np.testing.assert_array_equal(loop(int32([good] * 3)), 3 * np.asarray(run(int32(good))))
        fails(loop, message, int32([good, bad, good]))


@pytest.mark.parametrize("weights", ["tuple", pytest.param("pointers", marks=pytest.mark.skipif(not library.LIBRARY.exists(), reason="the library is not built (make build)"))])  # fmt: skip
def test_other_weights(switched_on, weights):
    addresses = np.array([w.ctypes.data for w in B], np.int64).view(np.uint8)
    b = {"b": tuple(B)} if weights == "tuple" else {"b_ptrs": jnp.asarray(addresses), "n": 8}
    run = jax.jit(lambda offsets: grouped_gemm(A, **b, offsets=offsets, generate_c=True))
    jax.block_until_ready(run(int32(GOOD["offsets"])))
    fails(run, "got offsets[1] = 3 after 5", int32([5, 3, 8, 9]))


@pytest.mark.parametrize("unused", ["result", "extents"])
def test_the_check_is_not_dropped(switched_on, unused):
    """Where D is not used, or has no elements, the offsets are wrong all the same."""
    a = A if unused == "result" else A[:, :0]
    b = B if unused == "result" else B[:, :, :0]

    def program(offsets):
        d = grouped_gemm(a, b, offsets=offsets)
        return offsets + 1 if unused == "result" else d

    fails(jax.jit(program), "got offsets[1] = 3 after 5", int32([5, 3, 8, 9]))


@given(
    entries=st.lists(st.integers(-3, 40) | st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4),
    by_size=st.booleans(),
)
@example(entries=[2**31 - 1] * 4, by_size=True)
@example(entries=[16, 16, 16, 16], by_size=True)
@example(entries=[16, 16, 16, 17], by_size=True)
@example(entries=[0, 64, 64, 64], by_size=False)
@example(entries=[0, 64, 64, 65], by_size=False)
def test_the_device_decides_as_the_host(entries, by_size):
    check = contract.check_group_sizes if by_size else contract.check_offsets
    try:
        check(entries, M)
        bad = False
    except ValueError:
        bad = True
    assert bool(jax.jit(lambda x: debug._any_bad(check, x, M))(int32(entries))) == bad


@pytest.mark.parametrize("name", GOOD)
def test_off_it_costs_nothing(monkeypatch, name):
    def jaxpr():
        return str(jax.make_jaxpr(call(name))(int32(GOOD[name])))

    monkeypatch.delenv(debug.SWITCH, raising=False)
    unset = jaxpr()
    assert "callback" not in unset
    assert "while" not in unset
    for value, same in (("0", True), ("", True), ("1", False)):
        monkeypatch.setenv(debug.SWITCH, value)
        assert (jaxpr() == unset) is same
    assert "io_callback" in jaxpr()


def test_it_is_read_at_each_trace(monkeypatch):
    run = jax.jit(call("offsets"))
    run(int32(GOOD["offsets"]))
    monkeypatch.setenv(debug.SWITCH, "1")
    jax.block_until_ready(run(int32([5, 3, 8, 9])))  # traced before
    fails(jax.jit(call("offsets")), "got offsets[1] = 3 after 5", int32([5, 3, 8, 9]))


def test_through_the_documents_names(monkeypatch):
    """Their program is traced once for the same shapes, whatever program it is part of: with and without the switch."""
    addresses = jnp.asarray(np.array([w.ctypes.data for w in B], np.int64).view(np.uint8))
    operands = {"a_tensor": jnp.asarray(A)[:, :, None], "alpha_tensor": jnp.ones(4), "prob_tensor": jnp.ones((M, 1, 1))}
    weights = {"b_ptrs": addresses, "n": 8, "b_dtype": "bfloat16"}

    def program():
        return jax.jit(
            lambda ends: grouped_gemm_wrapper(padded_offsets=ends, **operands, **weights, m_aligned=1).d_tensor
        )

    bad = int32([5, 3, 8, 9])
    jax.block_until_ready(program()(bad))
    monkeypatch.setenv(debug.SWITCH, "1")
    fails(program(), "got offsets[1] = 3 after 5", bad)
    monkeypatch.delenv(debug.SWITCH)
    jax.block_until_ready(program()(bad))


def test_eager_calls_are_checked_by_the_host_alone(switched_on, monkeypatch):
    monkeypatch.setattr(debug, "checked", None)
    call("offsets")(int32(GOOD["offsets"]))


def test_the_call_gets_what_was_checked(switched_on):
    """So no implementation can start before the check, whatever is lowered."""
    equations = jax.make_jaxpr(call("offsets"))(int32(GOOD["offsets"])).jaxpr.eqns
    (check,) = (equation for equation in equations if equation.primitive.name == "while")
    (product,) = (equation for equation in equations if equation.primitive is ffi_call.grouped_gemm_p)
    assert product.invars[1] is check.outvars[1]


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this JAX has shard_map elsewhere")
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", GOOD)
def test_in_a_shard_map(switched_on, name, check_vma):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
    axis = jax.sharding.PartitionSpec("x")

    run = jax.jit(jax.shard_map(call(name), mesh=mesh, in_specs=axis, out_specs=axis, check_vma=check_vma))
    jax.block_until_ready(run(int32(GOOD[name])))
    fails(run, f"got {name}[0] = -1", int32([-1, 0, 0, 0]))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["reference", "cutedsl"])
@every_bad
def test_on_a_gpu(switched_on, groups, message, implementation):
    ((name, bad),) = groups.items()
    run = jax.jit(call(name, implementation=implementation, d_dtype="float32"))
    loop = jax.jit(lambda each: jax.lax.scan(lambda d, x: (d + run(x), None), jnp.zeros((M, 8)), each)[0])
    for _ in range(3):
        good = jax.block_until_ready(run(int32(GOOD[name])))
        fails(run, message, int32(bad))
        np.testing.assert_array_equal(loop(int32([GOOD[name]] * 3)), 3 * np.asarray(good))
        fails(loop, message, int32([GOOD[name], bad, GOOD[name]]))
    # What is left of the last failure, JAX would report at exit; the next good call takes its place.
    np.testing.assert_array_equal(run(int32(GOOD[name])), good)

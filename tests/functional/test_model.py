"""The model's rules, one by one: a program that keeps a rule ends well, its neighbour that breaks it does not."""

import device
import numpy as np
import ptx
import pytest
from ptx import CLUSTER_SYNC, fault, fill, program, run, store_lanes, wait

OUT = np.zeros(32, np.uint32)
UNORDERED = ("race", "uninitialized")  # a read without order finds a write that it does not follow, or none yet
POLICIES = ("random", "eager", "lazy", "hold_loads", "hold_stores", "hold_matrix", "starve0")


# --- lanes ------------------------------------------------------------------------------------------------------------

A = np.array([0, 1, 2, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF, 0xFFFF], np.uint64)
SIGNED = A.astype(np.uint32).view(np.int32).astype(np.int64)


def wrapped(values, bits=32):
    return np.array([int(v) & ((1 << bits) - 1) for v in values], np.uint64)


# instruction, and what it computes of a and b, given as signed and as unsigned numbers
BINARY = {
    "add.s32 %r3, %r1, %r2": lambda s, t, u, v: wrapped(s + t),
    "sub.s32 %r3, %r1, %r2": lambda s, t, u, v: wrapped(s - t),
    "mul.lo.s32 %r3, %r1, %r2": lambda s, t, u, v: wrapped(int(x) * int(y) for x, y in zip(s, t, strict=True)),
    "mul.hi.s32 %r3, %r1, %r2": lambda s, t, u, v: wrapped(int(x) * int(y) >> 32 for x, y in zip(s, t, strict=True)),
    "min.s32 %r3, %r1, %r2": lambda s, t, u, v: wrapped(np.minimum(s, t)),
    "max.s32 %r3, %r1, %r2": lambda s, t, u, v: wrapped(np.maximum(s, t)),
    "and.b32 %r3, %r1, %r2": lambda s, t, u, v: u & v,
    "or.b32 %r3, %r1, %r2": lambda s, t, u, v: u | v,
    "xor.b32 %r3, %r1, %r2": lambda s, t, u, v: u ^ v,
    "not.b32 %r3, %r1": lambda s, t, u, v: wrapped(~s),
    "neg.s32 %r3, %r1": lambda s, t, u, v: wrapped(-s),
    "popc.b32 %r3, %r1": lambda s, t, u, v: np.array([bin(int(x)).count("1") for x in u], np.uint64),
    # Amounts are clamped to the width, not taken modulo it.
    "shl.b32 %r3, %r1, %r2": lambda s, t, u, v: wrapped(int(x) << min(int(n), 32) for x, n in zip(u, v, strict=True)),
    "shr.u32 %r3, %r1, %r2": lambda s, t, u, v: wrapped(int(x) >> min(int(n), 32) for x, n in zip(u, v, strict=True)),
    "shr.s32 %r3, %r1, %r2": lambda s, t, u, v: wrapped(int(x) >> min(int(n), 32) for x, n in zip(s, v, strict=True)),
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1": lambda s, t, u, v: (s < t).astype(np.uint64),
    "setp.ge.s32 %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1": lambda s, t, u, v: (s >= t).astype(np.uint64),
    "setp.lt.u32 %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1": lambda s, t, u, v: (u < v).astype(np.uint64),
    "setp.gt.u32 %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1": lambda s, t, u, v: (u > v).astype(np.uint64),
    "setp.eq.b32 %p1, %r1, %r2; not.pred %p2, %p1; selp.b32 %r3, 7, 9, %p2": lambda s, t, u, v: np.where(u != v, 7, 9),
    "cvt.u16.u32 %h1, %r1; mov.b32 %r3, {%h1, %h1}": lambda s, t, u, v: (u & 0xFFFF) * 0x10001,
    "mul.wide.s32 %d1, %r1, %r2; mov.b64 {_, %r3}, %d1": lambda s, t, u, v: wrapped(
        int(x) * int(y) >> 32 for x, y in zip(s, t, strict=True)
    ),
    "cvt.s64.s32 %d1, %r1; mov.b64 {_, %r3}, %d1": lambda s, t, u, v: wrapped(s >> 32),
    "cvt.u64.u32 %d1, %r1; mov.b64 {_, %r3}, %d1": lambda s, t, u, v: wrapped(u >> np.uint64(32)),
    "mad.lo.s32 %r3, %r1, %r2, %r1": lambda s, t, u, v: wrapped(
        int(x) * int(y) + int(x) for x, y in zip(s, t, strict=True)
    ),
}


@pytest.mark.parametrize("instruction", BINARY)
def test_integer(instruction, rng):
    a, b = rng.integers(0, len(A), (2, 32))
    load = """
        shl.b32 %r10, %r0, 2; cvt.u64.u32 %d10, %r10;
        ld.param.b64 %d11, [a]; add.s64 %d11, %d11, %d10; ld.global.b32 %r1, [%d11];
        ld.param.b64 %d12, [b]; add.s64 %d12, %d12, %d10; ld.global.b32 %r2, [%d12];"""
    text = program(f"{load} {instruction}; {store_lanes('%r3')}", ("out", "a", "b"))
    got = run(text, OUT, inputs=(A[a].astype(np.uint32), A[b].astype(np.uint32)))
    want = BINARY[instruction](SIGNED[a], SIGNED[b], A[a], A[b])
    np.testing.assert_array_equal(got, np.asarray(want).astype(np.uint64).astype(np.uint32))


def test_division_truncates_and_refuses_zero():
    body = "sub.s32 %r1, %r0, 16; div.s32 %r2, %r1, {}; " + store_lanes("%r2")
    got = run(program(fill(body, 3)), OUT).view(np.int32)
    np.testing.assert_array_equal(got, np.trunc((np.arange(32) - 16) / 3).astype(np.int32))
    assert fault(program(fill(body, 0)), OUT) == "bounds"


def test_float_conversions(rng):
    """To 16 bits as NumPy and ml_dtypes round, whatever the number; the first source is the upper half."""
    import ml_dtypes

    special = np.array([0, -0.0, 1e-40, 6e-8, 2.9e-8, 65504, 65519, 65520, 1e38, np.inf, -np.inf, 3e-5], np.float32)
    values = np.concatenate([special, (rng.standard_normal(20) * 10.0 ** rng.integers(-9, 9, 20)).astype(np.float32)])
    load = """shl.b32 %r10, %r0, 2; cvt.u64.u32 %d10, %r10; ld.param.b64 %d11, [a]; add.s64 %d11, %d11, %d10;
        ld.global.b32 %r1, [%d11]; mov.b32 %r2, 0f3f800000;"""
    for kind, dtype in (("bf16x2", ml_dtypes.bfloat16), ("f16x2", np.float16)):
        text = program(f"{load} cvt.rn.{kind}.f32 %r3, %r1, %r2; {store_lanes('%r3')}", ("out", "a"))
        got = run(text, OUT, inputs=(values,))
        with np.errstate(over="ignore"):
            want = values.astype(dtype).view(np.uint16)
        np.testing.assert_array_equal(got >> 16, want)
        np.testing.assert_array_equal(got & 0xFFFF, np.full(32, 1, dtype).view(np.uint16))


def test_pairs_of_floats(rng):
    """Each half by itself, also where one is a NaN or overflows."""
    a, b = np.array([[3e38, np.nan], [1.5, -0.0]], np.float32), np.array([[2, 1], [1 / 3, 5]], np.float32)
    text = program(
        "and.b32 %r1, %r0, 1; mul.wide.u32 %d10, %r1, 8; ld.param.b64 %d11, [a]; add.s64 %d11, %d11, %d10; ld.global.b64 %d1, [%d11];"
        "ld.param.b64 %d11, [b]; add.s64 %d11, %d11, %d10; ld.global.b64 %d2, [%d11]; mul.rn.f32x2 %d3, %d1, %d2;"
        + store_lanes("%d3", 64),
        ("out", "a", "b"), target="sm_100a",
    )  # fmt: skip
    got = run(text, np.zeros(32, np.uint64), inputs=(a, b)).view(np.float32).reshape(16, 2, 2)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, np.broadcast_to(a * b, got.shape))
    assert np.signbit(got[0, 1, 1])


def test_divergence_and_meeting_again():
    text = program(
        "and.b32 %r1, %r0, 3; setp.eq.b32 %p1, %r1, 1; @%p1 bra ONE; mov.b32 %r2, 5; bra END; ONE: mov.b32 %r2, 9; END: "
        "bar.warp.sync -1; shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1; vote.sync.ballot.b32 %r4, %p1, -1; add.s32 %r3, %r3, %r4;"
        + store_lanes("%r3")
    )
    one = np.arange(32) % 4 == 1
    want = np.where(one, 9, 5)[np.arange(32) ^ 1] + sum(1 << i for i in range(1, 32, 4))
    np.testing.assert_array_equal(run(text, OUT), want.astype(np.uint32))


def test_shuffle_up_keeps_the_lowest_lanes():
    text = program("shfl.sync.up.b32 %r2|%p1, %r0, 4, 0, -1; @!%p1 mov.b32 %r2, 77;" + store_lanes("%r2"))
    np.testing.assert_array_equal(run(text, OUT), np.where(np.arange(32) < 4, 77, np.arange(32) - 4))


def test_elect_picks_one_lane_the_same_every_time():
    text = program(
        "elect.sync _|%p1, -1; elect.sync _|%p2, -1; selp.b32 %r1, 1, 0, %p1; @%p2 add.s32 %r1, %r1, 1;"
        + store_lanes("%r1")
    )
    leaders = {
        int(np.flatnonzero(got)[0]) for seed in range(8) if sorted(got := run(text, OUT, seed=seed)) == [0] * 31 + [2]
    }
    assert len(leaders) > 1  # of different runs, others


def test_unknown_is_an_error():
    for statement in (
        "vadd.u32.u32.u32 %r1, %r1, %r1;",
        "add.f64 %d1, %d1, %d1;",
        "ld.shared.relaxed.gpu.b32 %r1, [smem];",
        "mov.b128 %d1, %d0;",
        "add.s32 %r1, %r0, %r0, %r0;",
        "bar.sync 1, 32, 7;",
        "mov.b64 {%h1, %h1, %h1}, %d0;",
        "ld.global.v16.b8 {" + ", ".join(["%h1"] * 16) + "}, [%d0];",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v8.b32 [%r0], {" + ", ".join(["%r0"] * 8) + "}, [%r0];",
        "mov.b64 %d1, 0d3FF0000000000000;",
        "add.s32 %r1, %r0, 12abc;",
        "ld.shared.b32 %r1, [%r0+%r0];",
    ):
        assert fault(program(statement), OUT) == "unknown"


def test_signed_loads_are_extended():
    text = program(
        "mov.b32 %r1, 0xff80; setp.eq.b32 %p1, %r0, 0; @%p1 st.global.b32 [%d0], %r1; bar.warp.sync -1; ld.global.s8 %r2, [%d0];"
        "ld.global.s16 %r3, [%d0]; bar.warp.sync -1; add.s32 %r3, %r3, %r2;" + store_lanes("%r3")
    )
    np.testing.assert_array_equal(run(text, OUT).view(np.int32), -256)


def test_empty_statements():
    assert fault(program("; {;} ;" + store_lanes("%r0") + ";"), OUT) is None


def test_uninitialized_registers():
    assert fault(program(store_lanes("%r5")), OUT) == "uninitialized"
    partly = "setp.lt.s32 %p1, %r0, 4; @%p1 mov.b32 %r5, 1; {} " + store_lanes("%r5")
    assert fault(program(fill(partly, "")), OUT) == "uninitialized"
    assert fault(program(fill(partly, "@!%p1 mov.b32 %r5, 2;")), OUT) is None


# --- memory -----------------------------------------------------------------------------------------------------------

AT = "mov.b32 %r9, smem; shl.b32 %r8, %r0, 2; add.s32 %r8, %r8, %r9;"  # %r9: shared memory; %r8: the thread's word


def test_bounds_alignment_and_unwritten_memory():
    assert (
        fault(program(AT + "st.shared.b32 [%r8], %r0; ld.shared.b32 %r1, [%r8];" + store_lanes("%r1")), OUT, shared=128)
        is None
    )
    assert fault(program(AT + "st.shared.b32 [%r8+4], %r0;"), OUT, shared=128) == "bounds"
    assert fault(program(AT + "st.shared.v2.b32 [%r8], {%r0, %r0};"), OUT, shared=256) == "alignment"
    assert fault(program(AT + "ld.shared.b32 %r1, [%r8];"), OUT, shared=128) == "uninitialized"
    assert fault(program("ld.global.b32 %r1, [%d0];"), OUT) == "uninitialized"
    assert fault(program("ld.global.b32 %r1, [%d0+128];"), OUT) == "bounds"
    assert fault(program("st.global.b32 [%d0+-4], %r0;"), OUT) == "bounds"
    read_only = program("ld.param.b64 %d1, [a]; setp.eq.b32 %p1, %r0, 0; @%p1 st.global.b32 [%d1], %r0;", ("out", "a"))
    assert fault(read_only, OUT, inputs=(OUT,)) == "bounds"


def test_widened_loads_may_skip_bytes():
    body = (
        AT
        + "setp.eq.b32 %p1, %r0, 0; @%p1 st.shared.b32 [%r9], %r0; bar.warp.sync -1; {} ld.shared.v2.b32 {%r1, %r2}, [%r9];"
        + store_lanes("%r1")
    )
    assert fault(program(fill(body, "")), OUT, shared=128) == "uninitialized"
    assert fault(program(fill(body, '.pragma "used_bytes_mask 0xf";')), OUT, shared=128) is None


def test_atomics():
    text = program("setp.eq.b32 %p1, %r0, 0; @%p1 st.global.b32 [%d0], %r0; {} atom.global.add.u32 %r1, [%d0], 1;")
    assert fault(text.replace("{}", "bar.warp.sync -1;"), OUT) == "unwritten"  # of out, the rest
    assert fault(text.replace("{}", ""), OUT) == "race"
    mixed = "mov.b32 %r1, 0; st.global.b32 [%d0], %r1;"
    assert fault(program(mixed), OUT) == "race"  # 32 lanes, one word


# --- who knows of what ------------------------------------------------------------------------------------------------

EXCHANGE = AT + "st.shared.b32 [%r8], %r0; {} xor.b32 %r1, %r8, 4; ld.shared.b32 %r2, [%r1];" + store_lanes("%r2")


@pytest.mark.parametrize("policy", POLICIES)
def test_warp_barrier_orders_memory_and_shuffle_does_not(policy):
    assert fault(program(fill(EXCHANGE, "bar.warp.sync -1;")), OUT, shared=128, policy=policy) is None
    assert fault(program(fill(EXCHANGE, "")), OUT, shared=128, policy=policy) == "race"
    shuffle = "shfl.sync.idx.b32 %r5, %r0, 0, 31, -1;"
    assert fault(program(fill(EXCHANGE, shuffle)), OUT, shared=128, policy=policy) == "race"


def test_named_barriers():
    other_warp = (
        AT + "st.shared.b32 [%r8], %r0; {} xor.b32 %r1, %r8, 128; ld.shared.b32 %r2, [%r1];" + store_lanes("%r2")
    )
    out = np.zeros(64, np.uint32)
    options = {"threads": 64, "shared": 256}
    np.testing.assert_array_equal(
        run(program(fill(other_warp, "bar.sync 3, 64;"), threads=64), out, **options), np.arange(64) ^ 32
    )
    assert fault(program(fill(other_warp, "bar.sync 0;"), threads=64), out, **options) is None
    assert fault(program(fill(other_warp, ""), threads=64), out, **options) in UNORDERED
    assert fault(program(fill(other_warp, "bar.sync 3, 32;"), threads=64), out, **options) in UNORDERED
    assert fault(program(fill(other_warp, "bar.sync 3, 96;"), threads=64), out, **options) == "deadlock"
    assert fault(program(fill(other_warp, "bar.sync 3, 40;"), threads=64), out, **options) == "barrier"
    assert fault(program(fill(other_warp, "bar.sync 16, 64;"), threads=64), out, **options) == "barrier"
    unequal = "setp.lt.s32 %p1, %r0, 32; selp.b32 %r3, 64, 96, %p1; bar.sync 1, %r3;"
    assert fault(program(unequal, threads=64), out, **options) == "barrier"


def test_arrivals_at_a_named_barrier():
    """bar.arrive passes on what the warp did, and learns nothing: the consumer's answer needs another barrier."""
    out = np.zeros(32, np.uint32)
    options = {"threads": 64, "shared": 256}
    body = AT + "setp.lt.s32 %p1, %r0, 32; @%p1 bra GIVE; {} ld.shared.b32 %r2, [%r8+-128]; sub.s32 %r0, %r0, 32;"
    body += store_lanes("%r2") + "{} ret; GIVE: st.shared.b32 [%r8], %r0; {}"
    arrive, sync, answer = "bar.arrive 3, 64;", "bar.sync 3, 64;", "bar.sync 4, 64;"
    again = "st.shared.b32 [%r8], %r0;"
    good = program(fill(body, sync, "bar.arrive 4, 64;", arrive + answer + again), threads=64)
    for policy in POLICIES:
        np.testing.assert_array_equal(run(good, out, policy=policy, **options), np.arange(32))

    def kind(*parts):
        return fault(program(fill(body, *parts), threads=64), out, **options)

    assert kind(sync, "", arrive + again) == "race"  # reads and writes in no order
    assert kind(arrive, "", arrive) in UNORDERED  # both arrive, nobody waits
    assert kind(sync, "", "bar.arrive 3, 96;") == "barrier"
    assert kind("bar.sync 3, 96;", "", "bar.arrive 3, 96;") == "deadlock"
    assert kind(sync, "", "bar.arrive 3;") == "unknown"  # how many wait is for it to say


def test_deadlock_says_who_waits_for_what():
    text = program(
        AT + "setp.eq.b32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r9], 3; bar.warp.sync -1;" + wait("%r9", 0)
    )
    with pytest.raises(device.Fault, match="deadlock") as found:
        run(text, OUT, shared=128)
    assert "warp 0" in str(found.value)
    assert "mbarrier at byte 0, phase 0: 3 of 3 arrivals missing" in str(found.value)


def test_warps_of_a_named_barrier_learn_of_its_own_generation():
    """Warps 0 and 1 meet at barrier 1, then warps 1 and 2: what warp 1 did in between, warp 0 does not know of."""
    body = (
        AT
        + """shr.u32 %r5, %r0, 5; setp.eq.b32 %p1, %r5, 0; setp.eq.b32 %p2, %r0, 32; setp.eq.b32 %p3, %r5, 1;
        @%p1 bra FIRST; @%p3 bra SECOND; bar.sync 2, 64; bar.sync 1, 64; bra END;
        SECOND: @%p2 st.shared.b32 [%r9], %r0; bar.sync 1, 64; {}
        bar.sync 2, 64; bar.sync 1, 64; bra END;
        FIRST: bar.sync 1, 64; ld.shared.b32 %r1, [%r9]; END: """
        + store_lanes("%r0")
    )
    again = program(fill(body, "@%p2 st.shared.b32 [%r9], %r0;"), threads=96)
    options = {"threads": 96, "shared": 128}
    out = np.zeros(96, np.uint32)
    assert fault(program(fill(body, ""), threads=96), out, **options) is None
    assert {fault(again, out, seed=seed, **options) for seed in range(40)} == {"race"}


# --- mbarriers --------------------------------------------------------------------------------------------------------

INIT = (
    AT + "setp.eq.b32 %p1, %r0, 0; setp.eq.b32 %p2, %r0, 1; @%p1 mbarrier.init.shared.b64 [%r9], {}; bar.warp.sync -1;"
)


def barrier_fault(body, count=1, **options):
    return fault(program(fill(INIT, count) + body), OUT, shared=256, **options)


def test_mbarrier_phases():
    arrive = "@%p1 mbarrier.arrive.shared.b64 _, [%r9];"
    done = store_lanes("%r0")
    assert barrier_fault(arrive + wait("%r9", 0) + done) is None
    # A fresh barrier has as good as finished a phase of parity 1, and not one of parity 0.
    assert barrier_fault(wait("%r9", 1) + done) is None
    assert barrier_fault(wait("%r9", 0) + done) == "deadlock"
    assert barrier_fault(arrive + wait("%r9", 0) + arrive + wait("%r9", 1) + done) is None
    assert barrier_fault(arrive + wait("%r9", 0) + wait("%r9", 1) + done) == "deadlock"
    # Somebody sees each phase complete before the next arrival.
    assert barrier_fault(arrive + arrive + done) == "barrier"
    assert barrier_fault("@%p1 mbarrier.arrive.shared.b64 _, [%r9], 2;" + done) == "barrier"
    assert barrier_fault("@%p1 mbarrier.arrive.shared.b64 _, [%r9], 2;" + wait("%r9", 0) + done, count=2) is None
    assert barrier_fault("mbarrier.arrive.shared.b64 _, [%r9];" + wait("%r9", 0) + done, count=32) is None
    assert barrier_fault(wait("%r9", 2)) == "barrier"
    assert barrier_fault(done, count=0) == barrier_fault(done, count=1 << 20) == "barrier"


def test_mbarrier_counts_bytes():
    arrive = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 64;"
    assert barrier_fault(arrive + wait("%r9", 0)) == "deadlock"


def test_mbarrier_orders_memory():
    body = (
        fill(INIT, 1)
        + "@%p1 st.shared.b32 [%r9+16], %r0; {} @%p1 mbarrier.arrive.shared.b64 _, [%r9]; {}"
        + wait("%r9", 0)
        + "ld.shared.b32 %r2, [%r9+16];"
        + store_lanes("%r2")
    )
    assert fault(program(fill(body, "", "")), OUT, shared=256) is None
    late = fill(body, "", "@%p1 st.shared.b32 [%r9+16], %r0;")
    assert fault(program(late), OUT, shared=256) == "race"
    by_another = fill(body, "@%p2 st.shared.b32 [%r9+16], %r0;", "").replace("@%p1 st.shared.b32 [%r9+16], %r0;", "", 1)
    assert fault(program(by_another), OUT, shared=256) == "race"


def test_mbarrier_memory_is_its_own():
    assert fault(program(AT + wait("%r9", 1)), OUT, shared=128) == "barrier"  # never initialized
    assert barrier_fault("@%p1 mbarrier.init.shared.b64 [%r9], 1;") == "barrier"  # live
    assert barrier_fault("@%p1 ld.shared.b32 %r1, [%r9+4];") == "barrier"
    assert barrier_fault("@%p1 st.shared.b32 [%r9], %r0;") == "barrier"
    assert barrier_fault("@%p1 mbarrier.init.shared.b64 [%r9+12], 1;") == "alignment"
    unordered = fill(INIT.replace("bar.warp.sync -1;", ""), 1) + "@%p2 mbarrier.arrive.shared.b64 _, [%r9];"
    assert fault(program(unordered), OUT, shared=128) == "barrier"


def test_a_lane_that_lags_can_miss_a_phase():
    """A wait names only a parity: lanes of a warp need not pass it together, and one that is two phases late waits for ever."""
    body = (
        fill(INIT, 1)
        + wait("%r9", 1)
        + "{}@%p1 mbarrier.arrive.shared.b64 _, [%r9];"
        + f"@!%p1 bra END; {wait('%r9', 0).replace('L', 'M').replace('D', 'E')} END: {store_lanes('%r0')}"
    )
    assert {fault(program(fill(body, "")), OUT, shared=128, seed=seed) for seed in range(60)} == {None, "deadlock"}
    assert {fault(program(fill(body, "bar.warp.sync -1;")), OUT, shared=128, seed=seed) for seed in range(60)} == {None}


# --- clusters ---------------------------------------------------------------------------------------------------------

PEER = (
    AT
    + "mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1; mapa.shared::cluster.u32 %r22, %r9, %r21; setp.eq.b32 %p1, %r0, 0;"
)
CLUSTER = {"ctas": 2, "cluster": 2, "shared": 256}
OUT2 = np.zeros(32, np.uint32)


def test_cluster_barrier_and_remote_arrival():
    body = (
        PEER
        + "@%p1 mbarrier.init.shared.b64 [%r9], 1; {} {} @%p1 mbarrier.arrive.shared::cluster.b64 _, [%r22];"
        + wait("%r9", 0)
    )
    end = "setp.eq.b32 %p3, %r20, 0; @!%p3 bra END;" + store_lanes("%r0") + " END: {}"

    def kind(fence, sync, last="bar.warp.sync -1;"):
        return fault(program(fill(body, fence, sync) + fill(end, last)), OUT2, **CLUSTER)

    relaxed = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    assert kind("", CLUSTER_SYNC) is None
    assert kind("fence.mbarrier_init.release.cluster;", relaxed) is None
    assert kind("", relaxed) == "barrier"
    assert kind("fence.mbarrier_init.release.cluster;", "") in ("barrier", "bounds")
    assert kind("", "barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;") == "barrier"
    assert kind("", "barrier.cluster.wait;") == "barrier"


def test_every_wait_at_the_clusters_barrier_has_its_arrive():
    end = "setp.eq.b32 %p3, %r20, 0; @!%p3 bra END;" + store_lanes("%r0") + " END:"
    assert fault(program(PEER + CLUSTER_SYNC + CLUSTER_SYNC + end), OUT2, **CLUSTER) is None
    assert fault(program(PEER + CLUSTER_SYNC + "barrier.cluster.wait;" + end), OUT2, **CLUSTER) == "barrier"


def test_a_cta_outlives_who_writes_to_it():
    """An arrival that the other CTA has not waited for may come when it is gone."""
    body = (
        PEER + "@%p1 mbarrier.init.shared.b64 [%r9], 1;" + CLUSTER_SYNC
        + "setp.eq.b32 %p3, %r20, 0; and.pred %p4, %p1, %p3; @%p4 mbarrier.arrive.shared::cluster.b64 _, [%r22]; {}"
        + "@!%p3 bra END;" + store_lanes("%r0") + " END:"
    )  # fmt: skip
    waits = f"@%p3 bra GO; {wait('%r9', 0)} GO:"
    assert fault(program(fill(body, waits)), OUT2, **CLUSTER) is None
    assert fault(program(fill(body, "")), OUT2, **CLUSTER) in ("race", "bounds")


def test_st_async_completes_at_the_peers_barrier():
    body = (
        PEER + "add.s32 %r23, %r22, 16; @%p1 mbarrier.init.shared.b64 [%r9], 1;" + CLUSTER_SYNC
        + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], {};"
        + "@%p1 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r23], %r20, [%r22]; {}"
        + "ld.shared.b32 %r5, [%r9+16]; setp.eq.b32 %p3, %r20, 0; @!%p3 bra END;" + store_lanes("%r5") + " END:"
    )  # fmt: skip
    good = program(fill(body, 4, wait("%r9", 0)))
    for policy in POLICIES:
        np.testing.assert_array_equal(run(good, OUT2, policy=policy, **CLUSTER), 1)
    assert fault(program(fill(body, 8, wait("%r9", 0))), OUT2, **CLUSTER) == "deadlock"
    assert fault(program(fill(body, 4, "")), OUT2, **CLUSTER) in UNORDERED
    # All bytes of a vector count, which is aligned to its size.
    vector = body.replace("bytes.b32 [%r23], %r20", "bytes.v2.b32 [%r23], {%r20, %r20}")
    assert fault(program(fill(vector, 8, wait("%r9", 0))), OUT2, **CLUSTER) is None
    assert fault(program(fill(vector, 4, wait("%r9", 0))), OUT2, **CLUSTER) == "deadlock"
    assert (
        fault(program(fill(vector.replace("%r22, 16;", "%r22, 20;"), 8, wait("%r9", 0))), OUT2, **CLUSTER)
        == "alignment"
    )
    # All lanes' bytes count, and each is another's place.
    lanes = body.replace("@%p1 st.async", "mad.lo.s32 %r24, %r0, 4, %r23; st.async")
    to_own = lanes.replace("b32 [%r23]", "b32 [%r24]")
    assert fault(program(fill(to_own, 128, wait("%r9", 0))), OUT2, **CLUSTER) is None
    assert fault(program(fill(to_own, 4, wait("%r9", 0))), OUT2, **CLUSTER) == "deadlock"
    assert fault(program(fill(lanes, 128, wait("%r9", 0))), OUT2, **CLUSTER) == "race"


def test_registers_move_between_warpgroups():
    text = (
        "setp.lt.s32 %p1, %r0, 128; @%p1 bra FIRST; setmaxnreg.inc.sync.aligned.u32 {}; bra END; FIRST: "
        "setmaxnreg.dec.sync.aligned.u32 {}; END: " + store_lanes("%r0")
    )
    out = np.zeros(384, np.uint32)
    assert fault(program(fill(text, 232, 40), threads=384), out, threads=384) is None
    assert fault(program(fill(text, 240, 40), threads=384), out, threads=384) == "deadlock"
    assert fault(program(fill(text, 160, 40), threads=384), out, threads=384) == "registers"


# --- engines and proxies ----------------------------------------------------------------------------------------------

# A box of 1 KiB; %r9: the barrier, %r10: data, %d6: the map of `a`, %d7: the map of `out`, both (8, 64) 16-bit elements.
ENGINES = (
    AT
    + """setp.eq.b32 %p1, %r0, 0; add.s32 %r10, %r9, 1024; mov.b32 %r11, 0;
    mov.b64 %d5, map_a; cvta.param.u64 %d6, %d5; mov.b64 %d5, map_out; cvta.param.u64 %d7, %d5;
    @%p1 mbarrier.init.shared.b64 [%r9], 1; bar.warp.sync -1;"""
)
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 1024;"
LOAD = """@%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r10], [%d6, {%r11, %r11}], [%r9];"""
STORE = "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d7, {%r11, %r11}], [%r10]; @%p1 cp.async.bulk.commit_group;"
WAIT_READ, WAIT_WRITTEN = "@%p1 cp.async.bulk.wait_group.read 0;", "@%p1 cp.async.bulk.wait_group 0;"
BOX = np.zeros((8, 64), np.uint16)
# Each lane writes 32 bytes of the box.
FILL = """shl.b32 %r12, %r0, 5; add.s32 %r12, %r12, %r10; st.shared.v4.b32 [%r12], {%r0, %r0, %r0, %r0};
    st.shared.v4.b32 [%r12+16], {%r0, %r0, %r0, %r0};"""


def engine_fault(body, **options):
    maps = [
        lambda d, at: ptx.tensor_map(d, at[1], (64, 8), (128,), (64, 8)),
        lambda d, at: ptx.tensor_map(d, at[0], (64, 8), (128,), (64, 8)),
    ]
    text = program(ENGINES + body, ("out", "a", "map_a", "map_out"))
    return fault(text, BOX, inputs=(np.ones((8, 64), np.uint16),), maps=maps, shared=4096, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_load_then_store(policy):
    whole = EXPECT + LOAD + wait("%r9", 0) + STORE + WAIT_WRITTEN
    assert engine_fault(whole, policy=policy) is None
    # What a load wrote is read by a store without a proxy fence, but not before it is there.
    assert engine_fault(EXPECT + LOAD + STORE + WAIT_WRITTEN + wait("%r9", 0), policy=policy) in UNORDERED
    assert engine_fault(LOAD + wait("%r9", 0), policy=policy) == "deadlock"
    assert engine_fault(EXPECT.replace("1024", "1040") + LOAD + wait("%r9", 0), policy=policy) == "deadlock"
    assert engine_fault(EXPECT + LOAD + LOAD + wait("%r9", 0) + STORE + WAIT_WRITTEN, policy=policy) in (
        "race",
        "deadlock",
    )
    # Nobody waits for the load: the CTA may be gone when it comes.
    assert engine_fault(EXPECT + LOAD, policy=policy) in ("race", "bounds")


@pytest.mark.parametrize("policy", POLICIES)
def test_proxy_fence_before_a_store_reads_what_threads_wrote(policy):
    sync, fence = "bar.warp.sync -1;", "fence.proxy.async.shared::cta;"
    assert engine_fault(FILL + fence + sync + STORE + WAIT_WRITTEN, policy=policy) is None
    # The fence may stand on either side of the barrier, in any thread on the way.
    assert engine_fault(FILL + sync + "@%p1 " + fence + STORE + WAIT_WRITTEN, policy=policy) is None
    assert engine_fault(FILL + sync + STORE + WAIT_WRITTEN, policy=policy) == "proxy"
    assert engine_fault(FILL + fence + STORE + WAIT_WRITTEN, policy=policy) == "race"
    assert engine_fault(fence + FILL + sync + STORE + WAIT_WRITTEN, policy=policy) == "proxy"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_keeps_its_source_until_it_has_read(policy):
    ready = FILL + "fence.proxy.async; bar.warp.sync -1;" + STORE
    again = "bar.warp.sync -1;" + FILL.replace("%r0, %r0, %r0, %r0", "%r12, %r12, %r12, %r12")
    assert engine_fault(ready + WAIT_READ + again, policy=policy) is None
    assert engine_fault(ready + again + WAIT_READ, policy=policy) == "race"
    assert engine_fault(ready + WAIT_READ.replace("0;", "1;") + again, policy=policy) == "race"
    assert (
        engine_fault(ready.replace("@%p1 cp.async.bulk.commit_group;", "") + WAIT_READ + again, policy=policy) == "race"
    )
    assert engine_fault(ready, policy=policy) in ("race", "bounds")


def test_what_a_store_wrote_is_seen_after_it_is_written():
    ready = FILL + "fence.proxy.async; bar.warp.sync -1;" + STORE
    read = "@%p1 ld.global.b32 %r30, [%d0];"
    assert engine_fault(ready + WAIT_WRITTEN + read) is None
    assert engine_fault(ready + WAIT_READ + read) in UNORDERED


def test_proxy_fence_of_shared_memory_is_not_one_of_global_memory():
    lines = "".join(f"st.global.b64 [%d12+{i}], %d12;" for i in range(0, 32, 8))
    filled = "shl.b32 %r12, %r0, 5; cvt.u64.u32 %d12, %r12; add.s64 %d12, %d12, %d0;" + lines
    load = "bar.warp.sync -1;" + EXPECT + LOAD.replace("%d6", "%d7") + wait("%r9", 0)
    for fence in ("fence.proxy.async;", "fence.proxy.async.global;"):
        assert engine_fault(filled + fence + load) is None
    for fence in ("", "fence.proxy.async.shared::cta;"):
        assert engine_fault(filled + fence + load) == "proxy"
    ready = FILL + "{} bar.warp.sync -1;" + STORE + WAIT_WRITTEN
    assert engine_fault(fill(ready, "fence.proxy.async.global;")) == "proxy"


# Two boxes in shared memory, each filled and fenced.
FILL_TWO = (
    FILL
    + """add.s32 %r14, %r10, 1024; add.s32 %r15, %r12, 1024; st.shared.v4.b32 [%r15], {%r0, %r0, %r0, %r0};
    st.shared.v4.b32 [%r15+16], {%r0, %r0, %r0, %r0}; mov.b32 %r13, 8; fence.proxy.async; bar.warp.sync -1;"""
)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lane_waits_for_its_own_stores_only(policy):
    """All lanes are in the second store's group, only one is in the first's."""
    both = """cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d7, {%r11, %r13}], [%r14];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; {} setp.eq.b32 %p9, %r0, 5;
        @%p9 st.shared.b32 [%r10], %r0; bar.warp.sync -1;"""
    assert engine_fault(FILL_TWO + STORE + fill(both, "bar.warp.sync -1;") + WAIT_WRITTEN, policy=policy) is None
    assert engine_fault(FILL_TWO + STORE + fill(both, "") + WAIT_WRITTEN, policy=policy) == "race"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_that_nobody_waits_for_is_not_forgotten(policy):
    """However many copies come after it."""
    load = EXPECT + LOAD.replace("[%r10]", "[%r14]") + wait("%r9", "%r41")
    loads = f"""mov.b32 %r40, 0; mov.b32 %r41, 0; AGAIN: {load} xor.b32 %r41, %r41, 1; bar.warp.sync -1;
        add.s32 %r40, %r40, 1; setp.lt.s32 %p10, %r40, 400; @%p10 bra AGAIN;"""
    assert engine_fault(FILL_TWO + STORE + loads + WAIT_READ, policy=policy) is None
    assert engine_fault(FILL_TWO + STORE + loads, policy=policy) == "race"


def test_many_clusters_have_copies_under_way():
    only_one = "mov.u32 %r20, %ctaid.x; setp.eq.b32 %p3, %r20, 0; and.pred %p1, %p1, %p3;"
    body = EXPECT + LOAD + wait("%r9", 0) + only_one + STORE + WAIT_WRITTEN
    assert engine_fault(body, ctas=200, policy="hold_loads") is None


def test_copy_engine_wants_alignment_and_one_issuer():
    assert engine_fault(EXPECT + LOAD.replace("[%r10]", "[%r10+16]") + wait("%r9", 0)) == "alignment"
    assert engine_fault(EXPECT + LOAD.replace("[%r10]", "[%r10+3072]") + wait("%r9", 0)) == "bounds"
    assert engine_fault(EXPECT + LOAD.replace("@%p1 ", "") + wait("%r9", 0)) == "unknown"
    assert engine_fault(EXPECT + LOAD.replace("[%d6,", "[%d0,") + wait("%r9", 0)) in (
        "unknown",
        "uninitialized",
        "alignment",
    )
    below = "mov.b32 %r11, -1;" + STORE + WAIT_WRITTEN
    assert engine_fault(FILL + "fence.proxy.async; bar.warp.sync -1;" + below) == "bounds"


# A map in global memory, at %d8, a copy of the parameter's.
COPY_MAP = "".join(f"ld.param.b64 %d10, [map_a+{i}]; @%p1 st.global.b64 [%d0+{i}], %d10;" for i in range(0, 128, 8))


def test_sums_by_the_copy_engine():
    """Of float32, by one lane, onto what was written and handed over to the async proxy."""
    zeros = """mul.wide.u32 %d8, %r0, 32; add.s64 %d8, %d8, %d0; mov.b32 %r16, 0;
        st.global.v4.b32 [%d8], {%r16, %r16, %r16, %r16}; st.global.v4.b32 [%d8+16], {%r16, %r16, %r16, %r16};"""
    fence = "fence.proxy.async;"
    reduce = STORE.replace("cp.async", "cp.reduce.async", 1).replace("shared::cta.tile", "shared::cta.add.tile")

    def kind(*parts, dtype=np.float32, **options):
        columns = 128 // np.dtype(dtype).itemsize
        maps = [lambda d, at: ptx.tensor_map(d, at[0], (columns, 8), (128,), (columns, 8), dtype=dtype)] * 2
        text = program(ENGINES + "".join(parts), ("out", "a", "map_a", "map_out"))
        return fault(text, BOX, inputs=(BOX,), maps=maps, shared=4096, **options)

    ready = FILL + zeros + fence + "bar.warp.sync -1;"
    for policy in POLICIES:
        assert kind(ready, reduce, WAIT_WRITTEN, policy=policy) is None
        assert kind(FILL + zeros + "bar.warp.sync -1;", reduce, WAIT_WRITTEN, policy=policy) == "proxy"
        assert kind(FILL + fence + "bar.warp.sync -1;", reduce, WAIT_WRITTEN, policy=policy) == "uninitialized"
        # Stricter than hardware: of two onto the same place the order would matter to rounding.
        assert kind(ready, reduce, reduce, WAIT_WRITTEN, policy=policy) == "race"
    for dtype in (np.uint16, np.float16):
        assert kind(ready, reduce, WAIT_WRITTEN, dtype=dtype) == "unknown"
    assert kind(ready, reduce.replace("@%p1 ", ""), WAIT_WRITTEN) == "unknown"
    for other in ("min", "inc", "and", ""):
        assert kind(ready, reduce.replace(".add", f".{other}" if other else ""), WAIT_WRITTEN) == "unknown"


def test_maps_written_by_device_code_need_both_fences():
    replace = "ld.param.b64 %d11, [a]; @%p1 tensormap.replace.tile.global_address.global.b1024.b64 [%d0], %d11;"
    release = "@%p1 fence.proxy.tensormap::generic.release.gpu;"
    acquire = "@%p1 fence.proxy.tensormap::generic.acquire.gpu [%d0], 128;"
    load = EXPECT + LOAD.replace("%d6", "%d0") + wait("%r9", 0)
    fill_out = (
        "bar.warp.sync -1; shl.b32 %r12, %r0, 5; cvt.u64.u32 %d12, %r12; add.s64 %d12, %d12, %d0; setp.gt.s32 %p4, %r0, 3;"
        + "".join(f"@%p4 st.global.b64 [%d12+{i}], %d12;" for i in range(0, 32, 8))
    )
    assert engine_fault(COPY_MAP + replace + release + acquire + load + fill_out) is None
    assert engine_fault(COPY_MAP + replace + acquire + load + fill_out) == "proxy"
    assert engine_fault(COPY_MAP + replace + release + load + fill_out) == "proxy"
    assert engine_fault(COPY_MAP + replace + fill_out) == "proxy"
    assert engine_fault(COPY_MAP + release + acquire + replace + load + fill_out) == "proxy"
    # What was acquired before the release is the map as it was.
    assert engine_fault(COPY_MAP + acquire + replace + release + load + fill_out) == "proxy"
    again = load.replace("L:", "M:").replace("bra L", "bra M").replace("D:", "E:").replace("bra D", "bra E")
    again = again.replace(", 0;", ", 1;")
    edited = COPY_MAP + replace + release + acquire + load + replace + release
    assert engine_fault(edited + acquire + again + fill_out) is None
    assert engine_fault(edited + again + fill_out) == "proxy"
    odd = replace.replace("[a];", "[a]; add.s64 %d11, %d11, 8;")
    assert engine_fault(COPY_MAP + odd + release + acquire + load + fill_out) == "alignment"
    # A load reads it until it is done.
    in_flight = load.replace("{ L:", replace + release + "{ L:")
    assert engine_fault(COPY_MAP + replace + release + acquire + in_flight + fill_out) == "race"
    # All of its bytes count.
    by_two = "setp.eq.b32 %p2, %r0, 1; {}" + COPY_MAP.replace(
        "@%p1 st.global.b64 [%d0+64]", "@%p2 st.global.b64 [%d0+64]"
    )
    assert engine_fault(fill(by_two, "") + replace + release + acquire + load + fill_out) == "race"


# --- wgmma ------------------------------------------------------------------------------------------------------------

# Operands of zeros written by the threads themselves; 128 threads, 32 accumulators in %r100 and on.
ACCUMULATORS = "{" + ", ".join(f"%r{100 + i}" for i in range(4)) + "}"
WGMMA_START = (
    AT
    + """add.s32 %r10, %r9, 1024; shl.b32 %r12, %r0, 7; add.s32 %r12, %r12, %r10; mov.b32 %r13, 0;
    """
    + "".join(f"st.shared.v4.b32 [%r12+{i}], {{%r13, %r13, %r13, %r13}};" for i in range(0, 128, 16))
    + """
    shr.u32 %r14, %r10, 4; cvt.u64.u32 %d8, %r14; or.b64 %d10, %d8, 4611686293305360384; setp.eq.b32 %p5, 0, 0; setp.ne.b32 %p6, 0, 0;"""
)
MMA = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {ACCUMULATORS}, %d10, %d10, {{}}, 1, 1, 0, 0;"
READY = "fence.proxy.async; bar.sync 1, 128;"
FENCE, COMMIT, DONE = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
)
RESULT = store_lanes("%r100")


@pytest.mark.parametrize("policy", ["random", "lazy", "hold_matrix"])
def test_wgmma_protocol(policy):
    out = np.zeros(128, np.uint32)
    first, add = fill(MMA, "%p6"), fill(MMA, "%p5")

    def kind(body):
        return fault(program(WGMMA_START + body, threads=128), out, threads=128, shared=1024 + 16384, policy=policy)

    assert kind(READY + FENCE + first + add + COMMIT + DONE + RESULT) is None
    assert kind("bar.sync 1, 128;" + FENCE + first + COMMIT + DONE + RESULT) == "proxy"
    assert kind("fence.proxy.async;" + FENCE + first + COMMIT + DONE + RESULT) == "race"
    assert kind(READY + first + COMMIT + DONE + RESULT) == "registers"
    assert kind(READY + FENCE + add + COMMIT + DONE + RESULT) == "uninitialized"
    assert kind(READY + FENCE + first + COMMIT + RESULT + DONE) == "registers"
    assert kind(READY + FENCE + first + DONE + RESULT) == "registers"  # waited for before it was committed
    assert kind(READY + FENCE + first + COMMIT + "wgmma.wait_group.sync.aligned 1;" + RESULT + DONE) == "registers"
    assert (
        kind(READY + FENCE + first + COMMIT + DONE + "mov.b32 %r100, 0;" + add + COMMIT + DONE + RESULT) == "registers"
    )
    assert (
        kind(READY + FENCE + first + COMMIT + DONE + "mov.b32 %r100, 0;" + FENCE + add + COMMIT + DONE + RESULT) is None
    )
    assert (
        kind(READY + FENCE + first + COMMIT + DONE + FENCE + "mov.b32 %r100, 0;" + add + COMMIT + DONE + RESULT)
        == "registers"
    )
    # The operands may be written again when it is done, not before.
    overwrite = "bar.sync 1, 128; st.shared.b32 [%r12], %r13;"
    assert kind(READY + FENCE + first + COMMIT + DONE + overwrite + RESULT) is None
    assert kind(READY + FENCE + first + COMMIT + overwrite + DONE + RESULT) == "race"
    skipping = (
        "setp.lt.s32 %p7, %r0, 32; @%p7 bra SKIP;" + FENCE + first + COMMIT + DONE + "SKIP: mov.b32 %r100, 0;" + RESULT
    )
    assert kind(READY + skipping) == "registers"


@pytest.mark.parametrize("policy", ["random", "lazy", "hold_matrix"])
def test_a_wgmma_does_not_hide_a_threads_read(policy):
    """Its end tells the other lanes of its own reads, not of what a lane read before."""
    separate = """add.s64 %d11, %d10, 1024; add.s32 %r12, %r12, 16384;""" + "".join(
        f"st.shared.v4.b32 [%r12+{i}], {{%r13, %r13, %r13, %r13}};" for i in range(0, 128, 16)
    )
    body = (
        WGMMA_START + separate + READY + "setp.eq.b32 %p7, %r0, 0; setp.eq.b32 %p8, %r0, 5; @%p7 ld.shared.b32 %r60, [%r10];"
        + FENCE + fill(MMA, "%p6").replace("%d10, %d10", "%d10, %d11") + COMMIT + DONE
        + "{} @%p8 st.shared.b32 [%r10], %r13;" + RESULT
    )  # fmt: skip
    options = {"threads": 128, "shared": 1024 + 32768, "policy": policy}
    out = np.zeros(128, np.uint32)
    assert fault(program(fill(body, "bar.warp.sync -1;"), threads=128), out, **options) is None
    assert fault(program(fill(body, ""), threads=128), out, **options) == "race"


# --- tensor memory ----------------------------------------------------------------------------------------------------

# One warpgroup; warp 0 allocates 32 columns and frees them; the barrier at byte 8 tells that the matrix unit is done.
TENSOR_START = (
    WGMMA_START.replace("4611686293305360384", str((2 << 61) + (1 << 46) + (64 << 32) + (1 << 16)))
    + """
    setp.eq.b32 %p1, %r0, 0; setp.lt.s32 %p2, %r0, 32; @%p1 mbarrier.init.shared.b64 [%r9+8], 1; add.s32 %r40, %r9, 8;
    @!%p2 bra A; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; A: fence.proxy.async; bar.sync 1, 128; ld.shared.b32 %r20, [%r9];
    shr.u32 %r21, %r0, 5; shl.b32 %r21, %r21, 21; add.s32 %r21, %r21, %r20; mov.b32 %r30, 134481040;"""
)
TENSOR_MMA = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r20], %d10, %d10, %r30, {%r13, %r13, %r13, %r13}, {};"
TENSOR_COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r40];"
AFTER, BEFORE = "tcgen05.fence::after_thread_sync;", "tcgen05.fence::before_thread_sync;"
TENSOR_LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r100}, [%r21];"
LOADED = "tcgen05.wait::ld.sync.aligned;"
TENSOR_FREE = "bar.sync 1, 128; @!%p2 bra B; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32; B:" + RESULT


def tensor_fault(body, start=TENSOR_START, **options):
    text = program(start + body, target="sm_100a", threads=128)
    return fault(text, np.zeros(128, np.uint32), threads=128, shared=1024 + 16384, **options)


@pytest.mark.parametrize("policy", ["random", "lazy", "hold_matrix"])
def test_tensor_memory_protocol(policy):
    first, add, done = fill(TENSOR_MMA, "%p6"), fill(TENSOR_MMA, "%p5"), wait("%r40", 0)
    load = AFTER + TENSOR_LOAD + LOADED + BEFORE

    def kind(body, **options):
        return tensor_fault(body, policy=policy, **options)

    assert kind(first + add + TENSOR_COMMIT + done + load + TENSOR_FREE) is None
    assert kind(add + TENSOR_COMMIT + done + load + TENSOR_FREE) == "uninitialized"
    assert kind(first + TENSOR_COMMIT + done + TENSOR_LOAD + LOADED + BEFORE + TENSOR_FREE) == "race"
    assert kind(first + TENSOR_COMMIT + load + done + TENSOR_FREE) in UNORDERED
    assert kind(first + done + load + TENSOR_FREE) == "deadlock"
    assert kind(first + TENSOR_COMMIT + done + load + RESULT) == "tensor_memory"
    # Nobody but the warp itself knows that its load is over, without both of these.
    assert kind(first + TENSOR_COMMIT + done + AFTER + TENSOR_LOAD + BEFORE + TENSOR_FREE) == "race"
    assert kind(first + TENSOR_COMMIT + done + AFTER + TENSOR_LOAD + LOADED + TENSOR_FREE) == "race"
    # The same before the matrix unit writes there again.
    again = (
        "bar.sync 1, 128; {}"
        + first
        + TENSOR_COMMIT
        + wait("%r40", 1).replace("L", "M").replace("D", "E")
        + load
        + TENSOR_FREE
    )
    assert kind(first + TENSOR_COMMIT + done + load + fill(again, AFTER)) is None
    assert kind(first + TENSOR_COMMIT + done + load + fill(again, "")) == "race"
    assert kind(first + TENSOR_COMMIT + done + AFTER + TENSOR_LOAD + BEFORE + fill(again, AFTER)) == "race"
    # Operands that threads wrote, and where.
    unfenced = TENSOR_START.replace("fence.proxy.async;", "")
    assert kind(first + TENSOR_COMMIT + done + load + TENSOR_FREE, start=unfenced) == "proxy"
    beyond = TENSOR_LOAD.replace("[%r21]", "[%r21+32]")
    assert kind(first + TENSOR_COMMIT + done + AFTER + beyond + TENSOR_FREE) == "tensor_memory"
    others = TENSOR_LOAD.replace("[%r21]", "[%r20]")
    assert kind(first + TENSOR_COMMIT + done + AFTER + others + TENSOR_FREE) == "tensor_memory"
    # 16 lanes, eight columns of each: those of the warp, from the first or the middle one on.
    for offset, expected in ((0, None), (16 << 16, None), (8 << 16, "tensor_memory"), (25, "tensor_memory")):
        half = fill("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r100, %r101, %r102, %r103}, [%r21+{}];", offset)
        assert kind(first + TENSOR_COMMIT + done + AFTER + half + LOADED + BEFORE + TENSOR_FREE) == expected
    everyone = first.replace("@%p1 ", "")
    assert kind(everyone + TENSOR_COMMIT + done + load + TENSOR_FREE) == "unknown"


@pytest.mark.parametrize("policy", ["random", "lazy", "hold_matrix"])
def test_a_commit_waits_for_its_own_threads_matrix_operations(policy):
    first, add, done = fill(TENSOR_MMA, "%p6"), fill(TENSOR_MMA, "%p5"), wait("%r40", 0)
    end = done + AFTER + TENSOR_LOAD + LOADED + BEFORE + TENSOR_FREE
    other = "setp.eq.b32 %p7, %r0, 32;"
    sync = BEFORE + "bar.sync 1, 128;" + AFTER
    by_another = TENSOR_COMMIT.replace("%p1", "%p7")
    assert tensor_fault(other + first + sync + by_another + end, policy=policy) == "race"
    # Two threads' operations on the same accumulators.
    handed_over = first + sync + add.replace("%p1", "%p7") + by_another
    assert tensor_fault(other + handed_over + end, policy=policy) == "unknown"
    again = wait("%r40", 1).replace("L:", "M:").replace("bra L", "bra M").replace("D:", "E:").replace("bra D", "bra E")
    one_by_one = first + TENSOR_COMMIT + done + sync + add.replace("%p1", "%p7") + by_another
    assert tensor_fault(other + one_by_one + end.replace(done, again), policy=policy) is None


def test_tensor_memory_allocation():
    twice = "@!%p2 bra C; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 32; C:"
    assert tensor_fault(twice + TENSOR_FREE) == "tensor_memory"  # after the permit was given back
    assert tensor_fault(TENSOR_FREE.replace("%r20, 32", "%r20, 64")) == "tensor_memory"
    assert tensor_fault("", start=TENSOR_START.replace("[%r9], 32", "[%r9], 48")) == "tensor_memory"
    mixed = "@!%p2 bra C; tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; C:"
    assert tensor_fault(mixed + TENSOR_FREE) == "unknown"

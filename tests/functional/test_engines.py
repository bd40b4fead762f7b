"""What instructions compute and where engines put their bytes, against NumPy: on the model, and the same programs on a GPU.

Programs that the model must refuse are in test_model.py; here every program is right.
"""

import numpy as np
import ptx
import pytest
from ptx import fill, program, store_lanes, wait

GPU = pytest.param(ptx.run_on_gpu, marks=pytest.mark.gpu, id="gpu")
MODEL = pytest.param(ptx.run, id="model")
BOTH = pytest.mark.parametrize("run", [MODEL, GPU])
RNG_BITS = 2**16

# %r9: shared memory; %p1: the first thread. The barrier is at byte 0, data from 1024 on.
ONE_BARRIER = """mov.b32 %r9, smem; setp.eq.b32 %p1, %r0, 0; add.s32 %r10, %r9, 1024;
    @%p1 mbarrier.init.shared.b64 [%r9], {}; fence.mbarrier_init.release.cluster; bar.sync 0;"""


def expecting(nbytes):
    """The barrier counts these bytes; the first thread goes on to load them, the others to W."""
    return fill(ONE_BARRIER, 1) + fill("@!%p1 bra W; mbarrier.arrive.expect_tx.shared.b64 _, [%r9], {}; ", nbytes)


def dump(words, threads=32):
    """out[i] = word i of shared memory after byte 1024."""
    return fill(
        """mov.b32 %r20, %r0;
        DUMP: shl.b32 %r21, %r20, 2; add.s32 %r22, %r21, %r10; ld.shared.b32 %r23, [%r22];
        cvt.u64.u32 %d20, %r21; add.s64 %d20, %d20, %d0; st.global.b32 [%d20], %r23;
        add.s32 %r20, %r20, {}; setp.lt.s32 %p20, %r20, {}; @%p20 bra DUMP;""",
        threads,
        words,
    )


def chunk_places(nbytes, swizzle):
    """Where the 16-byte chunks of a box that starts at a multiple of 1024 go: chunk number by chunk of shared memory."""
    address = np.arange(0, nbytes, 16)
    return (address ^ ((address >> 7 & ((1 << swizzle) - 1)) << 4)) // 16


def swizzled(box, swizzle):
    """The bytes of a box as they lie in shared memory."""
    chunks = np.ascontiguousarray(box).view(np.uint8).reshape(-1, 16)
    placed = np.empty_like(chunks)
    placed[chunk_places(chunks.size, swizzle)] = chunks
    return placed.view(np.uint32).ravel()


def window(tensor, start, box):
    """A box of a tensor, outermost first, zeros outside."""
    found = np.zeros(box, tensor.dtype)
    inside = [(max(s, 0), min(s + b, d)) for s, b, d in zip(start, box, tensor.shape, strict=True)]
    if all(begin < end for begin, end in inside):
        at = tuple(slice(begin - s, end - s) for s, (begin, end) in zip(start, inside, strict=True))
        found[at] = tensor[tuple(slice(begin, end) for begin, end in inside)]
    return found


# --- copy engine ------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("start", [(0, 0), (3, 8), (-2, -8), (25, 40), (100, 0), (7, -200)])
def test_tensor_load(run, rng, swizzle, start):
    tensor = rng.integers(1, RNG_BITS, (30, 48)).astype(np.uint16)
    columns = (16 << swizzle) // 2
    box = (16, columns)
    nbytes = 16 * columns * 2
    body = (
        expecting(nbytes)
        + fill(
            """mov.b32 %r11, {}; mov.b32 %r12, {}; mov.b64 %d5, map_a; cvta.param.u64 %d6, %d5;
            cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r10], [%d6, {%r11, %r12}], [%r9];
            W: """,
            start[1],
            start[0],
        )
        + wait("%r9", 0)
        + dump(nbytes // 4)
    )
    got = run(
        program(body, ("out", "a", "map_a")),
        np.zeros(nbytes // 4, np.uint32),
        inputs=(tensor,),
        maps=[lambda d, at: ptx.tensor_map(d, at[1], (48, 30), (96,), box[::-1], swizzle=swizzle)],
        shared=1024 + nbytes,
    )
    np.testing.assert_array_equal(got, swizzled(window(tensor, start, box), swizzle))


@BOTH
@pytest.mark.parametrize("start", [(0, 0, 0), (1, 5, 16), (-1, -3, 48), (2, 0, 0)])
def test_tensor_load_of_rank_3(run, rng, start):
    tensor = rng.standard_normal((3, 10, 64)).astype(np.float32)
    box = (2, 8, 32)
    nbytes = 2 * 8 * 32 * 4
    body = (
        expecting(nbytes)
        + fill(
            "mov.b32 %r11, {}; mov.b32 %r12, {}; mov.b32 %r13, {}; mov.b64 %d5, map_a; cvta.param.u64 %d6, %d5;",
            *start[::-1],
        )
        + """cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes
            [%r10], [%d6, {%r11, %r12, %r13}], [%r9]; W: """
        + wait("%r9", 0)
        + dump(nbytes // 4)
    )
    got = run(
        program(body, ("out", "a", "map_a")),
        np.zeros(nbytes // 4, np.uint32),
        inputs=(tensor,),
        maps=[lambda d, at: ptx.tensor_map(d, at[1], (64, 10, 3), (256, 2560), box[::-1], dtype=np.float32)],
        shared=1024 + nbytes,
    )
    np.testing.assert_array_equal(got, swizzled(window(tensor, start, box), 3))


@BOTH
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("start", [(0, 0), (5, 16), (18, 40), (24, 0), (0, 64)])
def test_tensor_store(run, swizzle, start):
    """Skips what is out of bounds. Shared word i holds i + 1; all of the tensor was zero."""
    columns = (16 << swizzle) // 2
    nbytes = 16 * columns * 2
    body = (
        fill(ONE_BARRIER, 1)
        + """mov.b32 %r20, %r0; mov.b32 %r24, 0;
        ZERO: shl.b32 %r21, %r20, 2; cvt.u64.u32 %d20, %r21; add.s64 %d20, %d20, %d0; st.global.b32 [%d20], %r24;
        add.s32 %r20, %r20, 32; setp.lt.s32 %p20, %r20, 576; @%p20 bra ZERO;
        mov.b32 %r20, %r0;"""
        + fill(
            """FILL: shl.b32 %r21, %r20, 2; add.s32 %r22, %r21, %r10; add.s32 %r23, %r20, 1; st.shared.b32 [%r22], %r23;
            add.s32 %r20, %r20, 32; setp.lt.s32 %p20, %r20, {}; @%p20 bra FILL;""",
            nbytes // 4,
        )
        + """fence.proxy.async; bar.warp.sync -1; @!%p1 bra END;"""
        + fill("mov.b32 %r11, {}; mov.b32 %r12, {}; mov.b64 %d5, map_a; cvta.param.u64 %d6, %d5;", start[1], start[0])
        + """cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d6, {%r11, %r12}], [%r10];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"""
    )
    got = run(
        program(body, ("out", "map_a")),
        np.zeros((24, 48), np.uint16),
        maps=[lambda d, at: ptx.tensor_map(d, at[0], (48, 24), (96,), (columns, 16), swizzle=swizzle)],
        shared=1024 + nbytes,
    )
    words = np.arange(1, nbytes // 4 + 1, dtype=np.uint32)
    box = (
        words.view(np.uint8).reshape(-1, 16)[chunk_places(nbytes, swizzle)].copy().view(np.uint16).reshape(16, columns)
    )
    want = np.zeros((24, 48), np.uint16)
    part = want[start[0] : start[0] + 16, start[1] : start[1] + columns]
    part[:] = box[: part.shape[0], : part.shape[1]]
    np.testing.assert_array_equal(got, want)


@BOTH
@pytest.mark.parametrize("start", [(0, 0), (5, 16), (18, 8)])
def test_tensor_sum(run, rng, start):
    """Adds float32 to what is there, subnormals too, and skips what is out of bounds."""
    special = [0, -0.0, 1e-40, -1e-45, 1.2e-38, -1.1e-38, np.inf, -np.inf, 3e38, 1, 2.0**-24, 1 + 2.0**-23, -1]
    values = rng.standard_normal((2, 24 * 32)) * 10.0 ** rng.integers(-40, 30, (2, 24 * 32))
    values[:, : len(special) ** 2] = np.array([(a, b) for a in special for b in special]).T
    total, added = values.astype(np.float32)
    total, added = total.reshape(24, 32), added[: 16 * 32]
    body = (
        fill(ONE_BARRIER, 1)
        + fill(
            """ld.param.b64 %d10, [total]; ld.param.b64 %d11, [added]; mov.b32 %r20, %r0;
            SET: mul.wide.u32 %d20, %r20, 4; add.s64 %d21, %d20, %d10; ld.global.b32 %r24, [%d21];
            add.s64 %d22, %d20, %d0; st.global.b32 [%d22], %r24;
            add.s32 %r20, %r20, 32; setp.lt.s32 %p20, %r20, {}; @%p20 bra SET;
            mov.b32 %r20, %r0;
            FILL: mul.wide.u32 %d20, %r20, 4; add.s64 %d21, %d20, %d11; ld.global.b32 %r24, [%d21];
            shl.b32 %r21, %r20, 2; add.s32 %r22, %r21, %r10; st.shared.b32 [%r22], %r24;
            add.s32 %r20, %r20, 32; setp.lt.s32 %p20, %r20, {}; @%p20 bra FILL;""",
            total.size,
            added.size,
        )
        + "fence.proxy.async; bar.warp.sync -1; @!%p1 bra END;"
        + fill("mov.b32 %r11, {}; mov.b32 %r12, {}; mov.b64 %d5, map_a; cvta.param.u64 %d6, %d5;", start[1], start[0])
        + """cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d6, {%r11, %r12}], [%r10];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"""
    )
    got = run(
        program(body, ("out", "total", "added", "map_a")),
        np.zeros((24, 32), np.float32),
        inputs=(total, added),
        maps=[lambda d, at: ptx.tensor_map(d, at[0], (32, 24), (128,), (32, 16), dtype=np.float32)],
        shared=1024 + added.nbytes,
    )

    box = added.view(np.uint8).reshape(-1, 16)[chunk_places(added.nbytes, 3)].copy().view(np.float32).reshape(16, 32)
    want = total.copy()
    part = want[start[0] : start[0] + 16, start[1] : start[1] + 32]
    with np.errstate(invalid="ignore", over="ignore"):
        part[:] = part + box[: part.shape[0], : part.shape[1]]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    number = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint32)[number], want.view(np.uint32)[number])


@BOTH
@pytest.mark.parametrize(("row", "end"), [(0, 16), (0, 40), (3, 4), (20, 30), (29, 30), (14, 30), (30, 31)])
@pytest.mark.parametrize("column", [0, 32, 48])
def test_tensor_load_whose_addresses_go_around(run, rng, row, end, column):
    """As wgrad's: rows are spelled twice, and what that is too much the last dimension takes off modulo 2^64. Rows from `end` on are zeros."""
    wrap, columns = 2**30, 64
    tensor = rng.integers(1, RNG_BITS, (30, columns)).astype(np.uint16)
    box, rows = (16, 64), min(end - row, 16)
    nbytes = 16 * 64 * 2
    place = (column, wrap - rows, row + rows, wrap)
    body = (
        expecting(nbytes)
        + fill("mov.b32 %r11, {}; mov.b32 %r12, {}; mov.b32 %r13, {}; mov.b32 %r14, {};", *place)
        + """mov.b64 %d5, map_a; cvta.param.u64 %d6, %d5;
            cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes
            [%r10], [%d6, {%r11, %r12, %r13, %r14}], [%r9]; W: """
        + wait("%r9", 0)
        + dump(nbytes // 4)
    )
    pitch = 2 * columns
    dims, strides = (columns, wrap, len(tensor) + 1, wrap + 1), (pitch, pitch, 2**34 - pitch)
    got = run(
        program(body, ("out", "a", "map_a")),
        np.zeros(nbytes // 4, np.uint32),
        inputs=(tensor,),
        maps=[lambda d, at: ptx.tensor_map(d, at[1], dims, strides, (64, 16, 1, 1))],
        shared=1024 + nbytes,
    )
    want = np.zeros(box, np.uint16)
    found = tensor[row : min(row + rows, len(tensor)), column:]
    want[: found.shape[0], : found.shape[1]] = found
    np.testing.assert_array_equal(got, swizzled(want, 3))


@BOTH
def test_multicast_load(run, rng):
    """CTA 1 loads for both; each waits at its own barrier. CTA r writes to the r-th half of out."""
    tensor = rng.integers(1, RNG_BITS, (8, 64)).astype(np.uint16)
    body = (
        fill(ONE_BARRIER, 1).replace("bar.sync 0;", "barrier.cluster.arrive.relaxed; barrier.cluster.wait;")
        + """mov.u32 %r30, %cluster_ctarank; setp.eq.b32 %p3, %r30, 1; and.pred %p4, %p1, %p3;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 1024;
        barrier.cluster.arrive; barrier.cluster.wait;
        @!%p4 bra W; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b64 %d5, map_a; cvta.param.u64 %d6, %d5; cvt.u16.u32 %h1, 3;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
            [%r10], [%d6, {%r11, %r12}], [%r9], %h1; W: """
        + wait("%r9", 0)
        + "mul.wide.u32 %d8, %r30, 1024; add.s64 %d0, %d0, %d8;"
        + dump(256)
        + "barrier.cluster.arrive; barrier.cluster.wait;"
    )
    got = run(
        program(body, ("out", "a", "map_a")),
        np.zeros(512, np.uint32),
        inputs=(tensor,),
        maps=[lambda d, at: ptx.tensor_map(d, at[1], (64, 8), (128,), (64, 8))],
        shared=2048,
        ctas=2,
        cluster=2,
    )
    np.testing.assert_array_equal(got, np.tile(swizzled(tensor, 3), 2))


@BOTH
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_store(run, transposed):
    """Lane 8 i + r gives the address of row r of matrix i; a register holds two neighbours of a row, or of a column."""
    # Lane l's register i holds 8 l + i and, in its high half, 8 l + i + 4.
    body = (
        fill(ONE_BARRIER, 1)
        + """shl.b32 %r11, %r0, 4; add.s32 %r11, %r11, %r10; mul.lo.s32 %r12, %r0, 524296; add.s32 %r12, %r12, 262144;
        add.s32 %r13, %r12, 65537; add.s32 %r14, %r13, 65537; add.s32 %r15, %r14, 65537;"""
        + f"stmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16"
        + " [%r11], {%r12, %r13, %r14, %r15}; bar.warp.sync -1;"
        + dump(128)
    )
    got = run(program(body), np.zeros(128, np.uint32), shared=2048)
    matrix, row, column = np.indices((4, 8, 8))
    across, along = (column, row) if transposed else (row, column)
    lane, half = 4 * across + along // 2, along % 2
    np.testing.assert_array_equal(got.view(np.uint16).reshape(4, 8, 8), 8 * lane + matrix + 4 * half)


# --- matrix unit ------------------------------------------------------------------------------------------------------


def wgmma_program(n, k_blocks, b_mn):
    """A (64, 64) and B by the copy engine, swizzled by 128 bytes; the accumulators to out[register][thread]."""
    b_bytes = n * 128
    registers = n // 2
    accumulators = "{" + ", ".join(f"%r{100 + i}" for i in range(registers)) + "}"
    enc = lambda nbytes: nbytes >> 4
    # K-major: rows of 128 bytes, groups of 8 rows 1024 bytes apart; 16 more of K are 32 bytes on. MN-major: 64 of N a row
    # of 128 bytes, 8 of K 1024 bytes; the next 64 of N after 64 of K; 16 more of K are 2048 bytes on.
    a_fields = 1 << 62 | enc(1024) << 32 | 1 << 16
    b_fields = 1 << 62 | enc(1024) << 32 | (enc(8192) if b_mn else 1) << 16
    steps = "".join(
        f"""add.s64 %d12, %d10, {enc(32) * block}; add.s64 %d13, %d11, {enc(2048 if b_mn else 32) * block};
        wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {accumulators}, %d12, %d13, {"%p5" if block else "%p6"}, 1, 1, 0, {int(b_mn)};"""
        for block in range(k_blocks)
    )
    boxes = max(n // 64, 1) if b_mn else 1
    loads = "".join(
        f"""add.s32 %r13, %r10, {8192 + 8192 * i}; mov.b32 %r11, {64 * i if b_mn else 0};
        cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r13], [%d7, {{%r11, %r12}}], [%r9];"""
        for i in range(boxes)
    )
    stores = "".join(f"st.global.b32 [%d14], %r{100 + i}; add.s64 %d14, %d14, 512;" for i in range(registers))
    return program(
        fill(ONE_BARRIER, 1)
        + f"""@!%p1 bra W; mbarrier.arrive.expect_tx.shared.b64 _, [%r9], {8192 + b_bytes};
        mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b64 %d5, map_a; cvta.param.u64 %d6, %d5; mov.b64 %d5, map_b; cvta.param.u64 %d7, %d5;
        cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r10], [%d6, {{%r11, %r12}}], [%r9];
        {loads} W: {wait("%r9", 0)}
        shr.u32 %r14, %r10, 4; and.b32 %r14, %r14, 16383; cvt.u64.u32 %d8, %r14; or.b64 %d10, %d8, {a_fields};
        add.s32 %r15, %r10, 8192; shr.u32 %r15, %r15, 4; and.b32 %r15, %r15, 16383; cvt.u64.u32 %d9, %r15;
        or.b64 %d11, %d9, {b_fields}; setp.eq.b32 %p5, 0, 0; setp.ne.b32 %p6, 0, 0;
        wgmma.fence.sync.aligned; {steps} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        shl.b32 %r16, %r0, 2; cvt.u64.u32 %d14, %r16; add.s64 %d14, %d14, %d0; {stores}""",
        ("out", "a", "b", "map_a", "map_b"),
        threads=128,
    )


@BOTH
@pytest.mark.parametrize(("n", "b_mn"), [(64, False), (128, False), (64, True), (128, True)])
def test_wgmma(run, rng, n, b_mn):
    """Operands through the swizzle, the layout of the accumulators, sums of small integers."""
    import ml_dtypes

    a = rng.integers(-8, 9, (64, 64))
    b = rng.integers(-8, 9, (n, 64))
    stored = (b.T if b_mn else b).astype(ml_dtypes.bfloat16)
    maps = [
        lambda d, at: ptx.tensor_map(d, at[1], (64, 64), (128,), (64, 64)),
        lambda d, at: ptx.tensor_map(d, at[2], stored.shape[::-1], (stored.shape[1] * 2,), (64, 64 if b_mn else n)),
    ]
    got = run(
        wgmma_program(n, 4, b_mn),
        np.zeros((n // 2, 128), np.float32),
        inputs=(a.astype(ml_dtypes.bfloat16), stored),
        maps=maps,
        threads=128,
        shared=1024 + 8192 + n * 128,
    )
    thread, register = np.meshgrid(np.arange(128), np.arange(n // 2))
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register >> 1 & 1)
    column = 8 * (register >> 2) + 2 * (thread % 4) + (register & 1)
    np.testing.assert_array_equal(got, (a @ b.T)[row, column])


# --- lanes ------------------------------------------------------------------------------------------------------------


@BOTH
def test_float_arithmetic(run, rng):
    """mul, fma, add and conversions of numbers of all sizes, infinities, NaNs and subnormals."""
    special = np.array([0, -0.0, 1e-40, -1e-45, 1, np.inf, -np.inf, np.nan, 3.4e38, 65519, 65520, 2.0**-25], np.float32)
    values = np.concatenate([special, (rng.standard_normal(20) * 10.0 ** rng.integers(-30, 30, 20)).astype(np.float32)])
    others = rng.permutation(values)
    body = """shl.b32 %r10, %r0, 2; cvt.u64.u32 %d10, %r10;
        ld.param.b64 %d11, [a]; add.s64 %d11, %d11, %d10; ld.global.b32 %r1, [%d11];
        ld.param.b64 %d11, [b]; add.s64 %d11, %d11, %d10; ld.global.b32 %r2, [%d11];
        mul.f32 %r3, %r1, %r2; fma.rn.f32 %r4, %r1, %r2, %r1; cvt.rn.bf16x2.f32 %r5, %r1, %r2; cvt.rn.f16x2.f32 %r6, %r1, %r2;
        cvt.u16.u32 %h1, %r6; cvt.f32.f16 %r7, %h1; add.f32 %r8, %r1, %r2;"""
    for register in ("%r3", "%r4", "%r5", "%r6", "%r7", "%r8"):
        body += store_lanes(register) + "add.s64 %d0, %d0, 128;"
    got = run(program(body, ("out", "a", "b")), np.zeros((6, 32), np.uint32), inputs=(values, others))
    import ml_dtypes

    def bits(x):
        x = np.asarray(x)
        return np.where(
            np.isnan(x.astype(np.float64)), {2: 0x7FFF, 4: 0x7FFFFFFF}[x.itemsize], x.view(f"u{x.itemsize}")
        ).astype(np.uint32)

    with np.errstate(all="ignore"):
        product = values.astype(np.float64) * others
        np.testing.assert_array_equal(got[0], bits(product.astype(np.float32)))
        # Exact in float64 but for the last addition, whose double rounding does not show in these numbers.
        np.testing.assert_array_equal(got[1], bits((product + values).astype(np.float32)))
        bf16, f16 = (np.array([values, others]).astype(dtype) for dtype in (ml_dtypes.bfloat16, np.float16))
        np.testing.assert_array_equal(got[2], bits(bf16[0]) << 16 | bits(bf16[1]))
        np.testing.assert_array_equal(got[3], bits(f16[0]) << 16 | bits(f16[1]))
        np.testing.assert_array_equal(got[4], bits(f16[1].astype(np.float32)))
        np.testing.assert_array_equal(got[5], bits(values + others))


@BOTH
def test_shuffles_and_votes(run):
    body = """shl.b32 %r1, %r0, 3; xor.b32 %r1, %r1, 5;
        shfl.sync.up.b32 %r2|%p1, %r1, 3, 0, -1; shfl.sync.idx.b32 %r3|%p2, %r1, 7, 31, -1; shfl.sync.bfly.b32 %r4|%p3, %r1, 9, 31, -1;
        shfl.sync.down.b32 %r5|%p4, %r1, 30, 31, -1; selp.b32 %r6, 1, 0, %p1; selp.b32 %r7, 2, 0, %p4; or.b32 %r6, %r6, %r7;
        and.b32 %r8, %r0, 6; setp.eq.b32 %p5, %r8, 2; vote.sync.ballot.b32 %r9, %p5, -1; popc.b32 %r10, %r9;"""
    for register in ("%r2", "%r3", "%r4", "%r5", "%r6", "%r9", "%r10"):
        body += store_lanes(register) + "add.s64 %d0, %d0, 128;"
    got = run(program(body), np.zeros((7, 32), np.uint32))
    lane = np.arange(32)
    value = (lane << 3) ^ 5
    np.testing.assert_array_equal(got[0], value[np.where(lane >= 3, lane - 3, lane)])
    np.testing.assert_array_equal(got[1], value[7])
    np.testing.assert_array_equal(got[2], value[lane ^ 9])
    np.testing.assert_array_equal(got[3], value[np.where(lane < 2, lane + 30, lane)])
    np.testing.assert_array_equal(got[4], (lane >= 3) + 2 * (lane < 2))
    ballot = sum(1 << i for i in range(32) if i & 6 == 2)
    np.testing.assert_array_equal(got[5], ballot)
    np.testing.assert_array_equal(got[6], 8)


@BOTH
def test_barrier_phases(run):
    """What a wait returns at every point of a barrier's life: 0 and 1 are the answers for parity 0 and parity 1, in two bits."""
    ask = """mbarrier.try_wait.parity.shared.b64 %p10, [%r9], 0, 0; mbarrier.try_wait.parity.shared.b64 %p11, [%r9], 1, 0;
        selp.b32 %r11, 1, 0, %p10; selp.b32 %r12, 2, 0, %p11; or.b32 %r11, %r11, %r12; @%p1 st.global.b32 [%d0], %r11; add.s64 %d0, %d0, 4;"""
    arrive = "bar.warp.sync -1; @%p1 mbarrier.arrive.shared.b64 _, [%r9]; bar.warp.sync -1;"
    body = fill(ONE_BARRIER, 2) + ask + arrive + ask + arrive + ask + arrive + ask + arrive + ask
    got = run(program(body), np.zeros(5, np.uint32), shared=1024, policy="lazy")
    np.testing.assert_array_equal(got, [2, 2, 1, 1, 2])


@BOTH
def test_some_threads_exit(run):
    """The others go on without them."""
    body = "setp.gt.s32 %p1, %r0, 9; @%p1 exit; griddepcontrol.wait; griddepcontrol.launch_dependents;" + store_lanes(
        "%r0"
    )
    got = run(program(body), np.zeros(10, np.uint32))
    np.testing.assert_array_equal(got, np.arange(10))


@BOTH
def test_one_warp_arrives_and_another_waits(run):
    """At a named barrier, with what the first wrote; `out` through its generic address."""
    body = """mov.b32 %r9, smem; shl.b32 %r8, %r0, 2; add.s32 %r8, %r8, %r9; add.s32 %r1, %r0, 7;
        setp.lt.s32 %p1, %r0, 32; @%p1 bra GIVE; bar.sync 3, 64; ld.shared.b32 %r2, [%r8+-128]; sub.s32 %r0, %r0, 32;
        cvta.global.u64 %d0, %d0;""" + store_lanes("%r2")
    got = run(program(body + "ret; GIVE: st.shared.b32 [%r8], %r1; bar.arrive 3, 64;", threads=64),
        np.zeros(32, np.uint32), threads=64, shared=128)  # fmt: skip
    np.testing.assert_array_equal(got, np.arange(32) + 7)


@BOTH
@pytest.mark.parametrize(
    ("source", "nbytes"), [("b32 [%r33], %r32", 4), ("v4.s32 [%r33], v", 16), ("v2.b64 [%r33], {%d20, %d21}", 16)]
)
def test_remote_store_and_arrival(run, source, nbytes):
    """Each CTA stores its rank + 40, and what follows it, into the other's memory, to be counted at the other's barrier."""
    body = (
        fill(ONE_BARRIER, 1).replace("bar.sync 0;", "barrier.cluster.arrive.relaxed; barrier.cluster.wait;")
        + """mov.u32 %r30, %cluster_ctarank; xor.b32 %r31, %r30, 1; add.s32 %r32, %r30, 40;
        mapa.shared::cluster.u32 %r33, %r10, %r31; mapa.shared::cluster.u32 %r34, %r9, %r31;
        .reg .v4 .s32 v; mov.s32 v.x, %r32; add.s32 v.y, v.x, 1; add.s32 v.z, v.x, 2; add.s32 v.w, v.x, 3;
        mov.b64 %d20, {v.x, v.y}; mov.b64 %d21, {v.z, v.w};"""
        + fill("@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9], {};", nbytes)
        + fill("@%p1 st.async.shared::cluster.mbarrier::complete_tx::bytes.{}, [%r34];", source)
        + wait("%r9", 0)
        + fill("mul.wide.u32 %d8, %r30, {}; add.s64 %d0, %d0, %d8;", nbytes)
        + "".join(f"ld.shared.b32 %r20, [%r10+{i}]; @%p1 st.global.b32 [%d0+{i}], %r20;" for i in range(0, nbytes, 4))
        + "barrier.cluster.arrive; barrier.cluster.wait;"
    )
    words = nbytes // 4
    got = run(program(body), np.zeros((2, words), np.uint32), shared=2048, ctas=2, cluster=2)
    np.testing.assert_array_equal(got, [np.arange(41, 41 + words), np.arange(40, 40 + words)])

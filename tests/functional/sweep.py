"""What every kernel is run on: small problems that reach every statement of it, and every edge of the contract.

Inputs of the sweep are small integers, so that the right result is one, bit for bit.
"""

import zlib

import device
import numpy as np
import oracle
import wgrad
from problem import Problem, cluster_tiles, loaded_rows

BIASES = (None, "float32", "bfloat16", "float16")
DTYPES_16 = ("bfloat16", "float16")
# In which order things happen: see model/machine.h. A warp that is starved runs only when no other can.
POLICIES = ("eager", "lazy", "hold_loads", "hold_stores", "hold_matrix")


def problems(variant):
    return wgrad.problems(variant.tile) if device.is_wgrad(variant) else forward_problems(variant.tile)


def forward_problems(tile):
    """For one tile: rows and columns of a cluster, tails of everything, and enough tiles that every ring wraps."""
    rows, cols = tile.m * tile.cluster_m, tile.n
    # Four times as many groups as the scheduler warp has lanes; most are empty, in two of the four all, and one has more
    # cluster rows than a band.
    sizes = [0] * 128
    sizes[0], sizes[20], sizes[70], sizes[94] = 40, 9 * rows + 3, 40, 1
    # Each its own expert, but for one that has none, and one that shares another's.
    experts = [*range(127, -1, -1)]
    experts[0], experts[94] = -(2**31), experts[70]
    return (
        # One cluster does it all: more tiles than three times the accumulators, an odd number of K blocks, more of them than
        # slabs of D, and more in all than there are stages. Three columns of tiles, for pairs that turn; the last one is narrow.
        Problem("ragged", (rows, rows + 1, rows + 1, 2 * rows + 3), 3 * rows + 40, 2 * cols + 8, 5 * 64 - 24),
        # Several clusters share the tiles, by the counter; one K block. The longest group's last rows turn, with three columns.
        Problem(
            "many groups",
            tuple(np.cumsum(sizes).tolist()),
            sum(sizes) + 9,
            (2 if tile.turns else 1) * cols + 16,
            16,
            clusters=2,
            dynamic=True,
            experts=tuple(experts),
        ),
        # Ends of any value: every one is clamped. N ends in the second half of a tile.
        # Groups share experts, or have none.
        Problem(
            "hostile ends",
            (-5, 70, 30, -(2**31), 9, rows, 2**31 - 1),
            rows + 72,
            168,
            8,
            clusters=2,
            dynamic=True,
            experts=(0, 1, 0, 1, -(2**31), 2**31 - 1, 1),
        ),
        # One tile, and a cluster that finds none. The K blocks are no multiple of the stages: the ring ends elsewhere than
        # it began.
        Problem("one tile", (rows - 1,), rows - 1, 40, 7 * 64, clusters=2, dynamic=True),
        # No row belongs to a group.
        Problem("no group", (0, 0), 70, 136, 64, clusters=2),
    )


def cases(variant):
    """(problem, case) pairs; optional operands come and go."""
    for i, problem in enumerate(problems(variant)):
        yield problem, make_case(variant, problem, i)


def make_case(variant, problem, i, exact=True):
    """exact: of numbers whose sums are; else how results are rounded shows too."""
    rng = np.random.default_rng(zlib.crc32(f"{variant.name} {problem.name}".encode()))
    if device.is_wgrad(variant):
        return wgrad.make_case(rng, variant, problem, alpha=i != 2, exact=exact)
    make = device.exact_case if exact else random_case
    scaled = variant.epilogue != "plain"
    bias = BIASES[(i + 1) % 4] if variant.c_dtype else BIASES[1 + i % 3] if variant.has_bias else None
    return make(
        rng,
        variant,
        problem.ends,
        problem.n,
        problem.k,
        problem.m,
        alpha=scaled and i != 1,
        prob=scaled and i != 2,
        bias=bias,
        d_dtype=DTYPES_16[i % 2] if variant.d_dtype == "16bit" else variant.d_dtype,
        c_dtype=DTYPES_16[i // 2 % 2] if variant.c_dtype == "16bit" else variant.c_dtype,
        experts=problem.experts,
    )


def random_case(rng, variant, ends, n, k, m, *, alpha, prob, bias, c_dtype, d_dtype, experts):
    return oracle.make_case(
        rng, len(ends), m, n, k, offsets=np.array(ends, np.int32), b_major=variant.b_major, d_dtype=d_dtype,
        alpha=alpha, prob=prob, bias=bias, generate_c=variant.c_dtype is not None, c_dtype=c_dtype, experts=experts,
    )  # fmt: skip


def b_ptrs(i):
    return ("memory", "value")[i % 2]


def schedules(variant, i):
    """Policies for a variant's i-th problem: at random, and for all but the longest one of the rest in turn."""
    if i == 1:
        return ("random",)
    every = [*POLICIES, *(f"starve{warp}" for warp in range(device.facts(variant.name)["threads"] // 32))]
    return "random", every[zlib.crc32(f"{variant.name} {i}".encode()) % len(every)]


def work(variant, case):
    """(bytes that the copy engine must load, bytes that it must store): every tile once, none twice, none in vain."""
    if device.is_wgrad(variant):
        return wgrad.work(variant, case)
    tile, k, n = variant.tile, case.a.shape[1], case.b.shape[1 if case.b_major == "k" else 2]

    def tiles(groups):
        return np.sum([cluster_tiles(tile, end - begin, n) for begin, end in groups], axis=0)

    groups = case.groups()
    multiplied = [group for g, group in enumerate(groups) if case.expert(g) is not None]
    outputs = ("D", "C") if case.generate_c else ("D",)
    element = sum(4 if case.dtype_of(output) == "float32" else 2 for output in outputs)
    tail = [(case.end(), case.a.shape[0])]
    loaded = loaded_rows(tile, *tiles(multiplied)) * -(-k // tile.k) * tile.k * 2
    return loaded, sum(tiles(groups + tail)) * tile.cluster_m * tile.m * tile.n * element


def run(variant, problem, case, i, policy, seed):
    """
    Raises:
      device.Fault: that says how to have it again.
    """
    try:
        _run(variant, problem, case, i, policy, seed)
    except device.Fault as fault:
        again = f"problem {problem.name!r}, policy {policy!r}, seed {seed}; lines are those of {variant.name}.ptx"
        raise device.Fault(fault.kind, f"{fault.report}\n({again})") from None


def _run(variant, problem, case, i, policy, seed):
    device.statistics()
    got = device.run(
        variant,
        case,
        dynamic=problem.dynamic,
        clusters=problem.clusters,
        policy=policy,
        seed=seed,
        b_ptrs=b_ptrs(i),
    )
    device.check_exact(got, case)
    done = device.statistics()
    did, must = (done.get("copy: bytes loaded", 0), done.get("copy: bytes stored", 0)), work(variant, case)
    if did != must:
        raise device.Fault("work", f"{did} bytes were loaded and stored, {must} are needed")


def run_all(variant):
    """Every problem under its schedules, small problems first: most mistakes show at once."""
    every = list(enumerate(cases(variant)))
    for i, (problem, case) in sorted(every, key=lambda each: work(variant, each[1][1])):
        for policy in schedules(variant, i):
            run(variant, problem, case, i, policy, seed=i)

"""How good is the checker? Edits a kernel's PTX, one statement at a time, and counts which edits the sweep notices.

    make mutants KERNELS="..." MUTANT_ARGS="--sample 100 --out FILE"

A mutant is caught if some run of the sweep faults, or gives a wrong result. One that is not caught may be a gap of the
checker or of the sweep, or may compute the same: EXPLAINED says which edits cannot matter, and why.
"""

import argparse
import collections
import dataclasses
import json
import multiprocessing
import random
import re
import sys
import time

import device
import sweep

from jax_grouped_gemm import config


@dataclasses.dataclass(frozen=True)
class Mutant:
    operator: str
    line: int  # of the PTX, from 1
    old: str
    new: str

    def apply(self, text):
        lines = text.split("\n")
        assert lines[self.line - 1] == self.old
        lines[self.line - 1] = self.new
        return "\n".join(lines)


# --- operators: each takes a statement's text and yields texts to put in its place ------------------------------------

DROPPED = (
    "fence.", "tcgen05.fence", "tcgen05.wait", "tcgen05.commit", "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.mma",
    "tcgen05.ld", "wgmma.", "bar.sync", "bar.warp.sync", "barrier.cluster", "mbarrier.init", "mbarrier.arrive",
    "cp.async.bulk", "st.async", "st.shared", "st.global", "stmatrix", "atom.", "setmaxnreg", "tensormap.replace",
)  # fmt: skip


def _with(register, change, statement):
    """The statement with a register changed for it alone."""
    kind = {"r": "b32", "rs": "b16", "rd": "b64"}[re.match(r"%([a-z]+)", register)[1]]
    changed = re.sub(re.escape(register) + r"\b", "mutated", statement)
    return f"{{ .reg .{kind} mutated; {change.format(register)} {changed} }}"


def drop(s):
    if s.startswith(DROPPED):
        yield ""


def skip_wait(s):
    if s.startswith("mbarrier.try_wait"):
        yield re.sub(r".*(P1|%p\d+), \[.*", r"setp.eq.b32 \1, 0, 0;", s)


def flip_parity(s):
    if match := re.match(r"mbarrier\.try_wait\S+ P1, (\[[^]]*\]), ([^,]+),", s):
        parity = match[2]
        if parity.startswith("%"):
            yield _with(parity, "xor.b32 mutated, {}, 1;", s)
        else:
            yield s.replace(f", {parity},", f", {1 - int(parity)},")


def arrive_count(s):
    if match := re.match(r"mbarrier\.arrive\.(?:shared|release)\S+ [^,]+, \[[^]]*\], (%r\d+);", s):
        yield s.replace(match[1] + ";", "2;")


def init_count(s):
    if match := re.match(r"mbarrier\.init\S+\s+\[[^]]*\], (%r\d+);", s):
        for change in (1, -1):
            yield _with(match[1], f"add.s32 mutated, {{}}, {change};", s)


def expected_bytes(s):
    if match := re.match(r"mbarrier\.arrive\.expect_tx\S+ [^,]+, \[[^]]*\], (%r\d+);", s):
        for change in (16, -16):
            yield _with(match[1], f"add.s32 mutated, {{}}, {change};", s)


def wait_fewer(s):
    if match := re.match(r"((?:cp\.async\.bulk\.wait_group|wgmma\.wait_group)\S+\s+)(\d+);", s):
        yield f"{match[1]}{int(match[2]) + 1};"


def other_ctas(s):
    """Who a multicast goes to, or a commit arrives at."""
    if ("multicast::cluster" in s) and (match := re.search(r"(%rs\d+)[;,]", s)):
        for bit in (1, 2):
            yield _with(match[1], f"xor.b16 mutated, {{}}, {bit};", s)


def other_address(s):
    """A shared address, of data or of a barrier."""
    if not s.startswith(
        ("ld.shared", "st.shared", "stmatrix", "mbarrier", "cp.async.bulk.tensor", "st.async", "tcgen05.commit")
    ):
        return
    step = 8 if s.startswith(("mbarrier", "tcgen05.commit")) else 16
    for match in re.finditer(r"\[(%r\d+)(?:\+(-?\d+))?\]", s):
        offset = int(match[2] or 0) + step
        yield s[: match.start()] + f"[{match[1]}+{offset}]" + s[match.end() :]


def other_coordinate(s):
    if s.startswith("cp.async.bulk.tensor") and (match := re.search(r"\{(%r\d+(?:, %r\d+)*)\}", s)):
        for register in dict.fromkeys(match[1].split(", ")):
            yield _with(register, "add.s32 mutated, {}, 1;", s)


def descriptor(s):
    """Fields of matrix and instruction descriptors, where a constant sets them."""
    if match := re.match(r"(or\.b64\s+%rd\d+, %rd\d+, )(\d{15,});", s):
        for bit in (16, 32, 61, 62, 63):
            yield f"{match[1]}{int(match[2]) ^ 1 << bit};"
    if match := re.match(r"(mov\.b32\s+%r\d+, )(\d{8,9});", s):
        for bit in (4, 7, 15, 16, 17, 24):
            yield f"{match[1]}{int(match[2]) ^ 1 << bit};"


def swizzle(s):
    if match := re.match(r"xor\.b32\s+(%r\d+), (%r\d+), (%r\d+);", s):
        for source in match.groups()[1:]:
            yield f"mov.b32 {match[1]}, {source};"
    if match := re.match(r"(and\.b32\s+%r\d+, %r\d+, )(112|48|16);", s):
        yield f"{match[1]}{int(match[2]) & 0x20};"


def negate_guard(s):
    if match := re.match(r"@(!?)(%p\d+) (bra\s.*)", s):
        yield f"@{'' if match[1] else '!'}{match[2]} {match[3]}"


def comparison(s):
    other = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
    if match := re.match(r"setp\.(\w\w)\.([sub]\d+)(.*)", s):
        yield f"setp.{other[match[1]]}.{match[2]}{match[3]}"


def constant(s):
    if match := re.match(r"((?:add|sub|mul\.lo)\.s32\s+%r\d+, %r\d+, )(-?\d+);", s):
        # Where addresses are meant, by 16: less would be cut off.
        step = 16 if abs(int(match[2])) >= 64 else 1
        yield f"{match[1]}{int(match[2]) + step};"
    if match := re.match(r"((?:shl\.b32|shr\.[us]32)\s+%r\d+, %r\d+, )(\d+);", s):
        yield f"{match[1]}{int(match[2]) - 1};"
    if match := re.match(r"(and\.b32\s+%r\d+, %r\d+, )(\d+);", s):  # without its lowest bit
        yield f"{match[1]}{int(match[2]) & (int(match[2]) - 1)};"
    if match := re.match(r"(mov\.b32\s+%r\d+, )(-?\d{1,7});", s):
        # Of zero something that shows as an integer and as a float.
        yield f"{match[1]}{int(match[2]) + 1 if int(match[2]) else 0x40000001};"
    if match := re.match(r"(selp\.b32\s+%r\d+, )(-?\d+), (-?\d+)(, .*)", s):
        yield f"{match[1]}{match[3]}, {match[2]}{match[4]}"


def arithmetic(s):
    if match := re.match(r"mul\.f32\s+(%r\d+), (%r\d+), (%r\d+);", s):
        yield f"mov.b32 {match[1]}, {match[2]};"
    if match := re.match(r"fma\.rn\.f32\s+(%r\d+), (%r\d+), (%r\d+), (%r\d+);", s):
        yield f"mul.f32 {match[1]}, {match[2]}, {match[3]};"
    if match := re.match(r"(cvt\.rn\.\S+x2\.f32\s+%r\d+, )(%r\d+), (%r\d+);", s):
        yield f"{match[1]}{match[3]}, {match[2]};"


OPERATORS = (
    drop, skip_wait, flip_parity, arrive_count, init_count, expected_bytes, wait_fewer, other_ctas, other_address,
    other_coordinate, descriptor, swizzle, negate_guard, comparison, constant, arithmetic,
)  # fmt: skip


def _dead(statement, text):
    """Nothing reads what it computes: `mov.b32 %r5, 1` of a form of an instruction that takes its number otherwise."""
    match = re.match(r"[a-z][\w.]*\s+(%r[sd]?\d+|%p\d+),", statement)
    return match and len(re.findall(re.escape(match[1]) + r"\b", text)) == 1


def mutants(text):
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        statement = line.strip()
        if not statement or statement.startswith((".", "/", "{", "}")) or _dead(statement, text):
            continue
        for operator in OPERATORS:
            found += [Mutant(operator.__name__, number, line, new) for new in operator(statement)]
    return found


# --- edits that compute the same --------------------------------------------------------------------------------------

# operator, pattern of the statement, pattern of the lines around it (3 before, 12 after; "" any), why it cannot matter.
EXPLAINED = (
    (
        "comparison|negate_guard",
        r"setp\.ne\.b32|bra",
        r"\A(?:.*\n){2,4}?.*(?:setp\.ne|bra).*\n(?:.*bra.*\n)?\s*cvta\.param\.u64.*\n\s*prefetch\.tensormap",
        "says which warp prefetches the tensor maps: a hint",
    ),
    ("constant", r"shr\.[su](32|64)\s+.*, 31;", "", "the sign of a number that is never negative: sizes, ranks, rows"),
    (
        "constant",
        r"shr\.u32",
        r"shr\.s32\s+%r\d+, %r\d+, 31;\n.*shr\.u32",
        "a correction for negative numbers, as above",
    ),
    ("comparison", r"setp\.gt\.s32\s+%p\d+, %r\d+, -1;", "", "the same sign; -1 does not occur"),
    (
        "comparison",
        r"setp\.(ne\.b32|lt\.s32)",
        r"setp\.ne\.b32\s+(%p\d+), .*\n\s*setp\.lt\.s32\s+(%p\d+), %r\d+, 0;\n\s*and\.pred\s+%p\d+, \2, \1;",
        "whether a negative rank is odd: both halves of an `and` of which one is always false",
    ),
    (
        "drop",
        r"fence\.mbarrier_init",
        r"(fence\.mbarrier_init\.release\.cluster;\s*){2}",
        "stands twice; of one that is left alone see the kernels where it does",
    ),
    (
        "constant",
        r"shl\.b32\s+%r\d+, %r\d+, \d;|and\.b32\s+%r\d+, %r\d+, 33554430;",
        r"33554430|shl\.b32 	%r\d+, %r\d+, 21;",
        "of the rank of a CTA's pair, of which a cluster has one",
    ),
    (
        "constant",
        r"shl\.b32\s+%r\d+, %r\d+, (8|7);",
        r"mapa|popc|vote|elect|shfl\.sync",
        "of the rank along N, which is 0",
    ),
    (
        "constant",
        r"mov\.b32\s+%r\d+, 0;",
        r"mov\.b32\s+%r\d+, -1;\n\s*mov\.b32|atom\.global",
        "fields of the ring's last entry, whose reader looks at the first only; a value that every path replaces",
    ),
    (
        "skip_wait|flip_parity",
        "",
        r"LAB_WAIT;.*\n(?:.*\n){0,9}.*atom\.global|try_wait(?:.*\n){1,8}.*setp\.ne\.b32(?:.*\n){1,5}.*atom\.global",
        "the claim's wait until the tile before is read: it is about who gets which tile, not about memory",
    ),
    (
        "comparison",
        r"setp\.gt\.u32\s+%p\d+, %r\d+, (15|7|3|1);",
        r"setp\.eq\.b32.*\n\s*max\.s32",
        "of a prefix maximum: a lane that finds no other there takes the maximum with itself",
    ),
)
# The same, of kernels of weight gradients: their scheduler asks more often than it has to.
WGRAD_EXPLAINED = (
    (
        "comparison",
        r"setp\.le\.s32",
        r"add\.s32\s+(%r\d+), %r\d+, 32;\n\s*setp\.le\.s32\s+%p\d+, \1,",
        "whether to walk on where the next group is the one past the last: it has no tiles here",
    ),
    (
        "comparison",
        r"setp\.ge\.s32",
        r"setp\.ge\.s32.*\n(?:\s*setp\.gt\.u32.*\n){4}",
        "whether there is a group: one past the last has no expert, which is asked for too",
    ),
    (
        "comparison",
        r"setp\.lt\.s32",
        r"popc\.b32.*\n\s*add\.s32.*\n\s*setp\.lt\.s32|"
        r"\A(?:.*\n){3}\s*setp\.lt\.s32.*\n(?:\s*setp\.ne\.b32.*\n)?(?:\s*selp\.b32\s+%r\d+, %r\d+, 0, %p\d+;\n){2}",
        "whether the group of a tile is one of the call's, and has an expert: else there would be no tile",
    ),
)

# Runs of waits for stage after stage, at a producer's end.
TAIL = (
    "consumers release a ring's stages in order: the wait for a later stage implies all before; and in a pair the handshake "
    "before tensor memory is freed implies every one"
)


def explanation(mutant, lines):
    at = mutant.line - 1
    around = "\n".join(lines[max(at - 3, 0) : at + 13])
    of_wgrad = any("GroupedWgrad" in line for line in lines[:40])
    for operator, pattern, context, why in EXPLAINED + (WGRAD_EXPLAINED if of_wgrad else ()):
        if re.fullmatch(operator, mutant.operator) and re.search(pattern, mutant.old) and re.search(context, around):
            return why
    if mutant.operator in ("skip_wait", "other_address", "swizzle", "comparison", "constant") and _in_tail(lines, at):
        return TAIL
    return None


def _in_tail(lines, at):
    """Between here and the next label of the kernel's, or the last, there is nothing but waits and the arithmetic between."""
    block = []
    for step in (range(at, -1, -1), range(at + 1, len(lines))):
        for i in step:
            if lines[i].startswith("$L") or re.search(r"\bbra\s+\$L|\b(ld|st|cp|tcgen05|wgmma|bar|atom)\.", lines[i]):
                break
            block.append(lines[i])
    return sum("mbarrier.try_wait" in line for line in block) >= 2 and not any(
        "mbarrier.arrive" in line for line in block
    )


# --- running ----------------------------------------------------------------------------------------------------------


def verdict(variant, mutant):
    """What caught it, or None."""
    try:
        device.register_with_prologues(variant, mutant.apply(device.ptx(variant.name)))
        sweep.run_all(variant)
    except device.Fault as fault:
        return fault.kind
    return None


def _work(arguments):
    device.MAX_STATEMENTS = 3_000_000
    variant, mutant = arguments
    return mutant, verdict(variant, mutant)


def survey(variant, chosen, jobs, progress=lambda line: None):
    """[(mutant, verdict)]. progress: is told how far it is."""
    results = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for result in pool.imap_unordered(_work, [(variant, mutant) for mutant in chosen], chunksize=4):
            results.append(result)
            progress(f"\r{variant.name}: {len(results)} of {len(chosen)} mutants")
    return results


def sampled(every, n, seed=0):
    return every if not n or n >= len(every) else random.Random(seed).sample(every, n)


def table(results):
    caught, total = collections.Counter(), collections.Counter()
    for mutant, found in results:
        total[mutant.operator] += 1
        caught[mutant.operator] += found is not None
    return "\n".join(f"  {name:18} {caught[name]:5} of {total[name]:5}" for name in total)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each kernel; 0: all")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--out", help="JSON of every mutant's verdict")
    options = parser.parse_args()
    known = {
        variant.name: variant
        for arch in config.TILES
        for variant in config.variants(arch) + config.wgrad_variants(arch)
    }
    if unknown := [name for name in options.kernels if name not in known]:
        parser.error(f"no such kernel: {' '.join(unknown)}; build/aot has their names")
    record = {}
    for name in options.kernels:
        variant, started = known[name], time.monotonic()
        chosen = sampled(mutants(device.ptx(name)), options.sample)

        results = survey(variant, chosen, options.jobs, lambda line: print(line, end="", file=sys.stderr, flush=True))
        missed = [mutant for mutant, found in results if found is None]
        lines = device.ptx(name).split("\n")
        unexplained = [mutant for mutant in missed if explanation(mutant, lines) is None]
        behaving = len(results) - len(missed) + len(unexplained)
        print(
            f"\n{name}: {len(results)} mutants, {len(results) - len(missed)} caught, {len(missed) - len(unexplained)} explained;"
        )
        print(
            f"  of those that change behaviour {1 - len(unexplained) / behaving:.1%}; {time.monotonic() - started:.0f} s"
        )
        print(table(results))
        for mutant in sorted(unexplained, key=lambda mutant: mutant.line):
            print(f"  missed: {mutant.operator} line {mutant.line}: {mutant.old.strip()[:90]}  ->  {mutant.new[:60]}")
        record[name] = [
            {**dataclasses.asdict(mutant), "caught": found, "explained": explanation(mutant, lines)}
            for mutant, found in results
        ]
    if options.out:
        with open(options.out, "w") as out:
            json.dump(record, out, indent=1)


if __name__ == "__main__":
    main()

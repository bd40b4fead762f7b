"""Kernels with one synchronisation broken, by name, and what sentryward says of them. A proof is worth what the prover finds wrong with these.

Each is an edit of a plain kernel's PTX that fails where it does not find what it breaks: one that changed nothing would prove nothing.
"""

import re

from .verify import LIFETIME, RACE, SYNCHRONISATION

WAIT = r"\t// begin inline asm\n\t\{\n(?:(?!\t// end).*\n)*?\tmbarrier\.try_wait(?:.*\n)+?\t// end inline asm\n"
# Where the scheduler publishes a tile: the first such store; the others are an epilogue's.
PUBLISHED = r"\tst\.shared\.b32"
CONSTANT = r"(mov\.b32 \t%r\d+, )"


def edit(pattern, replacement="", *, nth=0, before=None):
    """The edit that replaces the nth place where `pattern` is found, lines being ^ to $; with `before`, the last place ahead of the first `before`."""

    def apply(ptx):
        end = re.search(before, ptx).start() if before else len(ptx)
        match = list(re.finditer(pattern, ptx[:end], re.MULTILINE))[-1 if before else nth]
        return ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]

    return apply


def without(instruction, **where):
    """The edit that deletes a line with an instruction."""
    return edit(rf"^\t(?:@%p\d+ )?{instruction}.*\n", **where)


def both(first, second):
    return lambda ptx: second(first(ptx))


FAULTS = {
    "scheduler: a lane may be late to wait when the first has published": (
        SYNCHRONISATION,
        without(r"bar\.warp\.sync", before=PUBLISHED),
    ),
    "scheduler: publishes before the tile there is read": (SYNCHRONISATION, edit(WAIT, before=PUBLISHED)),
    "scheduler: counts a reader too few": (SYNCHRONISATION, edit(CONSTANT + r"6;(?=\n\tmbarrier\.init)", r"\g<1>5;")),
    "load: does not wait for an empty stage": (
        SYNCHRONISATION,
        edit(WAIT, before=r"cp\.async\.bulk\.tensor\.2d\.shared"),
    ),
    "load: announces 16 bytes too few": (
        SYNCHRONISATION,
        edit(CONSTANT + r"(?:49152|65536)(?=;\n\tmbarrier\.arrive\.expect_tx)", r"\g<1>49136"),
    ),
    "math: does not wait for a full stage": (SYNCHRONISATION, edit(WAIT, before=r"tcgen05\.mma")),
    "math: does not wait for an empty accumulator": (SYNCHRONISATION, edit(WAIT, before=r"tcgen05\.fence::after")),
    "math: does not hand back a stage": (SYNCHRONISATION, without(r"tcgen05\.commit", nth=0)),
    "math: does not hand over an accumulator": (SYNCHRONISATION, without(r"tcgen05\.commit", nth=1)),
    "epilogue: does not wait for a full accumulator": (SYNCHRONISATION, edit(WAIT, before=r"tcgen05\.ld")),
    "epilogue: hands back an accumulator after its first slab": (
        RACE,
        edit(r"(setp\.ne\.b32 \t%p\d+, %r\d+, )-1;(?=(?:.*\n){1,5}\ttcgen05\.fence::before)", r"\1-4;"),
    ),
    "epilogue: a warp too many is waited for": (
        SYNCHRONISATION,
        edit(CONSTANT + r"([48])(?=;\n\tmbarrier\.init)", r"\g<1>1\2"),
    ),
    "epilogue: writes a slab that is being stored": (RACE, without(r"cp\.async\.bulk\.wait_group\.read \t1")),
    "epilogue: writes a slab whose storing one warp only has waited for": (RACE, without(r"bar\.sync \t1", nth=0)),
    "epilogue: stores a slab that others have not written": (RACE, without(r"bar\.sync \t1", nth=1)),
    "epilogue: stores rows of the next group": (RACE, edit(r"min\.s32 (\t%r\d+), %r\d+, 128;", r"mov.b32 \1, 0;")),
    "tensor memory: used before its address is there": (
        LIFETIME,
        both(without(r"bar\.sync \t2"), without(r"bar\.sync \t2")),
    ),
    "tensor memory: not freed": (LIFETIME, without(r"tcgen05\.dealloc")),
}
# Of a pair.
PAIR_FAULTS = {
    "epilogue: hands back the accumulator to its own CTA": (
        SYNCHRONISATION,
        edit(r"(mapa\.shared::cluster\.u32 \t%r\d+, %r\d+), %r\d+;", r"\1, 1;", before=r"tcgen05\.ld"),
    ),
    "tensor memory: freed without the other CTA": (
        LIFETIME,
        edit(WAIT, before=r"tcgen05\.dealloc"),
    ),
    "start: barriers used before the other CTA's are there": (SYNCHRONISATION, without(r"barrier\.cluster\.wait")),
}
# What sentryward has no notion of: it calls these kernels proved.
UNSEEN = {
    "slab written for the copy engine without a proxy fence": without(r"fence\.proxy\.async"),
    "barriers not made visible": without(r"fence\.mbarrier_init"),
    "tensor memory not ordered before an arrival": without(r"tcgen05\.fence::before"),
    "tensor memory not ordered after a wait": without(r"tcgen05\.fence::after"),
    "accumulator handed back without a wait for its loads": without(r"tcgen05\.wait::ld"),
    "shared memory gone while it is stored from": without(r"cp\.async\.bulk\.wait_group\.read \t0"),
}

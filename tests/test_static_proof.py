"""The Blackwell kernels are free of races and deadlocks under every schedule, as far as sentryward sees: what of that takes seconds.

The rest is `make prove`; docs/static_proof.md says what is proved and what is not.
"""

import dataclasses
import json
import os
import pathlib

import pytest

pytest.importorskip("sentryward")  # a developer's tool; machines that only run the GPU tests lack it

from static_proof import launch, proofs, verify

pytestmark = pytest.mark.slow

AOT = pathlib.Path(os.environ.get("BUILD", pathlib.Path(__file__).resolve().parent.parent / "build")) / "aot"
PLANTED = proofs.planted(proofs.ONE)
# Those that are found quickly, one of each kind.
QUICK = [
    "scheduler: a lane may be late to wait when the first has published",
    "load: announces 16 bytes too few",
    "math: does not wait for a full stage",
    "math: does not hand back a stage",
    "epilogue: a warp too many is waited for",
    "epilogue: stores rows of the next group",
    "tensor memory: not freed",
]


@pytest.fixture(scope="module")
def compiled():
    """PTX and facts of the kernel of a question."""
    manifest = json.loads((AOT / "manifest.json").read_text())
    facts = {kernel["name"]: kernel for kernel in manifest["kernels"]}
    return lambda question: ((AOT / f"{question.kernel.name}.ptx").read_text(), facts[question.kernel.name])


@pytest.fixture(scope="module")
def proof(compiled):
    """(verdict, facts, problem) of the smallest one."""
    question = proofs.Proof(proofs.kernel(proofs.ONE), proofs.SMALL[proofs.ONE])
    ptx, facts = compiled(question)
    return verify.verify(ptx, facts, question.problem), facts, question.problem


def test_proof(proof):
    assert verify.objections(*proof) == []


@pytest.mark.parametrize("name", QUICK)
def test_planted_fault_is_found(name, compiled):
    verdict, objections = PLANTED[name].ask(*compiled(PLANTED[name]))
    assert objections == [], verdict


def test_a_proof_of_less_is_refused(proof):
    """Of fewer K tiles, of a kernel that does not store, with a race found, under another assumption, or of nothing: each is not the proof meant."""
    verdict, facts, problem = proof

    def objections(**changes):
        return verify.objections(dataclasses.replace(verdict, report=verdict.report | changes), facts, problem)

    opcodes = verdict.report["frontend"]["reached_opcodes"]
    no_store = {opcode: count for opcode, count in opcodes.items() if "global.shared" not in opcode}
    assumed = [{**one, "triggered": True} for one in verdict.report["assumptions"]]
    longer = dataclasses.replace(problem, k=problem.k + 64)
    assert "tcgen05.mma executed: 24, not 36" in verify.objections(verdict, facts, longer)
    assert "cp.async.bulk.tensor.3d.global executed: 0, not 16" in objections(
        frontend=verdict.report["frontend"] | {"reached_opcodes": no_store}
    )
    assert objections(race_count=1) == ["race_count: 1, not 0"]
    assert len(objections(assumptions=assumed)) == 1
    assert len(verify.objections(dataclasses.replace(verdict, result="unsupported"), facts, problem)) >= 1


@pytest.mark.parametrize("tile", [proofs.ONE, proofs.PAIR], ids=str)
def test_only_what_says_nothing_is_taken_out_of_the_ptx(tile, compiled):
    ptx, _ = compiled(proofs.Proof(proofs.kernel(tile), proofs.SMALL[tile]))
    before, after = ptx.splitlines(), launch.readable(ptx).splitlines()
    added = [line for line in after if "%issuer" in line and not line.startswith("\t@%issuer cp.async")]
    rest = [line.replace("@%issuer ", "") for line in after if line not in added]
    changed = [(old, new) for old, new in zip(before, rest, strict=True) if old != new]
    assert added == ["\t.reg .pred \t%issuer;", "\telect.sync \t_|%issuer, -1;"]
    assert len(changed) == 4
    assert all(old.startswith("\ttcgen05.mma") for old, _ in changed)


@pytest.mark.parametrize(
    "change", [("mov.b32 \t{}, 0;", "mov.b32 \t{}, 1;"), (".collector::a::discard", "")], ids=["mask", "hint"]
)
def test_other_matrix_instructions_are_not_taken_for_ours(change, compiled):
    ptx, _ = compiled(proofs.Proof(proofs.kernel(proofs.ONE), proofs.SMALL[proofs.ONE]))
    mask = ptx.partition("tcgen05.mma")[2].partition("{")[2].partition(",")[0]
    old, new = (text.format(mask) for text in change)
    assert old in ptx
    with pytest.raises(ValueError, match="not plainly zero|matrix instructions"):
        launch.readable(ptx.replace(old, new, 1))


@pytest.mark.parametrize("tile", [proofs.ONE, proofs.PAIR], ids=str)
def test_sizes_are_those_that_matter(tile):
    accumulators = 2
    small, long, wide = proofs.SMALL[tile], proofs.LONG[tile], proofs.WIDE[tile]
    for problem in (small, long, wide):
        contracted, tail = problem.tiles(tile)
        assert contracted > accumulators * problem.clusters
        assert tail > 0
        assert 0 in problem.sizes
        assert problem.k % tile.k
    contracted, _ = long.tiles(tile)
    assert contracted >= 3 * accumulators
    assert -(-long.k // tile.k) % 2 == 1
    assert tile.n < wide.n < 2 * tile.n

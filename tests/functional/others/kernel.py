"""What a kernel of another project is to the tests: how it is compiled, and problems with their results."""

import abc
import dataclasses

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
POLICIES = ("eager", "lazy", "hold_loads", "hold_stores", "hold_matrix", "random")


@dataclasses.dataclass(frozen=True)
class Kernel(abc.ABC):
    """amendments: to its PTX, without which the model refuses it; see test_others. What it is run on: numbers of problems, policies."""

    name: str
    arch: int
    amendments: tuple = ()
    problems: tuple = (0, 1)
    policies: tuple = POLICIES

    @abc.abstractmethod
    def compile(self):
        """The DSL's compiled function, in a process prepared for the architecture."""

    @abc.abstractmethod
    def problem(self, rng, number, memory):
        """Number 0 or 1, put into a `device.Memory`.

        Returns:
          arguments: of the compiled function.
          results: [(name, address, the array that is to be there)].
        """


# Of B: rows and K. The first has several tiles of few K blocks, the second the reverse: more K blocks than a kernel has stages.
SIZES = ((160, 200), (96, 584))


@dataclasses.dataclass(frozen=True)
class Broken:
    """A problem that a kernel gets wrong by the rules of PTX. Kind and text of the fault."""

    kernel: Kernel
    problem: int
    policy: str
    kind: str
    text: str


def integers(rng, *shape):
    """Small enough that every sum of products is exact in float32, whatever the order."""
    return rng.integers(-4, 5, shape).astype(BF16)


def product(a, b):
    """A B^T, exactly."""
    return a.astype(np.float32) @ np.swapaxes(b.astype(np.float32), -1, -2)


def grouped_product(a, b, ends):
    begins = (0, *ends[:-1])
    return np.concatenate([product(a[begin:end], bi) for begin, end, bi in zip(begins, ends, b, strict=True)])


def stored(array, major_last):
    """The array as it lies in memory: its last dimension outermost of the last two, unless that is the major one."""
    return array if major_last else np.ascontiguousarray(np.swapaxes(array, -1, -2))


def pointer(dtype, align=16):
    """An example argument of the DSL: only its type matters."""
    import cutlass.cute as cute

    return cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

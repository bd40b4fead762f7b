"""Values of offsets and pointers, checked on the host where they can be seen, and not twice."""

import functools
import weakref

import numpy as np

from jax_grouped_gemm.compat import strided

# id of a tensor -> (weak reference to it, its version, what its values were checked for). An entry goes with its tensor.
_checked: dict[int, tuple] = {}


def check_offsets(plan, tensor, version, read):
    """`read` gives the values as NumPy, which may wait for the device, or None where they cannot be seen now.

    version: None where it cannot be known.
    """
    checked_for = plan.call.m, plan.m_aligned
    if not _seen(tensor, version, checked_for) and (found := read(tensor)) is not None:
        plan.check_offsets(found)
        _remember(tensor, version, checked_for)


def check_pointers(tensor, version, read):
    if not _seen(tensor, version, "pointers") and (found := read(tensor)) is not None:
        strided.check_pointers(np.ascontiguousarray(found).view(np.int64))
        _remember(tensor, version, "pointers")


def _seen(tensor, version, checked_for):
    entry = _checked.get(id(tensor))
    return entry is not None and entry[0]() is tensor and entry[1:] == (version, checked_for) and version is not None


def _remember(tensor, version, checked_for):
    key = id(tensor)
    _checked[key] = (weakref.ref(tensor, functools.partial(_forget, key)), version, checked_for)


def _forget(key, reference):
    # Another tensor may have been given this id before the collector told of the first one's end.
    if key in _checked and _checked[key][0] is reference:
        del _checked[key]

"""Random problems, a float64 oracle, and a comparison whose tolerance follows from the arithmetic.

Shared by CPU and GPU tests. Everything is NumPy; `Case.arguments()` is what `grouped_gemm` takes.
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16


@dataclasses.dataclass
class Case:
    a: np.ndarray
    b: np.ndarray
    offsets: np.ndarray
    alpha: np.ndarray | None = None
    prob: np.ndarray | None = None
    b_major: str = "k"
    d_dtype: str = "bfloat16"

    def arguments(self):
        """Keyword arguments of `grouped_gemm` with dense weights, as JAX arrays."""
        arrays = {"a": self.a, "b": self.b, "offsets": self.offsets, "alpha": self.alpha, "prob": self.prob}
        options = {"b_major": self.b_major, "d_dtype": self.d_dtype}
        return {name: jnp.asarray(x) for name, x in arrays.items() if x is not None} | options

    def groups(self):
        """(begin, end) rows of each group, by the contract's clamping of any int32 offsets."""
        begin, found = 0, []
        for end in self.offsets.tolist():
            end = max(begin, min(max(end, 0), self.a.shape[0]))
            found.append((begin, end))
            begin = end
        return found

    def end(self):
        """First row that belongs to no group."""
        return self.groups()[-1][1] if self.offsets.size else 0


def random_offsets(rng, l, m):
    """Sorted random ends: empty groups and unassigned tail rows are common."""
    return np.sort(rng.integers(0, m + 1, l)).astype(np.int32)


def ends(sizes):
    return np.cumsum(sizes).astype(np.int32)


def make_case(rng, l, m, n, k, *, offsets=None, b_major="k", d_dtype="bfloat16", alpha=True, prob=True, poison=True):
    """A problem of unit scale. poison: NaN wherever the result must not depend on the value."""
    offsets = random_offsets(rng, l, m) if offsets is None else np.asarray(offsets, np.int32)
    a = rng.standard_normal((m, k), np.float32).astype(BF16)
    shape = (l, n, k) if b_major == "k" else (l, k, n)
    b = (rng.standard_normal(shape, np.float32) / np.sqrt(max(k, 1), dtype=np.float32)).astype(BF16)
    case = Case(
        a,
        b,
        offsets,
        rng.uniform(0.5, 2, l).astype(np.float32) if alpha else None,
        rng.uniform(0.1, 1, m).astype(np.float32) if prob else None,
        b_major,
        d_dtype,
    )
    if poison:
        _poison(case)
    return case


def _poison(case):
    end = case.end()
    case.a[end:] = np.nan
    if case.prob is not None:
        case.prob[end:] = np.nan
    for g, (begin, end) in enumerate(case.groups()):
        if begin == end:
            case.b[g] = np.nan
            if case.alpha is not None:
                case.alpha[g] = np.nan


def oracle(case):
    """(D, the same sums over absolute values), both (M, N) float64."""
    m, n = case.a.shape[0], case.b.shape[1 if case.b_major == "k" else 2]
    d, scale = np.zeros((m, n)), np.zeros((m, n))
    for g, (begin, end) in enumerate(case.groups()):
        if begin == end:
            continue
        rows = case.a[begin:end].astype(np.float64)
        weights = case.b[g].astype(np.float64)
        weights = weights.T if case.b_major == "k" else weights
        factor = np.ones((end - begin, 1))
        if case.alpha is not None:
            factor = factor * case.alpha[g].astype(np.float64)
        if case.prob is not None:
            factor = factor * case.prob[begin:end, None].astype(np.float64)
        d[begin:end] = factor * (rows @ weights)
        scale[begin:end] = np.abs(factor) * (np.abs(rows) @ np.abs(weights))
    return d, scale


def tolerance(want, scale, k, d_dtype):
    """Per element: one rounding to d_dtype, and the error of a float32 sum of K exact products.

    The products of two bfloat16 numbers are exact in float32; the errors of adding K of them grow like sqrt(K).
    """
    info = ml_dtypes.finfo(d_dtype)
    rounding = float(info.eps) / 2 * (1 + 1e-3) * np.abs(want) + float(info.smallest_subnormal)
    return rounding + 2.0**-23 * (np.sqrt(k) + 4) * scale


def assert_close(got, want, case):
    """want: `oracle(case)`. The result must have the right type, zero rows past the last group, and be accurate."""
    want, scale = want
    assert got.shape == want.shape
    assert got.dtype == case.d_dtype, f"{got.dtype} is not {case.d_dtype}"
    got = np.asarray(got).astype(np.float64)
    assert not got[case.end() :].any(), "rows past the last group must be exactly zero"
    error = np.abs(got - want) / tolerance(want, scale, case.a.shape[1], case.d_dtype)
    if not (error <= 1).all():  # NaN compares false
        row, column = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
        raise AssertionError(
            f"D[{row}, {column}] is {got[row, column]}, expected {want[row, column]}: "
            f"{error[row, column]:.3g} times the tolerance; {(~(error <= 1)).sum()} of {error.size} elements; "
            f"groups {case.groups()}"
        )


def relative_error(got, want, case):
    """Norm of the error over that of the result, rows of groups only."""
    end = case.end()
    got = np.asarray(got).astype(np.float64)[:end]
    return np.linalg.norm(got - want[0][:end]) / np.linalg.norm(want[0][:end])


def xla_product(case):
    """What XLA's own product of the same dtypes gives, group by group: the yardstick of `relative_error`."""
    d = np.zeros((case.a.shape[0], case.b.shape[1 if case.b_major == "k" else 2]), jnp.dtype(case.d_dtype))
    for g, (begin, end) in enumerate(case.groups()):
        if begin == end:
            continue
        weights = case.b[g].T if case.b_major == "k" else case.b[g]
        values = jnp.dot(jnp.asarray(case.a[begin:end]), jnp.asarray(weights), preferred_element_type=jnp.float32)
        if case.alpha is not None:
            values = values * case.alpha[g]
        if case.prob is not None:
            values = values * case.prob[begin:end, None]
        d[begin:end] = np.asarray(values.astype(case.d_dtype))
    return d

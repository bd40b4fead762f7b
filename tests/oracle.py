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
    bias: np.ndarray | None = None
    generate_c: bool = False
    c_dtype: str | None = None
    experts: np.ndarray | None = None  # of the groups, where they are not one expert each in order

    def arguments(self):
        """Keyword arguments of `grouped_gemm` with dense weights, as JAX arrays."""
        names = ("a", "b", "offsets", "alpha", "prob", "bias")
        arrays = {name: jnp.asarray(getattr(self, name)) for name in names if getattr(self, name) is not None}
        options = {"b_major": self.b_major, "d_dtype": self.d_dtype}
        if self.generate_c:
            options |= {"generate_c": True, "c_dtype": self.c_dtype}
        return arrays | options

    def dtype_of(self, output):
        """Of D or C, "bfloat16" where the case leaves C's to the default."""
        return self.d_dtype if output == "D" else self.c_dtype or "bfloat16"

    def groups(self):
        """(begin, end) rows of each group, by the contract's clamping of any int32 offsets."""
        begin, found = 0, []
        for end in self.offsets.tolist():
            end = max(begin, min(max(end, 0), self.a.shape[0]))
            found.append((begin, end))
            begin = end
        return found

    def expert(self, g):
        """Of a group; None where there is none, and its rows are zero."""
        expert = g if self.experts is None else int(self.experts[g])
        return expert if 0 <= expert < len(self.b) else None

    def end(self):
        """First row that belongs to no group."""
        return self.groups()[-1][1] if self.offsets.size else 0


def random_offsets(rng, l, m):
    """Sorted random ends: empty groups and unassigned tail rows are common."""
    return np.sort(rng.integers(0, m + 1, l)).astype(np.int32)


def num_experts(experts):
    """Up to the last one that there can be: whoever lists others means groups without."""
    return 1 + max(expert for expert in experts if expert < len(experts))


def ends(sizes):
    return np.cumsum(sizes).astype(np.int32)


def make_case(
    rng, l, m, n, k, *, offsets=None, b_major="k", d_dtype="bfloat16", alpha=True, prob=True, bias=None,
    generate_c=False, c_dtype=None, experts=None, poison=True,
):  # fmt: skip
    """A problem of unit scale. l: groups. bias: its dtype, or None. experts: of the groups, where they are not one each. poison: NaN wherever the result must not depend on the value."""
    offsets = random_offsets(rng, l, m) if offsets is None else np.asarray(offsets, np.int32)
    a = rng.standard_normal((m, k), np.float32).astype(BF16)
    weights = l if experts is None else num_experts(experts)
    shape = (weights, n, k) if b_major == "k" else (weights, k, n)
    b = (rng.standard_normal(shape, np.float32) / np.sqrt(max(k, 1), dtype=np.float32)).astype(BF16)
    case = Case(
        a,
        b,
        offsets,
        rng.uniform(0.5, 2, l).astype(np.float32) if alpha else None,
        rng.uniform(0.1, 1, m).astype(np.float32) if prob else None,
        b_major,
        d_dtype,
        None if bias is None else rng.standard_normal((l, n), np.float32).astype(bias),
        generate_c,
        c_dtype,
        None if experts is None else np.array(experts, np.int32),
    )
    if poison:
        _poison(case)
    return case


def _poison(case):
    end = case.end()
    case.a[end:] = np.nan
    if case.prob is not None:
        case.prob[end:] = np.nan
    used = set()
    for g, (begin, end) in enumerate(case.groups()):
        if begin < end and case.expert(g) is not None:
            used.add(case.expert(g))
            continue
        case.a[begin:end] = np.nan
        if case.prob is not None:
            case.prob[begin:end] = np.nan
        for of_group in (case.alpha, case.bias):
            if of_group is not None:
                of_group[g] = np.nan
    case.b[[expert for expert in range(len(case.b)) if expert not in used]] = np.nan


def oracle(case, output="D"):
    """(D, or C with output="C"; the same sums over absolute values), both (M, N) float64."""
    m, n = case.a.shape[0], case.b.shape[1 if case.b_major == "k" else 2]
    values, scale = np.zeros((m, n)), np.zeros((m, n))
    for g, (begin, end) in enumerate(case.groups()):
        if begin == end or case.expert(g) is None:
            continue
        rows = case.a[begin:end].astype(np.float64)
        weights = case.b[case.expert(g)].astype(np.float64)
        weights = weights.T if case.b_major == "k" else weights
        alpha = np.float64(1 if case.alpha is None else case.alpha[g])
        prob = np.ones((1, 1)) if case.prob is None else case.prob[begin:end, None].astype(np.float64)
        values[begin:end] = alpha * (rows @ weights)
        scale[begin:end] = np.abs(alpha) * (np.abs(rows) @ np.abs(weights))
        if case.bias is not None:
            bias = case.bias[g].astype(np.float64)
            values[begin:end] += prob * bias
            scale[begin:end] += np.abs(prob * bias)
        elif output == "D":
            values[begin:end] *= prob
            scale[begin:end] *= np.abs(prob)
    return values, scale


def tolerance(want, scale, k, dtype):
    """Per element: one rounding to dtype, and the error of a float32 sum of K exact products.

    The products of two bfloat16 numbers are exact in float32; the errors of adding K of them grow like sqrt(K).
    """
    info = ml_dtypes.finfo(dtype)
    rounding = float(info.eps) / 2 * (1 + 1e-3) * np.abs(want) + float(info.smallest_subnormal)
    return rounding + 2.0**-23 * (np.sqrt(k) + 4) * scale


def check(got, case):
    """What `grouped_gemm` returned for this case, D or (D, C), is right."""
    assert isinstance(got, tuple) == case.generate_c
    for output, array in zip("DC", got if case.generate_c else (got,), strict=False):
        assert_close(array, oracle(case, output), case, output)
    assert not case.generate_c or len(got) == 2


def assert_close(got, want, case, output="D"):
    """want: `oracle(case, output)`. The result must have the right type, zero rows past the last group, and be accurate."""
    want, scale = want
    dtype = case.dtype_of(output)
    assert got.shape == want.shape
    assert got.dtype == dtype, f"{output} is {got.dtype}, not {dtype}"
    got = np.asarray(got).astype(np.float64)
    assert not got[case.end() :].any(), f"rows of {output} past the last group must be exactly zero"
    error = np.abs(got - want) / tolerance(want, scale, case.a.shape[1], dtype)
    if not (error <= 1).all():  # NaN compares false
        row, column = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
        raise AssertionError(
            f"{output}[{row}, {column}] is {got[row, column]}, expected {want[row, column]}: "
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
        last = values if case.bias is None else case.bias[g].astype(np.float32)
        if case.prob is not None:
            last = last * case.prob[begin:end, None]
        values = last if case.bias is None else values + last
        d[begin:end] = np.asarray(values.astype(case.d_dtype))
    return d


# --- derivatives ------------------------------------------------------------------------------------------------------

OPERANDS = ("a", "b", "alpha", "prob", "bias")


def wgrad(x, y, groups, alpha=None, total=None):
    """(x[rows].T @ y[rows] of each group, the same sums over absolute values), both (L, N, K) float64."""
    values = np.zeros((len(groups), x.shape[1], y.shape[1]))
    scale = np.zeros_like(values)
    for g, (begin, end) in enumerate(groups):
        if begin < end:
            left, right = (array[begin:end].astype(np.float64) for array in (x, y))
            factor = 1.0 if alpha is None else np.float64(alpha[g])
            values[g] = factor * (left.T @ right)
            scale[g] = abs(factor) * (np.abs(left).T @ np.abs(right))
    if total is not None:
        values, scale = values + total, scale + np.abs(total)
    return values, scale


def cotangents(case, d=None, c=None):
    """{operand: (its cotangent, the same sums over absolute values)}, float64, of the cotangents of D and C, or None."""
    found = {name: tuple(np.zeros(getattr(case, name).shape) for _ in range(2)) for name in present(case)}
    for g, (begin, end) in enumerate(case.groups()):
        if begin == end:
            continue
        rows = slice(begin, end)
        of_d, of_c = (np.zeros((end - begin, 1)) if x is None else x[rows].astype(np.float64) for x in (d, c))
        prob = np.ones((end - begin, 1)) if case.prob is None else case.prob[rows, None].astype(np.float64)
        alpha = 1.0 if case.alpha is None else np.float64(case.alpha[g])
        a = case.a[rows].astype(np.float64)
        b = case.b[g].astype(np.float64)
        b = b if case.b_major == "k" else b.T
        for i, magnitude in enumerate((lambda x: x, np.abs)):
            p, f, x, w = (magnitude(v) for v in (prob, alpha, a, b))
            of_c_alone = (
                magnitude(of_d) + magnitude(of_c) if case.bias is not None else p * magnitude(of_d) + magnitude(of_c)
            )
            of_c_alone = np.broadcast_to(of_c_alone, (end - begin, w.shape[0]))
            found["a"][i][rows] = f * (of_c_alone @ w)
            db = f * (of_c_alone.T @ x)
            found["b"][i][g] = db if case.b_major == "k" else db.T
            if case.alpha is not None:
                found["alpha"][i][g] = (of_c_alone * (x @ w.T)).sum()
            if case.prob is not None:
                factor = f * (x @ w.T) if case.bias is None else magnitude(case.bias[g].astype(np.float64))
                of_prob = magnitude(of_d) if case.bias is None else of_c_alone
                found["prob"][i][rows] = (of_prob * factor).sum(axis=1)
            if case.bias is not None:
                found["bias"][i][g] = (p * of_c_alone).sum(axis=0)
    return found


def present(case):
    return [name for name in OPERANDS if getattr(case, name) is not None]


def assert_near(got, want, terms, *, roundings=0, what=""):
    """want: (values, sums of absolute values). Each of the sum's terms was rounded to bfloat16 so many times before."""
    values, scale = want
    assert got.shape == values.shape
    dtype = got.dtype
    got = np.asarray(got).astype(np.float64)
    assert not got[scale == 0].any(), f"{what} must be exactly zero where nothing is added up"
    allowed = tolerance(values, scale, terms, dtype) + roundings * float(ml_dtypes.finfo(BF16).eps) / 2 * 1.01 * scale
    error = np.abs(got - values) / np.maximum(allowed, np.finfo(np.float64).tiny)
    assert (error <= 1).all(), f"{what}: {np.nanmax(error):.3g} times the tolerance, {(~(error <= 1)).sum()} elements"


def random_cotangent(rng, case, output):
    """Of D or C: what bfloat16 holds, NaN in rows of no group, which nothing may depend on."""
    values = rng.standard_normal((len(case.a), case.b.shape[1 if case.b_major == "k" else 2])).astype(BF16)
    values[case.end() :] = np.nan
    return values.astype(case.dtype_of(output))


def random_cotangents(rng, case):
    """Of the case's outputs."""
    return tuple(random_cotangent(rng, case, output) for output in ("DC" if case.generate_c else "D"))


def check_cotangents(got, case, outputs, roundings=3):
    """{operand: cotangent}, of the outputs' cotangents, is right."""
    want = cotangents(case, *outputs)
    m, n = len(case.a), case.b.shape[1 if case.b_major == "k" else 2]
    terms = {"a": n, "b": m, "alpha": m * n, "prob": n, "bias": m}
    for name, x in got.items():
        assert_near(x, want[name], terms[name], roundings=roundings, what=f"the gradient of {name}")


# --- weight gradients -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class WgradCase:
    """d[expert of g] = alpha[g] x[rows of g].T y[rows of g], plus the total so far where there is one. l: results."""

    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray
    l: int
    alpha: np.ndarray | None = None
    total: np.ndarray | None = None
    d_dtype: str = "bfloat16"
    experts: np.ndarray | None = None  # of the groups, where they are not one each in order

    def arguments(self):
        """Keyword arguments of `grouped_gemm_wgrad`, as JAX arrays."""
        arrays = {"x": self.x, "y": self.y, "offsets": self.offsets, "alpha": self.alpha, "accumulate_into": self.total}
        given = {name: jnp.asarray(array) for name, array in arrays.items() if array is not None}
        return given | {"d_dtype": self.d_dtype}

    def groups(self):
        """(begin, end, expert or None) of each group."""
        begin, found = 0, []
        for g, end in enumerate(self.offsets.tolist()):
            end = max(begin, min(max(end, 0), len(self.x)))
            expert = g if self.experts is None else int(self.experts[g])
            found.append((begin, end, expert if 0 <= expert < self.l else None))
            begin = end
        return found

    def results(self):
        """{"D": (L, N, K) float64}"""
        return {"D": wgrad_oracle(self)[0]}

    def poison(self):
        """NaN wherever the result must not depend on the value."""
        used = np.zeros(len(self.x), bool)
        for g, (begin, end, expert) in enumerate(self.groups()):
            used[begin:end] = expert is not None
            if self.alpha is not None and (begin == end or expert is None):
                self.alpha[g] = np.nan
        self.x[~used] = self.y[~used] = np.nan


def make_wgrad_case(
    rng, groups, m, n, k, *, offsets=None, alpha=True, accumulate=False, d_dtype=None, experts=None, poison=True
):
    """As `make_case`; d_dtype: float32 where it accumulates, else bfloat16, unless it is given."""
    case = WgradCase(
        rng.standard_normal((m, n), np.float32).astype(BF16),
        rng.standard_normal((m, k), np.float32).astype(BF16),
        random_offsets(rng, groups, m) if offsets is None else np.asarray(offsets, np.int32),
        groups if experts is None else num_experts(experts),
        rng.uniform(0.5, 2, groups).astype(np.float32) if alpha else None,
        d_dtype=d_dtype or ("float32" if accumulate else "bfloat16"),
        experts=None if experts is None else np.array(experts, np.int32),
    )
    if accumulate:
        case.total = rng.standard_normal((case.l, n, k), np.float32)
    if poison:
        case.poison()
    return case


def wgrad_oracle(case):
    """(D; the same sums over absolute values), both (L, N, K) float64."""
    groups = case.groups()
    of_groups = wgrad(case.x, case.y, [(begin, end) for begin, end, _ in groups], case.alpha)
    found = np.zeros((2, case.l, case.x.shape[1], case.y.shape[1]))
    if case.total is not None:
        found += case.total, np.abs(case.total)
    for g, (_, _, expert) in enumerate(groups):
        if expert is not None:
            found[:, expert] += [values[g] for values in of_groups]
    return tuple(found)


def wgrad_check(got, case):
    """What `grouped_gemm_wgrad` returned for this case is right; without rows it is exactly what was there, or zero."""
    want, scale = wgrad_oracle(case)
    assert got.shape == want.shape
    assert got.dtype == case.d_dtype, f"D is {got.dtype}, not {case.d_dtype}"
    got = np.asarray(got).astype(np.float64)
    rows = np.zeros((case.l, 1, 1))
    for begin, end, expert in case.groups():
        if expert is not None:
            rows[expert] += end - begin
    untouched = rows[:, 0, 0] == 0
    np.testing.assert_array_equal(got[untouched], want[untouched])
    error = np.abs(got - want) / tolerance(want, scale, rows, case.d_dtype)
    if not (error <= 1).all():  # NaN compares false
        at = tuple(map(int, np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)))
        raise AssertionError(
            f"D{list(at)} is {got[at]}, expected {want[at]}: {error[at]:.3g} times the tolerance; "
            f"{(~(error <= 1)).sum()} of {error.size} elements; groups {case.groups()}"
        )

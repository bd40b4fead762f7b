"""What the epilogue's features cost: factors, bias, C and FP32 results beside the plain product, interleaved in one process.

    python -m benchmarks.features                  # on an H200, a minute
    python -m benchmarks.features --smoke          # tiny, any machine

Each is checked against a float32 reference before it is timed. Beside its time over the plain product's stand the bytes over
those of the plain product, and the time that the added bytes take at the bandwidth of a copy, measured in the same run.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import dataclasses
import datetime
import gc
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import arms, check, figures, report, shapes
from benchmarks.run import progress
from jax_grouped_gemm.timing import calibrate, interleave, summarize


@dataclasses.dataclass(frozen=True)
class Feature:
    """operands: by name, beside A and B; options: further ones of the operation."""

    operands: tuple[str, ...] = ()
    options: dict = dataclasses.field(default_factory=dict)

    @property
    def dtypes(self):
        """Of D, and of C if there is one."""
        c = (self.options["c_dtype"],) if "c_dtype" in self.options else ()
        return self.options.get("d_dtype", "bfloat16"), *c

    def added_bytes(self, row, sizes):
        """What must move beyond the plain product's bytes."""
        experts = int(np.count_nonzero(sizes))
        of_operands = {"alpha": 4 * experts, "prob": 4 * row.m, "bias": 2 * experts * row.n}
        outputs = row.m * row.n * (sum(jnp.dtype(dtype).itemsize for dtype in self.dtypes) - 2)
        return sum(of_operands[name] for name in self.operands) + outputs


WITH_C = {"generate_c": True, "c_dtype": "bfloat16"}
FEATURES = {
    "plain": Feature(),
    "alpha, prob": Feature(("alpha", "prob")),
    "bias": Feature(("bias",)),
    "C": Feature(options=WITH_C),
    "FP32 D": Feature(options={"d_dtype": "float32"}),
    "bias, C": Feature(("bias",), WITH_C),
}
ROWS = "gptoss_up,dsv3_up,qwen3_decode"


def operands(row, seed):
    """Factors around 1, and a bias of the scale of the operands."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "alpha": jax.random.uniform(keys[0], (row.l,), minval=0.5, maxval=2.0),
        "prob": jax.random.uniform(keys[1], (row.m,), minval=0.1, maxval=1.0),
        "bias": jax.random.normal(keys[2], (row.l, row.n), jnp.bfloat16),
    }


def error(feature, outputs, product, inputs, given):
    """The worst of D's and C's, in units of what it may be. product: float32 (m, n); given: the feature's operands."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if tuple(out.dtype for out in outputs) != feature.dtypes:
        return float("nan")
    # zip drops the C that was not asked for.
    pairs = zip(outputs, check.epilogue(product, inputs.ends, **given), strict=False)
    return float(np.max([check.worst_error(out, want, inputs.row.k) for out, want in pairs]))


def measure(row, bandwidth, reps, seed):
    """One row's record, and its lines on stdout."""
    progress(f"{row.name}: operands, checks")
    inputs = arms.Inputs(row, seed)
    further = operands(row, seed + 1)
    product = check.grouped_reference("forward", *inputs.pairs[0], inputs.ends)
    ready, errors = {}, {}
    for name, feature in FEATURES.items():
        given = {operand: further[operand] for operand in feature.operands}
        arm, _ = arms.ours(inputs, given, **feature.options)
        check.poison(row, feature.dtypes)
        errors[name] = error(feature, arm.call(0), product, inputs, given)
        if not errors[name] <= 1:
            raise SystemExit(f"{row.name}, {name}: wrong, error {errors[name]:.3g} times the limit")
        ready[name] = arm
    del product
    for arm in ready.values():
        calibrate(arm, reps)
    progress(f"{row.name}: timing")
    interleave(ready)
    plain_bytes, plain = row.bytes(inputs.sizes), summarize(ready["plain"].samples).median
    record = dataclasses.asdict(row) | {"bytes": plain_bytes, "group_sizes": inputs.sizes.tolist(), "features": {}}
    for name, arm in ready.items():
        median, added = summarize(arm.samples).median, FEATURES[name].added_bytes(row, inputs.sizes)
        record["features"][name] = {
            "error": errors[name],
            "samples": arm.samples,
            "over_plain": median / plain,
            "added_bytes": added,
            "seconds_of_added_bytes": added / bandwidth,
        }
        print(
            f"{row.name:15} {name:12} {median * 1e6:9.1f} us {median / plain:6.3f}x plain"
            f" {(median - plain) * 1e6:+8.1f} us, bytes {1 + added / plain_bytes:.3f}x:"
            f" {added / bandwidth * 1e6:+.1f} us at a copy's bandwidth",
            flush=True,
        )
    return record


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help=f"comma-separated names of forward rows (default: {ROWS})")
    parser.add_argument("--reps", type=int, default=15, help="bursts per feature (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny, any machine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    try:
        rows = shapes.select(args.rows or ("smoke_aligned,smoke_decode" if args.smoke else ROWS), args.smoke)
    except ValueError as unknown:
        parser.error(str(unknown))
    if others := [row.name for row in rows if row.product != "forward"]:
        parser.error(f"no forward row: {', '.join(others)}")
    if jax.default_backend() != "gpu" and not args.smoke:
        print("No GPU here: pass --smoke for tiny rows.", file=sys.stderr)
        return 2
    now = datetime.datetime.now(datetime.UTC)
    bandwidth = figures.copy_bytes_per_second(1 << 20 if args.smoke else 1 << 30)
    print(f"a copy moves {bandwidth / 1e12:.3g} TB/s")
    result = {
        "date": now.isoformat(timespec="seconds"),
        "machine": figures.machine(),
        "copy_bytes_per_second": bandwidth,
        "rows": [],
    }
    for row in rows:
        result["rows"].append(measure(row, bandwidth, args.reps, args.seed))
        gc.collect()  # the operands of a row are gigabytes
    device = result["machine"]["device"].replace(" ", "-")
    stem = f"{now:%Y%m%d-%H%M%S}-{device}-features{'-smoke' if args.smoke else ''}"
    print(f"wrote {report.write_json(result, args.out, stem)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

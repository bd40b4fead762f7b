"""The benchmark's own logic: interleaving, statistics, group sizes, correctness checks, reports, energy, and whole smoke runs."""

import ctypes
import functools
import itertools
import json
import math
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm
from benchmarks import arms, check, features, figures, power, report, run, shapes, tiles
from jax_grouped_gemm import config, library
from jax_grouped_gemm.timing import Arm, calibrate, geometric_mean, interleave, summarize


class FakeClock:
    """A clock that only the arms advance."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def fake_arm(clock, log, name, seconds, **fields):
    def call(i):
        clock.now += seconds
        log.append(name)

    return Arm(call, lambda _: None, **fields)


def test_interleave_takes_turns():
    """Every arm once a round, behind a burst of its own, in orders in which every arm follows every other."""
    clock, log = FakeClock(), []
    arms = {name: fake_arm(clock, log, name, 1.0, calls=1, rounds=15) for name in "abc"}
    interleave(arms, clock)
    bursts = "".join(log)
    assert bursts[0::2] == bursts[1::2]
    rounds = [bursts[i : i + 6 : 2] for i in range(0, len(bursts), 6)]
    assert {"".join(sorted(names)) for names in rounds} == {"abc"}
    assert {a + b for a, b in itertools.pairwise("".join(rounds))} >= {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_the_burst_behind_another_arm_is_not_timed():
    """A GPU that has the other arm's clock for a burst's time: each sample is of the arm's own."""
    clock, last = FakeClock(), []

    def arm(name, own):
        def call(i):
            clock.now += own if last[-1:] == [name] else 100.0
            last.append(name)

        return Arm(call, lambda _: None, calls=1, rounds=5)

    arms = {"fast": arm("fast", 1.0), "slow": arm("slow", 2.0)}
    interleave(arms, clock)
    assert (arms["fast"].samples, arms["slow"].samples) == ([1.0] * 5, [2.0] * 5)


def test_an_arm_with_fewer_rounds_leaves_early():
    clock, log = FakeClock(), []
    arms = {
        "fast": fake_arm(clock, log, "f", 1.0, calls=2, rounds=4),
        "slow": fake_arm(clock, log, "s", 9.0, calls=1, rounds=1),
    }
    interleave(arms, clock)
    assert arms["fast"].samples == [1.0] * 4  # per call, not per burst
    assert arms["slow"].samples == [9.0]
    assert log.count("f") == 16


def test_calibrate_gives_slow_arms_few_rounds():
    slow = Arm(lambda i: None, lambda _: None)
    slow.burst = lambda calls: 0.5  # type: ignore[method-assign]
    calibrate(slow, rounds=15)
    assert (slow.calls, slow.rounds) == (1, 3)
    fast = Arm(lambda i: None, lambda _: None)
    fast.burst = lambda calls: 0.001  # type: ignore[method-assign]
    calibrate(fast, rounds=15)
    assert (fast.calls, fast.rounds) == (20, 15)


def test_statistics():
    stats = summarize([3.0, 1.0, 2.0, 10.0])
    assert (stats.median, stats.low, stats.high, stats.count) == (2.5, 1.0, 10.0, 4)
    with pytest.raises(ValueError, match="never timed"):
        summarize([])
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


RESULTS = Path(run.__file__).parent / "results"
EVERY_ROW = shapes.FORWARD + shapes.BACKWARD + shapes.SWEEPS + shapes.SMOKE


@pytest.mark.parametrize("row", EVERY_ROW, ids=lambda row: row.name)
def test_group_sizes(row):
    sizes = row.group_sizes(seed=0)
    assert sizes.shape == (row.l,)
    assert sizes.dtype == np.int32
    assert sizes.min() >= 0
    assert sizes.sum() == row.m
    assert not (sizes % row.align).any()
    if row.shares == "balanced":
        assert set(sizes) == {row.m // row.l}
    if row.shares == "one_hot":
        assert np.count_nonzero(sizes) == 1


def test_shares_grow_more_uneven():
    def largest(shares):
        row = shapes.Row("x", 64, 65536, 8, 8, shares)
        return np.mean([row.group_sizes(seed).max() for seed in range(20)])

    kinds = ("balanced", "routed", "skew", "heavy", "one_hot")
    assert (np.diff([largest(kind) for kind in kinds]) > 0).all()
    with pytest.raises(ValueError, match="unknown shares nope"):
        largest("nope")


def test_gradients_of_weights_without_rows_are_written():
    sizes = np.array([0, 8])
    assert shapes.Row("x", 2, 8, 3, 5, "skew").bytes(sizes) == 2 * (8 * 5 + 3 * 5 + 8 * 3)
    assert shapes.Row("x", 2, 8, 3, 5, "skew", product="wgrad").bytes(sizes) == 2 * (8 * 5 + 2 * 3 * 5 + 8 * 3)


def test_one_quantity_varies_in_a_sweep():
    fields = {"rows_per_group": ("l", "n", "k"), "experts": ("m", "n", "k"), "skew": ("l", "m", "n", "k")}
    for sweep, same in fields.items():
        rows = shapes.select(sweep)
        assert len(rows) > 8
        for field in same:
            assert len({getattr(row, field) for row in rows}) == 1
        assert len({(row.product, row.x) for row in rows}) == len(rows)
        for row in rows:
            x = {"rows_per_group": row.m // row.l, "experts": row.l, "skew": row.x}[sweep]
            assert row.x == x
    unaligned = [row.x for row in shapes.select("skew") if (row.group_sizes(0) % 256).any()]
    assert set(unaligned) == {"routed", "heavy, unaligned"}


def test_rows_are_selected_by_name_and_by_set():
    assert shapes.select() == list(shapes.FORWARD + shapes.BACKWARD + shapes.SWEEPS)
    assert shapes.select("forward") == list(shapes.FORWARD)
    assert shapes.select("backward") == list(shapes.BACKWARD)
    assert shapes.select("sweeps") == list(shapes.SWEEPS)
    assert [row.name for row in shapes.select("experts_8,dsv3_up,experts_8")] == ["experts_8", "dsv3_up"]
    smoke = shapes.select("sweeps", smoke=True)
    assert {row.sweep for row in smoke} == {row.sweep for row in shapes.SWEEPS}
    assert {row.product for row in shapes.select("backward", smoke=True)} == {"dgrad", "wgrad"}


def test_ragged_dot_is_never_swept():
    for row in EVERY_ROW:
        assert ("ragged_dot" in arms.names(row)) == (not row.sweep)
        assert ("ours_static" in arms.names(row)) == ("ours_dynamic" in arms.names(row)) == (row.sweep == "skew")
        assert arms.names(row, ["ours", "ragged_dot"]) == (["ours"] if row.sweep else ["ours", "ragged_dot"])


@pytest.mark.parametrize(
    ("name", "given"), [("ours", None), ("ours_static", False), ("ours_dynamic", True)], ids=lambda value: str(value)
)
def test_arms_of_ours_name_their_scheduler(name, given, monkeypatch):
    seen = []

    def grouped_gemm(a, b, *, offsets, use_dynamic_sched=None, implementation=None):
        seen.append(use_dynamic_sched)
        return a

    monkeypatch.setattr(jax_grouped_gemm, "grouped_gemm", grouped_gemm)
    arms.build(name, arms.Inputs(shapes.SMOKE[0], 0))
    assert seen == [given]


def problem(ends):
    keys = jax.random.split(jax.random.key(0), 2)
    a = jax.random.normal(keys[0], (ends[-1], 40), jnp.bfloat16)
    b = jax.random.normal(keys[1], (len(ends), 24, 40), jnp.bfloat16)
    return a, b, jnp.asarray(ends, jnp.int32)


@pytest.mark.parametrize("ends", [[3, 3, 20, 33], [0, 0, 7], [16]])
def test_reference(ends):
    a, b, offsets = problem(ends)
    begins = [0, *ends[:-1]]
    a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
    expected = np.concatenate(
        [a64[begin:end] @ b64[g].T for g, (begin, end) in enumerate(zip(begins, ends, strict=True))]
    )
    got = check.grouped_reference("forward", a, b, offsets)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    got = check.grouped_reference("dgrad", a, jnp.swapaxes(b, 1, 2), offsets)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ends", [[3, 3, 20, 33], [0, 0, 7], [16]])
def test_reference_of_weight_gradients(ends):
    x = jax.random.normal(jax.random.key(0), (ends[-1], 24), jnp.bfloat16)
    y = jax.random.normal(jax.random.key(1), (ends[-1], 40), jnp.bfloat16)
    got = check.grouped_reference("wgrad", x, y, jnp.asarray(ends, jnp.int32))
    for g, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        expected = np.asarray(x, np.float64)[begin:end].T @ np.asarray(y, np.float64)[begin:end]
        np.testing.assert_allclose(got[g], expected, rtol=1e-5, atol=1e-5)


def test_check_finds_what_is_wrong():
    expected = check.grouped_reference("forward", *problem([3, 20, 33]))
    right = expected.astype(jnp.bfloat16)
    assert check.worst_error(right, expected, 40) <= 1
    assert not check.worst_error(right.at[5, 7].add(1.0), expected, 40) <= 1
    assert not check.worst_error(right.at[5, 7].set(jnp.nan), expected, 40) <= 1


def test_check_finds_a_float32_result_that_was_rounded():
    expected = check.grouped_reference("forward", *problem([3, 20, 33]))
    assert check.worst_error(expected, expected, 40) <= 1
    assert not check.worst_error(expected.astype(jnp.bfloat16).astype(jnp.float32), expected, 40) <= 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("factors", [False, True])
def test_reference_of_the_epilogue(factors, bias):
    """By the formula of `grouped_gemm`, group by group, with an empty one."""
    ends = np.array([3, 3, 8])
    rng = np.random.default_rng(0)
    product = rng.standard_normal((8, 5)).astype(np.float32)
    alpha, prob, values = (rng.uniform(0.5, 2, shape).astype(np.float32) for shape in (3, 8, (3, 5)))
    given = ({"alpha": alpha, "prob": prob} if factors else {}) | ({"bias": values} if bias else {})
    want_c, want_d = np.empty_like(product), np.empty_like(product)
    for row in range(8):
        group = 0 if row < 3 else 2
        a, p = (alpha[group], prob[row]) if factors else (1, 1)
        want_c[row] = a * product[row] + (p * values[group] if bias else 0)
        want_d[row] = want_c[row] if bias else p * want_c[row]
    d, c = check.epilogue(product, ends, **given)
    np.testing.assert_allclose(d, want_d, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(c, want_c, rtol=1e-6, atol=1e-6)


def fake_result():
    row = {"name": "x", "l": 1, "m": 2, "n": 3, "k": 4, "shares": "balanced", "decode": False, "flops": 48e12}
    arms = {
        "ours": {"samples": [0.1, 0.2, 0.3], "temporary_bytes": 0},
        "torch_grouped_mm": {"samples": [0.4]},
        "tokamax": {"skipped": "tokamax is not installed"},
    }
    machine = {"device": "test", "nvidia_smi": None, "jax": "1", "torch": None, "python": "3"}
    return {"date": "2025-01-01", "machine": machine, "rows": [row | {"arms": arms}]}


def test_report_states_medians_ratios_and_absences():
    text = report.markdown(fake_result())
    assert "| 240 | 120 (2.00x) | 0.0 KB |" in text
    assert "ours over torch_grouped_mm: geometric mean 2.00, least 2.00 (1 rows)" in text
    assert "x, tokamax: tokamax is not installed" in text
    assert "Roofline" not in text


def swept_result():
    """The listed row of `fake_result` and two rows of each sweep, where cuBLAS was timed."""
    result = fake_result()
    (listed,) = result["rows"]
    dense = {"cublas_dense": {"samples": [0.15]}}
    for sweep, xs in (("rows_per_group", (1, 4)), ("experts", (2, 8)), ("skew", ("heavy", "one_hot"))):
        for x in xs:
            fields = {"name": f"{sweep}_{x}", "sweep": sweep, "x": x, "product": "forward"}
            result["rows"].append(listed | fields | {"arms": listed["arms"] | dense})
    for row in result["rows"]:
        row["bytes"] = 10e12
    return result | {"copy_bytes_per_second": 100e12}


def test_roofline():
    row = swept_result()["rows"][1]
    assert report.roofline(row, 100e12) == (0.15, "operations")
    assert report.roofline(row, 50e12) == (0.2, "bytes")
    assert report.roofline(row | {"arms": {}}, 100e12) == (0.1, "bytes")


def test_report_of_sweeps_and_roofline():
    text = report.markdown(swept_result())
    listed, rest = text.split("## Sweep rows_per_group, forward")
    swept, roofline = rest.split("## Roofline")
    assert "(1 rows)" in listed  # not the sweeps'
    assert "cublas_dense" not in listed
    assert "ours over cublas_dense: geometric mean 0.75, least 0.75 (2 rows)" in swept
    assert "## Sweep skew, forward" in swept
    assert "| x (1, 2, 3, 4) balanced | 4.8e+04 | 1e+07 | 100000.0 us | bytes | 200000.0 us | 50% |" in roofline
    assert "| 150000.0 us | operations | 200000.0 us | 75% |" in roofline
    assert "every row, tokamax: tokamax is not installed" in roofline


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*H200.json")), ids=lambda path: path.stem)
def test_older_results_still_format(path):
    result = json.loads(path.read_text())
    text = report.markdown(result)
    for row in result["rows"]:
        assert f"| {row['name']} (" in text


def test_plot_of_sweeps():
    """A panel of bars, then one of each sweep with a line per arm; the limit of the bytes where the bandwidth is known."""
    plt = pytest.importorskip("matplotlib.pyplot")
    result = swept_result()
    figure = report.draw(result, plt)
    bars, rows_per_group, experts, skew = figure.axes
    assert len(bars.patches) == 2  # of the arms that were timed in the listed row
    for axis, limit in ((rows_per_group, True), (experts, False), (skew, False)):
        arms_timed = ["ours", "torch_grouped_mm", "cublas_dense"]
        assert [line.get_label() for line in axis.lines] == arms_timed + ["bytes at a copy's bandwidth"] * limit
    assert (rows_per_group.get_xscale(), rows_per_group.get_yscale()) == ("log", "log")
    assert (experts.get_xscale(), experts.get_yscale()) == ("log", "linear")
    np.testing.assert_allclose(rows_per_group.lines[0].get_xydata(), [[1, 240], [4, 240]])
    np.testing.assert_allclose(rows_per_group.lines[-1].get_ydata(), 48 / (10 / 100))
    assert [label.get_text() for label in skew.get_xticklabels()] == ["heavy", "one hot"]
    plt.close(figure)
    del result["copy_bytes_per_second"]
    figure = report.draw(result, plt)
    assert len(figure.axes[1].lines) == 3
    plt.close(figure)


def test_unknown_names_are_refused(capsys):
    for option, text in (
        ("--rows", "unknown row nope; there are dsv3_up"),
        ("--arms", "unknown arm nope; there are ours"),
    ):
        with pytest.raises(SystemExit):
            run.parse_args([option, "nope"])
        assert text in capsys.readouterr().err


def test_decode_rows():
    assert all(row.decode == row.name.endswith("_decode") for row in EVERY_ROW if not row.sweep)


@pytest.mark.slow
def test_smoke_run(tmp_path, capsys):
    assert (
        run.main(["--smoke", "--reps", "2", "--arms", "ours,ragged_dot,torch_grouped_mm", "--out", str(tmp_path)]) == 0
    )
    (path,) = tmp_path.glob("*-smoke.json")
    result = json.loads(path.read_text())
    assert {row["sweep"] for row in result["rows"]} == {"", "rows_per_group", "skew", "experts"}
    assert result["copy_bytes_per_second"] > 0
    for row in result["rows"]:
        assert ("ragged_dot" in row["arms"]) == (not row["sweep"])
        for name in row["arms"].keys() - {"torch_grouped_mm"}:
            assert row["arms"][name]["error"] <= 1
            assert len(row["arms"][name]["samples"]) >= 2
            assert all(math.isfinite(sample) for sample in row["arms"][name]["samples"])
    assert result["machine"]["jax"] == jax.__version__
    assert result["machine"]["build"] == (library.manifest() or {}).get("build_id")
    assert "first_call_seconds" in result["figures"]
    assert (tmp_path / path.with_suffix(".md").name).read_text() in capsys.readouterr().out


@pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad"])
def test_tiles_of_a_smoke_run(product, tmp_path):
    assert tiles.main(["--smoke", "--product", product, "--reps", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob(f"*-tiles-{product}-smoke.json")
    (problem,) = json.loads(path.read_text())["problems"]
    assert problem["loss"] >= 0
    of_product = config.WGRAD_TILES[90] if product == "wgrad" else config.TILES[90]
    assert {"rule", *map(str, of_product)} <= problem["seconds"].keys()


def test_random_rows_are_what_the_benchmark_says():
    rng = np.random.default_rng(0)
    rows = [tiles.random_row(rng, "wgrad") for _ in range(200)]
    for row in rows:
        assert 1 <= row.l <= 256
        assert row.m >= 32 * row.l
        for size in (row.n, row.k):
            assert 512 <= size <= 16384
            assert size % 8 == 0
        assert tiles.FLOPS[0] < row.flops < tiles.FLOPS[1]
        assert row.group_sizes(0).sum() == row.m
    assert {row.shares for row in rows} == {"balanced", "skew"}


# --- the copy ---------------------------------------------------------------------------------------------------------


def test_a_copy_reads_and_writes_every_byte():
    arm, moved = figures.copy_arm(1 << 12)
    first, second = (arm.call(i) for i in range(2))
    assert moved == 2 * first.nbytes == 2 << 12
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()  # not the operand itself
    assert np.unique(np.asarray(first)).size > 1000


def test_bandwidth_of_a_copy(monkeypatch):
    slow = Arm(lambda _: time.sleep(0.002), lambda _: None)
    monkeypatch.setattr(figures, "copy_arm", lambda size: (slow, 2 * size))
    assert 1e5 < figures.copy_bytes_per_second(1000, reps=3) <= 2000 / 0.002


# --- features of the epilogue -----------------------------------------------------------------------------------------


def test_bytes_of_features():
    row, sizes = shapes.Row("x", 4, 10, 6, 8, "skew"), np.array([0, 3, 0, 7])
    added = {name: feature.added_bytes(row, sizes) for name, feature in features.FEATURES.items()}
    outputs = 2 * 10 * 6
    assert added == {
        "plain": 0,
        "alpha, prob": 4 * 2 + 4 * 10,
        "bias": 2 * 2 * 6,
        "C": outputs,
        "FP32 D": outputs,
        "bias, C": 2 * 2 * 6 + outputs,
    }


def test_a_feature_that_is_wrong_is_found():
    """Each one's outputs, computed right, pass; those of another do not."""
    inputs = arms.Inputs(shapes.SMOKE[0], 0)
    product = check.grouped_reference("forward", *inputs.pairs[0], inputs.ends)
    further = features.operands(inputs.row, 1)
    given = {name: {x: further[x] for x in feature.operands} for name, feature in features.FEATURES.items()}
    outputs = {name: arms.ours(inputs, given[name], **f.options)[0].call(0) for name, f in features.FEATURES.items()}
    for (name, feature), (other, got) in itertools.product(features.FEATURES.items(), outputs.items()):
        error = features.error(feature, got, product, inputs, given[name])
        assert (error <= 1) == (name == other), f"{name}, {other}: {error}"
    d, c = outputs["C"]
    for wrong in ((d, c + 1), (d + 1, c)):
        assert features.error(features.FEATURES["C"], wrong, product, inputs, {}) > 1


def test_features_of_a_smoke_run(tmp_path, capsys):
    assert features.main(["--smoke", "--rows", "smoke_decode", "--reps", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-features-smoke.json")
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    assert row["features"].keys() == features.FEATURES.keys()
    for record in row["features"].values():
        assert record["error"] <= 1
        assert len(record["samples"]) >= 2
        expected = record["added_bytes"] / result["copy_bytes_per_second"]
        assert record["seconds_of_added_bytes"] == pytest.approx(expected)
    assert row["features"]["plain"]["over_plain"] == 1
    assert capsys.readouterr().out.count("smoke_decode ") == len(features.FEATURES)


def test_features_are_of_forward_products(capsys):
    with pytest.raises(SystemExit):
        features.main(["--rows", "dsv3_up,dsv3_up_wgrad"])
    assert "no forward row: dsv3_up_wgrad" in capsys.readouterr().err


# --- energy -----------------------------------------------------------------------------------------------------------


class FakeLibrary:
    """What ctypes makes of NVML: functions that write to where the last argument points, and return a code."""

    def __init__(self, **codes):
        self.codes = codes
        self.asked = []
        self.values = {
            "nvmlDeviceGetTotalEnergyConsumption": 2**33 + 500,
            "nvmlDeviceGetPowerUsage": 650_250,
            "nvmlDeviceGetClockInfo": 1755,
        }

    def __getattr__(self, name):
        def function(*args):
            self.asked.append((name, args[1:-1]))
            if name in self.values:
                args[-1]._obj.value = self.values[name]
            return self.codes.get(name, 0)

        return function


def test_nvml_readings():
    library = FakeLibrary()
    gpu = power.Nvml(library)
    assert gpu.joules() == 2**33 / 1e3 + 0.5  # the counter has 64 bits
    assert gpu.watts() == 650.25
    assert gpu.megahertz() == 1755
    assert library.asked[-1] == ("nvmlDeviceGetClockInfo", (1,))  # NVML_CLOCK_SM


def test_nvml_errors():
    with pytest.raises(power.NvmlError, match="nvmlInit_v2 returned 9"):
        power.Nvml(FakeLibrary(nvmlInit_v2=9))
    gpu = power.Nvml(FakeLibrary(nvmlDeviceGetPowerUsage=3))
    with pytest.raises(power.NvmlError, match="nvmlDeviceGetPowerUsage returned 3"):
        gpu.watts()


class FakeGpu:
    """Takes 500 W while the clock runs, reads 400, 600, 400, ... W and ever lower clocks."""

    def __init__(self, clock):
        self.clock = clock
        self.watt_readings = itertools.cycle((400.0, 600.0))
        self.megahertz_readings = itertools.count(2000, -100)

    def joules(self):
        return 1000.0 + 500 * self.clock.now

    def watts(self):
        return next(self.watt_readings)

    def megahertz(self):
        return next(self.megahertz_readings)


def test_observe_counts_what_ran():
    clock, log = FakeClock(), []
    arm = fake_arm(clock, log, "x", 0.25, calls=3)
    reading = power.observe(FakeGpu(clock), arm, 2.0, clock)
    assert reading == power.Reading(seconds=2.25, joules=1125.0, calls=9, watts=pytest.approx(1400 / 3), megahertz=1900)
    assert len(log) == 9


READING = power.Reading(seconds=2.0, joules=1000.0, calls=400, watts=505.0, megahertz=1500)


def test_figures_of_a_product():
    figures_of = power.of_product(READING, flops=2e12, peak_per_cycle=500_000)
    assert figures_of == {
        "millijoules": 2500.0,
        "watts": 505.0,
        "megahertz": 1500,
        "calls_per_second": 200.0,
        "tflops": 400.0,
        "share_of_peak": pytest.approx(400 / 750),
    }
    assert power.of_product(READING, 2e12, None)["share_of_peak"] is None
    assert "53.3% of the peak" in power.line("row", "ours", figures_of)
    assert "peak" not in power.line("row", "ours", figures_of | {"share_of_peak": None})


def test_figures_of_a_copy():
    figures_of = power.of_copy(READING, moved=2_000_000_000, idle_watts=100.0)
    assert figures_of["bytes_per_second"] == 4e11
    assert figures_of["picojoules_per_byte_above_idle"] == pytest.approx(1e12 * (1000 - 200) / (400 * 2e9))
    assert "1000.0 pJ per byte above idle" in power.line("", "copy", figures_of)


def test_peak_of_a_gpu():
    hopper = types.SimpleNamespace(compute_capability="9.0", core_count=132)
    assert power.peak_per_cycle(hopper) == 132 * 4096
    assert power.peak_per_cycle(types.SimpleNamespace(compute_capability="10.0", core_count=148)) is None
    assert power.peak_per_cycle(jax.devices("cpu")[0]) is None


def test_power_without_a_gpu_or_nvml(monkeypatch, capsys, tmp_path):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert power.main(["--out", str(tmp_path)]) == 2
    assert "No GPU here" in capsys.readouterr().err
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert power.main(["--out", str(tmp_path)]) == 2
    assert "NVML is not there: libnvidia-ml.so.1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_power_of_a_row(monkeypatch, capsys, tmp_path):
    """The whole run on a fake NVML: every arm that there is, a copy, and idle before them."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(power, "Nvml", functools.partial(power.Nvml, FakeLibrary()))
    monkeypatch.setattr(power, "WARM_SECONDS", 0.01)
    copy_arm = figures.copy_arm
    monkeypatch.setattr(figures, "copy_arm", lambda: copy_arm(1 << 12))
    monkeypatch.setattr(shapes, "select", lambda names: [shapes.SMOKE[1]])
    assert power.main(["--seconds", "0.05", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-power.json")
    result = json.loads(path.read_text())
    assert result["idle"] == {"watts": 650.25, "megahertz": 1755}
    assert result["copy"]["bytes_per_second"] > 0
    (row,) = result["rows"]
    assert row["arms"].keys() == set(power.ARMS)
    assert row["arms"]["ours"]["error"] <= 1
    assert row["arms"]["ours"]["tflops"] > 0
    out = capsys.readouterr().out
    assert out.index("idle") < out.index("copy") < out.index("smoke_decode")

"""The benchmark's own logic: interleaving, statistics, group sizes, the correctness check, and a whole smoke run."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import check, report, run, shapes, tiles
from benchmarks.timing import Arm, calibrate, geometric_mean, interleave, summarize
from jax_grouped_gemm import config, library


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


@pytest.mark.parametrize("row", shapes.FORWARD + shapes.BACKWARD + shapes.SMOKE, ids=lambda row: row.name)
def test_group_sizes(row):
    sizes = row.group_sizes(seed=0)
    assert sizes.shape == (row.l,)
    assert sizes.dtype == np.int32
    assert sizes.min() >= 0
    assert sizes.sum() == row.m
    assert not (sizes % row.align).any()
    if row.shares == "balanced":
        assert set(sizes) == {row.m // row.l}


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
    assert "| 240 | 120 (2.00x) | 0.0 KB | - |" in text
    assert "ours over torch_grouped_mm: geometric mean 2.00, least 2.00 (1 rows)" in text
    assert "x, tokamax: tokamax is not installed" in text


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        run.parse_args(["--rows", "nope"])
    assert "unknown row nope; there are dsv3_up" in capsys.readouterr().err


def test_decode_rows():
    assert all(row.decode == row.name.endswith("_decode") for row in shapes.FORWARD + shapes.BACKWARD + shapes.SMOKE)


@pytest.mark.slow
def test_smoke_run(tmp_path, capsys):
    assert (
        run.main(["--smoke", "--reps", "2", "--arms", "ours,ragged_dot,torch_grouped_mm", "--out", str(tmp_path)]) == 0
    )
    (path,) = tmp_path.glob("*-smoke.json")
    result = json.loads(path.read_text())
    for row in result["rows"]:
        for name in ("ours", "ragged_dot"):
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
    of_product = config.wgrad_tiles(90) if product == "wgrad" else config.TILES[90]
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

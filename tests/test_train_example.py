"""The training example learns, measures itself against what it should, and can fail."""

import collections
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("optax")

PATH = Path(__file__).parent.parent / "examples" / "train_moe.py"
SIZES = {"layers": 2, "width": 32, "heads": 2, "experts": 4, "hidden": 32, "sequence": 32, "batch": 16, "steps": 120}
TINY = SIZES | {"warmup": 5, "learning_rate": 1e-2, "report": 40, "validation": 2048}


def flags(**sizes):
    return [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module", autouse=True)
def _settings(compiled_fast):
    """Promotes types: jax.nn.dot_product_attention mixes them."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_moe", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text():
    """Sources whose documentation is a fast text: these modules of the standard library."""
    return Path(importlib.util.find_spec("asyncio").origin).parent


@pytest.mark.slow
def test_learns_the_same_with_either_product(example, text, tmp_path, capsys):
    given = flags(size="small", implementation="ragged_dot", text=text, output=tmp_path, **TINY)
    assert example.main(["--compare", *given]) == 0
    out = capsys.readouterr().out
    assert "largest difference of the smoothed curves: 0.0" in out
    assert "OK: validation" in out
    assert "bytes per second" in out
    facts = json.loads((tmp_path / "curves.json").read_text())
    ragged_dot, reference = facts["runs"]
    for run in facts["runs"]:
        assert len(run["bits_per_byte"]) == TINY["steps"]
        assert np.mean(run["bits_per_byte"][-5:]) < np.mean(run["bits_per_byte"][:5]) - 2
        assert [step for step, _ in run["validation"]] == [40, 80, 120]
        assert run["validation"][-1][1] < facts["baselines"]["bigram"] < facts["baselines"]["unigram"]
        assert run["bytes_per_second"] == pytest.approx(16 * 32 / run["seconds_per_step"])
    assert 0 < example.largest_difference(ragged_dot, reference) <= example.TOLERANCE
    assert (tmp_path / "curves.png").is_file() == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.slow
def test_another_curve_and_a_short_run_fail(example, text, tmp_path, capsys, monkeypatch):
    right = example.product

    def reference_ignores_prob(implementation, rows, weights, group_sizes, prob=None):
        return right(implementation, rows, weights, group_sizes, None if implementation == "reference" else prob)

    monkeypatch.setattr(example, "product", reference_ignores_prob)
    given = flags(size="small", text=text, output=tmp_path, **TINY | {"steps": 8})
    assert example.main(["--compare", *given]) == 1
    err = capsys.readouterr().err
    assert "FAILED: kernels and the reference differ by" in err
    assert re.search(r"FAILED: validation ends at .*; 8 steps may be too few, the preset has 400\n", err)
    kernels, _, ragged_dot = json.loads((tmp_path / "curves.json").read_text())["runs"]
    assert kernels["bits_per_byte"][:6] == pytest.approx(
        ragged_dot["bits_per_byte"], abs=0.05
    )  # in the first six steps


def test_documentation_is_every_string_once(example, tmp_path):
    (tmp_path / "one.py").write_text(
        '"""Module."""\nclass C:\n    "Class."\n    async def f():\n        """A\n        B"""\n    def g(): pass\n'
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "two.py").write_text('"""Module."""\n"not documentation"\ndef f(): "Function."\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "three.py").write_text('"""A test\'s."""')
    found = example.documentation(tmp_path)
    assert sorted(found) == ["A\nB", "Class.", "Function.", "Module."]
    (tmp_path / "one.py").rename(tmp_path / "zzz.py")
    assert example.documentation(tmp_path) == found


def test_baselines_are_those_of_counting(example):
    training, validation = b"abracadabra, abracadabra", b"abrakadabra"
    pairs = collections.Counter(itertools.pairwise(training))
    firsts, singles = collections.Counter(training[:-1]), collections.Counter(training)
    steps = list(itertools.pairwise(validation))
    expected = {
        "unigram": -sum(math.log2((singles[y] + 1) / (len(training) + 256)) for _, y in steps) / len(steps),
        "bigram": -sum(math.log2((pairs[x, y] + 1) / (firsts[x] + 256)) for x, y in steps) / len(steps),
    }
    found = example.baselines(np.frombuffer(training, np.uint8), np.frombuffer(validation, np.uint8))
    assert found == pytest.approx(expected, rel=1e-12)


def test_validation_is_the_last_tenth(example):
    config = example.Config(sequence=8, batch=2, validation=50)
    documents = [f"{i:09}" for i in range(100)]
    training, validation = example.split(documents, config)
    assert bytes(training) == "\n\n".join(documents[:90]).encode()
    assert bytes(validation) == "\n\n".join(documents[90:]).encode()[: 3 * 16 + 1]
    with pytest.raises(SystemExit, match="the text is too short: 9 bytes for validation, and a batch is 16"):
        example.split(documents[:10], config)


def test_no_byte_sees_a_later_one(example):
    config = example.Config(**TINY)
    params = example.init_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, config.sequence), 0, 256)
    logits = jax.jit(lambda tokens: example.forward(params, tokens, config, "kernels")[0])
    moved = np.abs(logits(tokens) - logits(tokens.at[0, 20].set((tokens[0, 20] + 1) % 256))).max(axis=(0, 2))
    assert moved[:20].max() < 0.05  # other tiles of rows round differently
    assert moved[20] > 0.5
    assert moved[21:].max() > 0.1


@pytest.mark.parametrize(("steps", "warmup", "peak"), [(400, 40, 40), (50, 40, 25), (2, 40, 1), (1, 40, 0), (9, 0, 0)])
def test_the_warm_up_is_at_most_half_of_the_steps(example, steps, warmup, peak):
    rate = example.learning_rate_of(example.Config(steps=steps, warmup=warmup, learning_rate=1.0))
    rates = [float(rate(step)) for step in range(steps + 1)]
    assert np.argmax(rates) == peak
    assert rates[peak] == pytest.approx(1)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["steps", "report"])
def test_wants_a_step(example, capsys, name):
    with pytest.raises(SystemExit):
        example.main([f"--{name}", "0"])
    assert f"--{name} must be at least 1; got 0" in capsys.readouterr().err


def test_without_optax():
    program = f"import runpy, sys; sys.modules['optax'] = None; runpy.run_path({str(PATH)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "train_moe.py needs optax; got none; install it, e.g. pip install optax\n"


def test_wants_something_to_compare(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--compare", "--implementation", "reference"])
    assert "choose another --implementation" in capsys.readouterr().err


def test_plots_only_with_matplotlib(example, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    example.plot(tmp_path / "curves.png", [], {}, "")
    assert "matplotlib is not installed" in capsys.readouterr().out

"""The example runs at a tiny size, checks itself, and can fail."""

import importlib.util
import inspect
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm

PATH = Path(__file__).parent.parent / "examples" / "moe_layer.py"
TINY = ["--tokens", "48", "--width", "32", "--hidden", "16", "--experts", "4", "--top-k", "2", "--calls", "1"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("moe_layer", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_runs_and_reports(example, capsys):
    assert example.main(TINY) == 0
    out = capsys.readouterr().out
    for line in ("device ", "implementation ", "rows per expert", "grouped_gemm ", "jax.lax.ragged_dot ", "TFLOP/s"):
        assert line in out, line
    assert "OK: 48 tokens agree with float64" in out


@pytest.mark.slow
def test_a_wrong_layer_fails(example, capsys, monkeypatch):
    right = example.experts

    def ignores_prob(params, rows, group_sizes, prob):
        return right(params, rows, group_sizes, prob * 0 + 1)

    monkeypatch.setattr(example, "experts", ignores_prob)
    assert example.main([*TINY, "--no-compare"]) == 1
    assert "FAILED: error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--width", "30"], "--width must be a multiple of 8; got 30"),
        (["--experts", "4", "--top-k", "5"], "--top-k must be at most --experts = 4; got 5"),
        (["--tokens", "0"], "argument --tokens: 0 is not positive"),
    ],
)
def test_impossible_sizes_are_refused(example, capsys, flags, message):
    with pytest.raises(SystemExit):
        example.main(flags)
    assert message in capsys.readouterr().err


def test_text_repeats_when_it_runs_out(example):
    import pydoc_data.topics

    length = len("\n".join(pydoc_data.topics.topics.values()).encode())
    tokens = example.text_tokens(length + 10)
    assert (tokens[:10] == tokens[length:]).all()


def test_the_readme_example_runs():
    accelerated, code, tuning = re.findall(
        r"```python\n(.*?)```", (PATH.parent.parent / "README.md").read_text(), re.DOTALL
    )
    calls = []
    package = types.SimpleNamespace(tune=lambda *args, **options: calls.append((args, options)))
    exec(tuning, {"jax_grouped_gemm": package, "train_step": "step", "params": 1, "batch": 2})
    ((args, options),) = calls
    inspect.signature(jax_grouped_gemm.tune).bind(*args, **options)  # it takes what it is given there
    exec(accelerated, {})
    jax_grouped_gemm.accelerate(False)
    names = {}
    exec(code, names)
    keys = jax.random.split(jax.random.key(0), 3)
    rows, up, down = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, [(10, 16), (3, 16, 32), (3, 32, 16)], strict=True)
    )
    out = names["experts"](rows, jnp.array([4, 0, 5]), up, down, jnp.full(10, 0.5))
    assert out.shape == (10, 16)
    assert jnp.abs(out[:9]).max() > 0
    assert not out[9].any()

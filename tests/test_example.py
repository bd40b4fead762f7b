"""The example runs at a tiny size, checks itself, and can fail."""

import importlib.util
from pathlib import Path

import pytest

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


def test_text_repeats_when_it_runs_out(example):
    import pydoc_data.topics

    length = len("\n".join(pydoc_data.topics.topics.values()).encode())
    tokens = example.text_tokens(length + 10)
    assert (tokens[:10] == tokens[length:]).all()

"""An unmodified mixture-of-experts layer of a public library, which calls jax.lax.ragged_dot: Gemma 4's of google-tunix."""

import importlib.metadata
import importlib.util
import runpy
import types

import jax.numpy as jnp

FILE = "tunix/models/gemma4/moe.py"


def found():
    """Whether google-tunix and Flax are installed."""
    try:
        importlib.metadata.version("google-tunix")
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("flax") is not None


def version():
    return importlib.metadata.version("google-tunix")


def make(experts, k, width, hidden, dtype=jnp.bfloat16):
    """(graph, state) of the layer, `flax.nnx.split`: tokens of `width` to k of the experts, gated MLPs with `hidden` units."""
    from flax import nnx

    config = types.SimpleNamespace(
        embed_dim=width,
        expert_dim=hidden,
        num_experts=experts,
        num_experts_per_tok=k,
        dtype=dtype,
        param_dtype=dtype,
        shd_config=types.SimpleNamespace(exp_weight_edf=None, exp_weight_efd=None),
    )
    return nnx.split(_layer()(config, rngs=nnx.Rngs(0)))


def apply(graph, state, x):
    """x (batch, tokens, width)."""
    from flax import nnx

    return nnx.merge(graph, state)(x)


def _layer():
    """The class, of its file alone: its package imports much that it does not need."""
    files = importlib.metadata.files("google-tunix") or ()
    (path,) = [file.locate() for file in files if str(file) == FILE]
    return runpy.run_path(str(path))["MoERagged"]

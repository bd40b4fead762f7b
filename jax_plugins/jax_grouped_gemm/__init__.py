"""What JAX runs when it looks for its backends, in every program of an environment that has the package."""

import os


def initialize():
    # Asked here too: programs that do not want it import nothing of ours.
    if os.environ.get("JAX_GROUPED_GEMM_ACCELERATE", "") not in ("", "0"):
        import jax_grouped_gemm  # noqa: F401  it looks at the same variable

"""What JAX loads when it looks for its backends, in every program of an environment that has the package."""


def initialize():
    from jax_grouped_gemm import acceleration

    if acceleration.enabled_by_environment():
        acceleration.accelerate()

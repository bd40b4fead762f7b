"""Every way to spell a dtype -> its name. Neither torch nor cutlass is imported: whoever passes one of theirs has it."""

import jax.numpy as jnp


def dtype_name(dtype):
    """bfloat16 for torch.bfloat16, jnp.bfloat16, a NumPy dtype, the name itself, and cutlass.BFloat16; None for None.

    What is no dtype is named by its repr, for the check that refuses it.
    """
    if dtype is None:
        return None
    if _package(type(dtype)) == "torch" or isinstance(dtype, str):
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, type) and _package(dtype) == "cutlass":
        return dtype.__name__.lower()
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return repr(dtype)


def _package(cls):
    return cls.__module__.partition(".")[0]

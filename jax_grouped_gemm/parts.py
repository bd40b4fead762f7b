"""Numbers of float32 as sums of numbers of bfloat16, which the kernels multiply exactly."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax


def of(values):
    """Three bfloat16 that add up to the float32 exactly. An infinity is its own first part, and all parts of NaN are NaN.

    Conversions there and back would not do: XLA may leave both out.
    """
    largest = float(jnp.finfo(jnp.bfloat16).max)
    found, rest = [], values
    for _ in range(3):
        high = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        high = jnp.where(jnp.isinf(rest), rest, jnp.clip(high, -largest, largest))  # to which no finite one is rounded
        found.append(high.astype(jnp.bfloat16))
        rest = jnp.where(jnp.isinf(high), 0, rest - high)
    return found


def beside(x, call, cotangent):
    """The call's cotangent as a factor beside its operand x: of a call in parts one of the two is float32."""
    in_parts = call.parts > 1 and x.dtype == jnp.bfloat16
    return cotangent.astype(jnp.float32 if in_parts else jnp.bfloat16)


def added(product, operands, call):
    """[product(*operands, call), of which one operand is float32]: the sum of those with its parts, the smallest first.

    Of an infinity in the other operand the first one is made alone: the parts may differ in sign, or be zero.
    """
    of_part = dataclasses.replace(call, parts=1, d_dtype="float32")
    split = [of(x)[: call.parts] if x.dtype == jnp.float32 else [x] * call.parts for x in operands]
    found = [product(*part, call=of_part)[0] for part in zip(*split, strict=True)]
    total = functools.reduce(jnp.add, reversed(found))
    return [jnp.where(jnp.isfinite(found[0]), total, found[0]).astype(call.d_dtype)]

"""Modules for `flax.linen`. What they compute is in `functional`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm import arguments
from jax_grouped_gemm.nn import checks, functional

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise checks.no_flax(__name__) from None


class GroupedDense(nn.Module):
    """`flax.linen.Dense` with weights of its own for every expert, on rows sorted by expert.

    Parameters: `kernel` (E, in, features) and, with `use_bias`, `bias` (E, features), each initialised as Dense's for every
    expert by itself. The initialisers may be wrapped by `nn.with_partitioning` or `nn.with_logical_partitioning`, with
    names for all three (two) axes.

    Attributes:
      num_experts: E.
      features: output columns.
      use_bias: off by default, other than in Dense.
      dtype: of the computation; None for what inputs and parameters promote to. The kernels take bfloat16, and sizes that
        are multiples of 8; anything else goes to `jax_grouped_gemm.ragged_dot`, which is JAX's own product there.
      param_dtype: of the parameters, which are cast to `dtype` in each call.
      precision: of JAX's products.
      kernel_init, bias_init: initialisers. Those with a fan-in need `batch_axis=(0,)`.
    """

    num_experts: int
    features: int
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., Any] = functional.default_kernel_init
    bias_init: Callable[..., Any] = functional.default_bias_init

    @nn.compact
    def __call__(self, rows, group_sizes, prob=None):
        """prob * (rows @ kernel[e] + bias[e]) for the rows of each expert e.

        Args:
          rows: (M, in), sorted by expert.
          group_sizes: (E,) int32, rows of each expert.
          prob: (M,) float32, optional: a factor per row.

        Returns:
          (M, features). Rows past the last expert's are zero, and have no gradients, whatever `rows` and `prob` hold there.

        Raises:
          ValueError: shapes, dtypes or attributes, or the values of the group sizes, as in `grouped_gemm`.
          flax.errors.ScopeParamShapeError: rows of another width than the parameters are for.
        """
        rows = arguments.array("rows", rows)
        checks.check_dense_rows(rows)
        width = {"rows.shape[1]": rows.shape[1]}
        checks.check_positive(num_experts=self.num_experts, features=self.features, **width)
        shape = (self.num_experts, rows.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, shape[::2], self.param_dtype) if self.use_bias else None
        return functional.grouped_dense(
            rows, kernel, bias, group_sizes, prob, dtype=self.dtype, precision=self.precision
        )


class MoEMLP(nn.Module):
    """A mixture-of-experts MLP with gated experts: sum over a token's k experts of prob * down(activation(gate(x)) * up(x)).

    No capacity: no token is dropped, whatever the routing. Parameters: `router/kernel` (D, E), and of `GroupedDense`
    `gate/kernel`, `up/kernel` (E, D, hidden_features) and `down/kernel` (E, hidden_features, D). The router is float32.

    Attributes:
      num_experts: E.
      hidden_features: of each expert.
      k: experts per token.
      normalize: the probabilities of a token's experts are divided by their sum.
      activation: of the gate; with the default it is SwiGLU.
      router_init: initialiser of the router's kernel.
      use_bias, dtype, param_dtype, precision, kernel_init, bias_init: of the three `GroupedDense`.
    """

    num_experts: int
    hidden_features: int
    k: int
    normalize: bool = True
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., Any] = functional.default_kernel_init
    bias_init: Callable[..., Any] = functional.default_bias_init
    router_init: Callable[..., Any] = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, inputs, mask=None, *, return_losses=False):
        """The layer.

        Args:
          inputs: (..., D).
          mask: (...) bool, optional. Where it is False, padding, outputs and gradients are zero, whatever the input holds.
          return_losses: return the `functional.RouterLosses` too.

        Returns:
          (..., D); with `return_losses`, that and the losses, which are also sown in "intermediates" as
          `load_balancing_loss` and `router_z_loss`, for `apply(..., mutable=["intermediates"])`.

        Raises:
          ValueError: shapes, the dtype of `mask`, or attributes.
          flax.errors.ScopeParamShapeError: inputs of another width than the parameters are for.
          NotImplementedError: a mesh with explicit axes, outside of `jax.shard_map`.
        """
        inputs = functional.checked_inputs(inputs)
        width = {"inputs.shape[-1]": inputs.shape[-1]}
        checks.check_positive(num_experts=self.num_experts, hidden_features=self.hidden_features, **width)
        checks.check_top_k(self.k, self.num_experts)

        def experts(features, name):
            return GroupedDense(
                self.num_experts,
                features,
                self.use_bias,
                self.dtype,
                self.param_dtype,
                self.precision,
                self.kernel_init,
                self.bias_init,
                name=name,
            )

        out, losses = functional.moe_mlp(
            inputs,
            mask,
            router=nn.Dense(
                self.num_experts,
                use_bias=False,
                dtype=jnp.float32,
                precision="highest",  # the default is TF32 on GPUs, which decides close calls by chance
                kernel_init=self.router_init,
                name="router",
            ),
            gate=experts(self.hidden_features, "gate"),
            up=experts(self.hidden_features, "up"),
            down=experts(inputs.shape[-1], "down"),
            k=self.k,
            normalize=self.normalize,
            activation=self.activation,
            dtype=self.dtype,
        )
        for name, loss in losses._asdict().items():
            self.sow("intermediates", name, loss)
        return (out, losses) if return_losses else out

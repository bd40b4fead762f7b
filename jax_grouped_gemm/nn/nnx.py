"""Modules for `flax.nnx`. What they compute is in `functional`."""

import jax
import jax.numpy as jnp

from jax_grouped_gemm.nn import checks, functional

try:
    from flax import nnx
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise checks.no_flax(__name__) from None


class GroupedDense(nnx.Module):
    """`flax.nnx.Linear` with weights of its own for every expert, on rows sorted by expert.

    Parameters: `kernel` (E, in, out) and, with `use_bias`, `bias` (E, out), else None; each initialised as Linear's for
    every expert by itself. The initialisers may be wrapped by `nnx.with_partitioning`, with names for all three (two) axes.

    Args:
      num_experts: E.
      in_features, out_features: input and output columns.
      use_bias: off by default, other than in Linear.
      dtype: of the computation; None for what inputs and parameters promote to. The kernels take bfloat16, and sizes that
        are multiples of 8; anything else goes to `jax_grouped_gemm.ragged_dot`, which is JAX's own product there.
      param_dtype: of the parameters, which are cast to `dtype` in each call.
      precision: of JAX's products.
      kernel_init, bias_init: initialisers. Those with a fan-in need `batch_axis=(0,)`.
      rngs: the source of keys, of its stream "params".
    """

    def __init__(
        self,
        num_experts,
        in_features,
        out_features,
        *,
        use_bias=False,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init=functional.default_kernel_init,
        bias_init=functional.default_bias_init,
        rngs,
    ):
        checks.check_positive(num_experts=num_experts, in_features=in_features, out_features=out_features)
        shape = (num_experts, in_features, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), shape[::2], param_dtype)) if use_bias else None
        self.dtype = dtype
        self.precision = precision

    def __call__(self, rows, group_sizes, prob=None):
        """prob * (rows @ kernel[e] + bias[e]) for the rows of each expert e.

        Args:
          rows: (M, in), sorted by expert.
          group_sizes: (E,) int32, rows of each expert.
          prob: (M,) float32, optional: a factor per row.

        Returns:
          (M, out). Rows past the last expert's are zero, and have no gradients, whatever `rows` and `prob` hold there.

        Raises:
          ValueError: shapes or dtypes, or the values of the group sizes, as in `grouped_gemm`.
        """
        bias = None if self.bias is None else self.bias[...]
        return functional.grouped_dense(
            rows, self.kernel[...], bias, group_sizes, prob, dtype=self.dtype, precision=self.precision
        )


class MoEMLP(nnx.Module):
    """A mixture-of-experts MLP with gated experts: sum over a token's k experts of prob * down(activation(gate(x)) * up(x)).

    No capacity: no token is dropped, whatever the routing. Parameters: `router.kernel` (D, E), and of `GroupedDense`
    `gate.kernel`, `up.kernel` (E, D, hidden_features) and `down.kernel` (E, hidden_features, D). The router is float32.

    Args:
      num_experts: E.
      in_features: D.
      hidden_features: of each expert.
      k: experts per token.
      normalize: the probabilities of a token's experts are divided by their sum.
      activation: of the gate; with the default it is SwiGLU.
      router_init: initialiser of the router's kernel.
      use_bias, dtype, param_dtype, precision, kernel_init, bias_init: of the three `GroupedDense`.
      rngs: the source of keys, of its stream "params".
    """

    def __init__(
        self,
        num_experts,
        in_features,
        hidden_features,
        k,
        *,
        normalize=True,
        activation=jax.nn.silu,
        dtype=None,
        router_init=jax.nn.initializers.lecun_normal(),  # noqa: B008
        rngs,
        **of_experts,
    ):
        checks.check_positive(num_experts=num_experts, in_features=in_features, hidden_features=hidden_features)
        checks.check_top_k(k, num_experts)
        self.router = nnx.Linear(
            in_features,
            num_experts,
            use_bias=False,
            dtype=jnp.float32,
            precision="highest",  # the default is TF32 on GPUs, which decides close calls by chance
            kernel_init=router_init,
            rngs=rngs,
        )
        self.gate, self.up = (
            GroupedDense(num_experts, in_features, hidden_features, dtype=dtype, rngs=rngs, **of_experts)
            for _ in range(2)
        )
        self.down = GroupedDense(num_experts, hidden_features, in_features, dtype=dtype, rngs=rngs, **of_experts)
        self.in_features = in_features
        self.k = k
        self.normalize = normalize
        self.activation = activation
        self.dtype = dtype

    def __call__(self, inputs, mask=None, *, return_losses=False):
        """The layer.

        Args:
          inputs: (..., D).
          mask: (...) bool, optional. Where it is False, padding, outputs and gradients are zero, whatever the input holds.
          return_losses: return the `functional.RouterLosses` too. They are not sown: Flax has no way of it that neither
            warns nor changes the module where nobody collects them.

        Returns:
          (..., D); with `return_losses`, that and the losses.

        Raises:
          ValueError: shapes, or the dtype of `mask`.
          NotImplementedError: a mesh with explicit axes, outside of `jax.shard_map`.
        """
        out, losses = functional.moe_mlp(
            functional.checked_inputs(inputs, self.in_features),
            mask,
            router=self.router,
            gate=self.gate,
            up=self.up,
            down=self.down,
            k=self.k,
            normalize=self.normalize,
            activation=self.activation,
            dtype=self.dtype,
        )
        return (out, losses) if return_losses else out

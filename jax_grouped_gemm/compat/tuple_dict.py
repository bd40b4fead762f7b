"""The wrapper's result: several arrays, by name or by position."""

import jax


@jax.tree_util.register_pytree_with_keys_class
class TupleDict:
    """Named values in order, unpacked like a tuple and read like a dict; a pytree in JAX.

    Example:
      >>> from jax_grouped_gemm import TupleDict
      >>> result = TupleDict(d_tensor=1, c_tensor=None)
      >>> d, c = result
      >>> d == result["d_tensor"] == result.d_tensor == result[0], len(result), list(result.items())
      (True, 2, [('d_tensor', 1), ('c_tensor', None)])
    """

    __slots__ = ("_values",)

    def __init__(self, **values):
        self._values = values

    def __getitem__(self, key):
        return self._values[key] if isinstance(key, str) else tuple(self._values.values())[key]

    def __getattr__(self, name):
        # Only for what is no attribute: also `_values` itself, while copy and pickle make an instance.
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"no attribute {name!r}")
        return self._values[name]

    def __dir__(self):
        return [*super().__dir__(), *self._values]

    def __iter__(self):
        return iter(self._values.values())

    def __len__(self):
        return len(self._values)

    def keys(self):
        return self._values.keys()

    def values(self):
        return self._values.values()

    def items(self):
        return self._values.items()

    def __repr__(self):
        return f"TupleDict({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def tree_flatten_with_keys(self):
        keyed = [(jax.tree_util.DictKey(name), value) for name, value in self._values.items()]
        return keyed, tuple(self._values)

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(**dict(zip(names, values, strict=True)))

"""The wrapper's result: several arrays, by name or by position."""

import jax


@jax.tree_util.register_pytree_with_keys_class
class TupleDict(dict):
    """A dict that is unpacked, and indexed by integers, like the tuple of its values; a pytree in JAX.

    Example:
      >>> from jax_grouped_gemm import TupleDict
      >>> result = TupleDict(d_tensor=1, c_tensor=None)
      >>> d, c = result
      >>> d == result["d_tensor"] == result.d_tensor == result[0], len(result), list(result.items())
      (True, 2, [('d_tensor', 1), ('c_tensor', None)])
    """

    __slots__ = ()

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no attribute {name!r}") from None

    def __dir__(self):
        return [*super().__dir__(), *self.keys()]

    def __iter__(self):
        return iter(self.values())

    def __repr__(self):
        return f"TupleDict({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey(name), value) for name, value in self.items()], tuple(self.keys())

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(zip(names, values, strict=True))

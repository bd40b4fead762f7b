"""Which device computes what of a call whose operands are sharded: on a mesh with explicit axes, and by automatic partitioning.

Dimensions have the letters of the contract: m, n, k, l, s for the stacks of weights that a vmap makes (`calls.Call.stacks`),
and g for that of the groups, which is small and never sharded. One rule settles every case: weights stay where they are (and
so do the matrices that a weight gradient makes), rows move.

On explicit axes the results' shardings follow from the operands' types, or the call is refused as jax.lax.dot_general would.
The call itself is then one on automatic axes. There XLA asks, when shardings are known, what each device is to do
(jax.experimental.custom_partitioning): the same call on its part, with the ends of the groups moved to its rows, the groups
mapped to its experts, and sums over devices around it.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

from jax_grouped_gemm import calls, contract, log, meshes, reference


def bind(primitive, rule, operands):
    """The primitive's results for operands on any number of devices. rule: a `Gemm` or a `Wgrad`."""
    return _computed(functools.partial(primitive.bind, call=rule.call), rule, operands)


def zeros(results, rule, operands):
    """Zeros of the types that its results would have, those as `jax.ShapeDtypeStruct`."""

    def compute(*operands):
        nothing = jnp.sum(operands[0][:0])  # a zero that is where the operands are, and of their types
        return [jnp.broadcast_to(nothing.astype(x.dtype), x.shape) for x in results]

    return _computed(compute, rule, operands)


def _computed(function, rule, operands):
    mesh, axes = meshes.explicit(rule.operands, operands)
    if mesh is None:
        return function(*meshes.alike(operands))
    result = rule.explicit(axes)
    specs = [meshes.spec_of(letters, result) for letters in rule.results]
    return meshes.computed(function, mesh, specs, operands)


def placed(module_context, run, primitive, rule):
    """What computes the call at this place in the program that is being lowered: run(*operands, call=...) on one device."""
    why = why_not(module_context)
    if why is not None:
        return functools.partial(run, call=rule.without_partition(why))
    return functools.partial(_automatic, primitive, rule) if is_automatic(module_context) else run


def is_automatic(module_context):
    """Whether XLA partitions the program that is being lowered, at this place in it."""
    context = module_context.axis_context
    return getattr(context, "manual_axes", None) is None and getattr(context, "num_devices", 1) > 1


def why_not(module_context):
    """Why there is no rule for a call at this place in the program; None where there is one, or none is needed."""
    context = module_context.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is not None:
        left = [name for name, size in context.mesh.shape.items() if size > 1 and name not in manual]
        # XLA aborts the process where a rule of custom_partitioning has it move anything there.
        return contract.partly_manual(left) if left else None
    if getattr(context, "num_devices", 1) > 1 and module_context.lowering_parameters.for_export:
        return contract.NO_PARTITIONING_IN_EXPORT
    return None


def _automatic(primitive, rule, *operands):
    """The primitive's results, each device making its part as `rule` says once XLA knows how operands are sharded."""

    @custom_partitioning
    def call(*operands):
        return primitive.bind(*operands, call=rule.call)

    def plan(mesh, arguments, wished):
        own = [_axes(mesh, letters, x) for letters, x in zip(rule.operands, arguments, strict=True)]
        return rule.plan(_Mesh(mesh), own, wished)

    def shardings(mesh, letters, axes):
        return [jax.sharding.NamedSharding(mesh, meshes.spec_of(*each)) for each in zip(letters, axes, strict=True)]

    def partition(mesh, arguments, results):
        found = plan(mesh, arguments, _axes(mesh, rule.results[0], results[0]))
        run = rule.local(found, lambda call, flat: primitive.bind(*flat, call=call))
        results = shardings(mesh, rule.results, [found.result] * len(rule.results))
        return mesh, meshes.without(run), results, tuple(shardings(mesh, rule.operands, found.operands))

    def infer(mesh, arguments, results):
        try:
            result = plan(mesh, arguments, {}).result
        except ValueError:  # which `partition` raises again: here, XLA might abort the process
            result = {}
        return shardings(mesh, rule.results, [result] * len(rule.results))

    call.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=_shardy_rule(rule))
    return call(*operands)


def _axes(mesh, letters, x):
    """The mesh axes of each sharded dimension, those of one device left out."""
    if x.sharding is None or x.sharding.is_fully_replicated:
        return {}
    if not isinstance(x.sharding, jax.sharding.NamedSharding):
        raise contract.no_mesh(x.sharding)
    found = meshes.axes_of(letters, x.sharding.spec)
    return {letter: tuple(axis for axis in axes if mesh.shape[axis] > 1) for letter, axes in found.items()}


def _shardy_rule(rule):
    """Which dimensions are sharded alike. Those of the groups have nothing to do with each other."""
    operands = [
        " ".join(f"g{i}" if letter == "g" else letter for letter in letters)
        for i, letters in enumerate(rule.operands)
    ]  # fmt: skip
    return f"{', '.join(operands)} -> {', '.join(' '.join(letters) for letters in rule.results)}"


class _Mesh:
    def __init__(self, mesh):
        self._shape = mesh.shape

    def size(self, axes):
        return math.prod(self._shape[axis] for axis in axes)

    def divides(self, size, axes, unit=1):
        return size % (self.size(axes) * unit) == 0

    def check(self, letter, size, axes, unit=1):
        if not self.divides(size, axes, unit):
            name = "the batch of weights" if letter == "s" else letter.upper()
            raise contract.uneven(name, size, axes, self.size(axes), unit)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each device is given, computes and leaves.

    operands: for each flat operand the axes of its dimensions.
    result: the axes of the results' dimensions.
    axes: those over which the call on each device is a part of the whole, by dimension.
    gathered: for each operand the axes over which a device gathers its rows: they came sharded over axes of L.
    scattered: by dimension of the results, the axes over which their sum is left scattered.
    """

    call: calls.Call | calls.WgradCall
    operands: list
    result: dict
    axes: dict
    gathered: list
    scattered: dict


class _Rule:
    def __init__(self, call):
        self.call = call
        stacks = call.stacks or 1
        self.sizes = {"m": call.m, "n": call.n, "k": call.k, "l": call.l // stacks, "s": stacks}
        self.matrices = "l" if call.stacks is None else "sl"

    def without_partition(self, why):
        """The call where XLA would partition it and there is no rule for that."""
        if not self.call.drop_in:
            raise contract.cannot_partition(why)
        log.once(f"ragged_dot is the reference implementation, which is slow on a GPU: {why}")
        return dataclasses.replace(self.call, implementation="reference")

    def _unit(self, letter):
        """Of a device's part of this dimension."""
        return contract.ALIGNMENT if letter in "nk" and not self.call.drop_in else 1

    def _legal(self, mesh, letter, axes):
        return mesh.divides(self.sizes[letter], axes, self._unit(letter))

    def _check(self, mesh, axes):
        for letter, of_letter in axes.items():
            mesh.check(letter, self.sizes[letter], of_letter, self._unit(letter))

    def _settle(self, mesh, weights, columns, own_rows, wished_rows):
        """Axes by dimension. weights: those of l, n and k that are fixed; columns, own_rows: of n and k, and of m, if left free."""
        axes = dict(weights)
        taken = {axis for of_letter in axes.values() for axis in of_letter}
        for letter, wanted in columns.items():
            if letter not in axes:
                axes[letter] = tuple(axis for axis in wanted if axis not in taken)
                taken.update(axes[letter])
        rows = tuple(axis for axis in own_rows or wished_rows if axis not in taken)
        axes["m"] = rows if self._legal(mesh, "m", rows) else ()
        self._check(mesh, axes)
        return axes

    def _plan(self, mesh, axes, own, result, scattered):
        """own: of each operand, as it comes. Rows that are sharded over axes of l are gathered by the call itself, in their order."""
        of_experts = axes["s"] + axes["l"]
        gathered = [tuple(axis for axis in x.get("m", ()) if axis in of_experts) for x in own]
        gathered = [more if mesh.divides(self.call.m, axes["m"] + more) else () for more in gathered]
        operands = [axes | {"m": axes["m"] + more} for more in gathered]
        local = {letter: size // mesh.size(axes[letter]) for letter, size in self.sizes.items()}
        stacks = local.pop("s")
        local["l"] *= stacks
        mapped = self.call.groups if of_experts else self.call.mapped_groups
        stacks = None if self.call.stacks is None else stacks
        call = dataclasses.replace(self.call, **local, stacks=stacks, mapped_groups=mapped)
        return Plan(call, operands, result, axes, gathered, scattered)

    def _local_operands(self, plan, flat):
        """The whole call's operands as those of the call on this device."""
        flat = [
            lax.all_gather(x, over, axis=0, tiled=True) if over else x
            for x, over in zip(flat, plan.gathered, strict=True)
        ]
        at = self.call.split(flat)
        if plan.axes["m"]:
            first = lax.axis_index(plan.axes["m"]) * plan.call.m
            ends = reference.clamp_offsets(at.offsets, self.call.m) - first
            at = at._replace(offsets=jnp.clip(ends, 0, plan.call.m))
        if plan.axes["s"] or plan.axes["l"]:
            experts = jnp.arange(self.call.l, dtype=jnp.int32) if at.experts is None else at.experts
            here = reference.has_expert(self.call, experts)
            if self.call.stacks is None or not plan.axes["l"]:  # this device's are neighbours
                index = experts - lax.axis_index(plan.axes["s"] or plan.axes["l"]) * plan.call.l
            else:
                of_stack, here_of_stack = self.sizes["l"], plan.call.l // plan.call.stacks
                stack, expert = experts // of_stack, experts % of_stack
                stack -= lax.axis_index(plan.axes["s"]) * plan.call.stacks if plan.axes["s"] else 0
                expert -= lax.axis_index(plan.axes["l"]) * here_of_stack
                here &= (expert >= 0) & (expert < here_of_stack)
                index = stack * here_of_stack + expert
            at = at._replace(experts=jnp.where(here, index, -1))
        return at


class Gemm(_Rule):
    """Of grouped_gemm."""

    def __init__(self, call):
        super().__init__(call)
        matrix = "nk" if call.b_major == "k" else "kn"
        b = {"dense": [self.matrices + matrix], "tuple": [matrix] * call.l, "pointers": ["p"]}[call.weights]
        self.operands = _letters(call, calls.Operands("mk", "g", "g", "g", "m", "gn", tuple(b)))
        self.results = ["mn"] * len(call.output_dtypes)

    def explicit(self, axes):
        at = self.call.split(axes)
        _check_unsummed("K, the contraction,", at.a.get("k"), *(w.get("k") for w in at.b))
        _check_unsummed("L, the experts,", *(w.get("l", w.get("p")) for w in at.b))
        _check_unsummed("the batch of weights", *(w.get("s") for w in at.b))
        columns = [w.get("n", ()) for w in at.b] + ([] if at.bias is None else [at.bias.get("n", ())])
        rows = [at.a.get("m", ())] + ([] if at.prob is None else [at.prob.get("m", ())])
        # Of weights that are not sharded each device takes its columns, and of rows its rows.
        result = {"m": _agreed("M, the rows,", rows), "n": _agreed("N, the output columns,", columns)}
        return _disjoint(result)

    def plan(self, mesh, own, wished):
        at = self.call.split(own)
        weights = {letter: _agreed_weights(letter, [w.get(letter, ()) for w in at.b]) for letter in "slnk"}
        taken = sum(weights.values(), ())
        if len(set(taken)) < len(taken):
            raise contract.weights_unlike("L, N and K", sorted(weights.values()))
        if self.call.weights == "pointers":
            for name, axes in (("b_ptrs", at.b[0].get("p")), ("K of a", at.a.get("k"))):
                if axes:
                    raise contract.pointers_sharded(name, axes)
            columns = {"n": (), "k": ()}
        else:
            columns = {"k": at.a.get("k", ())}
            wanted = tuple(axis for axis in wished.get("n", ()) if axis not in (*taken, *columns["k"]))
            columns["n"] = wanted if self._legal(mesh, "n", wanted) else ()
        weights = {letter: axes for letter, axes in weights.items() if axes or letter in "sl"}
        axes = self._settle(mesh, weights, columns, at.a.get("m", ()), wished.get("m", ()))
        scattered: dict = {}
        for letter in "mn":
            over = tuple(
                axis
                for axis in wished.get(letter, ())
                if axis in axes["s"] + axes["l"] + axes["k"] and axis not in scattered.get("m", ())
            )
            scattered[letter] = over if mesh.divides(self.sizes[letter], axes[letter] + over) else ()
        result = {letter: axes[letter] + scattered[letter] for letter in "mn"}
        return self._plan(mesh, axes, own, result, scattered)

    def local(self, plan, run):
        call, local = self.call, plan.call
        summed = plan.axes["s"] + plan.axes["l"] + plan.axes["k"]
        same = len(self.results) == 2 and (call.has_bias or not call.has_prob)  # D and C are, before they are rounded
        if summed:  # rounded after
            c_dtype = None if same or call.c_dtype is None else "float32"
            local = dataclasses.replace(local, d_dtype="float32", c_dtype=c_dtype)

        def compute(*flat):
            at = self._local_operands(plan, flat)
            if plan.axes["k"] and call.has_bias:  # it is one device's to add
                mine = lax.axis_index(plan.axes["k"]) == 0
                at = at._replace(bias=jnp.where(mine, at.bias, jnp.zeros_like(at.bias)))
                if call.has_prob:
                    at = at._replace(prob=jnp.where(mine, at.prob, jnp.zeros_like(at.prob)))
            outputs = run(local, local.flat(at))
            if not summed:
                return outputs
            outputs = [_summed(x, summed, plan.scattered) for x in outputs] * (1 + same)
            return [x.astype(dtype) for x, dtype in zip(outputs, call.output_dtypes, strict=True)]

        return compute


class Wgrad(_Rule):
    """Of grouped_wgrad."""

    def __init__(self, call):
        super().__init__(call)
        self.operands = _letters(call, calls.WgradOperands("mn", "mk", "g", "g", "g", self.matrices + "nk"))
        self.results = [self.matrices + "nk"]

    def explicit(self, axes):
        at = self.call.split(axes)
        _check_unsummed("M, the rows,", at.x.get("m"), at.y.get("m"))
        total = {} if at.total is None else at.total
        _check_unsummed("L, the experts,", total.get("l"))
        _check_unsummed("the batch of weights", total.get("s"))
        sides = {"n": ("N", at.x), "k": ("K", at.y)}
        return _disjoint(
            {letter: _agreed(name, [x.get(letter, ()), total.get(letter, ())]) for letter, (name, x) in sides.items()}
        )

    def plan(self, mesh, own, wished):
        at = self.call.split(own)
        if at.total is None:
            matrices = {letter: axes for letter, axes in wished.items() if self._legal(mesh, letter, axes)}
        else:
            matrices = at.total
        matrices = {"s": (), "l": ()} | {letter: axes for letter, axes in matrices.items() if axes}
        columns = {"n": at.x.get("n", ()), "k": at.y.get("k", ())}
        axes = self._settle(mesh, matrices, columns, at.x.get("m", ()) or at.y.get("m", ()), ())
        result = {letter: axes[letter] for letter in "slnk"}
        return self._plan(mesh, axes, own, result, {})

    def local(self, plan, run):
        local, summed = plan.call, plan.axes["m"]
        if summed:
            local = dataclasses.replace(local, accumulate=False, d_dtype="float32")

        def compute(*flat):
            at = self._local_operands(plan, flat)
            if not summed:
                return run(local, local.flat(at))
            (d,) = run(local, local.flat(at._replace(total=None)))
            d = _summed(d, summed, {})
            return [(d if at.total is None else at.total + d).astype(self.call.d_dtype)]

        return compute


class Like:
    """Of autodiff.sharded_like: x, with the shardings of another array."""

    def __init__(self, dimensions):
        self.call = dimensions
        self.operands = ["abcdefgh"[:dimensions]] * 2
        self.results = self.operands[:1]

    def without_partition(self, why):
        return self.call  # the call whose tangent x is says why

    def plan(self, mesh, own, wished):
        x, like = own
        result = wished or like or x
        return Plan(self.call, [result, like], result, {}, [], {})

    def local(self, plan, run):
        return lambda x, like: [x]


def _letters(call, named):
    """Of the flat operands that the call has."""
    present = {"experts": call.has_experts, "alpha": call.has_alpha}
    present |= {name: getattr(call, f"has_{name}") for name in ("prob", "bias") if name in named._fields}
    present |= {"total": call.accumulate} if "total" in named._fields else {}
    return call.flat(named._replace(**{name: None for name, there in present.items() if not there}))


def _summed(x, axes, scattered):
    for dimension, letter in enumerate("mn"):
        over = scattered.get(letter, ())
        if over:
            x = lax.psum_scatter(x, over, scatter_dimension=dimension, tiled=True)
            axes = tuple(axis for axis in axes if axis not in over)
    return lax.psum(x, axes) if axes else x


# --- agreement --------------------------------------------------------------------------------------------------------


def _agreed_weights(letter, found):
    """The axes of a dimension of all arrays of a tuple: what is not sharded can be, without communication."""
    different = sorted(set(found) - {()})
    if len(different) > 1:
        raise contract.weights_unlike(letter.upper(), different)
    return different[0] if different else ()


def _agreed(what, found):
    different = sorted(set(found) - {()})
    if len(different) > 1:
        raise contract.shardings_unlike(what, different)
    return different[0] if different else ()


def _check_unsummed(what, *found):
    for axes in found:
        if axes:
            raise contract.needs_a_sum(what, axes)


def _disjoint(axes):
    flat = sum(axes.values(), ())
    for axis in flat:
        if flat.count(axis) > 1:
            raise contract.axis_twice(axis, [letter.upper() for letter, own in axes.items() if axis in own])
    return axes

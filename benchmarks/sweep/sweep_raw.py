"""The sweep's hand-written peer: a raw JAX loop over a mapped step.

It computes what `fit`, `evaluate`, `predict` or `run` of the point do, from
the same host's batches, with the same metrics, and waits for each program
(virtual CPU devices must not run ahead). Several forms of its all-reduce are
tried on turns that are not counted, and the fastest is the peer.
"""

import dataclasses
import functools
import time

import sweep_models
import sweep_points

AXIS = "replica"
# Each leaf for itself; all leaves in one variadic sum; leaves below SMALL
# entries in one buffer, and others each; all in one buffer.
FORMS = ("small", "variadic", "each", "flat")
SMALL = 4096
# A form that is so many times slower at its first step is tried no further.
HOPELESS = 5
TRIAL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to write the loop.

    Attributes:
      form: How leaves are summed over replicas, one of FORMS.
      is_scanned: Whether K steps are one program, else K programs.
    """

    form: str
    is_scanned: bool

    def __str__(self):
        return self.form + (", scanned" if self.is_scanned else "")


def candidates(point):
    forms = FORMS if point["loop"] in ("fit", "run") else FORMS[:2]
    if point.get("is_brief"):
        forms = forms[:2]
    if point["loop"] == "predict" or point["devices"] == 1:
        forms = FORMS[:1]
    kinds = [False]
    if point["spe"] > 1:
        kinds = [True] + [False] * sweep_models.has_convolutions(point)
    return [
        Candidate(form=form, is_scanned=kind)
        for kind in kinds
        for form in forms
    ]


def fastest(point):
    """Binds arrays to the fastest loop; and what is told about it."""
    loops, ms = {}, {}
    step, groups = STEPS[point["loop"]](point)
    for candidate in candidates(point):
        bind = loop(point, candidate, step, groups)
        seconds = trial(point, bind, min(ms.values(), default=None))
        if seconds is not None:
            ms[candidate], loops[candidate] = seconds * 1e3, bind
    best = min(ms, key=ms.get)
    told = {str(each): round(value, 4) for each, value in ms.items()}
    return loops[best], {"form": str(best), "forms_ms": told}


def trial(point, bind, best_ms):
    """Seconds a step, the least of three; None for a hopeless one."""
    steps = point["spe"]
    work = bind(*sweep_models.data(point, steps))
    work()
    seconds = timed(work) / steps
    if best_ms is not None and seconds * 1e3 > HOPELESS * best_ms:
        return None
    many = max(round(TRIAL_SECONDS / seconds / steps), 2) * steps
    work = bind(*sweep_models.data(point, min(many, 100 * steps)))
    many = min(many, 100 * steps)
    work()
    return min(timed(work) / many for _ in range(3))


def timed(work):
    start = time.perf_counter()
    work()
    return agreed(time.perf_counter() - start)


def agreed(seconds):
    """Process 0's time: all processes decide the same."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return seconds
    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))


def summed(leaves, form):
    """The leaves summed over replicas."""
    import jax
    from jax.flatten_util import ravel_pytree

    leaves = list(leaves)
    if not leaves:
        return leaves
    if form == "each":
        return [jax.lax.psum(leaf, AXIS) for leaf in leaves]
    if form == "variadic":
        return list(jax.lax.psum(tuple(leaves), AXIS))
    limit = SMALL if form == "small" else float("inf")
    together = [i for i, leaf in enumerate(leaves) if leaf.size < limit]
    alone = [i for i in range(len(leaves)) if leaves[i].size >= limit]
    flat, restore = ravel_pytree([leaves[i] for i in together])
    flat, *others = jax.lax.psum((flat, *(leaves[i] for i in alone)), AXIS)
    sums = dict(zip(together, restore(flat), strict=True))
    sums |= dict(zip(alone, others, strict=True))
    return [sums[i] for i in range(len(leaves))]


def averaged(leaves, form):
    """Floating leaves averaged over replicas; others as they are."""
    import jax
    from jax import numpy as jnp

    leaves = list(leaves)
    which = [
        i
        for i, leaf in enumerate(leaves)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    sums = summed([leaves[i] for i in which], form)
    count = jax.lax.axis_size(AXIS)
    for i, total in zip(which, sums, strict=True):
        leaves[i] = total / count
    return leaves


def synchronized_norm():
    """A BatchNormalization over all replicas' rows, by hand."""
    import jax
    from keras import layers

    class Norm(layers.BatchNormalization):
        def _moments(self, inputs, mask):
            if not is_mapped():
                return super()._moments(inputs, mask)
            axes = self._reduction_axes
            means = inputs.mean(axes), (inputs**2).mean(axes)
            mean, square = jax.lax.pmean(means, AXIS)
            return mean, square - mean**2

    return Norm()


def is_mapped():
    import jax

    try:
        jax.lax.axis_size(AXIS)
    except NameError:
        return False
    return True


def loop(point, candidate, step, groups):
    """A function that binds arrays: it returns one turn's work."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    count = point["spe"]
    many = count if candidate.is_scanned else 1
    step = functools.partial(step, candidate.form)
    is_predict = point["loop"] == "predict"
    whole, rows = PartitionSpec(), PartitionSpec(AXIS)
    split = PartitionSpec(None, AXIS) if many > 1 else rows
    mesh = Mesh(np.array(jax.devices()), (AXIS,))

    def scanned(state, batches):
        state = tuple(map(list, state))
        state, out = jax.lax.scan(step, state, batches)
        last = out if is_predict else jax.tree.map(lambda a: a[-1], out)
        return state, last

    mapped = jax.jit(
        jax.shard_map(
            scanned if many > 1 else step,
            mesh=mesh,
            in_specs=(whole, split),
            out_specs=(whole, split if is_predict else whole),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    state = placed(
        tuple([np.array(v.value) for v in group] for group in groups),
        NamedSharding(mesh, whole),
    )

    def bind(x, y):
        batches = executions(point, x, y, many)
        arrays = NamedSharding(mesh, split)

        def work():
            nonlocal state
            outs = []
            together = count // many
            for start in range(0, len(batches), together):
                moved = placed(batches[start : start + together], arrays)
                for batch in moved:
                    state, out = mapped(state, batch)
                    jax.block_until_ready(out)
                    if is_predict:
                        outs.append(
                            np.asarray(out).reshape(-1, *out.shape[-1:])
                        )
            return np.concatenate(outs) if outs else None

        return work

    return bind


def executions(point, x, y, many):
    """What each program takes: views of the arrays, of this process's rows."""
    import jax

    rows, count = sweep_points.batch_rows(point), jax.process_count()
    share = rows // count
    mine = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
    taken = []
    for start in range(0, len(x), rows * many):
        batch = [a[start : start + rows * many] for a in (x, y)]
        if many > 1:
            batch = [a.reshape(many, rows, *a.shape[1:]) for a in batch]
            batch = [a[:, mine] for a in batch]
        else:
            batch = [a[mine] for a in batch]
        taken.append(tuple(batch))
    return taken


def placed(values, sharding):
    """Host's arrays on the devices."""
    import jax

    if jax.process_count() == 1:
        return jax.device_put(values, sharding)
    return jax.tree.map(
        lambda a: jax.make_array_from_process_local_data(sharding, a), values
    )


def fit_step(point):
    model = built(point)
    apply = model.optimizer.stateless_apply

    def step(form, state, batch):
        model.optimizer.stateless_apply = lambda slots, grads, weights: apply(
            slots, averaged(grads, form), weights
        )
        _, (weights, others, slots, metrics) = model.train_step(state, batch)
        metrics, logs = merged(model, state[3], metrics, form)
        return (weights, averaged(others, form), slots, metrics), logs

    return step, (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def evaluate_step(point):
    model = built(point)

    def step(form, state, batch):
        _, (weights, others, metrics) = model.test_step(state, batch)
        metrics, logs = merged(model, state[2], metrics, form)
        return (weights, others, metrics), logs

    return step, (
        model.trainable_variables,
        model.non_trainable_variables,
        model.metrics_variables,
    )


def predict_step(point):
    model = built(point)

    def step(form, state, batch):
        outputs, others = model.predict_step(state, batch)
        return (state[0], list(others)), outputs

    return step, (model.trainable_variables, model.non_trainable_variables)


def run_step(point):
    """What sweep_loops.py's `run` does, by hand."""
    import jax

    model, optimizer, accuracy, loss_of = sweep_models.parts(
        point, synchronized_norm
    )
    rows = sweep_points.batch_rows(point)

    def step(form, state, batch):
        weights, others, slots, sums = state
        x, y = batch

        def loss_fn(weights):
            logits, new_others = model.stateless_call(
                weights, others, x, training=True
            )
            loss = jax.numpy.sum(sweep_models.by_row(loss_of(y, logits))) / rows
            new_sums = accuracy.stateless_update_state(sums, y, logits)
            return loss, (new_others, new_sums)

        (loss, (others, new)), grads = jax.value_and_grad(
            loss_fn, has_aux=True
        )(weights)
        added = [n - s for n, s in zip(new, sums, strict=True)]
        *totals, loss = summed([*grads, *added, loss], form)
        grads, added = totals[: len(grads)], totals[len(grads) :]
        sums = [s + a for s, a in zip(sums, added, strict=True)]
        weights, slots = optimizer.stateless_apply(slots, grads, weights)
        return (weights, averaged(others, form), slots, sums), loss

    return step, (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
        accuracy.variables,
    )


STEPS = {
    "fit": fit_step,
    "evaluate": evaluate_step,
    "predict": predict_step,
    "run": run_step,
}


def built(point):
    model = sweep_models.compiled(point, synchronized_norm)
    model._symbolic_build(data_batch=sweep_models.data(point, 1))
    return model


def merged(model, old, new, form):
    """Metrics with what every replica added, and their logs."""
    import keras

    added = [n - o for n, o in zip(new, old, strict=True)]
    total = summed(added, form)
    metrics = [o + t for o, t in zip(old, total, strict=True)]
    mapping = list(zip(model.metrics_variables, metrics, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        return metrics, model.get_metrics_result()

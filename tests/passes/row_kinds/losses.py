"""Losses that are functions of the batch and not means over its rows."""

import jax
import keras
import numpy as np
from keras import ops

import keras_strategies as ks
from tests.support.loss_places import OUTPUTS


def error(t, p):
    return ops.square(t - p)


def of_rows(t, p):
    return ops.mean(error(t, p), axis=-1)


def concordance(t, p):
    covariance = ops.mean((t - ops.mean(t)) * (p - ops.mean(p)))
    spread = ops.var(t) + ops.var(p) + ops.square(ops.mean(t) - ops.mean(p))
    return 1 - 2 * covariance / spread


def correlation(t, p):
    a, b = t - ops.mean(t, 0), p - ops.mean(p, 0)
    norms = ops.sqrt(ops.sum(a * a, 0) * ops.sum(b * b, 0) + 1e-6)
    return 1 - ops.mean(ops.sum(a * b, 0) / norms)


def triplet(t, p):
    distances = ops.sum(ops.square(p[:, None] - p[None]), axis=-1)
    labels = ops.argmax(t, axis=-1)
    same = ops.cast(labels[:, None] == labels[None], p.dtype)
    hardest = ops.max(distances * same, axis=1)
    nearest = ops.min(distances + 1e3 * same, axis=1)
    return ops.mean(ops.relu(hardest - nearest + 0.2))


def contrastive(t, p):
    logits = ops.matmul(p, ops.transpose(t))
    places = ops.arange(ops.shape(p)[0])
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(
            places, logits, from_logits=True
        )
    )


def off_diagonal(t, p):
    a = (p - ops.mean(p, 0)) / (ops.std(p, 0) + 1e-3)
    b = (t - ops.mean(t, 0)) / (ops.std(t, 0) + 1e-3)
    both = ops.matmul(ops.transpose(a), b) / ops.shape(p)[0]
    return ops.sum(ops.square(both - ops.eye(OUTPUTS)))


def by_class(t, p):
    labels = ops.argmax(t, axis=-1)
    sums = ops.segment_sum(of_rows(t, p), labels, num_segments=OUTPUTS)
    ones = ops.ones_like(of_rows(t, p))
    counts = ops.segment_sum(ones, labels, num_segments=OUTPUTS)
    return ops.mean(sums / ops.maximum(counts, 1))


def balanced(t, p):
    chances = ops.softmax(p)
    share = ops.mean(chances, axis=0)
    best = ops.one_hot(ops.argmax(chances, axis=-1), OUTPUTS)
    router = OUTPUTS * ops.sum(ops.mean(best, axis=0) * share)
    return ops.mean(error(t, p)) + 0.1 * router


def hard_rows(t, p):
    return ops.mean(ops.top_k(of_rows(t, p), 5)[0])


def in_turn(t, p):
    def add(total, row):
        return total * 0.9 + row, total

    return ops.scan(add, 0.0, of_rows(t, p))[0]


def above_mean(t, p):
    rows = of_rows(t, p)
    mean = ops.mean(rows)
    return ops.mean(ops.where(rows > mean, rows, 0.5 * rows))


def conditional(t, p):
    mean = ops.mean(error(t, p))
    return ops.cond(mean > 0.1, lambda: mean, lambda: mean * mean)


def of_named_axis(reduce):
    """Makes a loss with a collective over the rows, an axis of `jax.vmap`."""

    def of_row(t, p):
        others = reduce(ops.sum(t * p), "rows")
        return ops.mean(error(t, p)) + 0.1 * ops.mean(others)

    def loss(t, p):
        return ops.mean(jax.vmap(of_row, axis_name="rows")(t, p))

    return loss


def named_maximum(value, axis):
    value = jax.lax.stop_gradient(value)
    return value * jax.lax.pmax(value, axis) - jax.lax.pmin(value, axis)


LOSSES = {
    "named_mean": of_named_axis(
        lambda v, axis: ops.square(v - jax.lax.pmean(v, axis))
    ),
    "named_sum": of_named_axis(
        lambda v, axis: ops.log(jax.lax.psum(ops.exp(v), axis))
    ),
    "named_maximum": of_named_axis(lambda v, axis: v * named_maximum(v, axis)),
    "named_gather": of_named_axis(
        lambda v, axis: ops.square(v - jax.lax.all_gather(v, axis))
    ),
    "root_of_mean": lambda t, p: ops.sqrt(ops.mean(error(t, p))),
    "square_of_mean": lambda t, p: ops.square(ops.mean(t - p)),
    "power_of_mean": lambda t, p: ops.mean(ops.abs(t - p) ** 3) ** (1 / 3),
    "clipped_mean": lambda t, p: ops.maximum(ops.mean(error(t, p)), 0.3),
    "largest": lambda t, p: ops.max(ops.abs(t - p)),
    "largest_row": lambda t, p: ops.max(of_rows(t, p)),
    "smooth_largest": lambda t, p: ops.logsumexp(of_rows(t, p)),
    "softmax_of_rows": lambda t, p: ops.sum(
        ops.softmax(of_rows(t, p)) * of_rows(t, p)
    ),
    "median": lambda t, p: ops.median(of_rows(t, p)),
    "sorted": lambda t, p: ops.mean(
        ops.abs(ops.sort(t, axis=0) - ops.sort(p, axis=0))
    ),
    "hard_rows": hard_rows,
    "sum": lambda t, p: 0.01 * ops.sum(error(t, p)),
    "sum_of_replica": lambda t, p: 0.1 * ops.sum(of_rows(t, p)) / 8,
    "sum_of_batch": lambda t, p: ops.sum(of_rows(t, p)) / 23,
    "ratio": lambda t, p: ops.sum(ops.abs(t - p)) / ops.sum(ops.abs(t)),
    "weighted_mean": lambda t, p: (
        ops.sum(error(t, p) * t) / (ops.sum(t) + 1e-7)
    ),
    "variance": lambda t, p: ops.mean(ops.var(t - p, axis=0)),
    "unbiased": lambda t, p: ops.sum(error(t, p)) / (3 * (ops.shape(t)[0] - 1)),
    "concordance": concordance,
    "correlation": correlation,
    "triplet": triplet,
    "contrastive": contrastive,
    "off_diagonal": off_diagonal,
    "covariance": lambda t, p: ops.mean(
        ops.abs(ops.matmul(ops.transpose(p), t - p))
    ),
    "by_class": by_class,
    "balanced": balanced,
    "next_row": lambda t, p: ops.mean(ops.abs(p[1:] - t[:-1])),
    "first_rows": lambda t, p: ops.mean(error(t, p)[:5]),
    "rolled": lambda t, p: ops.mean(error(ops.roll(t, 1, axis=0), p)),
    "running": lambda t, p: ops.mean(ops.abs(ops.cumsum(t - p, axis=0))),
    "by_place": lambda t, p: ops.mean(
        of_rows(t, p) * ops.cast(ops.arange(ops.shape(t)[0]), "float32")
    ),
    "in_turn": in_turn,
    "above_mean": above_mean,
    "conditional": conditional,
    "times_rows": lambda t, p: (
        0.01 * ops.mean(error(t, p)) * ops.cast(ops.shape(t)[0], "float32")
    ),
    "centered_rows": lambda t, p: ops.mean(
        ops.square(of_rows(t, p) - ops.mean(of_rows(t, p)))
    ),
}


@ks.global_batch_loss
def marked(t, p):
    return ops.sum(of_rows(t, p)) + ops.sum(ops.var(p, axis=0))


def rows_of(p):
    return float(ops.shape(p)[0])


def into_places(t, p):
    places = ops.stack(
        [ops.arange(ops.shape(p)[0]), ops.argmax(t, axis=-1)], axis=-1
    )
    put = ops.scatter_update(ops.zeros_like(p), places, of_rows(t, p))
    return ops.sum(put / rows_of(p), axis=-1)


# Of the number of rows, in ways of which one trace shows nothing. Some give a
# value for each row, or for each output.
OF_NUMBERS = {
    "sums_of_outputs": lambda t, p: 0.01 * ops.sum(error(t, p), axis=0),
    "spread_mean": lambda t, p: (
        0.01 * ops.sum(ops.mean(error(t, p)) * ops.ones_like(t[:, 0]))
    ),
    "bessel": lambda t, p: of_rows(t, p) * (rows_of(p) / (rows_of(p) - 1)),
    "over_log": lambda t, p: of_rows(t, p) / np.log(rows_of(p)),
    "log_of_scaled": lambda t, p: ops.log1p(rows_of(p) * ops.exp(-p[:, 0])),
    "scaled_rows": lambda t, p: of_rows(t, p) / rows_of(p) * t[:, 0],
    "product_with_scaled": lambda t, p: ops.matmul(
        error(t, p), ops.ones((OUTPUTS, 1)) / rows_of(p)
    )[:, 0],
    "first_twenty": lambda t, p: ops.mean(of_rows(t, p)[:20]),
    "of_few_rows": lambda t, p: of_rows(
        t, p - ops.mean(p[:20]) if rows_of(p) > 20 else p
    ),
    "at_most_sixteen": lambda t, p: (
        ops.sum(of_rows(t, p)) / min(rows_of(p), 16.0)
    ),
    "turns": lambda t, p: jax.lax.fori_loop(
        0, p.shape[0], lambda k, sum: sum + 0.01 * ops.mean(error(t, p)), 0.0
    ),
    "last_place": lambda t, p: (
        of_rows(t, p)
        * ops.cast(ops.max(ops.arange(ops.shape(p)[0])), "float32")
        * 0.01
    ),
    "triangle": lambda t, p: (
        of_rows(t, p) * ops.sum(ops.tril(ops.ones((p.shape[0],) * 2))) * 0.001
    ),
    "transformed": lambda t, p: ops.sum(
        ops.absolute(jax.numpy.fft.fft(p / rows_of(p))), axis=-1
    ),
    "running_product": lambda t, p: ops.sum(
        ops.cumprod(p / rows_of(p) * 8, axis=-1), axis=-1
    ),
    "into_places": into_places,
    "over_log1p": lambda t, p: (
        of_rows(t, p) / ops.log1p(ops.cast(ops.shape(p)[0], "float32"))
    ),
    "rounded": lambda t, p: of_rows(t, p) * ops.round(rows_of(p) / 5.0),
    "by_place_of_batch": lambda t, p: ops.einsum(
        "bi,b->bi", error(t, p), ops.arange(rows_of(p), dtype="float32") / 9
    ),
    "taken_by_place": lambda t, p: (
        of_rows(t, p)
        * ops.take_along_axis(
            ops.reshape(ops.arange(2 * rows_of(p), dtype="float32"), (-1, 2)),
            ops.cast(t[:, :1] > 0.7, "int32"),
            axis=1,
        )[:, 0]
        * 0.1
    ),
    "random_places": lambda t, p: (
        of_rows(t, p)
        * (
            ops.arange(rows_of(p), dtype="float32")
            + 0 * keras.random.uniform((ops.shape(p)[0],), seed=1)
        )
    ),
    "log_of_random_mean": lambda t, p: (
        of_rows(t, p)
        + ops.log(
            ops.mean(ops.exp(0 * keras.random.normal(ops.shape(p), seed=1)))
            * rows_of(p)
        )
        * ops.mean(p, axis=-1)
    ),
    "share_of_random": lambda t, p: (
        ops.mean(of_rows(t, p))
        / ops.sum(1 + 0 * keras.random.uniform((ops.shape(p)[0],), seed=1))
    ),
    "marked_over_rows": lambda t, p: marked(t, p) / rows_of(p),
    "into_a_table": lambda t, p: ops.mean(
        jax.numpy.zeros(64).at[jax.numpy.arange(p.shape[0])].add(of_rows(t, p))
        * jax.numpy.linspace(0.5, 1.5, 64)
    ),
    "next_places": lambda t, p: of_rows(
        t, p[(jax.numpy.arange(p.shape[0] + 1)[1:]) % p.shape[0]]
    ),
    "three_places": lambda t, p: ops.mean(
        jax.numpy.zeros((80, OUTPUTS))
        .at[3 * jax.numpy.arange(p.shape[0])]
        .add(error(t, p))
        * jax.numpy.linspace(0.5, 1.5, 80)[:, None]
    ),
    "padded": lambda t, p: (
        ops.sum(
            ops.pad(
                error(t, p) / rows_of(p), ((0, 0), (1, 0)), "constant", 1.0
            ),
            axis=-1,
        )
        * of_rows(t, p)
    ),
    "one_column_over_rows": lambda t, p: ops.sum(
        (error(t, p) / rows_of(p)).at[:, 0].set(error(t, p)[:, 0]), axis=-1
    ),
    "largest_places": lambda t, p: (
        of_rows(t, p)
        * ops.cast(ops.top_k(t / rows_of(p), 1)[1][:, 0] + 1, "float32")
        * rows_of(p)
        * 0.05
    ),
    "one_of_three": lambda t, p: jax.lax.select_n(
        ops.cast(ops.argmax(t, axis=-1), "int32"),
        of_rows(t, p) / rows_of(p),
        of_rows(t, p),
        of_rows(t, p),
    ),
    "shifted_ones": lambda t, p: (
        of_rows(t, p)
        * ops.sum(
            ops.reshape(
                jax.lax.dynamic_update_slice(
                    jax.numpy.zeros(2 * p.shape[0]),
                    jax.numpy.ones(p.shape[0]),
                    (3,),
                ),
                (2, -1),
            )[0]
        )
        * 0.1
    ),
    "places_by_class": lambda t, p: (
        ops.mean(error(t, p))
        + 0.01
        * ops.mean(
            ops.segment_sum(
                ops.arange(rows_of(p), dtype="float32"),
                ops.argmax(t, axis=-1),
                num_segments=OUTPUTS,
            )
            * ops.mean(p, axis=0)
        )
    ),
}
LOSSES |= OF_NUMBERS

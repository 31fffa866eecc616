"""Accumulated gradients are summed once per update, with the same numbers."""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import ops, optimizers

import keras_strategies as ks
from keras_strategies.variables import model_variables
from tests.parity.models import TwoOptimizers
from tests.support.combinations import combine, few
from tests.support.models import chain, compiled_in
from tests.support.plain_keras import (
    assert_same,
    check_same,
    dense,
    mirrored,
)
from tests.support.sums import count_reduced_bytes

ROWS, FEATURES = 50, 6
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, FEATURES)).astype("float32")
Y = np.tanh(X[:, :2])
SGD, ADAM = optimizers.SGD, optimizers.Adam
FIT = {"batch_size": 24, "shuffle": False, "verbose": 0}


def net(kind=keras.Sequential):
    return kind(
        [keras.Input((FEATURES,)), dense(8, activation="tanh"), dense(2)]
    )


def train(model, epochs=3):
    """Epochs of two even batches and one of two rows, and updates in all."""
    history = model.fit(X, Y, epochs=epochs, **FIT).history
    slots = [np.array(v.value) for v in model.optimizer.variables]
    return history, model.evaluate(X, Y, batch_size=24, verbose=0), slots


def check(make, build=net, act=train, **options):
    return check_same(build, act, optimizer=make, loss="mse", **options)


def gradient_bytes(model, strategy):
    """Bytes of the all-reduces that each step runs, and of those in branches.

    The few bytes of losses and metrics are not counted.
    """
    program = strategy.compile_step(model, (X[:24], Y[:24]))
    of_all, of_entry = count_reduced_bytes(program.as_text())
    size = sum(4 * v.value.size for v in model.trainable_variables)
    return of_entry // size, (of_all - of_entry) // size


def assert_sums(make, once, *, build=net, strategy=None):
    """Asserts whether a model's gradients are summed once per update."""
    strategy = strategy or mirrored(2)
    model = compiled_in(strategy, build, make(), "mse")
    expected = (0, 1) if once else (1, 0)
    assert gradient_bytes(model, strategy) == expected


# The numbers of one device.


def scaled(optimizer, **options):
    return optimizers.LossScaleOptimizer(optimizer, **options)


OPTIMIZERS = {
    "sgd": lambda k: SGD(0.1, momentum=0.9, gradient_accumulation_steps=k),
    "adam": lambda k: ADAM(0.01, gradient_accumulation_steps=k),
    "adamw": lambda k: optimizers.AdamW(
        0.01, weight_decay=0.1, gradient_accumulation_steps=k
    ),
    "clipnorm": lambda k: SGD(
        0.5, clipnorm=0.05, gradient_accumulation_steps=k
    ),
    "global_clipnorm": lambda k: SGD(
        0.5, global_clipnorm=0.05, gradient_accumulation_steps=k
    ),
    "clipvalue": lambda k: SGD(
        0.5, clipvalue=0.01, gradient_accumulation_steps=k
    ),
    "ema": lambda k: SGD(
        0.5,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=k,
    ),
    "scale_factor": lambda k: SGD(
        0.1, loss_scale_factor=64.0, gradient_accumulation_steps=k
    ),
    "loss_scale": lambda k: scaled(
        SGD(0.1, gradient_accumulation_steps=k),
        initial_scale=2.0**10,
        dynamic_growth_steps=3,
    ),
    "nadam": lambda k: optimizers.Nadam(0.01, gradient_accumulation_steps=k),
    "muon": lambda k: optimizers.Muon(0.01, gradient_accumulation_steps=k),
    "adafactor": lambda k: optimizers.Adafactor(
        0.01, gradient_accumulation_steps=k
    ),
}
QUICK = [
    *[("adamw", 2, 3), ("clipnorm", 3, 2), ("ema", 4, 8)],
    *[("loss_scale", 2, 2), ("scale_factor", 3, 3)],
]
EVERY = [(o, k, n) for o in OPTIMIZERS for k in (2, 3, 4) for n in (1, 2, 3, 8)]


def check_case(name, k, replicas):
    check(lambda: OPTIMIZERS[name](k), replicas=replicas)


@pytest.mark.parametrize(("name", "k", "replicas"), few(QUICK, every=4))
def test_numbers_are_those_of_one_device(name, k, replicas):
    check_case(name, k, replicas)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k", "replicas"), EVERY)
def test_all_numbers_are_those_of_one_device(name, k, replicas):
    check_case(name, k, replicas)


def sgd():
    return SGD(0.1, gradient_accumulation_steps=3)


def test_steps_in_one_execution():
    check(sgd, steps_per_execution=2)


@pytest.mark.slow
def test_eager_steps():
    check(sgd, run_eagerly=True)


class Reads(keras.callbacks.Callback):
    """Reads the optimizer's variables after every step."""

    def __init__(self):
        super().__init__()
        self.read = []

    def on_train_batch_end(self, batch, logs=None):
        self.model.jax_state_sync()
        slots = self.model.optimizer.variables
        self.read.append([np.array(v.value) for v in slots])


def test_callbacks_read_sums_in_every_step():
    def act(model):
        reads = Reads()
        model.fit(X, Y, epochs=3, callbacks=[reads], **FIT)
        return reads.read

    read, _ = check(sgd, act=act)
    accumulated = [float(np.abs(slots[2]).sum()) for slots in read]
    assert accumulated[0] > 0
    assert accumulated[2] == 0


class Copies(keras.callbacks.Callback):
    """Counts the arrays that are copied because a step may not donate them."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts, self._count = [], 0
        self._copy = model_variables.copy_with_sharding
        monkeypatch.setattr(
            model_variables, "copy_with_sharding", self._count_one
        )

    def _count_one(self, *args):
        self._count += 1
        return self._copy(*args)

    def on_epoch_end(self, epoch, logs=None):
        self.counts.append(self._count)
        self._count = 0


@pytest.mark.parametrize("rows", combine([48, 50], every=2))
def test_reading_variables_keeps_steps_in_place(rows, monkeypatch):
    counts = []
    for k in (None, 4):
        # Other tests' strategies over some of the devices would cause copies.
        monkeypatch.setattr(model_variables, "_device_sets", set())
        copies = Copies(monkeypatch)
        with mirrored(2).scope():
            model = net()
            model.compile(ADAM(0.01, gradient_accumulation_steps=k), "mse")
        for _ in range(2):
            model.fit(X[:rows], Y[:rows], epochs=3, callbacks=[copies], **FIT)
        counts.append(copies.counts[1:])
        monkeypatch.undo()
    assert counts[0] == counts[1]


class Writes(keras.callbacks.Callback):
    """Clears an accumulator in the middle of an update."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.jax_state_sync()
            accumulator = self.model.optimizer.variables[2]
            accumulator.assign(accumulator * 0.5)


def test_a_callback_writes_an_accumulator():
    def act(model):
        model.fit(X, Y, epochs=3, callbacks=[Writes()], **FIT)

    check(sgd, act=act)


def test_fits_and_single_batches_continue_an_update():
    def act(model):
        losses = []
        for _ in range(2):
            losses += model.fit(X[:24], Y[:24], **FIT).history["loss"]
            losses.append(model.train_on_batch(X[:10], Y[:10]))
            model.evaluate(X, Y, verbose=0)
        return losses

    check(sgd, act=act)


def test_fewer_trainable_weights_in_a_second_fit():
    def act(model):
        model.layers[0].trainable = True
        model.fit(X[:24], Y[:24], **FIT)
        model.layers[0].trainable = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.compile(SGD(0.1, gradient_accumulation_steps=2), "mse")
        model.fit(X, Y, epochs=2, **FIT)
        return [np.array(v.value) for v in model.optimizer.variables]

    check(sgd, act=act, is_fresh=True)


def test_another_optimizer_in_a_second_fit():
    def act(model):
        model.fit(X[:24], Y[:24], **FIT)
        model.compile(ADAM(0.01, gradient_accumulation_steps=2), "mse")
        model.fit(X, Y, epochs=2, **FIT)
        return [np.array(v.value) for v in model.optimizer.variables]

    check(sgd, act=act, is_fresh=True)


def embedded():
    return chain(
        (FEATURES,),
        keras.layers.Lambda(lambda x: ops.cast(x > 0, "int32")),
        keras.layers.Embedding(2, 4, embeddings_initializer="ones"),
        keras.layers.Flatten(),
        dense(2, kernel_regularizer="l2"),
    )


def test_embeddings_and_regularizers():
    check(sgd, embedded)


class Infinite(keras.layers.Layer):
    """Multiplies rows with a large entry by a number without a gradient."""

    def call(self, x):
        return x * ops.where(x[:, :1] > 50, np.float32(np.inf), 1.0)


def overflowing():
    return chain((FEATURES,), Infinite(), dense(2))


@pytest.mark.parametrize("step", combine([0, 1, 2], every=3))
def test_no_replica_counts_a_step_that_overflows_on_one(step):
    x = X[:36].copy()
    x[12 * step, 0] = 100.0

    def act(model):
        model.fit(x, Y[:36], epochs=2, **FIT | {"batch_size": 12})
        return [np.array(v.value) for v in model.optimizer.variables]

    def make():
        return scaled(SGD(0.1, gradient_accumulation_steps=2))

    slots, _ = check(make, overflowing, act, replicas=3, is_fresh=True)
    assert all(np.isfinite(slot).all() for slot in slots)


# What a step's program sends.


@pytest.mark.parametrize(
    "name", combine(["sgd", "adam", "loss_scale", "clipnorm"], every=2)
)
def test_gradients_are_summed_only_in_the_branch_of_an_update(name):
    assert_sums(lambda: OPTIMIZERS[name](4), once=True)


def test_steps_of_an_execution_sum_in_branches_too():
    strategy = mirrored(2)
    model = compiled_in(strategy, net, sgd(), "mse", steps_per_execution=4)
    assert gradient_bytes(model, strategy) == (0, 1)


def test_without_accumulation_each_step_sums():
    assert_sums(lambda: SGD(0.1), once=False)


class Signs(SGD):
    """A user's own, which uses the gradients of each step."""

    def apply(self, grads, trainable_variables=None):
        grads = [ops.sign(g) for g in grads]
        return super().apply(grads, trainable_variables)


def signs():
    return Signs(0.1, gradient_accumulation_steps=3)


def patched():
    optimizer = sgd()
    plain = optimizer._clip_gradients
    optimizer._clip_gradients = lambda grads: plain([g * 2 for g in grads])
    return optimizer


@pytest.mark.parametrize("make", combine([signs, patched], every=2))
def test_own_optimizers_get_summed_gradients(make):
    assert_sums(make, once=False)
    check(make)


@pytest.mark.parametrize("kind", ["FullySharded", "SlotsOnly"])
def test_sharded_accumulators_are_scattered_in_each_step(kind):
    partitioner = getattr(ks.experimental, kind)(min_size=1)
    strategy = ks.MirroredStrategy(
        ["cpu:0", "cpu:1"], variable_partitioner=partitioner
    )
    model = compiled_in(strategy, net, sgd(), "mse")
    program = strategy.compile_step(model, (X[:24], Y[:24]))
    assert program.collectives["reduce-scatter"] >= 2


# Steps that users write.


class Own(keras.Model):
    """A model whose step applies gradients in `update`."""

    def __init__(self):
        super().__init__()
        self.layer = dense(2)
        self.layer.build((None, FEATURES))
        self.built = True

    def call(self, x):
        return self.layer(x)

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights):
            outputs, new = self.stateless_call(weights, others, x)
            return ops.mean(ops.square(outputs - y)), new

        (loss, others), grads = jax.value_and_grad(loss_of, has_aux=True)(
            weights
        )
        logs, weights, slots = self.update(grads, weights, slots)
        return {"loss": loss, **logs}, (weights, others, slots, metrics)

    def update(self, grads, weights, slots):
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        return {}, weights, slots


class Applies(Own):
    """Calls `apply`, which writes to variables."""

    def update(self, grads, weights, slots):
        variables = [*self.trainable_variables, *self.optimizer.variables]
        values = zip(variables, [*weights, *slots], strict=True)
        with keras.StatelessScope(list(values)) as scope:
            self.optimizer.apply(grads, self.trainable_variables)
        new = list(map(scope.get_current_value, variables))
        return {}, new[: len(weights)], new[len(weights) :]


class Twice(Own):
    """Applies gradients two times in a step."""

    def update(self, grads, weights, slots):
        for _ in range(2):
            _, weights, slots = super().update(grads, weights, slots)
        return {}, weights, slots


class Half(Own):
    """Applies the gradients of one of its weights."""

    def update(self, grads, weights, slots):
        return super().update([grads[0], None], weights, slots)


class ReadsBefore(Own):
    """Logs an accumulator before it is changed."""

    def update(self, grads, weights, slots):
        accumulated = ops.sum(ops.abs(slots[2]))
        _, weights, slots = super().update(grads, weights, slots)
        return {"accumulated": accumulated}, weights, slots


class ReadsAfter(Own):
    """Logs what an accumulator has become."""

    def update(self, grads, weights, slots):
        _, weights, slots = super().update(grads, weights, slots)
        return {"accumulated": ops.sum(ops.abs(slots[2]))}, weights, slots


class Changes(Own):
    """Lets accumulators decay."""

    def update(self, grads, weights, slots):
        _, weights, slots = super().update(grads, weights, slots)
        return {}, weights, [*slots[:2], *(s * 0.5 for s in slots[2:])]


class Decays(Own):
    """Lets accumulators decay before gradients are added."""

    def update(self, grads, weights, slots):
        slots = [*slots[:2], *(s * 0.5 for s in slots[2:])]
        return super().update(grads, weights, slots)


class Discards(Own):
    """Keeps the optimizer's variables from before the update."""

    def update(self, grads, weights, slots):
        _, weights, _ = super().update(grads, weights, slots)
        return {}, weights, slots


class Tries(Own):
    """Keeps the first of two updates."""

    def update(self, grads, weights, slots):
        kept = super().update(grads, weights, slots)
        super().update([2 * g for g in grads], weights, slots)
        return kept


class Stores(Own):
    """Copies accumulators to weights that are not trained."""

    def __init__(self):
        super().__init__()
        self.copies = [
            self.add_weight(shape=v.shape, trainable=False)
            for v in self.layer.trainable_variables
        ]

    def train_step(self, state, data):
        logs, new = super().train_step(state, data)
        weights, _, slots, metrics = new
        return logs, (weights, self.choose(state[2], slots), slots, metrics)

    def choose(self, old, new):
        return new[2:]


class StoresOld(Stores):
    """Copies accumulators from before the step."""

    def choose(self, old, new):
        return old[2:]


class CountsRows(Own):
    """Counts a step only on replicas with a positive first entry."""

    def train_step(self, state, data):
        self.count = ops.cast(data[0][0, 0] > 0, "int32")
        return super().train_step(state, data)

    def update(self, grads, weights, slots):
        slots = [slots[0] + self.count, *slots[1:]]
        return super().update(grads, weights, slots)


OWN = {
    **dict.fromkeys((Own, Applies, Twice, Half, Discards, Tries), True),
    **dict.fromkeys((ReadsBefore, ReadsAfter, Changes, Decays), False),
    **dict.fromkeys((Stores, StoresOld), False),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "kind", combine(OWN, every=4), ids=lambda kind: kind.__name__
)
def test_own_steps_have_the_numbers_of_one_device(kind):
    check(sgd, kind)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_own_steps_that_use_accumulators_sum_in_each_step(kind):
    strategy = mirrored(2)
    model = compiled_in(strategy, kind, sgd(), "mse")
    program = strategy.compile_step(model, (X[:24], Y[:24]))
    assert sums_in_branch(program.as_text()) == OWN[kind]


def test_replicas_that_could_disagree_on_an_update_sum_in_each_step():
    strategy = mirrored(2)
    model = compiled_in(strategy, CountsRows, sgd(), "mse")
    program = strategy.compile_step(model, (X[:24], Y[:24]))
    assert not sums_in_branch(program.as_text())


def sums_in_branch(text):
    """Returns whether a compiled program sums over replicas in a branch."""
    computations, entry = text.split("\n\nENTRY")
    assert "all-reduce(" in computations + entry
    return "all-reduce(" in computations


class Sometimes(Own):
    """Applies gradients in a branch."""

    def update(self, grads, weights, slots):
        return {}, *jax.lax.cond(
            slots[0] < 100,
            lambda: tuple(
                super(Sometimes, self).update(grads, weights, slots)[1:]
            ),
            lambda: (weights, slots),
        )


@pytest.mark.filterwarnings("ignore:This step runs over the global batch")
def test_an_optimizer_in_a_branch():
    check(sgd, Sometimes)


def game():
    model = TwoOptimizers(dense(2), dense(2, seed=3))
    first = ADAM(0.01, gradient_accumulation_steps=2)
    model.optimizers = {"first": first}
    model.build((None, FEATURES))
    model.compile(sgd(), "mse")
    model.optimizer.build(model.second.trainable_variables)
    return model


def test_two_optimizers_that_accumulate():
    plain = game()
    with mirrored(2).scope():
        ours = game()
    for model in (plain, ours):
        model.fit(X, Y, epochs=3, **FIT)
    assert_same(
        *([np.array(v.value) for v in m.variables] for m in (plain, ours))
    )

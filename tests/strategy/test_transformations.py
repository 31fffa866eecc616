"""Calls of `run` and of Keras's loops in functions that JAX transforms."""

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from tests.support.mistakes import X, Y, assert_text, assert_usable, compiled
from tests.support.plain_keras import dense, mirrored

TRANSFORMATIONS = {
    "jit": lambda call: jax.jit(call)(),
    "scan": lambda call: jax.lax.scan(
        lambda carry, _: (carry, call()), 0, None, length=2
    ),
    "fori_loop": lambda call: jax.lax.fori_loop(
        0, 3, lambda i, carry: carry + call(), 0.0
    ),
    "make_jaxpr": lambda call: jax.make_jaxpr(call)(),
    "eval_shape": lambda call: jax.eval_shape(call),
    "vmap": lambda call: jax.vmap(lambda _: call())(np.zeros(2)),
    "grad": lambda call: jax.grad(lambda x: x * call())(1.0),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_run_is_refused_and_the_model_works_on(name):
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(x):
        loss, grads = ks.value_and_grad(
            lambda: ops.mean(ops.square(model(x))) / 2,
            model.trainable_variables,
        )()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    dataset = strategy.experimental_distribute_dataset(iter([X[:8]]))
    batch = next(iter(dataset))

    def train():
        losses = strategy.run(step, args=(batch,))
        return strategy.reduce("sum", losses, axis=None)

    with pytest.raises(RuntimeError, match=r"`run`.*jax\.jit") as caught:
        TRANSFORMATIONS[name](train)
    assert_text(caught, "ks.function")
    assert float(train()) > float(train())


@pytest.mark.parametrize("loop", ["fit", "predict", "train_on_batch"])
def test_loops_are_refused_and_the_model_works_on(loop):
    model = compiled(mirrored(2))
    data = (X[:8],) if loop == "predict" else (X[:8], Y[:8])
    with pytest.raises(RuntimeError, match=f"`{loop}`") as caught:
        jax.eval_shape(lambda: getattr(model, loop)(*data))
    assert_text(caught, "jax.jit")
    assert_usable(model)

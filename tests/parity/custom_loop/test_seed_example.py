"""The epoch function of tf.distribute's own pages, with its names changed."""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.combinations import combine
from tests.support.plain_keras import mirrored

ROWS, BATCH_SIZE, EPOCHS = 46, 8, 3
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 3)).astype("float32")
Y = (X @ np.array([[1.0], [2.0], [-1.0]], "float32")).astype("float32")


def by_hand():
    """The epochs' sums of losses, and the weights, of one device."""
    kernel, totals = np.zeros((3, 1), "float32"), []
    for _ in range(EPOCHS):
        total = 0.0
        for start in range(0, ROWS, BATCH_SIZE):
            x, y = X[start : start + BATCH_SIZE], Y[start : start + BATCH_SIZE]
            error = x @ kernel - y
            total += float((error**2).mean())
            kernel = kernel - 0.1 * 2 * x.T @ error / len(x)
        totals.append(total)
    return totals, kernel


@pytest.mark.filterwarnings("ignore:`experimental_run_v2`:DeprecationWarning")
@pytest.mark.parametrize("replicas", combine([1, 2, 3, 8], every=4))
def test_an_epoch_function_has_one_devices_numbers(replicas):
    my_strategy = mirrored(replicas)
    dataset = my_strategy.experimental_make_numpy_dataset((X, Y)).batch(
        BATCH_SIZE
    )
    train_results = []
    with my_strategy.scope():
        kernel = keras.Variable(np.zeros((3, 1), "float32"), name="kernel")
        optimizer = keras.optimizers.SGD(0.1)

        @ks.function
        def distribute_train_epoch(dataset):
            def replica_fn(input):
                x, y = input
                rows = ks.get_replica_context().all_reduce("sum", x.shape[0])

                def loss():
                    return keras.ops.sum((x @ kernel - y) ** 2) / rows

                value, grads = ks.value_and_grad(loss, [kernel])()
                optimizer.apply(grads, [kernel])
                return value

            total_result = 0
            for x in dataset:
                per_replica_result = my_strategy.experimental_run_v2(
                    replica_fn, args=(x,)
                )
                total_result += my_strategy.reduce(
                    ks.ReduceOp.SUM, per_replica_result, axis=None
                )
            return total_result

        dist_dataset = my_strategy.experimental_distribute_dataset(dataset)
        for _ in range(EPOCHS):
            train_results.append(float(distribute_train_epoch(dist_dataset)))
    totals, expected = by_hand()
    np.testing.assert_allclose(train_results, totals, rtol=1e-5)
    np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-5, atol=1e-6)
    # One program for whole batches and one for the tail, in all epochs; on
    # one replica, as on any that divides both.
    assert my_strategy._runner.num_programs == 2


def test_a_function_is_called_each_time():
    calls = []

    @ks.function
    def add(a, *, b):
        """Adds."""
        calls.append((a, b))
        return a + b

    assert [add(1, b=2), add(1, b=2)] == [3, 3]
    assert len(calls) == 2
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert ks.function(jit_compile=True)(abs)(-1) == 1

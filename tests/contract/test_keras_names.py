"""What is another name, or done another way, in Keras 3.15 and 3.16.

keras_strategies/keras_bridge/keras_names.py finds each by what the installed
Keras has; here is what it must find in which version, and what that means.
"""

import inspect
import random
import warnings

import keras
import numpy as np
import pytest
from keras.src.backend import jax as jax_backend
from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.trainers import trainer as trainer_lib
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from keras_strategies.fit.inputs.feed import Feed
from keras_strategies.fit.inputs.feed_position import Division
from keras_strategies.keras_bridge import keras_names

VERSION = tuple(map(int, keras.__version__.split(".")[:2]))
IN_3_16 = VERSION >= (3, 16)


def test_each_version_has_its_names():
    assert VERSION in ((3, 15), (3, 16)), "see what differs in a new version"
    found = {
        "the trainer": keras_names.TRAINER.__name__,
        "attention": keras_names.NN.__name__,
        "rematerialization": keras_names.CORE.__name__,
        "builds first": keras_names.BUILDS_FIRST,
        "numbers orders": keras_names.ORDERS_ARE_NUMBERED,
        "stacks batches": keras_names.SUPER_BATCHES,
    }
    assert found == {
        "the trainer": "BaseTrainer" if IN_3_16 else "Trainer",
        "attention": f"keras.src.backend.jax.{'ops.' * IN_3_16}nn",
        "rematerialization": (
            f"keras.src.backend.jax.{'ops' if IN_3_16 else 'core'}"
        ),
        "builds first": IN_3_16,
        "numbers orders": IN_3_16,
        "stacks batches": IN_3_16,
    }


def test_the_trainer_is_where_compile_and_the_constructor_are():
    for name in ("compile", "__init__"):
        assert name in vars(keras_names.TRAINER)
    assert keras_names.TRAINER in keras.Model.__mro__
    assert keras_names.TRAINER in vars(trainer_lib).values()
    assert keras.Model.compile is keras_names.TRAINER.compile


def test_attention_is_looked_up_in_its_module(monkeypatch):
    assert hasattr(jax_backend, "nn") != IN_3_16

    def attention(*args, **kwargs):
        return "replaced"

    monkeypatch.setattr(keras_names.NN, "dot_product_attention", attention)
    rows = np.ones((1, 2, 1, 4), "float32")
    assert keras.ops.dot_product_attention(rows, rows, rows) == "replaced"


def test_rematerialization_is_looked_up_in_its_module(monkeypatch):
    monkeypatch.setattr(keras_names.CORE, "remat", lambda fn: "replaced")
    assert keras.remat(len) == "replaced"


# Building.


def model_that_is_never_built():
    """Its compiled loss is none that its own `compute_loss` calls."""

    class Model(keras.Sequential):
        def compute_loss(self, x, y, y_pred, *args, **kwargs):
            return keras.ops.mean(keras.ops.square(y - y_pred))

    model = Model([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Counted(DataAdapter):
    """Four batches, and how often they were asked for."""

    def __init__(self):
        self.asked = 0
        self.super_batches = []

    def get_numpy_iterator(self):
        return iter([(np.ones((2, 1)), np.ones((2, 1)))] * 4)

    def get_jax_iterator(self, super_batch=None):
        self.super_batches.append(super_batch)
        self.asked += 1
        return self.get_numpy_iterator()

    num_batches = 4
    batch_size = 2
    has_partial_batch = False
    partial_batch_size = None


def test_fit_may_read_data_to_build_a_model_that_is_never_built():
    adapter = Counted()
    model = model_that_is_never_built()
    model.fit(adapter, verbose=0)
    plain, adapter.asked = adapter.asked, 0
    model.fit(adapter, verbose=0)
    if not keras_names.BUILDS_FIRST:
        assert not hasattr(model, keras_names.MAYBE_BUILD)
        assert plain == adapter.asked
        return
    name = keras_names.MAYBE_BUILD
    parameters = inspect.signature(getattr(keras.Model, name)).parameters
    assert list(parameters) == ["self", "iterator", "data_batch"]
    before = adapter.asked
    adapter.asked = 0
    # What the binding does, whose feeds have one iterator for an epoch.
    object.__setattr__(model, name, lambda *args, **kwargs: None)
    model.fit(adapter, verbose=0)
    assert adapter.asked == before - 1


# Orders.

ROWS = 13
EPOCHS = 5


def read_by_keras(x, steps_per_epoch, **options):
    """The first numbers of the batches of each epoch, as fit reads them."""
    iterator = JAXEpochIterator(x=x, steps_per_epoch=steps_per_epoch, **options)
    iterator.reset()  # As fit does before its first epoch.
    epochs = []
    for _ in range(EPOCHS):
        read = []
        with iterator.catch_stop_iteration():
            for _, _, batches in iterator:
                read.append(np.ravel(next(batches)).astype(int).tolist())
        epochs.append(read)
    return epochs


def list_passes(epochs, num_batches, steps_per_epoch):
    """The rows of each pass over the data, of complete ones."""
    division = Division(
        num_batches=num_batches,
        steps_per_epoch=steps_per_epoch,
        steps_per_execution=1,
    )
    each = division.epochs_of_a_pass
    passes = [epochs[i : i + each] for i in range(0, len(epochs), each)]
    return each, [
        [row for epoch in one for batch in epoch for row in batch]
        for one in passes
        if len(one) == each
    ]


def list_orders(order, each, count):
    order.set_epochs_per_pass(each)
    return [order.compute(k).tolist() for k in range(count)]


def seeded():
    random.seed(3)
    np.random.seed(3)


@pytest.fixture(autouse=True)
def _random_states():
    states = random.getstate(), np.random.get_state()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


@pytest.mark.parametrize("steps_per_epoch", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_orders_of_rows_are_those_of_keras(shuffle, steps_per_epoch):
    seeded()
    found = read_by_keras(
        np.arange(ROWS), steps_per_epoch, batch_size=4, shuffle=shuffle
    )
    each, passes = list_passes(found, 4, steps_per_epoch)
    assert len(passes) > 0
    seeded()
    window = 4 if shuffle == "batch" else None
    order = keras_names.ROW_ORDER(ROWS, window)
    assert passes == list_orders(order, each, len(passes))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return (np.array([index]),)


@pytest.mark.parametrize("workers", [0, 2])
def test_orders_of_batches_are_those_of_keras(workers):
    seeded()
    given = Batches(workers=workers) if workers else Batches()
    found = read_by_keras(given, None, shuffle=True)
    each, passes = list_passes(found, 6, None)
    assert len(passes) == EPOCHS
    seeded()
    assert passes == list_orders(keras_names.BATCH_ORDER(6), each, EPOCHS)


def test_an_order_by_number_is_kept_in_the_adapter():
    adapter = ArrayDataAdapter(np.zeros((1, 1)))
    assert ("_epoch" in vars(adapter)) == IN_3_16
    if IN_3_16:
        adapter.on_epoch_end()
        assert adapter._epoch == 1, "_epoch"


# Executions.


def test_iterators_are_asked_for_super_batches():
    adapter = Counted()
    for steps in (1, 2):
        list(JAXEpochIterator(adapter, steps_per_execution=steps))
    with_two = 2 if keras_names.SUPER_BATCHES else None
    assert set(adapter.super_batches) == {None, with_two}
    parameters = inspect.signature(Feed.get_jax_iterator).parameters
    assert "super_batch" in parameters


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_batches_of_an_execution_are_those_that_keras_was_given(steps):
    x = np.arange(2.0 * 7).astype("float32")[:, None]
    iterator = JAXEpochIterator(
        x=x, y=x + 1, batch_size=2, steps_per_execution=steps
    )
    executions = []
    with iterator.catch_stop_iteration():
        for _, _, batches in iterator:
            first = next(batches)
            executions.append(keras_names.take_execution(batches, first, steps))
    assert max(map(len, executions)) == steps
    assert [len(e) for e in executions[:-1]] == [steps] * (len(executions) - 1)
    read = [batch for execution in executions for batch in execution]
    assert [np.shape(batch[0]) for batch in read] == [(2, 1)] * 7
    np.testing.assert_array_equal(np.concatenate([b[0] for b in read]), x)
    np.testing.assert_array_equal(np.concatenate([b[1] for b in read]), x + 1)


def test_batches_that_cannot_be_stacked_come_in_a_list():
    partial = getattr(data_adapter_utils, "PartialBatchList", None)
    assert (partial is not None) == IN_3_16
    batches = [np.ones((2, 1)), np.ones((1, 1))]
    first = partial(batches) if partial else batches[0]
    read = keras_names.take_execution(iter(batches[1:]), first, 2)
    assert [each.shape for each in read] == [(2, 1), (1, 1)]

"""Passes end where those of Keras's own iterator do."""

import contextlib
import itertools
import warnings

import keras
import numpy as np
import pytest
from keras.src.trainers.epoch_iterator import EpochIterator

from keras_strategies.fit.inputs.feed_position import Division
from tests.support.combinations import combine
from tests.support.plain_keras import dense, mirrored

EPOCHS = 6


def epochs_of_keras(num_batches, steps_per_epoch, steps_per_execution):
    """The batches of each epoch, as Keras's loop reads them."""
    iterator = EpochIterator(
        np.arange(num_batches),
        batch_size=1,
        shuffle=False,
        steps_per_epoch=steps_per_epoch,
        steps_per_execution=steps_per_execution,
    )
    epochs = []
    for _ in range(EPOCHS):
        read = []
        # As a feed has it, no execution reaches over an epoch's end.
        for begin, end, batches in iterator._enumerate_iterator():
            count = min(end + 1, steps_per_epoch) - begin
            for batch in itertools.islice(batches, count):
                read.append(int(np.ravel(batch)[0]))
        epochs.append(read)
    return epochs


def epochs_of_ours(num_batches, steps_per_epoch, steps_per_execution):
    division = Division(
        num_batches=num_batches,
        steps_per_epoch=steps_per_epoch,
        steps_per_execution=steps_per_execution,
    )
    epochs, stop = [], 0
    for _ in range(EPOCHS):
        read = []
        while not division.is_over(stop):
            while True:
                read.append(stop)
                stop += 1
                if division.ends_execution(stop) or stop == num_batches:
                    break
            if division.ends_epoch(stop):
                break
        if division.is_over(stop):
            stop = 0
        epochs.append(read)
    return epochs


@pytest.mark.parametrize("steps_per_execution", [1, 2, 3])
@pytest.mark.parametrize("steps_per_epoch", [1, 2, 3, 4, 5, 7])
def test_passes_end_where_keras_ends_them(steps_per_epoch, steps_per_execution):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        for num_batches in range(1, 9):
            case = (num_batches, steps_per_epoch, steps_per_execution)
            assert epochs_of_ours(*case) == epochs_of_keras(*case), case


def test_a_pass_of_unknown_length_is_never_over():
    division = Division(
        num_batches=None, steps_per_epoch=3, steps_per_execution=1
    )
    assert not division.is_over(10**6)
    assert [stop for stop in range(1, 8) if division.ends_epoch(stop)] == [3, 6]


def test_without_steps_per_epoch_a_pass_is_an_epoch():
    division = Division(
        num_batches=5, steps_per_epoch=None, steps_per_execution=2
    )
    assert [stop for stop in range(6) if division.ends_execution(stop)] == [
        0,
        2,
        4,
    ]
    assert [stop for stop in range(6) if division.is_over(stop)] == [5]
    assert not any(map(division.ends_epoch, range(6)))


@pytest.mark.parametrize(
    ("steps_per_epoch", "shuffle"), combine([2, 4], [True, "batch"], every=2)
)
def test_passes_of_several_epochs_are_shuffled_as_keras_does(
    steps_per_epoch, shuffle
):
    x = np.arange(14, dtype="float32")[:, None] / 14

    def trained(scope):
        keras.utils.set_random_seed(3)
        with scope:
            model = keras.Sequential([keras.Input((1,)), dense()])
            model.compile(keras.optimizers.SGD(0.3), "mse")
        model.fit(
            x,
            3 * x - 1,
            batch_size=2,
            epochs=EPOCHS,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            verbose=0,
        )
        return model.get_weights()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        expected = trained(contextlib.nullcontext())
        actual = trained(mirrored(2).scope())
    # The order of the steps decides on the weights.
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)

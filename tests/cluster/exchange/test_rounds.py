"""Rounds of messages: sent as JSON, read in one form, ended at last."""

import numpy as np
import pytest

from keras_strategies.cluster.exchange.message_forms import is_count
from keras_strategies.cluster.exchange.rounds import Rounds

pytestmark = pytest.mark.quick


class Echo:
    """An agreement in which process 1 sends a given text."""

    def __init__(self, text):
        self.text = text
        self.is_ended = False

    def __call__(self, processes, name):
        assert (processes, name) == ((0, 1), "counting")
        return self

    def exchange(self, text, is_stopped):
        return [text, self.text]

    def end(self):
        self.is_ended = True


def test_each_process_receives_all_messages():
    echo = Echo('{"wait": 3}')
    with Rounds((0, 1), "counting", agree=echo) as rounds:
        received = rounds.exchange({"wait": 2}, {"wait": is_count})
        assert received == [{"wait": 2}, {"wait": 3}]
        assert not echo.is_ended
    assert echo.is_ended


def test_a_message_of_another_form_names_its_process_and_ends_the_rounds():
    echo = Echo('{"wait": -1}')
    with (
        pytest.raises(RuntimeError, match="about numbers.*from process 1"),
        Rounds((0, 1), "counting", "numbers", agree=echo) as rounds,
    ):
        rounds.exchange({"wait": 2}, {"wait": is_count})
    assert echo.is_ended


def test_numbers_of_numpy_are_numbers():
    # Rows of a user's source, say.
    with Rounds((0, 1), "counting", agree=Echo("[1]")) as rounds:
        assert rounds.exchange([np.int64(2)], [is_count]) == [[2], [1]]


def test_what_json_has_not_is_sent_as_a_text():
    with Rounds((0, 1), "counting", agree=Echo('"1"')) as rounds:
        assert rounds.exchange(np.float32(0.5), str) == ["0.5", "1"]

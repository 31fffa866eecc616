"""Exchange of texts between the processes of a job, without their devices.

The texts are sent through the key-value store of JAX's coordination service.
Because the devices are not used, any thread may exchange texts at any time.
"""

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_strategies.cluster.checks import TIMEOUT, read_timeout
from keras_strategies.cluster.exchange.exit_codes import Stalled
from keras_strategies.cluster.exchange.greetings import clean_text
from keras_strategies.cluster.exchange.kv_store import get_client
from keras_strategies.cluster.exchange.message_forms import (
    MAX_MESSAGE,
    Either,
    Form,
    read_messages,
)

_SLICE_MS = 250
# After an `Agreement` has ended, its messages are deleted once this number of
# further agreements has been created: by then, no process can still be reading
# them.
_NUM_KEPT = 64
# Up to this number of processes, every process reads the messages of every
# other one. With more processes, the first process reads all messages and
# sends them to all, so that the number of reads grows only linearly.
_MAX_RECEIVED_BY_ALL = 4
_SAME_CALLS = (
    "All processes must call fit, evaluate and predict, and iterate over "
    "datasets, in the same order and with the same number of epochs."
)
_FIX = "Compare the logs of all processes to find the call that differs."
CREATING = "the creation of variables"
"""The name of the agreements about variables. Each of their first texts ends
with a space and the description of a variable."""


SAME_VARIABLES = (
    "All processes must create the same variables, in the same order."
)
"""The rule that agreements about variables check."""

SAME_VARIABLES_FIX = (
    "Create the same layers, metrics and optimizers in all processes, with the "
    "same arguments, and freeze the same layers; create none in the chief "
    "alone."
)
"""What to do if processes create different variables."""

_ALL = "all"
_SHARED = "shared"
_MAX_SHOWN = 400
_numbers = itertools.count()
# For each waiting thread: what it waits for, and since when.
_waits: dict[int, tuple[str, float]] = {}
# Maps the number of each ended `Agreement` to a function that deletes the
# messages of its last round.
_ended: dict[int, Callable[[], None]] = {}
# For each thread that shares texts: what it does before its next exchange.
_before_exchange: dict[int, Callable[[], object]] = {}
# The timeout that `limit_waiting` has set, or None.
_limit_s: float | None = None
IsStopped = Callable[[], bool]
# The function that `set_compiling` has set, or None.
_is_compiling: Callable[[], bool] | None = None


class Agreement:
    """Rounds in which each process sends a text to all processes.

    All processes must create their agreements in the same order, and call
    `exchange` on each of them the same number of times.

    Args:
      processes: JAX's ids of the processes that take part.
      name: What the texts are about, such as "the time of a checkpoint", for
        error messages. It must be the same in all processes.
      timeout_s: The timeout of each round, in seconds. None: the value of the
        environment variable `KERAS_STRATEGIES_TIMEOUT_S`, or 600.

    Raises:
      ValueError: see `read_waiting_limit`.
    """

    def __init__(
        self,
        processes: tuple[int, ...],
        name: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self._processes = processes
        self._name = name
        self._timeout_s = (
            read_waiting_limit() if timeout_s is None else timeout_s
        )
        self._number = next(_numbers)
        self._round = 0
        self.num_shared = 0
        self._sent = ""
        forget = _ended.pop(self._number - _NUM_KEPT, None)
        if forget is not None:
            forget()

    def end(self) -> None:
        """Ends the rounds; other processes can still read the last texts."""
        last = self._round - 1
        if last >= 0:
            _ended[self._number] = lambda: self._forget(get_client(), last)

    def exchange(
        self, text: str, is_stopped: IsStopped | None = None
    ) -> list[str]:
        """Sends a text and receives the texts of all processes. Collective.

        All processes must call it, but no devices are used.

        Args:
          text: This process's text, which should be short.
          is_stopped: A function that is called a few times per second while
            this process waits. The wait ends when the function returns True.

        Returns:
          The texts of all processes, in the order of `processes`.

        Raises:
          ValueError: if the processes' agreements have different names. All
            processes raise it.
          TimeoutError: if a process sent nothing in time. The error message
            names the process. The time begins again while any process
            compiles (see `set_compiling`).
          RuntimeError: if a process sent a malformed message.
          InterruptedError: if `is_stopped` returned True.
        """
        before = _before_exchange.pop(threading.get_ident(), None)
        if before is not None:
            before()
        client = get_client()
        me = jax.process_index()
        number, self._round = self._round, self._round + 1
        # This process sends its text before it waits for the others. So even
        # if it times out, the others receive its text when they get here.
        self._sent = text
        sent = json.dumps([self._name, text])
        client.key_value_set(self._make_key(number, me), sent)
        with self._waiting():
            received = self._receive_all(client, number, sent, is_stopped)
        messages = self._read(received, (str, str), self._processes)
        names, texts = zip(*messages, strict=True)
        if len(set(names)) > 1:
            raise ValueError(_describe_calls(self._processes, messages))
        if not number and self.num_shared and me == self._processes[0]:
            # All have read the shared texts, whose keys begin with this.
            client.key_value_delete(self._make_key(_SHARED, ""))
        if number:
            # All processes have sent their texts of this round, so all of them
            # have read the texts of the previous round.
            self._forget(client, number - 1)
        return list(texts)

    def share(
        self, text: str, data: bytes, before: Callable[[], object]
    ) -> tuple[str, bytes] | None:
        """Sends the first process's text and data to all. Collective.

        The first process goes on without waiting.

        Args:
          text: A text.
          data: At most some kilobytes.
          before: A function that calls `exchange` on this agreement. It is
            called before this thread's next `exchange`.

        Returns:
          The first process's; None if it called `exchange` instead.

        Raises:
          TimeoutError, RuntimeError: see `exchange`.
        """
        client, first = get_client(), self._processes[0]
        _before_exchange[threading.get_ident()] = before
        number, self.num_shared = self.num_shared, self.num_shared + 1
        shared, self._sent = f"{_SHARED}/{number}", text
        if jax.process_index() == first:
            message = json.dumps(text).encode() + b"\n" + data
            client.key_value_set_bytes(self._make_key(shared, first), message)
            return text, data
        following = self._make_key(self._round, first)
        get = client.blocking_key_value_get_bytes
        # Both may be sent between two looks, so the text is looked for again.
        for is_stopped in (lambda: _has(client, following), lambda: True):
            with self._waiting(), contextlib.suppress(InterruptedError):
                message = self._receive(get, shared, first, is_stopped)
                line, _, received = message.partition(b"\n")
                lines = [line.decode(errors="replace")]
                return self._read(lines, str, (first,))[0], received
        return None

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Lets `find_wait` find this thread's wait."""
        thread = threading.get_ident()
        doing = _describe_call(self._name, self._sent)[:_MAX_SHOWN]
        _waits[thread] = (doing, time.monotonic())
        try:
            yield
        finally:
            del _waits[thread]

    @property
    def _is_many(self) -> bool:
        """Whether the first process receives the texts, and sends all of them.

        Otherwise, each process receives them from each other process.
        """
        return len(self._processes) > _MAX_RECEIVED_BY_ALL

    def _receive_all(
        self, client: Any, number: int, sent: str, is_stopped: IsStopped | None
    ) -> list[str]:
        me, get = jax.process_index(), client.blocking_key_value_get
        first, answer = self._processes[0], None
        if self._is_many and me != first:
            # The first process may itself wait for another process until the
            # timeout, so this process waits twice as long.
            limit_s = 2 * self._timeout_s
            text = self._receive(get, number, _ALL, is_stopped, limit_s)
            form = Either((str, (str,) * len(self._processes)))
            (received,) = self._read([text], form, (first,))
            if isinstance(received, str):
                raise Stalled(received)
            return received
        try:
            answer = [
                sent if p == me else self._receive(get, number, p, is_stopped)
                for p in self._processes
            ]
            return answer
        except TimeoutError as error:
            answer = str(error)
            raise
        finally:
            if self._is_many and answer is not None:
                key = self._make_key(number, _ALL)
                client.key_value_set(key, json.dumps(answer))

    def _read(
        self, texts: list[str], form: Form, processes: tuple[int, ...]
    ) -> list[Any]:
        return read_messages(
            texts,
            form,
            processes=processes,
            about=self._name,
            # The text may be JSON, and it is encoded as a JSON string twice.
            # Each time, its quotes are escaped, which makes it longer.
            max_characters=4 * MAX_MESSAGE * len(self._processes),
        )

    def _forget(self, client: Any, number: int) -> None:
        me = jax.process_index()
        client.key_value_delete(self._make_key(number, me))
        if self._is_many and me == self._processes[0]:
            client.key_value_delete(self._make_key(number, _ALL))

    def _receive(
        self,
        get: Callable[[str, int], Any],
        number: int | str,
        process: int | str,
        is_stopped: IsStopped | None,
        timeout_s: float | None = None,
    ) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + timeout_s
        key = self._make_key(number, process)
        if process == _ALL:
            process = self._processes[0]
        while True:
            try:
                return get(key, _SLICE_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if is_stopped is not None and is_stopped():
                raise InterruptedError
            if time.monotonic() <= end:
                continue
            if _is_compiling is not None and _is_compiling():
                end = time.monotonic() + timeout_s
                continue
            raise Stalled(
                f"Process {process} did not take part in {self._name} "
                f"within {timeout_s:.0f} s. Received: nothing from process "
                f"{process} in round {number}; this process is in "
                f"{_describe_call(self._name, self._sent)}. {_FIX} If that "
                "process has no error but needs more time, for example to read "
                f"its data, set the environment variable {TIMEOUT} to a larger "
                "number of seconds."
            )

    def _make_key(self, number: int | str, process: int | str) -> str:
        return f"keras_strategies/{self._number}/{number}/{process}"


def _has(client: Any, key: str) -> bool:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_try_get(key)
        return True
    return False


def _describe_calls(
    processes: tuple[int, ...], messages: list[tuple[str, str]]
) -> str:
    """Describes the agreements, by name and text, that processes are in."""
    rule, fix = _SAME_CALLS, _FIX
    if any(name == CREATING for name, _ in messages):
        rule, fix = SAME_VARIABLES, SAME_VARIABLES_FIX
    calls = ", ".join(
        f"{clean_text(_describe_call(*message))} (process {process})"
        for process, message in zip(processes, messages, strict=True)
    )
    return f"{rule} Received: {calls}. {fix}"


def _describe_call(name: str, text: str) -> str:
    variable = text.partition(" ")[2]
    return f"{CREATING}: {variable}" if name == CREATING else name


def find_wait() -> tuple[bool, float, str]:
    """Finds the main thread's wait in an `Agreement`, or else the longest wait.

    Returns:
      Whether the main thread waits, the time waited so far, in seconds, and the
      agreement's name and variable; False, 0.0, "" if no thread is waiting.
    """
    now, main = time.monotonic(), threading.main_thread().ident
    items = list(_waits.items())
    waits = [(t == main, now - since, name) for t, (name, since) in items]
    return max(waits, default=(False, 0.0, ""))


def set_compiling(is_compiling: Callable[[], bool] | None) -> None:
    """Sets the function with which a wait asks, at its end, whether to go on.

    Args:
      is_compiling: The watchdog's function. It returns whether any process
        traces, compiles or starts a program now. None: waits are not extended.
    """
    global _is_compiling
    _is_compiling = is_compiling


def limit_waiting(seconds: float) -> None:
    """Sets how long this process's strategies wait for other processes.

    This overrides the environment variable.

    Args:
      seconds: The longest wait, a positive number of seconds.
    """
    global _limit_s
    _limit_s = seconds


def read_waiting_limit() -> float:
    """Returns how long this process waits for others, at most, in seconds.

    Raises:
      ValueError: if the environment variable is not a positive number.
    """
    if _limit_s is not None:
        return _limit_s
    return read_timeout(os.environ)

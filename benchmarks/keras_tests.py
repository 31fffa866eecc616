"""Keras's own tests of its trainer, in a strategy's scope.

Reads the tests of the installed Keras. Each test is run once in plain Keras,
and once in the scope of a `MirroredStrategy` of each number of replicas. The
results of 2 replicas are in docs/keras_distribution.md.

    ./run bench keras_tests                        # 1 and 2 replicas
    ./run bench keras_tests --replicas 3 -k fit    # some of them
    ./run bench keras_tests --file trainer_test.py # of another version

A test that is not listed passes everywhere. `plain` is plain Keras.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import pathlib

import keras
import pytest
from keras.src import testing
from keras.src.backend.jax import trainer

import keras_strategies as ks

PLAIN_TRAINER = trainer.JAXTrainer
FILE = pathlib.Path(keras.__file__).parent / "src/trainers/trainer_test.py"


class TrainedLayer(keras.Model):
    """A model that computes what the layer does from which it is derived."""

    layers = ()  # A test stores them, which `keras.Model` does not allow.

    def __init__(self) -> None:
        PLAIN_TRAINER.__init__(self)

    def build(self, input_shape):
        return super(keras.Model, self).build(input_shape)

    def call(self, inputs, training=None):
        return super(keras.Model, self).call(inputs, training=training)


class InScope:
    """A plugin of pytest that opens a scope in each test, and keeps results.

    Args:
      replicas: The number of replicas; 0 for plain Keras.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self.results: dict[str, str] = {}

    @pytest.fixture(autouse=True)
    def _scope(self, monkeypatch):
        set_up, count = testing.TestCase.setUp, self._replicas

        def set_up_in_scope(test):
            set_up(test)  # Clears Keras's state, and so its distribution.
            if count:
                devices = [f"cpu:{i}" for i in range(count)]
                test.enterContext(ks.MirroredStrategy(devices).scope())

        monkeypatch.setattr(testing.TestCase, "setUp", set_up_in_scope)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection(self):
        # Its models are layers with Keras's private trainer. A strategy trains
        # models, so they become models.
        trainer.JAXTrainer = TrainedLayer
        yield
        trainer.JAXTrainer = PLAIN_TRAINER

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.skipped:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = crash.message.splitlines() if crash else [""]
            reason = f": {lines[0]}" if report.failed else ""
            name = report.nodeid.rpartition("::")[2]
            self.results[name] = f"{report.outcome}{reason}"


def run(replicas: int, file: pathlib.Path, words: list[str]) -> dict[str, str]:
    """Returns the outcome of each test, by its name."""
    plugin = InScope(replicas)
    options = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    options += ["-c", os.devnull, "--rootdir", str(file.parent)]
    pytest.main([str(file), *options, *words], plugins=[plugin])
    return plugin.results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--file", type=pathlib.Path, default=FILE)
    options, words = parser.parse_known_args()
    found = {n: run(n, options.file, words) for n in (0, *options.replicas)}
    plain = found.pop(0)
    for replicas, results in found.items():
        counts = [
            sum(r.startswith(outcome) for r in results.values())
            for outcome in ("passed", "failed", "skipped")
        ]
        print(
            f"\n{replicas} replicas: %d passed, %d failed, %d skipped"
            % (*counts,)
        )
        for name, result in results.items():
            if result.startswith("failed") or result[:4] != plain[name][:4]:
                print(f"  {name}: {result} (plain: {plain[name]})")


if __name__ == "__main__":
    main()

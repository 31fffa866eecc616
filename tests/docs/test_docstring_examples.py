"""The examples in the docstrings of all public names run."""

import re

import pytest

from tests.docs.docstring_code import list_examples, run_example
from tests.docs.example_names import names_for
from tests.docs.public_names import public_code, public_docstrings

EXAMPLES = {
    path: examples
    for path, docstring in public_docstrings().items()
    if (examples := list_examples(docstring))
}
ELSEWHERE = {
    "keras_strategies.MultiWorkerMirroredStrategy": (
        "waits for a second process; tests/multi_process has two"
    ),
    "keras_strategies.cluster_resolver.KubernetesClusterResolver": (
        "queries Kubernetes for pods; tests/cluster has a client that answers"
    ),
    "keras_strategies.cluster_resolver.KubernetesExecutableLocation": (
        "loads credentials; tests/cluster has a client that answers"
    ),
    "keras_strategies.cluster_resolver.TPUClusterResolver": (
        "joins hosts before JAX's devices are used; tests/tpu has hosts"
    ),
    "keras_strategies.testing.ProcessResult": (
        "starts two processes; tests/multi_process does"
    ),
    "keras_strategies.testing.run_processes": (
        "starts two processes; tests/multi_process does"
    ),
    "keras_strategies.tpu.experimental.TPUSystemMetadata": (
        "joins hosts before JAX's devices are used; tests/tpu has hosts"
    ),
}
WITH_LIBTPU = {"keras_strategies.MirroredStrategy.for_topology"}


def cases():
    """The docstrings that have examples to run here."""
    return [
        pytest.param(
            path, marks=[pytest.mark.tpu] if path in WITH_LIBTPU else []
        )
        for path in sorted(EXAMPLES.keys() - ELSEWHERE.keys())
    ]


@pytest.mark.filterwarnings(
    # jax 0.10.2's own, when Keras 3.15 exports a model.
    "ignore:The `native_serialization:DeprecationWarning"
)
@pytest.mark.parametrize("path", cases())
def test_an_example_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = names_for(path, tmp_path)
    for source in EXAMPLES[path]:
        run_example(with_fewer_steps(source), names)


def with_fewer_steps(source):
    """A hundredth, where an example trains for many; sessions show theirs."""
    if ">>>" in source:
        return source
    words = r"\b((?:max|save_checkpoints)_steps|every_n_iter)=(\d+)00\b"
    return re.sub(words, r"\1=\2", source)


def test_examples_have_fewer_steps():
    given = "train(f, max_steps=1000)\nHook(every_n_iter=500, steps=100)\n"
    wanted = "train(f, max_steps=10)\nHook(every_n_iter=5, steps=100)\n"
    assert with_fewer_steps(given) == wanted
    assert with_fewer_steps(f">>> {given}") == f">>> {given}"


def without_example(code):
    """The dotted names of classes and functions without an example."""
    return {
        path
        for path, value in code.items()
        if not list_examples(value.__doc__ or "")
    }


def test_each_public_class_and_function_has_an_example():
    assert not without_example(public_code())


def test_names_without_an_example_are_seen():
    def documented():
        """Adds.

        Example:
          >>> 1 + 1
          2
        """

    def summarized():
        """Adds."""

    def bare(): ...

    code = {"a": documented, "b": summarized, "c": bare}
    assert without_example(code) == {"b", "c"}


def test_there_are_examples_of_all_kinds():
    sources = [source for found in EXAMPLES.values() for source in found]
    assert sum(">>>" in source for source in sources) >= 2
    assert EXAMPLES.keys() >= ELSEWHERE.keys() | WITH_LIBTPU


@pytest.mark.parametrize("path", ELSEWHERE)
def test_an_example_that_is_not_run_is_python(path):
    for source in EXAMPLES[path]:
        compile(source, path, "exec")


DOCSTRING = """Adds.

        first = 1

        second = first + 1

    Args:
      rows: Some.

        Of them, more than one.

    ```sh
    echo no python
    ```

    Example:
      ```python
      if second:
          third = 3
      ```
      >>> third
      3
    """


def test_examples_are_found():
    assert [source.strip() for source in list_examples(DOCSTRING)] == [
        "first = 1\n\nsecond = first + 1",
        "if second:\n    third = 3",
        ">>> third\n3",
    ]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("strategy.fit()", NameError),
        ("raise OSError('disk')", OSError),
        (">>> 1 + 1\n3\n", AssertionError),
        (">>> 1 / 0\n", AssertionError),
        ("a text", SyntaxError),
    ],
)
def test_an_example_that_fails_is_seen(source, error):
    with pytest.raises(error):
        run_example(source, {})


def test_names_go_from_one_example_to_the_next():
    names = {}
    for source in list_examples(DOCSTRING):
        run_example(source, names)
    assert names["third"] == 3

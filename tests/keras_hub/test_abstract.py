"""Models of keras-hub without values, from their configurations."""

import contextlib
import math

import jax
import keras
import pytest

import keras_strategies as ks

pytestmark = [
    pytest.mark.keras_hub,
    # Of its own, and of what it imports.
    pytest.mark.filterwarnings("ignore"),
]
SIZES = {
    "vocabulary_size": 256,
    "num_layers": 2,
    "hidden_dim": 64,
    "intermediate_dim": 128,
}
GROUPED = SIZES | {"num_query_heads": 4, "num_key_value_heads": 2}
SHORT = SIZES | {"num_heads": 4, "max_sequence_length": 16}
CASES = {
    "LlamaBackbone": GROUPED,
    "GemmaBackbone": GROUPED | {"head_dim": 16},
    "BertBackbone": SHORT,
    "GPT2Backbone": SHORT,
}


def compiled(name, *, abstract):
    """What a program of a train step is, and the model."""
    hub = pytest.importorskip("keras_hub", reason="./run test -m keras_hub")
    keras.backend.clear_session()
    strategy = ks.MirroredStrategy(
        variable_partitioner=ks.experimental.FullySharded(min_size=256)
    )
    values = ks.abstract() if abstract else contextlib.nullcontext()
    with strategy.scope(), values:
        backbone = getattr(hub.models, name)(**CASES[name])
        output = backbone.output
        if isinstance(output, dict):
            output = output["sequence_output"]
        model = keras.Model(backbone.input, keras.layers.Dense(4)(output))
        model.compile("adam", "mse")
    x = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct((8, 16), t.dtype), backbone.input
    )
    y = jax.ShapeDtypeStruct((8, 16, 4), "float32")
    program = strategy.compile_step(model, (x, y))
    variables = [*model.variables, *model.optimizer.variables]
    facts = [(v.path, v.shape, v.dtype) for v in variables]
    sizes = program.argument_bytes, program.temporary_bytes
    return variables, (facts, sizes, program.collectives)


@pytest.mark.parametrize("name", CASES)
def test_backbones_without_values_are_those_with_values(name):
    _, wanted = compiled(name, abstract=False)
    variables, found = compiled(name, abstract=True)
    assert found == wanted
    for variable in variables:
        is_large = math.prod(variable.shape) > 64
        assert (variable._value is None) == is_large, variable.path

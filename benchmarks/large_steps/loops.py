"""Bidirectional recurrent layers over many frames, with AdamW's update.

Peers: `ours`, Keras's layers; `products`, in which loops compute only what the
next frame needs: the products of the inputs come before a loop, and those of
the weights' and the inputs' gradients after it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import keras_strategies as ks
from benchmarks.large_steps import measure

HALF = jnp.bfloat16


def lstm_sums(inputs, hidden):
    return inputs + hidden


def lstm(sums, state):
    entered, kept, new, shown = jnp.split(sums, 4, axis=-1)
    cell = jax.nn.sigmoid(kept) * state[1]
    cell += jax.nn.sigmoid(entered) * jnp.tanh(new)
    return jax.nn.sigmoid(shown) * jnp.tanh(cell), cell


def gru_sums(inputs, hidden):
    units = inputs.shape[-1] // 3
    gates = (inputs + hidden)[..., : 2 * units]
    rest = inputs[..., 2 * units :], hidden[..., 2 * units :]
    return jnp.concatenate([gates, *rest], axis=-1)


def gru(sums, state):
    (before,) = state
    kept, read, inputs, hidden = jnp.split(sums, 4, axis=-1)
    kept = jax.nn.sigmoid(kept)
    new = jnp.tanh(inputs + jax.nn.sigmoid(read) * hidden)
    return (kept * before + (1 - kept) * new,)


CELLS = {"LSTM": (4, 2, lstm_sums, lstm), "GRU": (3, 1, gru_sums, gru)}


def run_layer(name, is_reversed, weights, x):
    """Computes a layer of arrays of shape (frames, rows, width)."""
    _, states, add, act = CELLS[name]

    def run_forward(weights, x):
        kernel, recurrent, bias, hidden_bias = weights
        inputs = x @ kernel + bias
        zeros = jnp.zeros((x.shape[1], recurrent.shape[0]), x.dtype)

        def iterate(state, inputs):
            sums = add(inputs, state[0] @ recurrent + hidden_bias)
            new = act(sums, state)
            return new, (new[0], sums, state)

        first = (zeros,) * states
        return lax.scan(iterate, first, inputs, reverse=is_reversed)[1]

    @jax.custom_vjp
    def run(weights, x):
        return run_forward(weights, x)[0]

    def forward(weights, x):
        y, sums, before = run_forward(weights, x)
        return y, (weights, x, sums, before)

    def backward(stored, grads):
        weights, x, sums, before = stored
        kernel, recurrent, *_ = weights
        zeros = jnp.zeros((x.shape[1], recurrent.shape[0]), x.dtype)
        wide = jax.ShapeDtypeStruct((x.shape[1], kernel.shape[1]), x.dtype)
        split = jax.linear_transpose(add, wide, wide)

        def iterate(state, slices):
            grad, sums, before = slices
            _, pull = jax.vjp(act, sums, before)
            sums, before = pull((state[0] + grad, *state[1:]))
            inputs, hidden = split(sums)
            first = before[0] + hidden @ recurrent.T
            return (first, *before[1:]), (inputs, hidden)

        _, (inputs, hidden) = lax.scan(
            iterate,
            (zeros,) * states,
            (grads, sums, before),
            reverse=not is_reversed,
        )
        of_weights = (
            jnp.einsum("tri,trj->ij", x, inputs),
            jnp.einsum("tri,trj->ij", before[0], hidden),
            inputs.sum((0, 1)),
            hidden.sum((0, 1)),
        )
        return of_weights, inputs @ kernel.T

    run.defvjp(forward, backward)
    return run(weights, x)


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """Bidirectional layers, and a `Dense` layer.

    Attributes:
      name: The class of the layers.
      depth: Their number.
    """

    name: str
    depth: int = 3
    units: int = 512
    frames: int = 800
    features: int = 80
    classes: int = 32
    rows: int = 16
    topology: str = "v5e:4x4"
    peers: tuple[str, ...] = ("ours", "products")

    def measure(self, peer, is_low=True):
        """Compiles the step of a peer."""
        keras.config.set_dtype_policy("mixed_bfloat16")
        strategy = ks.TPUStrategy.for_topology(self.topology)
        devices = np.array(strategy.mesh.devices).ravel()
        if peer != "ours":
            return measure.measure(self._lower_raw(devices), devices, is_low)
        with strategy.scope(), ks.abstract():
            model = self._make_model()
        x, y = self._shapes(devices.size)
        options = dict(measure.LOW_EFFORT) if is_low else None
        batch = (
            jax.ShapeDtypeStruct(x, "float32"),
            jax.ShapeDtypeStruct(y, "int32"),
        )
        program = strategy.compile_step(model, batch, compiler_options=options)
        seconds = program.compile_seconds
        return measure.read(program.executable, devices, seconds)

    def _shapes(self, count):
        rows = self.rows * count
        return (rows, self.frames, self.features), (rows, self.frames)

    def _make_model(self):
        layers = keras.layers
        x = inputs = keras.Input((self.frames, self.features))
        for _ in range(self.depth):
            layer = getattr(layers, self.name)
            layer = layer(self.units, return_sequences=True)
            x = layers.Bidirectional(layer)(x)
        model = keras.Model(inputs, layers.Dense(self.classes)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-4), loss)
        return model

    def _lower_raw(self, devices):
        gates = CELLS[self.name][0] * self.units
        layers, width = [], self.features
        for _ in range(self.depth):
            shapes = (width, gates), (self.units, gates), (gates,), (gates,)
            layers.append([shapes, shapes])
            width = 2 * self.units
        shapes = layers, ((width, self.classes), (self.classes,))
        mesh = Mesh(devices, ("data",))

        def shape(sizes, spec, dtype="float32"):
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

        weights = jax.tree.map(
            lambda sizes: shape(sizes, ()),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
        )

        def step(weights, first, second, x, y):
            value, grads = jax.value_and_grad(self._compute_loss)(weights, x, y)
            grads, value = lax.pmean((grads, value), "data")
            each = jax.tree.map
            first = each(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
            second = each(lambda v, g: 0.999 * v + 1e-3 * g**2, second, grads)
            weights = each(
                lambda w, m, v: (
                    w * (1 - 4e-7) - 1e-4 * m / (jnp.sqrt(v) + 1e-7)
                ),
                *(weights, first, second),
            )
            return weights, first, second, value

        rows = PartitionSpec("data")
        empty = PartitionSpec()
        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(empty, empty, empty, rows, rows),
            out_specs=empty,
            check_vma=False,
        )
        x, y = self._shapes(devices.size)
        x, y = shape(x, ("data",)), shape(y, ("data",), "int32")
        jitted = jax.jit(mapped, donate_argnums=(0, 1, 2))
        return jitted.lower(weights, weights, weights, x, y)

    def _compute_loss(self, weights, x, y):
        layers, last = jax.tree.map(lambda x: x.astype(HALF), weights)
        x = jnp.swapaxes(x, 0, 1).astype(HALF)
        for both in layers:
            x = jnp.concatenate(
                [
                    run_layer(self.name, is_reversed, each, x)
                    for is_reversed, each in enumerate(both)
                ],
                axis=-1,
            )
        logits = (x @ last[0] + last[1]).astype("float32")
        logits = jax.nn.log_softmax(jnp.swapaxes(logits, 0, 1))
        return -jnp.take_along_axis(logits, y[..., None], axis=-1).mean()


CASES = {"lstm": Recurrent("LSTM"), "gru": Recurrent("GRU")}

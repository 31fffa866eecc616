"""Six models, and all that they are made to do, for `./run bench programs`.

Run as a script in a process of its own: every program that it compiles is
dumped by JAX and XLA, and the numbers of each part are printed.
"""

import argparse
import hashlib
import json

ROWS, STEPS = 8, 10


def mlp():
    import keras

    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    return model, (8,), classified(model, keras.optimizers.Adam(1e-2))


def cnn():
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.3, seed=1),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    return model, (8, 8, 3), classified(model, optimizer)


def transformer():
    import keras
    from keras import layers

    policy = keras.DTypePolicy("mixed_bfloat16")
    inputs = keras.Input((8, 16))
    x = layers.LayerNormalization(dtype=policy)(inputs)
    x = inputs + layers.MultiHeadAttention(2, 8, dtype=policy)(x, x)
    y = layers.Dense(32, activation="gelu", dtype=policy)(x)
    x = x + layers.Dense(16, dtype=policy)(y)
    x = layers.GlobalAveragePooling1D(dtype=policy)(x)
    outputs = layers.Dense(4, dtype="float32")(x)
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.AdamW(1e-2, clipnorm=1.0)
    return model, (8, 16), classified(model, optimizer)


def lstm():
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((6, 5)),
            layers.Masking(),
            layers.LSTM(8, return_sequences=True),
            layers.LSTM(8),
            layers.Dense(4),
        ]
    )
    return model, (6, 5), classified(model, keras.optimizers.RMSprop(1e-2))


def gan():
    """Two networks with an optimizer each, in a step of its own."""
    import jax
    import keras
    from keras import layers, ops

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.maker = keras.Sequential(
                [keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(6)]
            )
            self.judge = keras.Sequential(
                [keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)]
            )
            self.second = keras.optimizers.Adam(1e-2)
            self.second.build(self.maker.trainable_variables)
            self.loss_tracker = keras.metrics.Mean(name="judged")

        def call(self, x):
            return self.judge(self.maker(x))

        @property
        def non_trainable_variables(self):
            own = super().non_trainable_variables
            known = {id(v) for v in own}
            slots = self.second.variables
            return own + [v for v in slots if id(v) not in known]

        def train_step(self, state, data):
            trainable, other, optimizer, metrics = state
            x = data[0] if isinstance(data, tuple) else data
            count = len(self.maker.trainable_variables)
            slots = len(self.second.variables)

            def judged(maker, judge, x):
                made, _ = self.maker.stateless_call(maker, [], x)
                return self.judge.stateless_call(judge, [], made)[0]

            def judge_loss(judge):
                real, _ = self.judge.stateless_call(judge, [], x)
                made = judged(trainable[:count], judge, x)
                return ops.mean(ops.softplus(-real) + ops.softplus(made))

            def maker_loss(maker):
                made = judged(maker, trainable[count:], x)
                return ops.mean(ops.softplus(-made))

            first, grads = jax.value_and_grad(judge_loss)(trainable[count:])
            judge, optimizer = self.optimizer.stateless_apply(
                optimizer, grads, trainable[count:]
            )
            second, grads = jax.value_and_grad(maker_loss)(trainable[:count])
            maker, new_slots = self.second.stateless_apply(
                other[-slots:], grads, trainable[:count]
            )
            state = [*maker, *judge], [*other[:-slots], *new_slots]
            return {"judge": first, "maker": second}, (
                *state,
                optimizer,
                metrics,
            )

    model = Gan()
    model.build((None, 6))
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.judge.trainable_variables)

    def compile_model(spe):
        model.compile(optimizer, "mse", steps_per_execution=spe)

    return model, (6,), compile_model


def scaled():
    import keras

    layers = [
        keras.layers.Dense(16, activation="relu", dtype="mixed_float16"),
        keras.layers.Dense(4, dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    inner = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    return model, (8,), classified(model, optimizer)


MODELS = {fn.__name__: fn for fn in (mlp, cnn, transformer, lstm, gan, scaled)}


def classified(model, optimizer):
    import keras

    def compile_model(spe):
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=spe,
        )

    return compile_model


def told(part, model, *numbers):
    """Prints the digest of a part's numbers and of the model's variables."""
    import jax
    import numpy as np

    digest = hashlib.sha256()
    arrays = [v.value for v in [*model.variables, *model.optimizer.variables]]
    for value in jax.tree.leaves([numbers, arrays]):
        array = np.asarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    print(json.dumps({"part": part, "digest": digest.hexdigest()}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--devices", type=int, required=True)
    args = parser.parse_args()
    import keras
    import numpy as np

    import keras_strategies as ks

    keras.utils.set_random_seed(1)
    strategy = ks.MirroredStrategy([f"cpu:{i}" for i in range(args.devices)])
    with strategy.scope():
        model, shape, compile_model = MODELS[args.model]()
    random = np.random.default_rng(0)
    batch = ROWS * args.devices
    x = random.normal(size=(batch * STEPS + 1, *shape)).astype("float32")
    y = random.integers(0, 4, len(x)).astype("int32")
    if args.model == "gan":
        y = random.normal(size=(len(x), 1)).astype("float32")

    def cut(rows):
        return x[:rows], y[:rows]

    options = {"batch_size": batch, "shuffle": False, "verbose": 0}
    for spe in (1, 20):
        with strategy.scope():
            compile_model(spe)
        for name, rows in (("even", batch * STEPS), ("uneven", len(x))):
            history = model.fit(
                *cut(rows), epochs=2 if spe == 1 else 4, **options
            )
            told(f"fit {spe} {name}", model, history.history)
        del options["shuffle"]
        for name, rows in (("even", batch * 4), ("uneven", batch * 4 + 1)):
            results = model.evaluate(*cut(rows), return_dict=True, **options)
            told(f"evaluate {spe} {name}", model, results)
            told(
                f"predict {spe} {name}",
                model,
                model.predict(cut(rows)[0], **options),
            )
        options["shuffle"] = False
    run(strategy, model, x, y, args.devices)


def run(strategy, model, x, y, devices):
    """A loop of one's own, on even and on uneven rows."""
    import numpy as np

    import keras_strategies as ks

    def step(x, y):
        def loss():
            outputs = model(x, training=True)
            value = model.compute_loss(x=x, y=y, y_pred=outputs)
            return value / devices

        value, gradients = ks.value_and_grad(loss, weights)()
        model.optimizer.apply(gradients, weights)
        return value

    weights = model.trainable_variables
    if hasattr(model, "judge"):
        weights = model.judge.trainable_variables
    for name, less in (("even", 0), ("uneven", 3)):
        sizes = [ROWS] * (devices - 1) + [ROWS - less]
        args = []
        for array in (x, y):
            parts = np.split(array[: sum(sizes)], np.cumsum(sizes)[:-1])
            args.append(
                strategy.experimental_distribute_values_from_function(
                    lambda context, parts=parts: parts[
                        context.replica_id_in_sync_group
                    ]
                )
            )
        total = 0.0
        for _ in range(STEPS):
            value = strategy.run(step, args=tuple(args))
            total += float(strategy.reduce("sum", value, axis=None))
        told(f"run {name}", model, np.float64(total))


if __name__ == "__main__":
    main()

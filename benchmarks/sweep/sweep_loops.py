"""The sweep's peers that Keras and tf.distribute offer, and ours.

`bound(role, point)` makes a point's model; the function it returns takes
arrays, and returns a turn's work on them.
"""

import functools

import sweep_models
import sweep_points

ROLES = ("ours", "dataparallel", "raw", "one", "tf")


def bound(role, point, place):
    """Makes the point's model.

    Args:
      role: One of ROLES.
      point: See sweep_points.py.
      place: This worker's command line: `devices`, `processes`, `process` and
        `address`.

    Returns:
      A function of arrays that returns a turn's work, and facts to be told.
    """
    if role == "raw":
        import sweep_raw

        join(place)
        return sweep_raw.fastest(point)
    if role == "ours" and point["loop"] == "run":
        return our_loop(point, place), {}
    if role == "ours":
        with our_strategy(place).scope():
            model = sweep_models.compiled(point)
    elif role == "tf":
        with tf_strategy(place.devices).scope():
            model = sweep_models.compiled(point)
    else:
        if role == "dataparallel":
            # Anew for each point: what frees a point forgets it.
            import keras

            keras.distribution.set_distribution(
                keras.distribution.DataParallel(
                    devices=keras.distribution.list_devices()
                )
            )
        from keras import layers

        # Keras's on JAX is over all rows of a batch as it is.
        model = sweep_models.compiled(point, layers.BatchNormalization)
    return functools.partial(get_keras_loop, model, point), {}


def get_keras_loop(model, point, x, y):
    arguments = {"batch_size": sweep_points.batch_rows(point), "verbose": 0}
    if point["loop"] == "fit":
        return lambda: model.fit(x, y, epochs=1, shuffle=False, **arguments)
    if point["loop"] == "evaluate":
        return lambda: model.evaluate(x, y, **arguments)
    return lambda: model.predict(x, **arguments)


def join(place):
    """Joins the worker's other process, once."""
    import jax

    if place.processes > 1 and not jax.distributed.is_initialized():
        jax.distributed.initialize(
            place.address, place.processes, place.process
        )


def our_strategy(place):
    import keras_strategies as ks

    if place.processes == 1:
        return ks.MirroredStrategy()
    return our_job(place.address, place.processes, place.process)


@functools.cache
def our_job(address, processes, process):
    """The job's only strategy: a process joins once."""
    import keras_strategies as ks

    return ks.MultiWorkerMirroredStrategy(
        coordinator_address=address,
        num_processes=processes,
        process_id=process,
    )


@functools.cache
def tf_strategy(devices):
    import fit

    return fit.tf_strategy(devices)


def our_loop(point, place):
    """`run` and `reduce` over a distributed dataset."""
    import keras_strategies as ks

    strategy = our_strategy(place)
    rows = sweep_points.batch_rows(point)
    with strategy.scope():
        model, optimizer, accuracy, loss_of = sweep_models.parts(point)

    def step(x, y):
        def loss_fn():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            return ks.compute_average_loss(
                sweep_models.by_row(loss_of(y, logits)), global_batch_size=rows
            )

        loss, grads = ks.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    def bind(x, y):
        dataset = strategy.experimental_distribute_dataset(
            strategy.experimental_make_numpy_dataset((x, y)).batch(rows)
        )

        def work():
            total = 0.0
            for batch in dataset:
                losses = strategy.run(step, args=batch)
                total += strategy.reduce("sum", losses, axis=None)
            return float(total)

        return work

    return bind

"""What XLA makes slow on CPU, in raw JAX: the causes of the sweep's misses.

Nothing of this package or of Keras runs here. Each case is one step that is
written in two ways, which compute the same.

    ./run bench upstream
    ./run bench upstream recurrent --devices 8 --rows 64 --width 256

`recurrent`: a recurrent layer's step, mapped over the devices, and divided by
XLA's partitioner, which is what an indivisible batch needs. The partitioner
sums the gradient of the recurrent weights over the devices at each step of the
backward loop over time, and not once after it.

`rounded`: mixed_bfloat16 on one device, with an all-reduce of the gradients
over that one device, and without. Without it XLA leaves each weight's gradient
transposed, and both moments of Adam read it across its rows.
"""

import argparse
import os
import statistics
import time

STEPS_OF_TIME = 8
FEATURES = 32
TURNS, CALLS = 9, 10


def recurrent(devices, rows, width, count):
    """Seconds a step of each way, and how many sums are in loops."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("replica",))
    whole, split = PartitionSpec(), PartitionSpec(None, "replica")
    units = width // STEPS_OF_TIME
    shapes = (FEATURES, width), (units, 4 * units), (units, 4 * units)

    def loss(weights, x):
        dense, kernel, recurrent = weights
        x = jnp.tanh(x @ dense).reshape(-1, STEPS_OF_TIME, units)

        def cell(carry, now):
            hidden, memory = carry
            gates = now @ kernel + hidden @ recurrent
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            memory = jax.nn.sigmoid(f) * memory
            memory += jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (hidden, memory), hidden

        start = (jnp.zeros((len(x), units)),) * 2
        _, hidden = jax.lax.scan(cell, start, x.swapaxes(0, 1))
        return (hidden**2).mean()

    def steps(is_mapped):
        def one(weights, x):
            gradients = jax.grad(loss)(weights, x)
            if is_mapped:
                gradients = jax.lax.pmean(gradients, "replica")
            return [
                w - 0.01 * g for w, g in zip(weights, gradients, strict=True)
            ], None

        def many(weights, x):
            return jax.lax.scan(one, weights, x)[0]

        return many

    def divided(count_of_rows):
        def fn(weights, x):
            x = x[:, :count_of_rows]
            sharding = NamedSharding(mesh, split)
            return steps(False)(
                weights, jax.lax.with_sharding_constraint(x, sharding)
            )

        return fn

    mapped = jax.shard_map(
        steps(True),
        mesh=mesh,
        in_specs=(whole, split),
        out_specs=whole,
        check_vma=False,
    )
    ways = {
        "mapped": (mapped, rows * devices),
        "divided": (divided(rows * devices), rows * devices),
        "divided, 1 row more": (
            divided(rows * devices + 1),
            (rows + 1) * devices,
        ),
    }
    works = {}
    for name, (fn, padded) in ways.items():
        weights = [jnp.full(shape, 0.01) for shape in shapes]
        x = jnp.ones((count, padded, FEATURES))
        weights = jax.device_put(weights, NamedSharding(mesh, whole))
        x = jax.device_put(x, NamedSharding(mesh, split))
        out = NamedSharding(mesh, whole)
        works[name] = caller(
            jax.jit(fn, donate_argnums=0, out_shardings=out), weights, x
        )
    return measure_times(works, count)


def rounded(width, rows, dtype):
    """Seconds a step of each way."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:1]), ("replica",))
    whole = PartitionSpec()

    def step(is_summed, state, x):
        weights, means, squares = state

        def loss(weights):
            value = x.astype(dtype)
            for weight in weights:
                value = jax.nn.relu(value @ weight.astype(dtype))
            return value.astype("float32").sum()

        grads = jax.grad(loss)(weights)
        if is_summed:
            grads = jax.lax.psum(grads, "replica")
        pairs = list(zip(grads, means, squares, weights, strict=True))
        means = [m + 0.1 * (g - m) for g, m, _, _ in pairs]
        squares = [s + 0.001 * (g * g - s) for g, _, s, _ in pairs]
        updated = zip(weights, means, squares, strict=True)
        weights = [w - 1e-3 * m / (jnp.sqrt(s) + 1e-7) for w, m, s in updated]
        return weights, means, squares

    works = {}
    for name, is_summed in {"summed": True, "as they are": False}.items():
        fn = jax.shard_map(
            lambda state, x, is_summed=is_summed: step(is_summed, state, x),
            mesh=mesh,
            in_specs=(whole, whole),
            out_specs=whole,
            check_vma=False,
        )
        state = tuple(
            [jnp.full((width, width), 0.01) for _ in range(3)] for _ in range(3)
        )
        works[name] = caller(
            jax.jit(fn, donate_argnums=0), state, jnp.ones((rows, width))
        )
    return measure_times(works, 1)


def caller(fn, state, x):
    """A turn: some calls, each with the state of the one before."""
    import jax

    held = [state]

    def turn():
        for _ in range(CALLS):
            held[0] = jax.block_until_ready(fn(held[0], x))

    turn()
    return turn


def measure_times(works, steps):
    """Milliseconds a step; the ways take turns."""
    taken = {name: [] for name in works}
    for _ in range(TURNS):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
            taken[name].append(seconds / CALLS / steps * 1e3)
    return {name: statistics.median(each) for name, each in taken.items()}


def show(title, ms):
    first = next(iter(ms.values()))
    print(title)
    for name, value in ms.items():
        print(f"  {name:22} {value:8.3f} ms  {value / first:5.2f}x")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "case", nargs="?", choices=("recurrent", "rounded"), help="both"
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rows", type=int, help="of a device: 1; 16")
    parser.add_argument("--width", type=int, help="128; 1024")
    parser.add_argument("--steps", type=int, default=20, help="of a program")
    options = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={options.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.case != "rounded":
        rows, width = options.rows or 1, options.width or 128
        ms = recurrent(options.devices, rows, width, options.steps)
        show(f"recurrent: {options.devices} x {rows} rows, width {width}", ms)
    if options.case != "recurrent":
        rows, width = options.rows or 16, options.width or 1024
        for dtype in ("bfloat16", "float32"):
            ms = rounded(width, rows, dtype)
            show(f"rounded, {dtype}: {rows} rows, width {width}", ms)


if __name__ == "__main__":
    main()

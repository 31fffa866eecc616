"""What JAX does that `keras_strategies` relies on."""

import inspect
import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import api, distributed
from jax.sharding import SingleDeviceSharding

from keras_strategies.cluster import user_code
from keras_strategies.cluster.addresses import find_free_ports
from keras_strategies.cluster.exchange import kv_store
from keras_strategies.job import mutual_tls
from keras_strategies.names import versions
from keras_strategies.passes.replay import separate_trace
from keras_strategies.passes.stages import scan_operands
from keras_strategies.passes.traces import is_tracing, read_settings
from keras_strategies.planning.compile.compiler import parse_misfit
from keras_strategies.spmd.compiled import measure_memory
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import replica_map, split_spec
from keras_strategies.tpu.chips import find_memory
from keras_strategies.tpu.device_groups import make_tpu_devices
from keras_strategies.watchdog import progress
from tests.support import compiling
from tests.support.commands import python
from tests.support.jobs import values_of


def run_python(code, *, devices):
    """Runs code in a process with so many virtual devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    flags += compiling.FLAGS
    return python(
        "-c", code, env=os.environ | {"XLA_FLAGS": flags}, timeout=120
    )


def client_calls():
    """Uses the key-value client as an `Agreement` does."""
    import jax

    client = distributed.global_state.client
    me = jax.process_index()
    client.key_value_set(f"contract/{me}", "é" * 100_000)
    other = client.blocking_key_value_get(f"contract/{1 - me}", 60_000)
    told = {}
    try:
        client.blocking_key_value_get("contract/never", 50)
    except jax.errors.JaxRuntimeError as error:
        told["late"] = str(error)
    try:
        client.key_value_set(f"contract/{me}", "again")
    except jax.errors.JaxRuntimeError as error:
        told["twice"] = str(error)
    # What the guard needs besides: to write again, and to read a directory.
    client.key_value_set(f"contract/{me}", "changed", True)
    told["directory"] = [
        value
        for key, value in client.key_value_dir_get("contract/")
        if key == f"contract/{me}"
    ]
    told["empty"] = client.key_value_dir_get("no such directory/")
    told["is_reachable"] = kv_store.is_reachable()
    client.key_value_set(f"heard/{me}", "")
    client.blocking_key_value_get(f"heard/{1 - me}", 60_000)
    client.key_value_delete(f"contract/{me}")
    client.key_value_delete("contract/no such key")
    try:
        client.blocking_key_value_get(f"contract/{me}", 50)
    except jax.errors.JaxRuntimeError as error:
        told["deleted"] = str(error)
    return told | {"other": len(other), "first": other[0]}


def agree():
    """Many agreements: what was said is forgotten at last."""
    import jax

    from keras_strategies.cluster.exchange import host_exchange

    client = distributed.global_state.client
    assert kv_store.is_available()
    for number in range(host_exchange._NUM_KEPT + 5):
        made = host_exchange.Agreement((0, 1), "x")
        for count in range(2):
            text = f"{number} {count} {jax.process_index()}"
            heard = made.exchange(text)
            assert heard == [f"{number} {count} {p}" for p in (0, 1)]
        made.end()
    left = client.key_value_dir_get("keras_strategies/")
    try:
        host_exchange.Agreement((0, 1), f"call {jax.process_index()}").exchange(
            ""
        )
    except ValueError as error:
        return len(left), str(error)


def run():
    return client_calls(), agree()


@pytest.mark.multi_process
def test_the_key_value_client_and_what_it_forgets():
    from keras_strategies.cluster.exchange import host_exchange

    for value in values_of("contract.test_jax_contract:run", 2):
        told, (count, error) = value
        assert (told["other"], told["first"]) == (100_000, "é")
        assert "DEADLINE_EXCEEDED" in told["late"]
        assert "DEADLINE_EXCEEDED" in told["deleted"]
        assert "ALREADY_EXISTS" in told["twice"]
        assert told["directory"] == ["changed"]
        assert told["empty"] == []
        assert told["is_reachable"]
        assert count <= 2 * (host_exchange._NUM_KEPT + 2)
        assert "Received: call 0 (process 0), call 1 (process 1)" in error


def test_there_is_no_public_name_of_the_client():
    import jax

    assert not hasattr(jax.distributed, "global_state")
    source = inspect.getsource(distributed.State)
    assert "client" in source
    assert "coordinator_address" in source
    # Of a process that has joined no job.
    state = distributed.State()
    assert (state.process_id, state.num_processes) == (0, 1)


def test_it_is_known_whether_devices_are_in_use():
    import jax
    from jax._src import xla_bridge

    jax.devices()
    assert xla_bridge.backends_are_initialized() is True
    with pytest.raises(RuntimeError, match="before"):
        jax.distributed.initialize("127.0.0.1:1", 1, 0)


def test_gpus_of_a_process_are_an_option_of_jax():
    import jax

    assert jax.config.values["jax_cuda_visible_devices"] == "all"
    assert jax.config.values["jax_platforms"] == jax.config.jax_platforms
    source = inspect.getsource(distributed.State.initialize)
    assert 'config.update("jax_cuda_visible_devices"' in source
    # Without this, JAX takes one GPU in each process of SLURM and Open MPI.
    assert "cluster_detection_method != 'deactivate'" in source
    assert "JAX_LOCAL_DEVICE_IDS" in source


@pytest.mark.skipif(
    versions.parse_version(jax.__version__) < mutual_tls.MIN_JAX,
    reason="jax >= 0.11.2",
)
def test_mutual_tls_has_these_options_and_arguments():
    for name in (*mutual_tls.FILES, mutual_tls.REQUIRED):
        assert not jax.config.values[name.lower()]
    # JAX reads the options itself.
    source = inspect.getsource(distributed)
    for name in mutual_tls.FILES:
        argument = name.lower().removeprefix("jax_")
        assert f"{argument}, config.{argument})" in source


def test_jax_leaves_a_job_past_the_public_name():
    # The guard's hook on `jax.distributed.shutdown` is for users' calls; at
    # the end of a script JAX calls another name, after the guard's `atexit`.
    assert "distributed.shutdown()" in inspect.getsource(api.clean_up)
    assert api.distributed is distributed


def test_open_constraints_are_still_emitted():
    """Fails when JAX leaves them out (passes/constrained_operations.py)."""
    code = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "model"))
step = jax.shard_map(
    lambda x: x * 2.0 + 1.0, mesh=mesh, axis_names={"replica"},
    in_specs=P("replica"), out_specs=P("replica"), check_vma=False,
)
print(jax.jit(step).lower(np.ones((4, 4), "float32")).as_text())
"""
    ended = run_python(code, devices=4)
    assert ended.returncode == 0, ended.stderr
    assert "sdy.sharding_constraint" in ended.stdout


def test_open_constraints_can_be_left_out():
    devices = tuple(jax.devices()[:4])
    mesh = ReplicaMesh(devices=devices, cores_per_replica=2)
    step = replica_map(
        lambda x: x * 2.0 + 1.0,
        mesh,
        in_specs=split_spec(mesh),
        out_specs=split_spec(mesh),
    )
    text = jax.jit(step).lower(np.ones((4, 4), "float32")).as_text()
    assert "manual_computation" in text
    assert "sdy.sharding_constraint" not in text


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_padding_is_scattered_where_rows_are_repeated(shape):
    """Fails when XLA leaves it out: then `constrain_rows` may divide them."""
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("replica", "model"))
    split, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (("replica",), ())
    )

    def scattered(rows, tokens):
        rows, tokens = (
            jax.lax.with_sharding_constraint(a[:5], split)
            for a in (rows, tokens)
        )
        return jax.numpy.zeros(4).at[tokens].add(rows)

    program = jax.jit(
        scattered, in_shardings=(split, split), out_shardings=whole
    )
    rows, tokens = np.ones(6, "float32"), np.ones(6, "int32")
    # Token 0 is nowhere; five rows have token 1.
    right = np.array_equal(program(rows, tokens), [0, 5, 0, 0])
    assert right == (shape[1] == 1)


def test_gradients_of_sorts_abort_where_rows_are_divided_unevenly():
    """Fails when they no longer do: `has_unsafe_scatters` is smaller then."""
    code = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("replica",))
split = NamedSharding(mesh, P("replica"))

def gradient(x):
    x = jax.lax.with_sharding_constraint(x[:3], split)
    return jax.grad(lambda x: jax.numpy.sort(x)[:, 0].sum())(x)

jax.jit(gradient, in_shardings=split)(np.ones((4, 4), "float32"))
"""
    ended = run_python(code, devices=2)
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert "spmd_partitioner" in ended.stderr


def test_gradients_of_a_kernel_for_each_row_are_wrong_where_rows_are_divided():
    """Fails when they no longer are: features may stay open then."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    split = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec("replica")
    )

    def loss(kernel, x):
        dimensions = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(
            x[None], kernel, (1,), "VALID", dimension_numbers=dimensions
        )
        return jax.numpy.sum(y**2)

    gradient = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
    kernel = np.ones((2, 3, 1), "float32")
    x = np.arange(48, dtype="float32").reshape(4, 4, 3)
    right = gradient(kernel, x)
    divided = gradient(kernel, jax.device_put(x, split))
    assert not np.allclose(right, divided)


def shard_rows(array):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    spec = jax.sharding.PartitionSpec("rows")
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))


@pytest.mark.parametrize("is_hidden", [False, True])
def test_shifts_in_place_are_wrong_where_a_dimension_is_added(is_hidden):
    """If XLA is mended (#49176), `spmd/replica_map` needs no barriers."""

    @jax.jit
    def shift(x):
        x = x + 1
        shifted = x.at[1:].set(x[:-1])
        if is_hidden:
            shifted = jax.lax.optimization_barrier(shifted)
        return shifted[None]

    x = np.arange(4, dtype="float32")[:, None]
    found = np.asarray(shift(x)).ravel().tolist()
    assert found == ([1, 1, 2, 3] if is_hidden else [1, 1, 1, 1])


def test_gradients_of_maxima_are_wrong_where_windows_overlap_over_shards():
    """Fails when they no longer are: windows may be sharded then
    (`constrain_operations`)."""

    @jax.jit
    def gradient(x):
        def pool(x):
            return jax.lax.reduce_window(
                x, -jnp.inf, jax.lax.max, (2,), (1,), "VALID"
            )

        return jax.grad(lambda x: jnp.sum(pool(x)))(x)

    x = np.arange(8, dtype="float32")
    np.testing.assert_array_equal(gradient(x), [0] + [1] * 7)
    assert not np.array_equal(gradient(shard_rows(x)), gradient(x))


def test_fourier_transforms_along_shards_fail():
    """Fails when they work: `constrain_operations` may leave them out then."""
    x = shard_rows(np.ones((8, 4), "float32"))
    whole = jax.sharding.NamedSharding(
        x.sharding.mesh, jax.sharding.PartitionSpec()
    )
    transform = jax.jit(lambda x: jnp.fft.fft(x.T), out_shardings=whole)
    with pytest.raises(jax.errors.JaxRuntimeError, match="fft_thunk"):
        transform(x).block_until_ready()


@pytest.mark.parametrize(
    ("groups", "spec"), [(1, (None, "a")), (4, ("a",))], ids=["spatial", "rows"]
)
def test_gradients_of_kernels_sharded_over_some_devices_are_counted_twice(
    groups, spec
):
    """Fails when they no longer are: `_find_specs` is smaller then."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b"))
    sharded = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*spec)
    )
    kernel = jax.ShapeDtypeStruct((3, 3, 4 // groups, 8), "float32")

    def convolve(x, kernel):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "VALID",
            dimension_numbers=dimensions,
            feature_group_count=groups,
        )

    @jax.jit
    def gradient(x, result):
        transpose = jax.linear_transpose(lambda k: convolve(x, k), kernel)
        return transpose(result)[0]

    arrays = np.ones((8, 8, 8, 4)), np.ones((8, 6, 6, 8))
    arrays = [array.astype("float32") for array in arrays]
    right = gradient(*arrays)
    wrong = gradient(*jax.device_put(arrays, sharded))
    np.testing.assert_allclose(wrong, 2 * right, rtol=1e-5)


def test_the_guard_knows_where_jax_traces_and_compares():
    """Names by which watchdog/progress.py reads a thread's stack."""
    from jax._src.interpreters import partial_eval, pxla
    from jax.experimental import multihost_utils

    seen = []

    def is_frame_traced():
        frames = user_code.list_frames(threading.get_ident())
        names = progress._PARTIAL_EVAL, progress._TRACES
        return progress._is_in(frames, *names)

    def traced(x):
        seen.append(is_frame_traced())
        return x

    jax.eval_shape(traced, 1.0)
    jax.jit(traced)(1)
    assert seen == [True, True]
    assert not is_frame_traced()
    for name in progress._COMPARES:
        assert hasattr(multihost_utils, name)
    assert multihost_utils.__file__.endswith(progress._MULTIHOST)
    assert partial_eval.__file__.endswith(progress._PARTIAL_EVAL)
    assert pxla.__file__.endswith(progress._EXECUTES)


def test_what_is_traced_to_be_compiled_is_told_apart():
    seen = []

    def fn(x):
        seen.append(is_tracing())
        return 2.0 * x

    fn(1.0)
    jax.grad(fn)(1.0)
    jax.vmap(fn)(np.ones(2))
    with jax.ensure_compile_time_eval():
        fn(1.0)
    assert seen == [False] * 4
    seen.clear()
    jax.jit(fn)(1.0)
    jax.jit(jax.grad(fn))(1.0)
    jax.grad(jax.jit(fn))(1.0)
    jax.eval_shape(fn, 1.0)
    jax.lax.scan(lambda c, x: (fn(c), x), 1.0, np.ones(2))
    assert seen
    assert all(seen)


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "gib", "available"),
    [("v5e:2x2", 8, 15.75), ("v5p:2x2x1", 48, 95.74), ("v6e:2x2", 16, 31.25)],
)
def test_libtpu_says_what_a_program_needs_that_does_not_fit(
    name, gib, available
):
    """With its arguments and results: compiler.py, chips.py."""
    device = make_tpu_devices(name)[0]
    rows = jax.ShapeDtypeStruct(
        (gib, 2**28), "float32", sharding=SingleDeviceSharding(device)
    )
    lowered = jax.jit(lambda x: x + 1).lower(rows)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        lowered.compile()
    message = str(caught.value)
    assert f"temporaries ({2 * gib}.00G) exceeds" in message
    assert f"available HBM ({available}G)" in message
    misfit = parse_misfit(caught.value)
    assert misfit is not None
    assert misfit.bytes_in_all == 2 * gib * 2**30
    assert find_memory(device) == int(available * 2**30)


def test_an_equation_knows_the_code_that_made_it():
    def computed(x):
        return jax.lax.sin(x)

    (equation,) = jax.make_jaxpr(computed)(1.0).eqns
    codes, _ = equation.source_info.traceback.raw_frames()
    assert codes[0].co_filename.startswith(os.path.dirname(jax.__file__))
    assert computed.__code__ in codes


def test_the_operands_of_a_scan_are_told_apart():
    def scanned(x, weight):
        def turn(carry, row):
            return carry + row[0] * weight, carry

        return jax.lax.scan(turn, x[0], (x, x + 1))

    equations = jax.make_jaxpr(scanned)(np.ones((3, 2)), 2.0).eqns
    (equation,) = (e for e in equations if e.primitive.name == "scan")
    consts, carry, given = scan_operands(equation, equation.invars)
    assert [v.aval.shape for v in consts] == [()]
    assert [v.aval.shape for v in carry] == [(2,)]
    assert [v.aval.shape for v in given] == [(3, 2), (3, 2)]


def test_what_is_jitted_is_traced_for_each_name_of_a_trace():
    traced = []

    @jax.jit
    def counted(x):
        traced.append(x.shape)
        return x + 1

    def inside(name):
        def named(x):
            with separate_trace(name):
                return counted(x)

        return jax.make_jaxpr(named)(np.ones(3))

    first, second = inside("one"), inside("one")
    assert len(traced) == 1
    other = inside("other")
    assert len(traced) == 2
    assert str(first) == str(second) == str(other)


def test_what_a_trace_depends_on_is_one_key():
    before = read_settings()
    for change in (
        jax.default_matmul_precision("highest"),
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
    ):
        with change:
            assert read_settings() != before
        assert read_settings() == before
    assert hash(before) == hash(read_settings())


def test_compilations_are_told_to_listeners_with_their_names():
    """With the names of events: reporting/recorder.py."""
    heard = []

    def listen(event, duration_secs, **kwargs):
        heard.append((event.rpartition("/")[2], kwargs.get("fun_name")))
        assert duration_secs >= 0

    @jax.jit
    def told(x):
        return x * 3 + 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        told(2.0)
        told(3.0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    told(np.ones(3))
    names = [name for event, name in heard if "backend_compile" in event]
    assert len(names) == 1
    assert "told" in names[0]
    events = [event for event, _ in heard]
    assert "jaxpr_trace_duration" in events
    assert events[-1] == "backend_compile_duration"


def test_an_array_knows_whether_it_is_ready():
    array = jax.jit(lambda x: x + 1)(np.ones(3))
    assert array.is_ready() in (True, False)
    array.block_until_ready()
    assert array.is_ready() is True
    assert array.is_deleted() is False


@pytest.mark.tpu
def test_libtpu_compares_a_programs_peak_with_the_memory():
    """Not the sum of its temporaries, which a loop makes too large."""
    device = make_tpu_devices("v5e:2x2")[0]

    def shape(*dims):
        sharding = SingleDeviceSharding(device)
        return jax.ShapeDtypeStruct(dims, "float32", sharding=sharding)

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return (x**2).mean()

    def step(weights, x):
        return weights - jax.grad(loss)(weights, x)

    jitted = jax.jit(step, donate_argnums=0)
    arguments = shape(16, 1024, 1024), shape(94_000, 1024)
    compiled = jitted.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    available = find_memory(device)
    in_all = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert in_all > available
    assert memory.peak_memory_in_bytes < available
    found = measure_memory(compiled)
    assert sum(found.values()) == memory.peak_memory_in_bytes


@pytest.mark.slow
@pytest.mark.multi_process
def test_reduce_scatters_of_processes_on_cpus_wait_for_30_seconds_at_most():
    """Fails when they wait longer: `_scatter_in_group` may use them then."""
    code = """
import os, sys, time
import jax, jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
process, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
mesh = Mesh(jax.devices(), "x")
fn = lambda v: jax.lax.psum_scatter(v, "x", tiled=True)
fn = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P("x")))
jax.block_until_ready(fn(jnp.ones(8)))
time.sleep(35 * process)
try:
    jax.block_until_ready(fn(jnp.ones(8)))
    print("It waited.", flush=True)
except Exception as error:
    print(error, flush=True)
# Without the barrier at the end, which would wait for the other process.
os._exit(0)
"""
    (port,) = find_free_ports(1)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(k), str(port)],
            env=os.environ | {"XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for k in range(2)
    ]
    try:
        said, _ = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    # JAX 0.12 waits; whether its sums of large shards are right is not known.
    is_mended = versions.parse_version(jax.__version__) >= (0, 12)
    assert ("It waited." if is_mended else "Gloo ReduceScatter failed") in said


def test_a_trace_has_its_equations_so_far():
    """`GradientTape` reads them, and adds equations to an outer trace."""
    from jax._src import core

    found = {}

    def compute(x):
        outer = core.trace_ctx.trace
        with jax.named_scope("outside"):
            y = jnp.sin(x)
        found["equations"] = outer.frame.get_eqns()
        found["variables"] = [x.val, y.val]

        def inner(z):
            assert core.trace_ctx.trace is not outer
            assert z._trace is core.trace_ctx.trace
            with core.set_current_trace(outer):
                found["outer"] = jnp.cos(x)
            return z + found["outer"]

        return jax.jit(inner)(y)

    traced = jax.make_jaxpr(compute)(1.0)
    (equation,) = found["equations"]
    assert equation.primitive.name == "sin"
    assert "outside" in str(equation.source_info.name_stack)
    assert [*equation.invars, *equation.outvars] == found["variables"]
    names = [equation.primitive.name for equation in traced.jaxpr.eqns]
    assert names[:2] == ["sin", "cos"]
    assert len(names) == 3


def test_outside_of_a_trace_there_are_no_equations():
    from jax._src import core

    assert not hasattr(core.trace_ctx.trace, "frame")

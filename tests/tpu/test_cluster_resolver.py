"""TPUClusterResolver: what it reads, and what it refuses."""

import jax
import pytest

import keras_strategies as ks
from keras_strategies.tpu import cluster_resolver
from tests.support.slices import make_slice

pytestmark = pytest.mark.quick

Resolver = ks.cluster_resolver.TPUClusterResolver

GKE = {
    "TPU_WORKER_HOSTNAMES": "host-0.tpu,host-1.tpu",
    "TPU_WORKER_ID": "1",
    "TPU_NAME": "mine",
}
SLICES = GKE | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}


@pytest.mark.parametrize("tpu", [None, "", "mine"])
def test_the_hosts_of_this_tpu(tpu):
    resolver = Resolver(tpu, environ=GKE)
    spec = resolver.cluster_spec()
    assert spec.as_dict() == {"worker": ["host-0.tpu:8482", "host-1.tpu:8482"]}
    assert resolver.task_type == resolver.get_job_name() == "worker"
    assert resolver.task_id == 1
    assert resolver.num_processes == 2
    assert resolver.master() == "grpc://host-1.tpu:8482"
    assert resolver.master("worker", 0) == "grpc://host-0.tpu:8482"
    assert resolver.get_master() == resolver.master()
    assert resolver.get_coordination_service_leader() == "/job:worker/task:0"
    assert resolver.environment == ""
    with pytest.raises(ValueError, match="index 7"):
        resolver.master("worker", 7)


@pytest.mark.parametrize(
    ("tpu", "environ"),
    [("local", GKE), (None, {"TPU_NAME": "local"})],
)
def test_local_is_this_host_alone(tpu, environ):
    resolver = Resolver(tpu, environ=environ)
    assert resolver.cluster_spec() == {}
    assert resolver.master() == ""
    assert (resolver.num_processes, resolver.task_id) == (1, 0)
    assert resolver.devices() == tuple(jax.local_devices())


def test_without_variables_little_is_known():
    resolver = Resolver("", environ={})
    assert resolver.cluster_spec() == {}
    assert resolver.master() == ""
    assert resolver.num_processes is None
    assert resolver.task_id is None
    resolver.task_id = 3
    resolver.task_type = "chief"
    assert (resolver.task_id, resolver.get_job_name()) == (3, "chief")


@pytest.mark.parametrize(
    "environ", [{}, {"TPU_LOAD_LIBRARY": "0", "TPU_WORKER_HOSTNAMES": ""}]
)
def test_without_a_tpu_none_is_resolved(environ, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_resolver, "_DEV", tmp_path)
    for make in (
        lambda: Resolver(environ=environ),
        lambda: Resolver(None, environ=environ),
    ):
        with pytest.raises(ValueError, match="needs a TPU") as caught:
            make()
        assert "This machine has none (no /dev/accel0" in str(caught.value)
        assert "'local'" in str(caught.value)
    assert repr(Resolver("", environ=environ)).endswith("'this host'>")
    assert repr(Resolver("local", environ=environ)).endswith("'local'>")


@pytest.mark.parametrize("name", ["accel0", "vfio/0", "TPU_SKIP_MDS_QUERY"])
def test_a_tpu_is_found_by_its_files_or_variables(name, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_resolver, "_DEV", tmp_path)
    environ = {}
    if name.startswith("TPU"):
        environ[name] = "1"
    else:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert Resolver(environ=environ).num_processes is None


def test_a_slice_of_several():
    resolver = Resolver(environ=SLICES)
    assert resolver.cluster_spec().as_dict() == {}
    assert resolver.num_processes == 4
    assert resolver.task_id is None
    assert resolver.master() == ""


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("10.0.0.1:8476,10.0.0.2:8476", ["10.0.0.1:9", "10.0.0.2:9"]),
        ("a, b", ["a:9", "b:9"]),
        ("fd00::1", ["[fd00::1]:9"]),
    ],
)
def test_ports_are_those_that_jax_meets_at(hosts, expected):
    environ = {"TPU_PROCESS_ADDRESSES": hosts, "JAX_COORDINATOR_PORT": "9"}
    spec = Resolver(job_name="tpu", environ=environ).cluster_spec()
    assert spec.as_dict() == {"tpu": expected}


def test_a_coordinator_is_a_job_of_its_own():
    resolver = Resolver(
        coordinator_name="coordinator",
        coordinator_address="host:1",
        environ=GKE,
    )
    assert resolver.cluster_spec().task_address("coordinator", 0) == "host:1"


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,,b"}, ["host 1", "TPU_WORKER_HOSTNAMES"]),
        ({"TPU_WORKER_HOSTNAMES": "a b"}, ["'a b:8482'"]),
        (GKE | {"TPU_WORKER_ID": "x"}, ["TPU_WORKER_ID", "'x'"]),
        (SLICES | {"MEGASCALE_NUM_SLICES": "two"}, ["MEGASCALE_NUM_SLICES"]),
        (SLICES | {"MEGASCALE_NUM_SLICES": "0"}, ["MEGASCALE_NUM_SLICES"]),
        (GKE | {"JAX_COORDINATOR_PORT": "70000"}, ["JAX_COORDINATOR_PORT"]),
    ],
)
def test_variables_that_cannot_be_followed_are_named(environ, parts):
    resolver = Resolver(environ=environ)
    with pytest.raises(ValueError, match="Received") as caught:
        (resolver.cluster_spec(), resolver.task_id)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("environ", [{}, GKE])
@pytest.mark.parametrize("tpu", ["other", "grpc://10.0.0.1:8470", " "])
def test_another_tpu_is_refused(tpu, environ):
    with pytest.raises(ValueError, match="Pass ''") as caught:
        Resolver(tpu, environ=environ)
    text = str(caught.value)
    assert repr(tpu) in text
    assert "'local'" in text
    assert ("'mine'" if environ else "not set") in text


@pytest.mark.parametrize("tpu", [3, b"local", ["local"]])
def test_a_name_of_another_type_is_refused(tpu):
    with pytest.raises(TypeError, match="`tpu` must be a str"):
        Resolver(tpu)


def test_what_is_not_used_is_taken():
    resolver = Resolver(
        "", "us-central1-a", "project", "worker", None, None, "x", 3, "y"
    )
    assert repr(resolver) == "<TPUClusterResolver of 'this host'>"


# JAX's devices are in use in tests: nothing can be joined any more.


def test_where_there_is_no_tpu_nobody_is_joined():
    resolver = Resolver.connect("")
    assert resolver.num_accelerators() == {"TPU": 0}
    metadata = resolver.get_tpu_system_metadata()
    assert metadata.num_cores == metadata.num_of_cores_per_host == 8
    assert metadata.num_hosts == 1
    assert metadata.topology.mesh_shape.tolist() == [8, 1, 1, 1]
    assert metadata.devices == tuple(jax.devices())
    assert ks.TPUStrategy(resolver).num_replicas_in_sync == 8


def test_hosts_cannot_be_joined_when_the_devices_are_in_use():
    with pytest.raises(RuntimeError, match="before JAX's devices") as caught:
        Resolver(environ=GKE).join()
    assert "'local'" in str(caught.value)


def test_one_host_joins_nobody():
    Resolver(environ={"TPU_WORKER_HOSTNAMES": "a"}).join()


def test_metadata_of_several_slices(monkeypatch):
    devices = [
        device
        for i in range(2)
        for device in make_slice((4, 4, 1), slice_index=i, first_process=4 * i)
    ]
    resolver = Resolver("", environ={})
    monkeypatch.setattr(resolver, "devices", lambda: tuple(devices))
    metadata = resolver.get_tpu_system_metadata()
    assert metadata[:4] == (32, 8, 4, None)
    assert isinstance(metadata, cluster_resolver.TPUSystemMetadata)

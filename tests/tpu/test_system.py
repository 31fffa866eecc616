"""initialize_tpu_system and shutdown_tpu_system."""

import jax
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.slices import make_slice

pytestmark = pytest.mark.quick

experimental = ks.tpu.experimental


def test_the_names_of_tf_are_there():
    names = {name for name in vars(experimental) if not name.startswith("_")}
    assert names == {
        *("DeviceAssignment", "DeviceOrderMode", "SINGLE_CORE_ASSIGNMENT"),
        *("TPUSystemMetadata", "Topology"),
        *("initialize_tpu_system", "shutdown_tpu_system"),
    }


def test_without_a_tpu_the_error_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"devices=jax\.devices\(\)"):
        experimental.initialize_tpu_system()


@pytest.mark.parametrize("devices", [jax.devices(), make_slice((4, 4, 1))])
def test_given_devices_are_the_system(devices):
    topology = experimental.initialize_tpu_system(devices=devices)
    assert topology == experimental.Topology.from_devices(devices)


def test_a_tpu_resolver_gives_its_devices():
    resolver = ks.cluster_resolver.TPUClusterResolver("local")
    with pytest.raises(RuntimeError, match="platform 'cpu'"):
        experimental.initialize_tpu_system(resolver)


class Resolver:
    def cluster_spec(self):
        return None


def test_a_resolver_is_taken():
    topology = experimental.initialize_tpu_system(
        Resolver(), devices=jax.devices()
    )
    assert topology.num_tpus_per_task == 8
    experimental.shutdown_tpu_system(Resolver())


def test_after_a_shutdown_programs_are_compiled_again():
    traced = []

    @jax.jit
    def double(x):
        traced.append(x)
        return 2 * x

    kept = double(np.arange(3))
    experimental.shutdown_tpu_system()
    assert double(np.arange(3)).tolist() == kept.tolist() == [0, 2, 4]
    assert len(traced) == 2

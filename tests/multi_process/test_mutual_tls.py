"""Jobs whose coordination service has mutual TLS."""

import jax
import pytest

from keras_strategies.job.mutual_tls import CERT, MIN_JAX
from keras_strategies.names.versions import parse_version
from tests.multi_process.startup import train
from tests.multi_process.test_startup import free_addresses, in_turn
from tests.support.certificates import make_certificates, sign

pytestmark = pytest.mark.multi_process

HAS_TLS = parse_version(jax.__version__) >= MIN_JAX
needs_tls = pytest.mark.skipif(not HAS_TLS, reason="jax >= 0.11.2")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("job"))


@needs_tls
def test_a_job_trains_and_answers_none_but_its_processes(
    certificates, tmp_path
):
    stranger = make_certificates(tmp_path)
    words = (free_addresses(2), certificates, stranger)
    first, second = in_turn("train_and_knock", 2, *words, of="mutual_tls")
    alone = train(0, None, {})
    for found in (first, second):
        assert found["replicas"] == 4
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    answered = {
        name: second[name] for name in ("own", "stranger", "without", "plain")
    }
    assert answered == {
        "own": True,
        "stranger": False,
        "without": False,
        "plain": False,
    }


@needs_tls
def test_a_job_trains_with_certificates_that_have_only_uris(tmp_path):
    environ = sign(
        tmp_path / "uris", extensions=["subjectAltName=URI:train://job/a"]
    )
    environ |= {"JAX_MTLS_PEER_URI_PREFIX": "train://job/"}
    words = (free_addresses(2), environ)
    first, second = in_turn("train_over", 2, *words, of="mutual_tls")
    assert first["replicas"] == 4
    assert first["loss"] == second["loss"]


@needs_tls
def test_a_process_without_it_is_named_by_all(certificates):
    words = (free_addresses(2), [certificates, {}])
    for text in in_turn("start", 2, *words, of="mutual_tls"):
        assert "same mutual TLS" in text
        assert "'on' in process 0, 'off' in process 1" in text


def test_a_wrong_file_of_one_process_is_told_to_all(certificates):
    wrong = {CERT: "/none"}
    words = (
        free_addresses(2),
        [{}, certificates | wrong if HAS_TLS else wrong],
    )
    for text in in_turn("start", 2, *words, of="mutual_tls"):
        assert "process 1" in text
        assert ("'/none'" if HAS_TLS else "jax 0.11.2 or newer") in text

"""What is said of mutual TLS that would not work, before JAX starts."""

import os
import re
import subprocess
import time

import pytest

from keras_strategies.cli.doctor.findings import Level
from keras_strategies.cli.doctor.tls import check_tls
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.job.mutual_tls import (
    CA,
    CERT,
    FILES,
    KEY,
    PREFIX,
    REQUIRED,
    MutualTlsError,
    check_files,
    read_credentials,
)
from tests.support.certificates import RECIPE, make_certificates, sign
from tests.support.commands import call

pytestmark = pytest.mark.quick

HOST = "127.0.0.1"
TASK = TaskInfo(
    type="worker",
    index=0,
    is_chief=True,
    process_id=0,
    num_processes=2,
    addresses=("127.0.0.1:1", "127.0.0.1:2"),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("good"), HOST, "host0")


def check(environ, host=HOST, is_host=True):
    credentials = read_credentials(environ, is_supported=True)
    return check_files(credentials, host, is_host=is_host)


def refused(environ, host=HOST, is_host=True):
    """The text of the error; it has all four parts."""
    with pytest.raises(MutualTlsError) as caught:
        check(environ, host, is_host)
    assert re.fullmatch(
        r".+ (must|needs?) .+\. Received: .+\. [A-Z].+\.", str(caught.value)
    )
    return str(caught.value)


def test_files_of_the_recipe_are_good(good):
    for host in (HOST, "host0", "host0."):
        assert check(good, host).endswith("GMT")
    assert sorted(os.listdir(os.path.dirname(good[CERT]))) == [
        *("ca.pem", "cert.pem", "key.pem")
    ]
    assert os.stat(good[KEY]).st_mode & 0o077 == 0


def test_without_variables_there_is_none():
    for environ in ({}, {CERT: ""}, {REQUIRED: "false"}):
        assert read_credentials(environ, is_supported=False) is None


def test_options_of_jax_come_first(good):
    options = {CA.lower(): "other", PREFIX.lower(): "a://b/"}
    found = read_credentials(good, options, is_supported=True)
    assert found.as_arguments() == {
        "mtls_cert_file": good[CERT],
        "mtls_key_file": good[KEY],
        "mtls_ca_file": "other",
        "mtls_peer_uri_prefix": "a://b/",
    }


@pytest.mark.parametrize("name", [*FILES, PREFIX, REQUIRED])
def test_an_older_jax_would_ignore_it(name):
    with pytest.raises(MutualTlsError, match=f"0.11.2.*Received: {name}"):
        read_credentials({name: "true"}, is_supported=False)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({REQUIRED: "1"}, f"no {CERT}, no {KEY}, no {CA}"),
        ({CERT: "a"}, f"Received: no {KEY}, no {CA}"),
        ({PREFIX: "a://b/"}, f"no {CERT}"),
        (dict.fromkeys(FILES, "a") | {PREFIX: "a://b"}, "end with '/'"),
        (dict.fromkeys(FILES, "a") | {PREFIX: "a" * 3000 + "/"}, "2048"),
    ],
)
def test_variables_that_do_not_fit(environ, said):
    assert said in refused(environ)


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read(good, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "large").write_bytes(b"-----BEGIN" * 200_000)
    for path, said in [
        (tmp_path / "none", "No such file"),
        (tmp_path, "regular file"),
        (tmp_path / "pipe", "regular file"),
        (tmp_path / "empty", "does not contain a"),
        (tmp_path / "large", "more than 1048576 bytes"),
        ("a\0b", "null"),
        ("a" * 10_000, "too long"),
    ]:
        text = refused(good | {name: str(path)})
        assert text.startswith(f"{name} must be")
        assert said in text
        assert len(text) < 500


def test_a_key_of_another_certificate(good, tmp_path):
    other = make_certificates(tmp_path)
    text = refused(good | {KEY: other[KEY]})
    assert text.startswith(f"{KEY} must be the private key")
    assert "KEY_VALUES_MISMATCH" in text


def test_a_file_that_is_cut_off(good, tmp_path):
    for name in FILES:
        cut = tmp_path / name
        with open(good[name]) as file:
            cut.write_text(file.read()[:80])
        assert "OpenSSL refuses" in refused(good | {name: str(cut)})


def test_a_damaged_ca_is_not_blamed_on_the_key(good, tmp_path):
    with open(good[CA]) as file:
        text = file.read()
    damaged = tmp_path / "ca.pem"
    for other in (
        text[:80],
        text[:200],
        text[:100] + "!" + text[101:],
        text[:100] + "AAAAAAAA" + text[108:],
        text + text[:200],
    ):
        damaged.write_text(other)
        said = refused(good | {CA: str(damaged)})
        assert said.startswith(f"{CA} must be")
        assert "OpenSSL refuses" in said
        assert KEY not in said
    damaged.write_text(f"A comment, in UTF-8: \N{EM DASH}\n{text}", "utf-8")
    assert check(good | {CA: str(damaged)})


@pytest.mark.parametrize("name", ["1.2.3.4.5", "256.1.1.1"])
def test_the_recipe_keeps_no_key_of_a_ca_if_openssl_fails(tmp_path, name):
    done = subprocess.run(
        ["sh", RECIPE, tmp_path, HOST, name], capture_output=True, check=False
    )
    assert done.returncode != 0
    assert not list(tmp_path.glob("ca.key"))
    assert not list(tmp_path.glob("request.pem"))


def test_a_key_with_a_password_is_not_asked_for(good, tmp_path):
    key = tmp_path / "key"
    options = ("-aes128", "-passout", "pass:abcd", "-out", key)
    call("openssl", "ec", "-in", good[KEY], *options)
    assert "password" in refused(good | {KEY: str(key)})
    options = ("-topk8", "-passout", "pass:abcd", "-out", key)
    call("openssl", "pkcs8", "-in", good[KEY], *options)
    assert "password" in refused(good | {KEY: str(key)})


def test_another_host(good):
    assert "not valid for '10.0.0.1'" in refused(good, "10.0.0.1")
    assert "not valid for 'host1'" in refused(good, "host1")
    # Only process 0's certificate is compared with the address.
    assert check(good, "host1", is_host=False)


def test_another_ca(good, tmp_path):
    other = make_certificates(tmp_path)
    for is_host in (True, False):
        text = refused(good | {CA: other[CA]}, is_host=is_host)
        assert "unable to get local issuer certificate" in text


def test_a_certificate_that_has_ended(tmp_path):
    environ = sign(tmp_path / "a", days=0)
    time.sleep(1.1)  # Dates have whole seconds.
    assert "has expired" in refused(environ, is_host=False)


def test_uses_and_uris_of_a_certificate(tmp_path):
    uses = ("subjectAltName=URI:train://job/a", "extendedKeyUsage=clientAuth")
    environ = sign(tmp_path / "a", extensions=uses)
    prefix = {PREFIX: "train://job/"}
    assert check(environ | prefix, is_host=False)
    assert "purpose" in refused(environ | prefix)
    assert "none of its URIs" in refused(
        environ | {PREFIX: "train://other/"}, is_host=False
    )
    environ = sign(tmp_path / "b", extensions=uses[:1])
    assert check(environ | prefix)
    assert "not valid for" in refused(environ)


def test_keys_that_jax_refuses(tmp_path):
    names = [f"subjectAltName=IP:{HOST}"]
    environ = sign(tmp_path / "a", key="ed25519", extensions=names)
    assert "RSA and ECDSA keys only" in refused(environ)


@pytest.mark.parametrize(
    ("version", "changed", "row", "said"),
    [
        ("0.11.2", {}, "on; the certificate is valid until", None),
        ("0.10.2", {}, "faulty", "0.11.2 or newer"),
        ("0.12.0.1", {KEY: "/none"}, "faulty", "Received: '/none'"),
    ],
)
def test_doctor_has_a_row(good, version, changed, row, said):
    for info in (TASK, None):
        rows, findings = check_tls(
            good | changed, info, version_of={"jax": version}.get
        )
        assert dict(rows)["mutual TLS"].startswith(row)
        assert [f.level for f in findings] == [Level.FAULT] * bool(said)
        if said:
            assert said in findings[0].text
            assert findings[0].fix


def test_doctor_says_that_a_job_is_open():
    assert check_tls({}, TASK) == ((("mutual TLS", "off"),), ())
    assert check_tls({}, None) == ((), ())

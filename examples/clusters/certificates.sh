#!/bin/sh
# Certificates for mutual TLS of one job's processes (docs/clusters.md):
#
#   ./certificates.sh DIRECTORY 10.0.0.1 host0    # process 0's addresses
#
# Copy DIRECTORY to every host, for no other user to read. The certificates are
# good for DAYS days (30 by default). The CA's key is thrown away, so nobody can
# make further certificates for the job.
set -eu

directory=${1:?usage: $0 DIRECTORY ADDRESS...}
shift
: "${1:?give the IP addresses or names of process 0}"
names=
for name in "$@"; do
    case $name in
        *[!0-9.]*) kind=DNS ;;
        *) kind=IP ;;
    esac
    case $name in *:*) kind=IP ;; esac
    names="$names${names:+,}$kind:$name"
done

umask 077
mkdir -p "$directory"
cd "$directory"
trap 'rm -f ca.key ca.srl request.pem extensions' EXIT
trap 'exit 1' HUP INT TERM
curve="ec -pkeyopt ec_paramgen_curve:P-256"
# shellcheck disable=SC2086
openssl req -x509 -newkey $curve -nodes -days "${DAYS:-30}" \
    -subj "/CN=CA of one job" -addext keyUsage=critical,keyCertSign -keyout ca.key -out ca.pem
# shellcheck disable=SC2086
openssl req -newkey $curve -nodes -subj "/CN=process of one job" \
    -keyout key.pem -out request.pem
cat >extensions <<END
subjectAltName=$names
authorityKeyIdentifier=keyid
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth,clientAuth
END
openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial \
    -days "${DAYS:-30}" -extfile extensions -out cert.pem
echo "export JAX_MTLS_CERT_FILE=$PWD/cert.pem"
echo "export JAX_MTLS_KEY_FILE=$PWD/key.pem"
echo "export JAX_MTLS_CA_FILE=$PWD/ca.pem"

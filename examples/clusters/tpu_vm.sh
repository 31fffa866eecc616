#!/bin/sh
# A TPU slice of TPU VMs, from a machine with gcloud. v5litepod-16 is a slice
# of 4 hosts; the same commands serve one host (v5litepod-4).
#
#   PROJECT=my-project ZONE=us-west4-a ./tpu_vm.sh create
#   PROJECT=my-project ZONE=us-west4-a ./tpu_vm.sh train --epochs 20
#   PROJECT=my-project ZONE=us-west4-a ./tpu_vm.sh delete
#
# WHEEL is the project's wheel, made with `pip wheel --no-deps .` at its root.
set -eu

NAME=${NAME:-train}
TYPE=${TYPE:-v5litepod-16}
VERSION=${VERSION:-v2-alpha-tpuv5-lite}
: "${PROJECT:?set PROJECT}" "${ZONE:?set ZONE}"
here=$(dirname "$0")

tpu() {
    verb=$1
    shift
    gcloud compute tpus tpu-vm "$verb" "$@" --project "$PROJECT" --zone "$ZONE"
}

# Every host of the slice runs the same command at the same time.
on_all() {
    tpu ssh "$NAME" --worker=all --command "$1"
}

command=${1:?usage: $0 (create | train [ARGUMENTS] | delete)}
shift
case $command in
create)
    tpu create "$NAME" --accelerator-type "$TYPE" --version "$VERSION"
    tpu scp "${WHEEL:?set WHEEL}" "$NAME:" --worker=all
    on_all "python3 -m venv train && \
        train/bin/pip install './$(basename "$WHEEL")[tpu]'"
    ;;
train)
    tpu scp "$here/train.py" "$NAME:" --worker=all
    on_all "train/bin/keras-strategies doctor"
    on_all "train/bin/python train.py --cluster tpu $*"
    ;;
delete)
    tpu delete "$NAME" --quiet
    ;;
*)
    echo "$0: no such command: '$command'" >&2
    exit 2
    ;;
esac

#!/bin/sh
# torchrun, on each of two hosts:
#
#   HOST=host0 ./torchrun.sh
#
# HOST is the one where all meet. Arguments go to the script. The strategy does
# not use torch; torchrun starts its processes and tells them who they are.
# It starts them again (--max-restarts) only together, as a job needs it.
set -eu

: "${HOST:?set HOST to the name of the first host}"
exec torchrun \
    --nnodes "${NODES:-2}" \
    --nproc-per-node "${PROCESSES:-1}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HOST:${PORT:-29400}" \
    --max-restarts 0 \
    "$(dirname "$0")/train.py" --cluster torchrun "$@"

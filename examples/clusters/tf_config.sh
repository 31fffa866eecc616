#!/bin/sh
# TF_CONFIG on hosts that you log in to, the same command on each but for its
# number:
#
#   HOSTS="host0:2222 host1:2222" ./tf_config.sh 0    # on host0
#   HOSTS="host0:2222 host1:2222" ./tf_config.sh 1    # on host1
#
# The first is the chief. Its port must be reachable from the others, and from
# nowhere else. Arguments after the number go to the script.
set -eu

number=${1:?usage: HOSTS=\"host0:2222 host1:2222\" $0 NUMBER [ARGUMENTS]}
shift
: "${HOSTS:?set HOSTS to the host:port of every process}"

workers=
for address in $HOSTS; do
    workers="$workers${workers:+, }\"$address\""
done
TF_CONFIG="{\"cluster\": {\"worker\": [$workers]},
 \"task\": {\"type\": \"worker\", \"index\": $number}}"
export TF_CONFIG
exec python "$(dirname "$0")/train.py" "$@"

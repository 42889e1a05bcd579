#!/usr/bin/env bash
# A Slurm TaskProlog (TaskProlog= in slurm.conf, or srun --task-prolog): fills a directory of the node before the task
# begins. The tasks of a node share one download. It never fails a task or a node: whatever happens, its exit is 0, and
# the job finds out for itself (`neffcache run` launches nothing that is not warm).
#
# A job asks for it by two variables; without them nothing happens.
#   NEFFCACHE_INIT      the words for `neffcache init`, such as: llama3_8b --lnc 2 --toolchain neuron
#   NEFFCACHE_REMOTE    s3://bucket/prefix, or the directory of a store on a shared file system
# and may set
#   NEFFCACHE_NODE_DIR         where on the node (default /var/tmp/neffcache-<uid>)
#   NEFFCACHE_PROLOG_SECONDS   how long it may take (default 1800)
fetching=""
trap 'exit 0' EXIT
trap '[ -z "$fetching" ] || kill "$fetching"; exit 0' HUP INT TERM

[ -n "${NEFFCACHE_INIT:-}" ] && [ -n "${NEFFCACHE_REMOTE:-}" ] || exit 0
directory="${NEFFCACHE_NODE_DIR:-/var/tmp/neffcache-$(id -u)}"

# Slurm reads our standard output: `export NAME=value` sets a variable of the task, `print TEXT` prints.
# In the background, so that a signal ends both at once.
# shellcheck disable=SC2086  # words on purpose
timeout --kill-after=10 "${NEFFCACHE_PROLOG_SECONDS:-1800}" \
    neffcache init $NEFFCACHE_INIT --dir "$directory" </dev/null >/dev/null &
fetching=$!
wait "$fetching"
status=$?
if [ "$status" -eq 0 ]; then
    echo "export NEFFCACHE_DIR=$directory"
else
    echo "print neffcache init ended with $status on $(uname -n); the node has not been filled"
fi
exit 0

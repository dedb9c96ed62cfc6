#!/bin/sh
# For Slurm's Prolog (as root, on every node of a job): an agent for this job. It must never fail a job, so it always ends with 0.
# NCCLWATCH_ENGINE is set in /etc/ncclwatch/agent.conf; the agent ends with the job (epilog.sh), or by itself after MAX_S.
NCCLWATCH=${NCCLWATCH:-/opt/ncclwatch/bin/ncclwatch}
STATE=/var/lib/ncclwatch/slurm-${SLURM_JOB_ID:-0}
MAX_S=2592000
[ -r /etc/ncclwatch/agent.conf ] && . /etc/ncclwatch/agent.conf
[ -n "$NCCLWATCH_ENGINE" ] && [ -x "$NCCLWATCH" ] || exit 0
mkdir -p "$STATE" && chmod 700 "$STATE" || exit 0
# Jobs of different users on one engine: a token of their own, derived from the job's number and the cluster's secret.
if [ -r /etc/ncclwatch/job-secret ]; then
    NCCLWATCH_JOB=$( { cat /etc/ncclwatch/job-secret; echo "$SLURM_JOB_ID"; } | sha256sum | cut -d' ' -f1 )
    export NCCLWATCH_JOB
fi
setsid "$NCCLWATCH" agent --engine "$NCCLWATCH_ENGINE" --keys /etc/ncclwatch/keys --all --spool "$STATE/spool" \
    --duration "$MAX_S" </dev/null >"$STATE/agent.log" 2>&1 &
echo $! >"$STATE/pid"
exit 0

#!/bin/sh
# For Slurm's Epilog: ends the job's agent and removes what it kept. Always ends with 0.
STATE=/var/lib/ncclwatch/slurm-${SLURM_JOB_ID:-0}
[ -r "$STATE/pid" ] || exit 0
PID=$(cat "$STATE/pid")
# Only what the prolog started: a pid may be another's by now.
if tr '\0' ' ' <"/proc/$PID/cmdline" 2>/dev/null | grep -q "ncclwatch agent"; then
    kill -TERM "$PID"
    for _ in 1 2 3 4 5; do
        [ -d "/proc/$PID" ] || break
        sleep 1
    done
fi
rm -rf "$STATE"
exit 0

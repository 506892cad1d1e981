#!/usr/bin/env bash
# Runs a command, the trainer, again and again until it is done, or until it is no use:
#
#   launch/restart.sh python -m deltares_jax.train --config=CONFIG --workdir=FOLDER
#
# The trainer goes on from its newest checkpoint. By its exit code:
#
#   1, 7             started again: an unexpected error, a process of the run that is missing
#   129 and above    started again: ended by a signal (134, 137, 139), or stopped by one (143, 144)
#   130              the end: interrupted from a keyboard
#   0, 2, 3, 4, 5, 6 the end: done, or an error that comes again
#   all others       the end: not of the trainer (126, 127: there is no such command)
#
# The exit code is that of the last start, or 143 after SIGTERM in a pause (SIGINT 130, SIGHUP 129).
# SIGTERM, SIGINT and SIGHUP to this script go to the
# trainer, and then its end is the end. Of several hosts each runs this script.
#
# RESTART_LIMIT    starts again in a row, 10 when empty; one that lasted RESTART_RESET seconds
#                  (1800 when empty) begins the count anew
# RESTART_PAUSE    seconds before the first of them, 5 when empty; doubles up to 60, so that hosts
#                  meet within the trainer's distributed.timeout
# RESTART_RESULT   a file that gets the exit code at the end

set -uo pipefail
set -m # the trainer gets a signal from here alone, and not from the terminal as well

dry_run=
case ${1:-} in
  -h | --help)
    sed -n '2,/^$/s/^#\( \|$\)//p' "$0"
    exit 0
    ;;
  --dry_run)
    dry_run=yes
    shift
    ;;
esac
case ${1:-} in
  -*)
    echo "error: unknown flag $1; see $0 --help" >&2
    exit 2
    ;;
esac
if [ $# -eq 0 ]; then
  echo "error: no command to run; see $0 --help" >&2
  exit 2
fi
limit=${RESTART_LIMIT:-10} reset=${RESTART_RESET:-1800} first_pause=${RESTART_PAUSE:-5}
for pair in "RESTART_LIMIT=$limit" "RESTART_RESET=$reset" "RESTART_PAUSE=$first_pause"; do
  if ! [[ ${pair#*=} =~ ^(0|[1-9][0-9]{0,8})$ ]]; then
    echo "error: $pair must be a whole number of at most 9 digits" >&2
    exit 2
  fi
done
if [ -n "$dry_run" ]; then
  words=$(printf ' %q' "$@")
  echo "${words:1}"
  exit 0
fi

child=
stopping=
forward() {
  stopping=$2
  [ -n "$child" ] && kill "-$1" "$child" 2>/dev/null
}
trap 'forward TERM 143' TERM
trap 'forward INT 130' INT
trap 'forward HUP 129' HUP # under nohup it stays ignored

end() {
  [ -n "${RESTART_RESULT:-}" ] && echo "$1" >"$RESTART_RESULT"
  exit "$1"
}

# A signal interrupts `wait`, which is then given again until the command has ended.
await() {
  local code
  while true; do
    wait "$1"
    code=$?
    kill -0 "$1" 2>/dev/null || return "$code"
  done
}

restarts=0 pause=$first_pause
while true; do
  began=$SECONDS
  "$@" &
  child=$!
  [ -n "$stopping" ] && kill -TERM "$child" 2>/dev/null
  await "$child"
  code=$?
  child=
  if [ -n "$stopping" ]; then
    echo "restart.sh: asked to stop; exit code $code" >&2
    end "$code"
  fi
  case $code in
    1 | 7) ;;
    130) end "$code" ;;
    *)
      if [ "$code" -lt 129 ]; then
        [ "$code" -ne 0 ] && echo "restart.sh: exit code $code; no start would change that" >&2
        end "$code"
      fi
      ;;
  esac
  if [ $((SECONDS - began)) -ge "$reset" ]; then
    restarts=0 pause=$first_pause
  fi
  if [ "$restarts" -ge "$limit" ]; then
    echo "restart.sh: exit code $code after $restarts restarts in a row (RESTART_LIMIT); the end" >&2
    end "$code"
  fi
  restarts=$((restarts + 1))
  echo "restart.sh: exit code $code; start $restarts of $limit again in $pause s" >&2
  # In the background, so that a signal ends it at once.
  sleep "$pause" &
  wait $!
  if [ -n "$stopping" ]; then
    kill $! 2>/dev/null
    echo "restart.sh: asked to stop; nothing runs" >&2
    end "$stopping"
  fi
  pause=$((pause * 2 > 60 ? 60 : pause * 2))
done

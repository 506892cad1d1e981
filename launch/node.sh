#!/usr/bin/env bash
# One machine: a node with GPUs, a worker of a TPU slice, or the computer at hand.
#
#   launch/node.sh install   a Python environment in .venv, by the lock file of the platform
#   launch/node.sh start     the trainer under restart.sh, in the background; its log is run.log
#   launch/node.sh resume    the same, unless it has come to its own end before, or stop was given
#   launch/node.sh stop      asks it to save and end, and waits for that
#   launch/node.sh log       follows run.log
#
# start and resume do nothing where it runs; they take flags of the trainer, and need CONFIG and
# WORKDIR.
#
# PLATFORM      gpu, tpu, or cpu
# CONFIG        the recipe
# WORKDIR       the run's folder, at gs:// or local; of several machines one that all of them see
# STOP_SECONDS  600 when empty: how long stop waits
#
# --dry_run prints the commands.

SCRIPT=$(readlink -f "$0")
cd "${SCRIPT%/*}/.." || exit 1
# shellcheck source=launch/lib.sh
source launch/lib.sh

# The process of restart.sh, in LOOP, and trainers that it left when it was killed, in ORPHANS.
look() {
  local pid=
  LOOP='' ORPHANS=''
  [ ! -f run.pid ] || pid=$(<run.pid)
  [[ $pid =~ ^[1-9][0-9]*$ ]] || return 0
  # After a restart of the machine another process may have the number.
  if [[ $(ps -o args= -p "$pid") == *launch/restart.sh* ]]; then
    LOOP=$pid
  else
    # It began a session, in which they are still.
    ORPHANS=$(ps -o pid=,args= -s "$pid" | awk '/deltares_jax\.train/ { print $1 }') || true
  fi
}

# Whether restart.sh would start the trainer again after this exit code.
passes() {
  [[ $1 =~ ^[0-9]+$ ]] && [ "$1" -ne 130 ] &&
    { [ "$1" -eq 1 ] || [ "$1" -eq 7 ] || [ "$1" -ge 129 ]; }
}

result() {
  cat run.exit 2>/dev/null || echo unknown
}

start() {
  trainer "$PLATFORM"
  local command=(env "PATH=$PWD/.venv/bin:$PATH" RESTART_RESULT=run.exit
    setsid nohup bash launch/restart.sh "${TRAINER[@]}")
  if [ -n "$DRY_RUN" ]; then
    echo "rm -f run.exit run.stopped"
    echo "$(quoted "${command[@]}") </dev/null >>run.log 2>&1 & echo \$! >run.pid"
    return
  fi
  [ -e .venv/installed ] || fail "$HERE: no environment in $PWD/.venv; give install first"
  rm -f run.exit run.stopped
  "${command[@]}" </dev/null >>run.log 2>&1 9>&- &
  echo $! >run.pid
  sleep 1
  if kill -0 $! 2>/dev/null; then
    say "$HERE: started"
  elif [ "$(result)" = 0 ]; then
    say "$HERE: ended with exit code 0"
  else
    tail --lines=5 run.log >&2
    say "error: $HERE: ended at once, with exit code $(result); above is the end of run.log"
    exit 1
  fi
}

start_once() {
  [ -n "$DRY_RUN" ] || exec 9>run.lock
  [ -n "$DRY_RUN" ] || flock 9 # of two starts at once the second finds what the first started
  look
  if [ -n "$LOOP" ]; then
    say "$HERE: runs already"
  elif [ -n "$ORPHANS" ]; then
    say "error: $HERE: restart.sh was killed, but its trainer runs (process ${ORPHANS//$'\n'/ });" \
      "give stop first"
    exit 1
  elif [ "$VERB" = resume ] && [ -f run.exit ] && ! passes "$(result)"; then
    say "$HERE: ended with exit code $(result); run starts it again"
  elif [ "$VERB" = resume ] && [ -f run.stopped ]; then
    say "$HERE: was stopped; run starts it again"
  else
    start
  fi
}

stop() {
  local seconds=0
  if [ -n "$DRY_RUN" ]; then
    echo "touch run.stopped; kill -TERM \"\$(cat run.pid)\""
    return
  fi
  # From a stop that was asked for resume does not go on, but from the end of the machine.
  [ ! -f run.pid ] || touch run.stopped
  look
  if [ -z "$LOOP$ORPHANS" ]; then
    say "$HERE: nothing runs"
    return
  fi
  # shellcheck disable=SC2086  # one or several
  kill -TERM $LOOP $ORPHANS || true
  while [ -n "$LOOP$ORPHANS" ]; do
    if [ "$seconds" -ge "$STOP_SECONDS" ]; then
      say "error: $HERE: has not ended in $STOP_SECONDS s; give stop again to wait on, or, which" \
        "saves nothing: pkill -KILL --session $(cat run.pid)"
      exit 1
    fi
    sleep 1
    seconds=$((seconds + 1))
    look
  done
  say "$HERE: ended with exit code $(result)"
}

HERE=$(hostname)
STOP_SECONDS=${STOP_SECONDS:-600}

parse "install start resume stop log" "start resume" "$@"
case $VERB in
  install | start | resume) need PLATFORM gpu 'gpu|tpu|cpu' ;;
esac
case $VERB in
  install) need HOME /home/me ;;
  start | resume) need_run '*' ;;
  stop) need STOP_SECONDS 600 '[0-9]{1,6}' ;;
esac
needed
case $VERB in
  install) need_tool python3 "uv, which brings another, is installed by it" ;;
  start | resume)
    need_tool setsid "it is in the package util-linux"
    need_tool flock "it is in the package util-linux"
    ;;
esac

case $VERB in
  install)
    # Where Python belongs to the system, pip asks to be told; older ones do not know that.
    run env PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
    run "$HOME/.local/bin/uv" venv --quiet --allow-existing --python=3.11 .venv
    run "$HOME/.local/bin/uv" pip install --quiet --python=.venv/bin/python \
      "--requirement=launch/requirements-${PLATFORM/gpu/cuda}.txt"
    run "$HOME/.local/bin/uv" pip install --quiet --python=.venv/bin/python --no-deps .
    run touch .venv/installed
    ;;
  start | resume) start_once ;;
  stop) stop ;;
  log)
    run tail --lines=+1 --follow=name --retry run.log
    ;;
esac

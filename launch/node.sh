#!/usr/bin/env bash
# One machine: a node with GPUs, a worker of a TPU slice, or the computer at hand.
#
#   launch/node.sh install   a Python environment in .venv, by the lock file of the platform
#   launch/node.sh start     the trainer under restart.sh, in the background; its log is run.log
#   launch/node.sh resume    the same, unless it has come to its own end before
#   launch/node.sh stop      asks it to save and end, and waits for that
#   launch/node.sh log       follows run.log
#
# start and resume do nothing where it runs; they take flags of the trainer, and need CONFIG and
# WORKDIR.
#
# PLATFORM   gpu, tpu, or cpu
# CONFIG     the recipe
# WORKDIR    the run's folder, at gs:// or local; of several machines one that all of them see
#
# --dry_run prints the commands.

cd "$(dirname "$0")/.." || exit 1
# shellcheck source=launch/lib.sh
source launch/lib.sh

# After a restart of the machine another process may have the number.
running() {
  [ -f run.pid ] && ps -o args= -p "$(cat run.pid)" | grep -q "launch/restart\.sh"
}

start() {
  trainer "$PLATFORM"
  local command=(env "PATH=$PWD/.venv/bin:$PATH" RESTART_RESULT=run.exit
    setsid nohup launch/restart.sh "${TRAINER[@]}")
  if [ -n "$DRY_RUN" ]; then
    echo "rm -f run.exit"
    echo "$(quoted "${command[@]}") </dev/null >>run.log 2>&1 & echo \$! >run.pid"
    return
  fi
  rm -f run.exit
  "${command[@]}" </dev/null >>run.log 2>&1 &
  echo $! >run.pid
  say "$(hostname): started"
}

parse "install start resume stop log" "start resume" "$@"
case $VERB in
  install | start | resume) need PLATFORM gpu 'gpu|tpu|cpu' ;;
esac
case $VERB in
  start | resume) need_run ;;
esac
needed

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
  start | resume)
    if running; then
      say "$(hostname): runs already"
    elif [ "$VERB" = resume ] && [ -f run.exit ]; then
      say "$(hostname): ended with exit code $(cat run.exit); run starts it again"
    else
      start
    fi
    ;;
  stop)
    if [ -n "$DRY_RUN" ]; then
      echo "kill -TERM \"\$(cat run.pid)\""
    elif running; then
      kill -TERM "$(cat run.pid)"
      while running; do sleep 1; done
      say "$(hostname): ended with exit code $(cat run.exit 2>/dev/null || echo unknown)"
    else
      say "$(hostname): nothing runs"
    fi
    ;;
  log)
    run tail --lines=+1 --follow=name --retry run.log
    ;;
esac

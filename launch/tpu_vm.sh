#!/usr/bin/env bash
# A TPU slice as Cloud TPU VMs, from nothing to a run and back:
#
#   launch/tpu_vm.sh create    asks for it; says so where it is there already
#   launch/tpu_vm.sh wait      returns when it has been granted
#   launch/tpu_vm.sh install   sends the last commit to all workers, and installs it there
#   launch/tpu_vm.sh run       starts the trainer on all workers; takes flags of the trainer
#   launch/tpu_vm.sh logs      follows the log of worker 0
#   launch/tpu_vm.sh stop      asks the trainer to save and end; the machines stay, and cost
#   launch/tpu_vm.sh resume    after preemption: create, wait, install and run as far as need be; takes
#                              flags of the trainer. What runs, or came to its own end, is left alone
#   launch/tpu_vm.sh delete    gives the machines back
#
# PROJECT      of Google Cloud
# ZONE         that has the accelerator
# NAME         of the slice
# ACCELERATOR  for create and resume: type and size; v5p-128 counts cores (64 chips), v6e-64 and
#              v5litepod-64 chips
# CONFIG       for run and resume: the recipe
# WORKDIR      for run and resume: the run's folder, at gs://, or one that all workers see
# TIER         on_demand when empty, spot, or reserved
# QUEUED       yes when empty: a queued resource; no: a TPU VM at once, or an error
# RUNTIME      version of the machines' software; by the accelerator when empty
#
# --dry_run prints the commands.

SCRIPT=$(readlink -f "$0")
cd "${SCRIPT%/*}/.." || exit 1
# shellcheck source=launch/lib.sh
source launch/lib.sh

PACKAGE=${TMPDIR:-/tmp}/deltares_jax.tar.gz
QUEUED=${QUEUED:-yes}
TIER=${TIER:-on_demand}

parse "create wait install run logs stop resume delete" "run resume" "$@"
need PROJECT my-project '[a-z][-a-z0-9:.]*'
need ZONE us-east5-a '[a-z]+-[a-z]+[0-9]+-[a-z]'
need NAME 7b '[a-z0-9]([-a-z0-9]*[a-z0-9])?'
need QUEUED yes 'yes|no'
need TIER spot 'on_demand|spot|reserved'
case $VERB in
  create | resume) need ACCELERATOR v5p-128 '(v4|v5p|v6e|v5litepod)-[0-9]+' ;;
esac
case $VERB in
  run | resume) need_run '[!/]*' ;;
esac
needed
need_gcloud
case $VERB in
  install | resume) need_tool git "see https://git-scm.com/downloads" ;;
esac

case ${ACCELERATOR:-} in
  v4-*) default=tpu-ubuntu2204-base ;;
  v5p-*) default=v2-alpha-tpuv5 ;;
  v5litepod-*) default=v2-alpha-tpuv5-lite ;;
  *) default=v2-alpha-tpuv6e ;;
esac
RUNTIME=${RUNTIME:-$default}
where=("--project=$PROJECT" "--zone=$ZONE")
tier=()
[ "$TIER" = on_demand ] || tier=("--$TIER")

# Its state, in ANSWER.
there() {
  if [ "$QUEUED" = yes ]; then
    exists NOT_FOUND gcloud compute tpus queued-resources describe "$NAME" "${where[@]}" \
      '--format=value(state.state)'
  else
    exists NOT_FOUND gcloud compute tpus tpu-vm describe "$NAME" "${where[@]}" \
      '--format=value(state)'
  fi
}

create() {
  if [ "$QUEUED" = yes ]; then
    run gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "${where[@]}" \
      "--accelerator-type=$ACCELERATOR" "--runtime-version=$RUNTIME" ${tier[@]+"${tier[@]}"}
  else
    run gcloud compute tpus tpu-vm create "$NAME" "${where[@]}" \
      "--accelerator-type=$ACCELERATOR" "--version=$RUNTIME" ${tier[@]+"${tier[@]}"}
  fi
}

delete() {
  if [ "$QUEUED" = yes ]; then
    run gcloud compute tpus queued-resources delete "$NAME" "${where[@]}" --force --quiet
  else
    run gcloud compute tpus tpu-vm delete "$NAME" "${where[@]}" --quiet
  fi
}

# Ends the script in a state that does not become ACTIVE or READY by itself.
comes_right() {
  local advice
  case $ANSWER in
    ACTIVE | READY) return ;;
    CREATING | ACCEPTED | WAITING_FOR_RESOURCES | PROVISIONING) return ;;
    STARTING | RESTARTING | REIMAGING | REPAIRING) return ;;
    FAILED | SUSPENDED | PREEMPTED | TERMINATED) advice="resume asks for it again" ;;
    STOPPED)
      advice="resume starts it, and so does: $(quoted gcloud compute tpus tpu-vm start "$NAME" \
        "${where[@]}")"
      ;;
    DELETING | STOPPING | SUSPENDING) advice="give $VERB again in a minute" ;;
    *) advice="look at it in the console of Google Cloud, or give delete, then create" ;;
  esac
  say "error: $NAME is $ANSWER; $advice"
  exit 1
}

wait_for() {
  while true; do
    if ! there; then
      [ -n "$DRY_RUN" ] && return
      say "error: there is no $NAME; give create first"
      exit 1
    fi
    case $ANSWER in
      ACTIVE | READY) return ;;
    esac
    comes_right
    say "$NAME: $ANSWER"
    sleep "${POLL_SECONDS:-30}"
  done
}

# on WORKERS COMMAND: by ssh.
on() {
  run gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" "--worker=$1" "--command=$2" --quiet
}

install() {
  if exists 'not a git repository' git status --porcelain; then
    say "not sent, for it is not committed:" "$ANSWER"
  fi
  run git archive --format=tar.gz "--output=$PACKAGE" HEAD ||
    fail "git archive failed; install sends the last commit of $PWD, a checkout by git"
  run gcloud compute tpus tpu-vm scp "$PACKAGE" "$NAME:deltares_jax.tar.gz" "${where[@]}" \
    --worker=all --quiet
  on all "mkdir -p deltares_jax && tar -xzf deltares_jax.tar.gz -C deltares_jax && \
env PLATFORM=tpu bash deltares_jax/launch/node.sh install"
}

# What runs there keeps its code; where install was cut short, nothing can.
install_where_bare() {
  if exists 'no such thing' gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" \
    --worker=all '--command=[ -e deltares_jax/.venv/installed ] || echo bare' --quiet &&
    grep -qx bare <<<"$ANSWER"; then
    install
  fi
}

# start VERB, of node.sh
start() {
  on all "$(quoted env PLATFORM=tpu "CONFIG=$CONFIG" "WORKDIR=$WORKDIR" bash deltares_jax/launch/node.sh "$1" \
    ${TRAINER_FLAGS[@]+"${TRAINER_FLAGS[@]}"})"
}

case $VERB in
  create)
    if there; then
      comes_right
      say "$NAME is there already: $ANSWER"
    else
      create
    fi
    ;;
  wait) wait_for ;;
  install) install ;;
  run) start start ;;
  logs) on 0 "bash deltares_jax/launch/node.sh log" ;;
  stop) on all "bash deltares_jax/launch/node.sh stop" ;;
  resume)
    if ! there; then
      create
      ANSWER=
    fi
    case $ANSWER in
      FAILED | SUSPENDED | PREEMPTED | TERMINATED)
        say "$NAME is $ANSWER; asking for it again"
        delete
        create
        wait_for
        install
        ;;
      STOPPED)
        say "$NAME is $ANSWER; starting it"
        run gcloud compute tpus tpu-vm start "$NAME" "${where[@]}"
        wait_for
        install_where_bare
        ;;
      ACTIVE | READY) install_where_bare ;;
      *)
        [ -z "$ANSWER" ] || comes_right
        wait_for
        install
        ;;
    esac
    start resume
    ;;
  delete)
    if there || [ -n "$DRY_RUN" ]; then
      delete
    else
      say "there is no $NAME"
    fi
    ;;
esac

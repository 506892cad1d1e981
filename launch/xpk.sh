#!/usr/bin/env bash
# A run on GKE by xpk (pip install xpk), which makes clusters, and runs containers on their slices:
#
#   launch/xpk.sh cluster          makes the cluster, or adds to it
#   launch/xpk.sh create           starts the run; takes flags of the trainer. Says so where there is one
#   launch/xpk.sh logs             follows the log of the first worker of the first slice
#   launch/xpk.sh delete           ends the run: it gets SIGTERM, and 300 seconds to save
#   launch/xpk.sh delete_cluster   gives the machines back
#
# PROJECT      of Google Cloud
# ZONE         that has the accelerator
# CLUSTER      its name
# ACCELERATOR  type and size of a slice: v5p-128 counts cores (64 chips), v6e-64 chips
# SLICES       1 when empty; --config.mesh.replica must be a multiple of it
# NAME         of the run, for create, logs and delete
# IMAGE        for create: the container, with the target tpu of launch/Dockerfile
# CONFIG       for create: the recipe, in configs/, which the container has
# WORKDIR      for create: the run's folder, at gs:// or s3://
# TIER         for cluster: on_demand when empty, spot, or reserved
# RESERVATION  for cluster with TIER=reserved: its name
# MAX_RESTARTS 10 when empty: how often lost machines are made up for
#
# --dry_run prints the commands.

SCRIPT=$(readlink -f "$0")
cd "${SCRIPT%/*}/.." || exit 1
# shellcheck source=launch/lib.sh
source launch/lib.sh

SLICES=${SLICES:-1}
TIER=${TIER:-on_demand}
MAX_RESTARTS=${MAX_RESTARTS:-10}

parse "cluster create logs delete delete_cluster" "create" "$@"
need PROJECT my-project '[a-z][-a-z0-9:.]*'
need ZONE us-east5-a '[a-z]+-[a-z]+[0-9]+-[a-z]'
need CLUSTER my-cluster '[a-z]([-a-z0-9]*[a-z0-9])?'
need SLICES 2 '[1-9][0-9]{0,3}'
need MAX_RESTARTS 10 '[0-9]+'
case $VERB in
  cluster | create) need ACCELERATOR v5p-128 '[a-z0-9]+-[0-9]+' ;;
esac
if [ "$VERB" = cluster ]; then
  need TIER spot 'on_demand|spot|reserved'
  [ "$TIER" != reserved ] || need RESERVATION my-reservation '[-/a-z0-9]+'
fi
case $VERB in
  create | logs | delete) need NAME delta-7b '[a-z]([-a-z0-9]*[a-z0-9])?' ;;
esac
if [ "$VERB" = create ]; then
  need_image
  need_run 'configs/*' bucket
fi
needed
[ "$VERB" != create ] || check_replica
if [ "$VERB" = logs ]; then
  need_gcloud
  need_kubectl
else
  need_tool xpk "give: pip install xpk"
fi

where=("--cluster=$CLUSTER" "--project=$PROJECT" "--zone=$ZONE")

# `xpk workload list` prints what it does, and a table of the runs that have the name in theirs.
there() {
  exists 'no such thing' xpk workload list "${where[@]}" "--filter-by-job=$NAME" &&
    awk -v name="$NAME" '$1 == name { found = 1 } END { exit !found }' <<<"$ANSWER"
}

case $VERB in
  cluster)
    case $TIER in
      on_demand) tier=--on-demand ;;
      spot) tier=--spot ;;
      reserved) tier=--reservation=$RESERVATION ;;
    esac
    run xpk cluster create "${where[@]}" "--tpu-type=$ACCELERATOR" "--num-slices=$SLICES" "$tier"
    ;;
  create)
    if there; then
      say "$NAME is there already; delete it first to run it anew"
    else
      trainer tpu
      run xpk workload create "${where[@]}" "--workload=$NAME" "--tpu-type=$ACCELERATOR" \
        "--num-slices=$SLICES" "--docker-image=$IMAGE" "--max-restarts=$MAX_RESTARTS" \
        --restart-on-exit-codes=1,7 --termination-grace-period-seconds=300 \
        "--command=exec launch/restart.sh $(quoted "${TRAINER[@]}")"
    fi
    ;;
  logs)
    run gcloud container clusters get-credentials "$CLUSTER" "--project=$PROJECT" \
      "--location=${ZONE%-*}"
    run_logs
    ;;
  delete)
    if there || [ -n "$DRY_RUN" ]; then
      run xpk workload delete "${where[@]}" "--workload=$NAME" --force
    else
      say "there is no $NAME"
    fi
    ;;
  delete_cluster)
    run xpk cluster delete "${where[@]}" --force
    ;;
esac

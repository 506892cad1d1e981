#!/usr/bin/env bash
# A run on GKE as a JobSet of one or several TPU slices, by launch/jobset.yaml. The cluster needs
# the JobSet controller and a node pool for each slice; launch/xpk.sh cluster makes one.
#
#   launch/gke.sh render   prints the manifest; takes flags of the trainer
#   launch/gke.sh create   starts the run; takes flags of the trainer. Changes nothing where there is one
#   launch/gke.sh logs     follows the log of the first worker of the first slice
#   launch/gke.sh delete   ends the run: it gets SIGTERM, and 300 seconds to save
#
# PROJECT          of Google Cloud
# LOCATION         of the cluster, a region or zone
# CLUSTER          its name
# NAME             of the run
# ACCELERATOR      label of its nodes: tpu-v5p-slice, tpu-v6e-slice, tpu-v5-lite-podslice, tpu7x
# TOPOLOGY         of a slice in chips: 4x4x4, for v6e and v5e 8x8
# CHIPS_PER_HOST   4 when empty
# SLICES           1 when empty; --config.mesh.replica must be a multiple of it
# IMAGE            the container, with the target tpu of launch/Dockerfile
# CONFIG           the recipe, in configs/, which the container has
# WORKDIR          the run's folder, at gs:// or s3://
# SERVICE_ACCOUNT  of Kubernetes, which may write to the bucket; default when empty
# MAX_RESTARTS     10 when empty: how often lost machines are made up for
#
# logs and delete need the first four alone. --dry_run prints the commands.

SCRIPT=$(readlink -f "$0")
cd "${SCRIPT%/*}/.." || exit 1
# shellcheck source=launch/lib.sh
source launch/lib.sh

CHIPS_PER_HOST=${CHIPS_PER_HOST:-4}
SLICES=${SLICES:-1}
SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-default}
MAX_RESTARTS=${MAX_RESTARTS:-10}

parse "render create logs delete" "render create" "$@"
need PROJECT my-project '[a-z][-a-z0-9:.]*'
need LOCATION us-east5 '[a-z]+-[a-z]+[0-9]+(-[a-z])?'
need CLUSTER my-cluster '[a-z]([-a-z0-9]*[a-z0-9])?'
need NAME delta-7b '[a-z]([-a-z0-9]*[a-z0-9])?'
case $VERB in
  render | create)
    need ACCELERATOR tpu-v5p-slice 'tpu-v4-podslice|tpu-v5p-slice|tpu-v6e-slice|tpu-v5-lite-podslice|tpu7x'
    side='[1-9][0-9]{0,2}'
    case ${ACCELERATOR:-} in
      tpu-v6e-slice | tpu-v5-lite-podslice) need TOPOLOGY 8x8 "${side}x$side" ;;
      *) need TOPOLOGY 4x4x4 "${side}x${side}x$side" ;;
    esac
    need CHIPS_PER_HOST 4 '1|4|8'
    need SLICES 2 '[1-9][0-9]{0,3}'
    need SERVICE_ACCOUNT trainer '[a-z]([-a-z0-9]*[a-z0-9])?'
    need MAX_RESTARTS 10 '[0-9]+'
    need_image
    need_run 'configs/*' bucket
    ;;
esac
needed
if [ "$VERB" = render ] || [ "$VERB" = create ]; then
  check_replica
fi
if [ "$VERB" != render ]; then
  need_gcloud
  need_kubectl
fi

# The words of a command as JSON, which YAML takes.
json() {
  local word text=
  for word in "$@"; do
    word=${word//\\/\\\\}
    text+=", \"${word//\"/\\\"}\""
  done
  echo "[${text:2}]"
}

render() {
  local chips=$((${TOPOLOGY//x/*})) text name
  [ $((chips % CHIPS_PER_HOST)) -eq 0 ] ||
    fail "TOPOLOGY=$TOPOLOGY has $chips chips, no multiple of CHIPS_PER_HOST=$CHIPS_PER_HOST"
  trainer tpu
  text=$(<launch/jobset.yaml)
  # shellcheck disable=SC2034  # read by their names
  local HOSTS=$((chips / CHIPS_PER_HOST)) COMMAND
  # shellcheck disable=SC2034
  COMMAND=$(json launch/restart.sh "${TRAINER[@]}")
  for name in NAME ACCELERATOR TOPOLOGY CHIPS_PER_HOST HOSTS SLICES SERVICE_ACCOUNT MAX_RESTARTS \
    IMAGE COMMAND; do
    text=${text//"@$name@"/"${!name}"}
  done
  echo "$text"
}

credentials() {
  run gcloud container clusters get-credentials "$CLUSTER" "--project=$PROJECT" \
    "--location=$LOCATION"
}

case $VERB in
  render) render ;;
  create)
    manifest=$(render)
    credentials
    if [ -n "$DRY_RUN" ]; then
      printf "kubectl apply --filename=- <<'EOF'\n%s\nEOF\n" "$manifest"
    else
      kubectl apply --filename=- <<<"$manifest"
    fi
    ;;
  logs)
    credentials
    run_logs
    ;;
  delete)
    credentials
    run kubectl delete jobset "$NAME" --ignore-not-found
    ;;
esac

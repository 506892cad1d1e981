#!/usr/bin/env bash
# What a run needs of a Google Cloud project besides machines:
#
#   launch/project.sh create   switches services on, and makes a bucket for data and runs, where there
#                              is none
#   launch/project.sh data     copies the prepared data of this computer to the bucket
#   launch/project.sh image    builds the container of a target, and pushes it
#
# PROJECT    of Google Cloud
# ZONE       of the machines
# BUCKET     for create and data: its name
# DATA       for data: prepared data; that of the cache folder when empty
# IMAGE      for image: its name in a repository of Artifact Registry that is there
# TARGET     for image: tpu when empty, cuda, or cpu
#
# --dry_run prints the commands.

SCRIPT=$(readlink -f "$0")
cd "${SCRIPT%/*}/.." || exit 1
# shellcheck source=launch/lib.sh
source launch/lib.sh

TARGET=${TARGET:-tpu}

parse "create data image" "" "$@"
need PROJECT my-project '[a-z][-a-z0-9:.]*'
need ZONE us-east5-a '[a-z]+-[a-z]+[0-9]+-[a-z]'
need TARGET tpu 'tpu|cuda|cpu'
case $VERB in
  create | data) need BUCKET my-bucket '[a-z0-9][-_.a-z0-9]*' ;;
  image) need_image ;;
esac
if [ "$VERB" = data ] && [ -z "${DATA:-}" ]; then
  [ -n "${XDG_CACHE_HOME:-}" ] || need HOME /home/me
  DATA=${XDG_CACHE_HOME:-${HOME:-}/.cache}/deltares_jax/data
fi
needed
need_gcloud
[ "$VERB" != image ] || need_tool docker "see https://docs.docker.com/engine/install"

case $VERB in
  create)
    run gcloud services enable tpu.googleapis.com storage.googleapis.com \
      artifactregistry.googleapis.com container.googleapis.com "--project=$PROJECT"
    if exists 'not found|NOT_FOUND' gcloud storage buckets describe "gs://$BUCKET" \
      "--project=$PROJECT" '--format=value(name)'; then
      say "the bucket $BUCKET is there already"
    else
      run gcloud storage buckets create "gs://$BUCKET" "--project=$PROJECT" \
        "--location=${ZONE%-*}" --uniform-bucket-level-access
    fi
    ;;
  data)
    [ -n "$DRY_RUN" ] || [ -d "$DATA" ] ||
      fail "DATA=$DATA is no folder; make it by python -m deltares_jax.data.prepare"
    run gcloud storage rsync "$DATA" "gs://$BUCKET/data" --recursive "--project=$PROJECT"
    ;;
  image)
    run docker build --file=launch/Dockerfile "--target=$TARGET" "--tag=$IMAGE" .
    run gcloud auth configure-docker "${IMAGE%%/*}" --quiet
    run docker push "$IMAGE"
    ;;
esac

#!/usr/bin/env bash
# What a run needs of a Google Cloud project besides machines:
#
#   launch/project.sh create   switches services on; makes a bucket for data, and a shared folder
#                              (Filestore) for runs. Says so where they are there
#   launch/project.sh share    prints NFS=…, which the other scripts take: where the shared folder is
#   launch/project.sh data     copies the prepared data of this computer to the bucket
#   launch/project.sh image    builds the container of a target, and pushes it
#   launch/project.sh delete   gives the shared folder back, with all runs in it; the bucket stays
#
# PROJECT    of Google Cloud
# ZONE       of the machines
# BUCKET     the name of the bucket, for create and data
# SHARE      the name of the shared folder, for create, share and delete; runs when empty
# CAPACITY   of the shared folder; 1TB when empty. A checkpoint is 12 bytes a parameter
# DATA       for data: prepared data; that of the cache folder when empty
# IMAGE      for image: its name in a repository of Artifact Registry that is there
# TARGET     for image: tpu when empty, cuda, or cpu
#
# --dry_run prints the commands.

cd "$(dirname "$0")/.." || exit 1
# shellcheck source=launch/lib.sh
source launch/lib.sh

SHARE=${SHARE:-runs}
CAPACITY=${CAPACITY:-1TB}
DATA=${DATA:-${XDG_CACHE_HOME:-$HOME/.cache}/deltares_jax/data}
TARGET=${TARGET:-tpu}

parse "create share data image delete" "" "$@"
need PROJECT my-project '[a-z][-a-z0-9:.]*'
need ZONE us-east5-a '[a-z]+-[a-z]+[0-9]+-[a-z]'
need SHARE runs '[a-z]([-a-z0-9]*[a-z0-9])?'
need CAPACITY 1TB '[0-9.]+(GB|TB)'
need TARGET tpu 'tpu|cuda|cpu'
case $VERB in
  create | data) need BUCKET my-bucket '[a-z0-9][-_.a-z0-9]*' ;;
  image) need IMAGE us-east5-docker.pkg.dev/my-project/my-repository/deltares_jax:tpu ;;
esac
needed

where=("--project=$PROJECT" "--zone=$ZONE")
share_there() {
  exists NOT_FOUND gcloud filestore instances describe "$SHARE" "${where[@]}" "--format=$1"
}

case $VERB in
  create)
    run gcloud services enable tpu.googleapis.com file.googleapis.com storage.googleapis.com \
      artifactregistry.googleapis.com container.googleapis.com "--project=$PROJECT"
    if exists 'not found|NOT_FOUND' gcloud storage buckets describe "gs://$BUCKET" \
      "--project=$PROJECT" '--format=value(name)'; then
      say "the bucket $BUCKET is there already"
    else
      run gcloud storage buckets create "gs://$BUCKET" "--project=$PROJECT" \
        "--location=${ZONE%-*}" --uniform-bucket-level-access
    fi
    if share_there 'value(state)'; then
      say "the shared folder $SHARE is there already: $ANSWER"
    else
      run gcloud filestore instances create "$SHARE" "${where[@]}" --tier=ZONAL \
        "--file-share=name=runs,capacity=$CAPACITY" --network=name=default
    fi
    ;;
  share)
    if share_there 'value(networks[0].ipAddresses[0])'; then
      echo "NFS=$ANSWER:/runs"
    elif [ -z "$DRY_RUN" ]; then
      say "error: there is no shared folder $SHARE; give create first"
      exit 1
    fi
    ;;
  data)
    run gcloud storage rsync "$DATA" "gs://$BUCKET/data" --recursive "--project=$PROJECT"
    ;;
  image)
    run docker build --file=launch/Dockerfile "--target=$TARGET" "--tag=$IMAGE" .
    run gcloud auth configure-docker "${IMAGE%%/*}" --quiet
    run docker push "$IMAGE"
    ;;
  delete)
    if share_there 'value(state)' || [ -n "$DRY_RUN" ]; then
      run gcloud filestore instances delete "$SHARE" "${where[@]}" --quiet
    else
      say "there is no shared folder $SHARE"
    fi
    ;;
esac

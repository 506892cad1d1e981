# shellcheck shell=bash
# What the launch scripts share; sourced, not run.
#
# A script says what it needs by `need` and its like, and acts by `run` and `exists` alone, so that
# --dry_run prints every command that would be run, in a form that a shell takes.

set -euo pipefail

DRY_RUN=
VERB=
TRAINER_FLAGS=()
TRAINER=()
MISSING=()

fail() {
  echo "error: $*" >&2
  exit 2
}

# parse "VERB VERB …" "VERBS THAT TAKE FLAGS OF THE TRAINER" ARGUMENTS…
parse() {
  local verbs=" $1 " training=" $2 " argument
  shift 2
  for argument in "$@"; do
    case $argument in
      -h | --help)
        sed -n '2,/^$/s/^#\( \|$\)//p' "$SCRIPT"
        exit 0
        ;;
      --dry_run | --dry-run) DRY_RUN=yes ;;
      --config.?*) TRAINER_FLAGS+=("$argument") ;;
      -*) fail "unknown flag $argument; flags of the trainer begin with --config.; see $0 --help" ;;
      *)
        [ -z "$VERB" ] || fail "unexpected argument '$argument' after $VERB"
        VERB=$argument
        ;;
    esac
  done
  [ -n "$VERB" ] || fail "one of${verbs% } is missing; see $0 --help"
  [[ $verbs == *" $VERB "* ]] || fail "'$VERB' is none of${verbs% }; see $0 --help"
  if [ ${#TRAINER_FLAGS[@]} -gt 0 ] && [[ $training != *" $VERB "* ]]; then
    fail "unknown flag ${TRAINER_FLAGS[0]} of $VERB; see $0 --help"
  fi
}

# need NAME EXAMPLE [PATTERN]: a variable that must be set, and of what form.
need() {
  local value=${!1:-}
  if [ -z "$value" ]; then
    MISSING+=("$1 (for example $1=$2)")
  elif [ $# -gt 2 ] && ! [[ $value =~ ^($3)$ ]]; then
    fail "$1='$value' must have the form $3, for example $1=$2"
  fi
}

# Refuses all that is missing at once.
needed() {
  local text
  if [ ${#MISSING[@]} -gt 0 ]; then
    text=$(printf ', %s' "${MISSING[@]}")
    fail "missing variables: ${text:2}"
  fi
  local folder=${TMPDIR:-/tmp}
  if ! [ -d "$folder" ] || ! [ -w "$folder" ]; then
    fail "TMPDIR=$folder must be a folder that can be written; make it, or unset TMPDIR"
  fi
}

# need_tool NAME WHERE: a command, and where to get it; a dry run does without.
need_tool() {
  [ -n "$DRY_RUN" ] || command -v "$1" >/dev/null || fail "$1 is not installed; $2"
}

need_gcloud() {
  need_tool gcloud "see https://cloud.google.com/sdk/docs/install"
}

need_kubectl() {
  need_tool kubectl "give: gcloud components install kubectl gke-gcloud-auth-plugin"
}

# With its registry: nodes pull it from there.
need_image() {
  need IMAGE us-east5-docker.pkg.dev/my-project/my-repository/deltares_jax:tpu \
    '[-.a-zA-Z0-9]+\.[a-z]+(:[0-9]+)?/[-_.:/@a-zA-Z0-9]+'
}

quoted() {
  local words
  words=$(printf ' %q' "$@")
  echo "${words:1}"
}

# Runs a command, or prints it.
run() {
  if [ -n "$DRY_RUN" ]; then
    quoted "$@"
  else
    "$@"
  fi
}

# exists NOT_FOUND COMMAND…: whether a thing is there; its answer is in ANSWER. A failure that does
# not match the pattern NOT_FOUND ends the script. A dry run prints the command, and goes on as if
# there were nothing.
ANSWER=
exists() {
  local pattern=$1 errors
  shift
  if [ -n "$DRY_RUN" ]; then
    quoted "$@"
    return 1
  fi
  errors=$(mktemp)
  if ANSWER=$("$@" 2>"$errors"); then
    rm "$errors"
    [ -n "$ANSWER" ]
    return
  fi
  if grep -qE "$pattern" "$errors"; then
    rm "$errors"
    return 1
  fi
  [ -z "$ANSWER" ] || say "$ANSWER" # where xpk says what is wrong
  cat "$errors" >&2
  rm "$errors"
  echo "error: $(quoted "$@") failed" >&2
  exit 1
}

say() {
  echo "$*" >&2
}

# need_config PATTERN: the recipe, a file whose path matches, or the name of one in configs/.
need_config() {
  need CONFIG configs/7b_delta_block.py
  local file=${CONFIG:-} bare
  bare=${file#configs/}
  bare=${bare%.py}
  # shellcheck disable=SC2053  # a pattern
  [[ -z $file || (-f $file && $file == $1) || ($bare != */* && -f configs/$bare.py) ]] ||
    fail "CONFIG='$file' is no file of the form $1, and not the name of one in configs/"
}

# need_run PATTERN [bucket]: what the trainer needs; the pattern is that of need_config.
need_run() {
  local form='(gs|s3)://[^:/][^:]*'
  [ "${2:-}" = bucket ] || form+='|[^:]+'
  need_config "$1"
  need WORKDIR gs://my-bucket/runs/7b "$form"
}

# Refuses what the trainer would refuse when all slices are up.
check_replica() {
  local flag value=
  for flag in ${TRAINER_FLAGS[@]+"${TRAINER_FLAGS[@]}"}; do
    [[ $flag != --config.mesh.replica=* ]] || value=${flag#*=}
  done
  [[ $SLICES -eq 1 || $value == -1 ]] && return
  [[ $value =~ ^[1-9][0-9]{0,3}$ && $((value % SLICES)) -eq 0 ]] ||
    fail "SLICES=$SLICES needs --config.mesh.replica=$SLICES or a multiple of it, not '$value':" \
      "no other axis goes across slices"
}

# trainer PLATFORM: its command, in the array TRAINER.
# shellcheck disable=SC2034  # used by the scripts that source this one
trainer() {
  TRAINER=(python -m deltares_jax.train "--config=$CONFIG" "--workdir=$WORKDIR"
    "--config.train.platform=$1" ${TRAINER_FLAGS[@]+"${TRAINER_FLAGS[@]}"})
}

# Follows the log of the first worker of the first slice of the JobSet NAME.
run_logs() {
  local of=jobset.sigs.k8s.io/jobset-name=$NAME,jobset.sigs.k8s.io/job-index=0
  run kubectl logs --follow --tail=-1 \
    "--selector=$of,batch.kubernetes.io/job-completion-index=0"
}

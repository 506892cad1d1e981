# shellcheck shell=bash
# What the launch scripts share; sourced, not run.
#
# A script says what it needs by `need`, and acts by `run` and `exists` alone, so that --dry_run
# prints every command that would be run, in a form that a shell takes.

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
        sed -n '2,/^$/s/^#\( \|$\)//p' "launch/${0##*/}"
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
  [ ${#MISSING[@]} -eq 0 ] && return
  local text
  text=$(printf ', %s' "${MISSING[@]}")
  fail "missing variables: ${text:2}"
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
  cat "$errors" >&2
  rm "$errors"
  echo "error: $(quoted "$@") failed" >&2
  exit 1
}

say() {
  echo "$*" >&2
}

# What the trainer needs.
need_run() {
  need CONFIG configs/7b_delta_block.py
  need WORKDIR gs://my-bucket/runs/7b '((gs|s3):/)?/?[^:]+'
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

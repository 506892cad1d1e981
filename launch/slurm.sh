#!/usr/bin/env bash
# A run on nodes with GPUs, by Slurm:
#
#   launch/slurm.sh create   submits it; takes flags of the trainer. Says so where it is queued already
#   launch/slurm.sh logs     follows its log, NAME.log
#   launch/slurm.sh stop     asks it to save and end
#   launch/slurm.sh delete   ends it, whether it has saved or not
#
# At the end of its time, or when a node is lost, it goes to the queue again, and goes on from its
# newest checkpoint. Give the commands in the folder of this repository, in the environment that it
# is installed in, on a file system that all nodes see.
#
# NAME           of the run
# NODES          how many
# GPUS_PER_NODE  on each, for one process
# TIME           the limit of one start, as Slurm writes it
# PARTITION      the cluster's own when empty
# CONFIG         the recipe
# WORKDIR        the run's folder, which all nodes see
#
# stop, logs and delete need NAME alone. --dry_run prints the commands.

SCRIPT=$(readlink -f "$0")
cd "${SCRIPT%/*}/.." || exit 1
# shellcheck source=launch/lib.sh
source launch/lib.sh

parse "create logs stop delete" "create" "$@"
need NAME delta-7b '[-_.a-zA-Z0-9]+'
if [ "$VERB" = create ]; then
  need NODES 4 '[1-9][0-9]*'
  need GPUS_PER_NODE 8 '[1-9][0-9]*'
  need TIME 24:00:00 '[-:0-9]+'
  need_run '*'
fi
needed
slurm="give this on a machine that has the commands of Slurm"
case $VERB in
  create)
    need_tool squeue "$slurm"
    need_tool sbatch "$slurm"
    ;;
  stop | delete) need_tool scancel "$slurm" ;;
esac
user=${USER:-$(id -un)}

case $VERB in
  create)
    if exists 'no such thing' squeue --noheader "--name=$NAME" "--user=$user" '--format=%i %T'; then
      say "$NAME is there already: $ANSWER"
      exit 0
    fi
    trainer gpu
    partition=()
    [ -z "${PARTITION:-}" ] || partition=("--partition=$PARTITION")
    # TERM@300: five minutes before its time is up the trainer is asked to save.
    run sbatch "--job-name=$NAME" "--nodes=$NODES" --ntasks-per-node=1 \
      "--gpus-per-node=$GPUS_PER_NODE" --exclusive "--time=$TIME" \
      ${partition[@]+"${partition[@]}"} --requeue --signal=TERM@300 --open-mode=append \
      "--output=$NAME.log" launch/slurm.sbatch "${TRAINER[@]}"
    ;;
  logs) run tail --lines=+1 --follow=name --retry "$NAME.log" ;;
  stop) run scancel --full --signal=TERM "--name=$NAME" "--user=$user" ;;
  delete) run scancel "--name=$NAME" "--user=$user" ;;
esac

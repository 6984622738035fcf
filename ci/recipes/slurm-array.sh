#!/bin/bash
# One run divided over the tasks of a Slurm array, each on a host of its own:
#     id=$(sbatch --parsable slurm-array.sh)
#     sbatch --dependency="afterany:$id" slurm-merge.sh
#SBATCH --job-name=fsdp-verify
#SBATCH --array=1-8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -eu
part="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
fsdp-verify run my_package:ADAPTER --shard "$part" --json "part-$SLURM_ARRAY_TASK_ID.json"

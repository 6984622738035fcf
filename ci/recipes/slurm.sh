#!/bin/bash
# One run over several hosts of a Slurm cluster: sbatch slurm.sh
#SBATCH --job-name=fsdp-verify
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
set -eu
# All processes meet at the first host, where this script runs.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export MASTER_ADDR MASTER_PORT
# The first process reports what became of the others: let it finish when one of them ends badly.
srun --kill-on-bad-exit=0 fsdp-verify run my_package:ADAPTER --world-size 2,8 --junit report.xml --html report

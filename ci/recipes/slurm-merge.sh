#!/bin/bash
# After slurm-array.sh: the report and exit code of one run. A part that is missing is named.
#SBATCH --job-name=fsdp-verify-merge
#SBATCH --time=00:10:00
set -eu
fsdp-verify merge part-*.json --html report --junit report.xml

#!/usr/bin/env bash
#SBATCH --job-name=llama3_8b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Two nodes of trn2.48xlarge. The prolog fills each node, then one torchrun a node starts its 64 ranks. `neffcache run`
# launches nothing when the job is not warm (exit code 3), and proves what the ranks did.
# Built to the documented interfaces of Slurm and torchrun; not run on a Trainium device.
set -euo pipefail

job=(llama3_8b --lnc 2 --nodes "${SLURM_JOB_NUM_NODES:-2}" --toolchain neuron)

export NEFFCACHE_REMOTE="${NEFFCACHE_REMOTE:-s3://my-bucket/neffcache}"
export NEFFCACHE_VERSIONS="${NEFFCACHE_VERSIONS:-torch=2.14.1; torchtitan=0.3.0; compiler=neuronx-cc 2.30.1}"
export NEFFCACHE_INIT="${job[*]} --jitter 20"

head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun --task-prolog="${NEFFCACHE_PROLOG:-/etc/slurm/neffcache_task_prolog.sh}" \
    neffcache run "${job[@]}" -- \
    torchrun --nnodes "${SLURM_JOB_NUM_NODES:-2}" --nproc-per-node 64 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29400" --rdzv-id "$SLURM_JOB_ID" \
    -m torchtitan.train --module llama3 --config llama3_8b

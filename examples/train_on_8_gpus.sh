#!/bin/bash
# Train on one machine of 8 GPUs by FSDP2, then continue with each sequence on two GPUs and the heads on two.
#     bash examples/train_on_8_gpus.sh OUT        OUT: folder of `retro-model neighbours OUT --shards N`
# Smaller, also without GPUs: GPUS=4 SIZES='--window 256 --batch 4' STEPS=10 bash examples/train_on_8_gpus.sh OUT
set -e
out=$1 gpus=${GPUS:-8} steps=${STEPS:-1000} sizes=${SIZES:---preset 172m --window 2048 --batch 64 --save-every 100 --workers 2}
train=$(dirname "$0")/train_many.py
torchrun --standalone --nproc-per-node "$gpus" "$train" "$out" $sizes --steps "$steps"
torchrun --standalone --nproc-per-node "$gpus" "$train" "$out" $sizes --steps $((2 * steps)) --sequence 2 --tensor 2

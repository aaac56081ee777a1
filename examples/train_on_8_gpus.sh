#!/bin/bash
# One machine of 8 GPUs: FSDP2 over 8, or over 2 x 2 with each sequence's halves on two GPUs and the heads on two.
#     bash examples/train_on_8_gpus.sh OUT        OUT: what `retro-model scale build OUT` left
set -e
out=$1
torchrun --standalone --nproc-per-node 8 -m retro_model scale train "$out" \
    --preset 172m --window 2048 --batch 64 --steps 1000 --save-every 100 --workers 2
torchrun --standalone --nproc-per-node 8 -m retro_model scale train "$out" \
    --preset 172m --window 2048 --batch 64 --steps 2000 --save-every 100 --workers 2 --sequence 2 --tensor 2 --exchange ring

"""Your own decoder with chunked cross-attention in every second block.

It trains with torch.compile, bfloat16 autocast, activation checkpointing and several processes, if asked:

    python examples/own_gpt_with_cca.py
    python examples/own_gpt_with_cca.py --compile inductor --autocast --checkpoint
    torchrun --nproc-per-node 2 examples/own_gpt_with_cca.py --ddp
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from retro_model import ChunkedCrossAttention, FeedForward

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 4, 32
TOKENS, CHUNK, NEIGHBOURS, NEIGHBOUR_LEN = 128, 16, 2, 32


class Block(nn.Module):
    """Self-attention, chunked cross-attention where `retrieves`, feed-forward; each a pre-norm residual."""

    def __init__(self, retrieves: bool) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cca = self.cca_norm = None
        if retrieves:
            self.cca = ChunkedCrossAttention(WIDTH, HEADS, WIDTH // HEADS, chunk_len=CHUNK)
            self.cca_norm = nn.RMSNorm(WIDTH)
        self.feed_forward = FeedForward(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        if self.cca is not None and self.cca_norm is not None:
            x = x + self.cca(self.cca_norm(x), neighbours)
        return x + self.feed_forward(self.feed_forward_norm(x))


class OwnGPT(nn.Module):
    """Decoder that attends embedded tokens of neighbours; RETRO encodes them first (`retro_model.NeighbourEncoder`)."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(retrieves=layer % 2 == 1) for layer in range(LAYERS))
        self.norm, self.readout = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, neighbours: Tensor) -> Tensor:
        """Return logits [B,N,V] of tokens [B,N] and neighbours [B,L,K,R]."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        context = self.embedding(neighbours)  # [B,L,K,R,WIDTH]
        for block in self.blocks:
            x = checkpoint(block, x, context, use_reentrant=False) if self.checkpointed else block(x, context)
        return self.readout(self.norm(x))


def draw(data: torch.Generator, batch: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return random text [B,N], neighbours [B,L,K,R] of which one holds the next chunk, and random neighbours.

    Only a neighbour determines the next token, so a model without retrieval stays at ln 32 = 3.47.
    """
    tokens = torch.randint(VOCABULARY, (batch, TOKENS), generator=data)
    shape = (batch, TOKENS // CHUNK, NEIGHBOURS, NEIGHBOUR_LEN)
    neighbours, random = (torch.randint(VOCABULARY, shape, generator=data) for _ in range(2))
    neighbours[:, :-1, 0, :CHUNK] = tokens.unflatten(1, (-1, CHUNK))[:, 1:]
    return tokens, neighbours, random


def loss_of(model: Callable[..., Tensor], tokens: Tensor, neighbours: Tensor) -> Tensor:
    """Return the loss, in nats a token, of the tokens after the first chunk, which a neighbour holds."""
    logits = model(tokens, neighbours)[:, CHUNK - 1 : -1]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, CHUNK:].flatten())


def train(arguments: argparse.Namespace) -> tuple[list[float], float, float]:
    """Train. Return the losses of all steps, and on new text the loss with its neighbours and with random ones."""
    torch.manual_seed(0)
    rank = 0
    model: nn.Module = OwnGPT(arguments.checkpoint)
    if arguments.ddp:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(model)
    step = torch.compile(model, fullgraph=not arguments.ddp, backend=arguments.compile) if arguments.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(rank)  # each process draws other batches
    autocast = torch.autocast("cpu", torch.bfloat16) if arguments.autocast else contextlib.nullcontext()
    losses = []
    for number in range(arguments.steps):
        tokens, neighbours, _ = draw(data)
        with autocast:
            loss = loss_of(step, tokens, neighbours)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and (number % 20 == 0 or number + 1 == arguments.steps):
            print(f"step {number}  loss {losses[-1]:.3f}", flush=True)
    tokens, neighbours, random = draw(data)
    with torch.no_grad(), autocast:
        found, control = (loss_of(step, tokens, given).item() for given in (neighbours, random))
    if rank == 0:
        result = f"{found:.3f} nats a token with its neighbours, {control:.3f} with random ones"
        print(f"new text: {result}; guessing is 3.47")
    if arguments.ddp:
        dist.destroy_process_group()
    return losses, found, control


def main(argv: list[str] | None = None) -> tuple[list[float], float, float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--compile", metavar="BACKEND", help="torch.compile with this backend, e.g. inductor")
    add("--autocast", action="store_true", help="bfloat16 autocast")
    add("--checkpoint", action="store_true", help="recompute each block's activations in the backward pass")
    processes = os.environ.get("WORLD_SIZE", 1)
    add("--ddp", action="store_true", help=f"DistributedDataParallel, under torchrun (now {processes} processes)")
    add("--steps", type=int, default=120)
    return train(parser.parse_args(argv))


if __name__ == "__main__":
    main()

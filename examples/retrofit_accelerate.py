"""Your own loop with accelerate: train a retrofitted GPT-2 together with LoRA adapters.

The GPT-2 has random weights, so that this runs in seconds and without a download. Needs transformers, peft and
accelerate.

    python examples/retrofit_accelerate.py
    torchrun --nproc-per-node 2 examples/retrofit_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from retro_model.integrations.huggingface import NeighbourCollator, RetrofitForCausalLM

V, M, N = 64, 8, 32  # vocabulary, chunk length, tokens per row


def rows(count: int) -> list[dict]:
    """Return rows of random tokens; the neighbour of a chunk is that chunk and the next one."""
    chunks = torch.randint(V, (count, N // M + 1, M))
    neighbours = torch.cat([chunks[:, :-1], chunks[:, 1:]], -1).unsqueeze(2)  # [count, L, K=1, 2M]
    return [{"input_ids": c[:-1].flatten(), "neighbours": n} for c, n in zip(chunks, neighbours)]


def main(steps: int = 60) -> tuple[float, float]:
    """Train. Return the loss of the first and of the last step, in nats a token."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    # PEFT first, then retrofit
    tuned = get_peft_model(gpt2, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    encoder = {"layers": 1, "d_model": 64, "d_ff": 128, "heads": 4, "head_dim": 16}
    sizes = {f"encoder_{name}": size for name, size in encoder.items()}
    model = RetrofitForCausalLM.from_decoder(tuned, cca_layers=(1, 2), chunk_len=M, **sizes)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    data: DataLoader = DataLoader(rows(16 * steps), batch_size=16, collate_fn=NeighbourCollator(chunk_len=M))  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for batch in data:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f"loss with retrieval: {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()

"""Retrieval for a trained Llama with the Hugging Face Trainer: its weights stay frozen, the added ones train.

The Llama has a few thousand random weights, so that this runs in seconds and without a download. Replace it by
`AutoModelForCausalLM.from_pretrained(FOLDER)`. Needs transformers and accelerate.

    python examples/retrofit_llama_trainer.py

To train LoRA adapters too, apply PEFT first: `RetrofitForCausalLM.from_decoder(get_peft_model(...))`.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from retro_model.integrations.huggingface import NeighbourCollator, RetrofitForCausalLM

V, M, R, K, N = 64, 8, 16, 1, 32  # vocabulary, chunk length, tokens per neighbour, neighbours, tokens per row


class Rows(Dataset):
    """Rows of random tokens; the neighbour of a chunk is that chunk and the next one. To precompute yours, see
    docs/retro.md."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(V, (count, N + M))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        chunks = self.tokens[row].unflatten(0, (-1, M))
        # [N], [L,K,R]
        return {"input_ids": chunks[:-1].flatten(), "neighbours": torch.cat([chunks[:-1], chunks[1:]], -1).unsqueeze(1)}


def main(steps: int = 80) -> tuple[float, float]:
    """Train. Return the loss with retrieval before and after training, in nats a token."""
    torch.manual_seed(0)
    widths = {"vocab_size": V, "max_position_embeddings": 128, "hidden_size": 64, "intermediate_size": 128}
    llama = LlamaForCausalLM(LlamaConfig(**widths, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
    encoder = {"layers": 1, "d_model": 64, "d_ff": 128, "heads": 4, "head_dim": 16}
    sizes = {f"encoder_{name}": size for name, size in encoder.items()}
    model = RetrofitForCausalLM.from_decoder(llama, cca_layers=(1, 2), chunk_len=M, **sizes)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} weights train")

    rows = Rows(8)
    collate = NeighbourCollator(chunk_len=M)
    held_out = collate([rows[i] for i in range(len(rows))])

    def loss() -> float:
        with torch.no_grad():
            return model.eval()(**held_out).loss.item()

    before = loss()
    with tempfile.TemporaryDirectory() as folder:
        rates = {"max_steps": steps, "learning_rate": 5e-3, "per_device_train_batch_size": 16, "logging_steps": 20}
        quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        arguments = TrainingArguments(folder, **rates, **quiet, use_cpu=not torch.cuda.is_available())
        Trainer(model, arguments, train_dataset=Rows(16 * steps), data_collator=collate).train()
        model.save_pretrained(folder)
        model = RetrofitForCausalLM.from_pretrained(folder)
    after = loss()
    print(f"loss with retrieval: {before:.3f} before, {after:.3f} after")

    def retrieve(chunks: Tensor) -> tuple[Tensor, None]:
        """Return random neighbours instead of searching."""
        return torch.randint(V, (len(chunks), K, R)), None

    prompt = held_out["input_ids"][:1, :M]
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": M, "pad_token_id": 0}
    print("sampled:", *model.generate(prompt, retrieve=retrieve, **how)[0].tolist())
    return before, after


if __name__ == "__main__":
    main()

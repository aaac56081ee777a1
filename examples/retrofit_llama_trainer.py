"""Retrieval for a Llama that is already trained, with the Hugging Face Trainer: its weights stay frozen, only what is added trains.

A Llama of a few thousand random weights stands in for yours, so that this runs in seconds and without a download; put
`AutoModelForCausalLM.from_pretrained(FOLDER)` in its place. Needs transformers and accelerate.

    python examples/retrofit_llama_trainer.py

What does not work yet: a `RetrofittedDecoder` as the Trainer's model itself (hence `WithLoss`), `model.generate` (use `retro_model.generate`), PEFT
around a retrofit; `retrofit(get_peft_model(...))` trains both.
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from retro_model import RetrofittedDecoder, generate, retrofit

V, M, R, K, N = 64, 8, 16, 1, 32  # vocabulary, chunk length, tokens a neighbour, neighbours, tokens a row


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, max_position_embeddings=128, **sizes))


class Rows(Dataset):
    """Rows of random tokens; the neighbour of a chunk holds it and what follows. Precompute yours: see docs/retro.md."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(V, (count, N + M))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        chunks = self.tokens[row].unflatten(0, (-1, M))
        return {"tokens": chunks[:-1].flatten(), "neighbours": torch.cat([chunks[:-1], chunks[1:]], -1).unsqueeze(1)}  # [N], [L,K,R]


class WithLoss(nn.Module):
    """What the Trainer wants of a plain module: keyword arguments of a row, a dict with the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, neighbours: Tensor) -> dict[str, Tensor]:
        logits = self.model(tokens, neighbours)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), "logits": logits}


def main(steps: int = 80) -> tuple[float, float]:
    """The loss, nats a token, with retrieval before and after training."""
    torch.manual_seed(0)
    model = retrofit(
        llama(),
        cca_layers=(1, 2),
        chunk_len=M,
        encoder_layers=1,
        encoder_d_model=64,
        encoder_d_ff=128,
        encoder_heads=4,
        encoder_head_dim=16,
    )
    assert isinstance(model, RetrofittedDecoder)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} weights train")

    rows = Rows(8)
    examples = [rows[i] for i in range(len(rows))]
    held_out = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}

    def loss() -> float:
        with torch.no_grad():
            return WithLoss(model.eval())(**held_out)["loss"].item()

    before = loss()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=16, learning_rate=5e-3, logging_steps=20, save_strategy="no",
            report_to="none", use_cpu=not torch.cuda.is_available(), remove_unused_columns=False, disable_tqdm=True,
        )  # fmt: skip
        Trainer(WithLoss(model), arguments, train_dataset=Rows(16 * steps)).train()
        torch.save(model.added_state_dict(), f"{folder}/added.pt")  # load_state_dict(..., strict=False) takes it back
    after = loss()
    print(f"loss with retrieval: {before:.3f} before, {after:.3f} after")

    def retrieve(chunks: Tensor) -> tuple[Tensor, None]:
        """A search would stand here; random neighbours show the shapes."""
        return torch.randint(V, (len(chunks), K, R)), None

    print("sampled:", *generate(model, held_out["tokens"][:1, :M], M, retrieve=retrieve)[0].tolist())
    return before, after


if __name__ == "__main__":
    main()

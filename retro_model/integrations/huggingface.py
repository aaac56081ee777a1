"""A retrofitted decoder as a Hugging Face model: Trainer, generate, save_pretrained. Needs transformers.

model = RetrofitForCausalLM.from_decoder(AutoModelForCausalLM.from_pretrained(NAME), neighbours="own")
Trainer(model, arguments, train_dataset=rows, data_collator=NeighbourCollator(chunk_len=32)).train()
model.save_pretrained(FOLDER)
model = RetrofitForCausalLM.from_pretrained(FOLDER)
model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), retrieve=retrieve, max_new_tokens=100)
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import EllipsisType

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoConfig, DynamicCache, GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from retro_model.base import checks, disk
from retro_model.generation.chunk_neighbours import ChunkNeighbours, Retrieve
from retro_model.retro.cache import completed, left_mask
from retro_model.retro.inputs import row_starts
from retro_model.retrofit import retrofit
from retro_model.retrofit.base import FrozenDecoder, RetrofitCache
from retro_model.retrofit.decoders import adapters, base_of
from retro_model.training.windows import IGNORED

from . import _saved_decoder as saved_decoder

WEIGHTS = "model.safetensors"  # file of the added weights
DECODER = "decoder"  # folder of a decoder that is saved whole
ADAPTERS = "adapters"  # folder of PEFT's adapters
GENERATION = "generation_config.json"


class RetrofitConfig(PretrainedConfig):
    """Configuration of a retrofitted decoder.

    Args:
        decoder: the decoder's own configuration.
        retrieval: options of `retrofit`.
        base: name or folder of the decoder; None if its weights are in the same folder.
        sha256: digest of the file of the added weights.
        base_sha256: `digest_of` the decoder's folder; None if it has no weight files, like a name on the hub.
        adapters: whether the folder holds PEFT's adapters; None in folders of version 0.2.0.
    """

    model_type = "retro_retrofit"

    def __init__(
        self, decoder=None, retrieval=None, base=None, sha256=None, base_sha256=None, adapters=None, **options
    ):
        self.decoder, self.retrieval, self.base, self.sha256 = decoder or {}, retrieval or {}, base, sha256
        self.base_sha256, self.adapters = base_sha256, adapters
        super().__init__(**options)

    def get_text_config(self, *_, **__) -> PretrainedConfig:
        """Return the decoder's configuration: the library reads the number of layers and their caches from it."""
        return AutoConfig.for_model(**self.decoder) if self.decoder else self


class RetrofitForCausalLM(PreTrainedModel, GenerationMixin):
    """Hugging Face model of a decoder after `retrofit`; the retrofitted decoder is its attribute `model`.

    Args:
        config: the decoder's, and of the added layers.
        model: a `RetrofittedDecoder` or an `OwnAttention`.
    """

    config_class = RetrofitConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True

    def __init__(self, config: RetrofitConfig, model: FrozenDecoder):
        super().__init__(config)
        self.model = model
        self.generation_config = model.decoder.generation_config
        self._neighbours: ChunkNeighbours | None = None  # set while `generate` runs
        # weights that no checkpoint has: the Trainer does not miss them when it resumes
        self._keys_to_ignore_on_save = sorted(self.state_dict().keys() - self.trained_state_dict().keys())

    @classmethod
    def from_decoder(cls, decoder: PreTrainedModel, **changes) -> RetrofitForCausalLM:
        """Return a decoder with retrieval; `changes` as in `retrofit`, without `blocks`, which a folder cannot name."""
        if changes.get("blocks") is not None:
            raise ValueError("blocks: expected None for a model of the Hugging Face library; got a value")
        model = retrofit(decoder, **changes)
        base = getattr(decoder.config, "_name_or_path", None) or None
        if base is not None and Path(base).is_dir():
            base = str(Path(base).resolve())
        return cls(RetrofitConfig(decoder.config.to_dict(), model.config.to_dict(), base), model)

    def _init_weights(self, module) -> None:
        """Do nothing: `retrofit` has drawn the weights."""

    def trained_state_dict(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the weights that training changes and `save_pretrained` writes: added ones, and PEFT's.

        state: weights by name, from which they are taken; None for the model's.
        """
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        trained = {f"model.{name}" for name in trained | self.model.added_state_dict().keys()}
        state = self.state_dict() if state is None else state
        return {name: tensor for name, tensor in state.items() if name in trained}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        neighbours: Tensor | None = None,
        neighbour_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cache=None,
        past_key_values=None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        position_ids: Tensor | None = None,
        return_dict: bool | None = None,
        **options,
    ) -> CausalLMOutputWithPast | tuple:
        """Return logits [B,N,V] and, with labels [B,N], the mean loss over the labels that are not -100.

        In training with labels the logits are None: the logits of all tokens are never in memory together.

        Args:
            attention_mask: [B,N], or [B, tokens held + N] with a cache that holds tokens. Padding is on the left if
                there is a cache.
            neighbours, neighbour_mask: of the chunks that these tokens complete, as in `FrozenDecoder`; None within
                `generate`, which retrieves them.
            cache, before transformers 5.24 past_key_values: the library's own. It must hold the tokens that this model
                has read into it, and no others. It is filled unless use_cache is False. Calls with a cache are not
                differentiable.
            use_cache: True to make and return a cache if none is given; None to make none.
            num_items_in_batch: number by which the loss is divided; None for the number of labels.
            position_ids, options: as in `FrozenDecoder`, which names the keywords that are refused.
            return_dict: False for a tuple.

        Raises: TypeError, ValueError: naming the argument.
        """
        self.model.decoder_options(options)
        sizes: dict[str, int] = {}
        checks.shape("input_ids", input_ids, "B,N", sizes)
        if labels is not None:
            checks.shape("labels", labels, "B,N", sizes)
            ids = labels.masked_fill(labels == IGNORED, 0)
            checks.token_ids("labels", ids, self.model.config.vocab_size, input_ids.device)
            if options.get("logits_to_keep"):
                raise ValueError("logits_to_keep: expected None with labels, which need all logits; got a value")
        inputs = dict(zip(checks.RETRIEVED, (neighbours, neighbour_mask)))
        if position_ids is not None:
            options["position_ids"] = position_ids
        if cache is not None and past_key_values is not None:
            raise ValueError("past_key_values: expected None next to cache, its other name; got both")
        past = past_key_values if cache is None else cache
        if labels is not None and self.training:
            if past is not None or use_cache:
                raise ValueError("use_cache: expected no cache in training with labels, which is not differentiable")
            inputs |= {"loss_mask": labels != IGNORED, "targets": labels.clamp(min=0)}
            total = self.model(input_ids, attention_mask=attention_mask, **inputs, **options).total
            out = CausalLMOutputWithPast(loss=total / self._count(labels, num_items_in_batch))
            return out.to_tuple() if return_dict is False else out
        if use_cache is False and past is not None and past.get_seq_length():
            raise ValueError("use_cache: expected None or True with a cache that holds tokens; got False")
        if use_cache and past is None:
            past = DynamicCache(config=self.config.get_text_config())
        if past is None or use_cache is False:
            logits = self.model(input_ids, attention_mask=attention_mask, **inputs, **options)
        else:
            logits = self._decode(input_ids, attention_mask, past, inputs, options)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum")
            loss = loss / self._count(labels, num_items_in_batch)
        out = CausalLMOutputWithPast(loss, logits, past)  # by position: the last field has had two names
        return out.to_tuple() if return_dict is False else out

    @staticmethod
    def _count(labels: Tensor, counted: Tensor | int | None) -> Tensor | int:
        """Return the number of tokens whose loss counts: the Trainer's, or the labels after a row's first token."""
        return (labels[:, 1:] != IGNORED).sum().clamp(min=1) if counted is None else counted

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        retrieve: Retrieve | EllipsisType | None = ...,
        **options,
    ):
        """Run the library's `generate`; `retrieve` gets the chunks that complete, as in `retro_model.generate`.

        Greedy decoding and sampling are served, with every processor and criterion of the library.

        Args:
            retrieve: function that retrieves. None decodes without retrieval by the decoder's own `generate`, with all
                of its options; a model with a prefix continues the prefix. If the argument is left out, None is
                assumed, with a warning.
            inputs, generation_config, options: the library's.

        Raises: ValueError for options under which rows or tokens would part from their neighbours, wherever they are
            set: beams, assisted decoding, guidance, caches of fixed size, no cache, neighbours of the caller's.
        """
        if isinstance(retrieve, EllipsisType):
            wanted = "a function, or None to decode without retrieval"
            warnings.warn(f"retrieve: expected {wanted}; got nothing", stacklevel=2)
            retrieve = None
        if retrieve is None and not self.model.always_attends:
            decoder = base_of(self.model.decoder)
            decoder.generation_config = self.generation_config
            return decoder.generate(inputs, generation_config, **options)
        _check_generation(self._prepare_generation_config(generation_config, **options)[0], options)
        if retrieve is not None:
            self._neighbours = ChunkNeighbours(retrieve, self.model.config, self.device)
        try:
            return super().generate(inputs, generation_config, **options)
        finally:
            self._neighbours = None

    def _decode(self, tokens: Tensor, attention_mask: Tensor | None, past, inputs: dict, options: dict) -> Tensor:
        """Return logits of tokens after those in the library's cache, whose attribute `retrofit` is our cache."""
        if getattr(past, "is_compileable", False):
            raise ValueError(f"cache: expected one that grows, such as DynamicCache; got a {type(past).__name__}")
        cache = getattr(past, "retrofit", None)
        if cache is None or not past.get_seq_length():
            cache = past.retrofit = self.model.make_cache(len(tokens))
            cache.decoder, cache.history = past, tokens[:, :0]
        if attention_mask is not None and cache.length:
            known = left_mask(cache.starts, cache.length + tokens.shape[1], tokens.device)
            if attention_mask.shape != known.shape or not torch.equal(attention_mask.bool(), known):
                wanted = f"{list(known.shape)}, 0 on the padding of the first call alone"
                raise ValueError(
                    f"attention_mask: expected {wanted}; got {list(attention_mask.shape)} with other zeros"
                )
            attention_mask = None
        self.model.check_cache(cache, attention_mask)  # before anything is retrieved for these tokens
        if starts := row_starts("attention_mask", attention_mask, tokens):
            cache.pad(starts)
        cache.history = torch.cat([cache.history, tokens], 1)
        if self._neighbours is not None:
            inputs = self._completed(cache, tokens.shape[1])
        return self.model(tokens, cache=cache, attention_mask=attention_mask, **inputs, **options)

    def _completed(self, cache: RetrofitCache, count: int) -> dict:
        """Return the result of `retrieve` for the chunks that complete in the history's last `count` columns."""
        m = self.model.config.chunk_len
        places, chunks = [], []
        for row, (start, held) in enumerate(zip(cache.starts, cache.positions)):
            first = max(held, 0) // m
            for chunk in range(completed(held, count, m)):
                begin = start + (first + chunk) * m
                places.append((row, chunk))
                chunks.append(cache.history[row, begin : begin + m])
        return self._neighbours.of_places(places, torch.stack(chunks), cache.batch) if chunks else {}

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict | None = None, **_) -> None:
        """See `FrozenDecoder.gradient_checkpointing_enable`."""
        self.model.gradient_checkpointing_enable(activation_checkpointing_kwargs)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **_) -> None:
        """See `FrozenDecoder.gradient_checkpointing_enable`."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def get_input_embeddings(self):
        """Return the decoder's."""
        return self.model.decoder.get_input_embeddings()

    def resize_token_embeddings(self, *_, **__):
        """Refuse, because the added layers have the decoder's vocabulary. Raises: ValueError."""
        raise ValueError("resize_token_embeddings: expected a call on the decoder, before `from_decoder`")

    def save_pretrained(
        self,
        folder: str | os.PathLike,
        *,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **options,
    ) -> None:
        """Write the added weights, the configuration and PEFT's adapters, if there are any.

        The configuration names the decoder by its origin if the decoder's weights have not changed. To find out, the
        origin is loaded and compared with the decoder bit by bit. A decoder without an origin, or whose
        weights have changed, is written too, with the configuration that it has now.

        Args:
            is_main_process: nothing is written if it is False.
            state_dict: weights by name, from which the added ones are taken; None for the model's.
            options: keywords of the decoder's `save_pretrained`.

        Raises: ValueError for adapters without their PeftModel, which alone can save them, for a decoder that its
        configuration does not rebuild, and for push_to_hub.
        """
        if push_to_hub:
            raise ValueError("push_to_hub: expected False; got True; upload the folder with huggingface_hub")
        if not is_main_process:
            return
        decoder, origin, folder = self.model.decoder, self.config.base, Path(folder)
        tuned = _check_saved(self.model)
        if origin is not None and not saved_decoder.is_unchanged(decoder, origin):
            origin = None
        folder.mkdir(parents=True, exist_ok=True)
        if origin is None:
            saved_decoder.save(decoder, folder / DECODER, **options)
            if not saved_decoder.is_unchanged(decoder, folder / DECODER):
                got = "one whose folder AutoModelForCausalLM loads with other weights"
                raise ValueError(f"decoder: expected a decoder that its configuration describes; got {got}")
        if tuned:
            decoder.save_pretrained(folder / ADAPTERS)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
        weights = save({name: tensor.contiguous() for name, tensor in self.trained_state_dict(state_dict).items()})
        disk.write_plain(folder / WEIGHTS, weights)
        RetrofitConfig(
            saved_decoder.config_of(decoder),
            self.config.retrieval,
            origin,
            hashlib.sha256(weights).hexdigest(),
            digest_of(origin or folder / DECODER),
            tuned,
        ).save_pretrained(folder)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike, *, decoder: PreTrainedModel | None = None, **options
    ) -> RetrofitForCausalLM:
        """Load a folder that `save_pretrained` wrote.

        decoder: a decoder that is loaded already, without the saved adapters; None: load it. options: of the decoder's
        from_pretrained.
        Raises: ValueError or RuntimeError if the configuration is corrupt, the added weights do not match it, or the
        weights in the decoder's folder have changed. FileNotFoundError if the decoder's folder is missing.
        """
        folder = Path(folder)
        config = _config_of(folder)
        state = _weights(folder / WEIGHTS, config.sha256)
        if config.adapters is None and (folder / DECODER / "adapter_config.json").exists():
            remedy = f'rename the folder, and add "adapters": true to {folder}/config.json'
            raise ValueError(f"folder: expected adapters in {ADAPTERS}; got some in {DECODER}, of 0.2.0; {remedy}")
        if decoder is None:
            decoder = saved_decoder.load(_checked_origin(folder, config), config.decoder, **options)
        if config.adapters:
            from peft import PeftModel

            decoder = PeftModel.from_pretrained(decoder, folder / ADAPTERS, is_trainable=True)
        fixed = ("vocab_size", "d_model", "d_ff", "num_layers", "share_embeddings")  # `retrofit` takes the decoder's
        left = (*fixed, "score_bias")  # an option of version 0.2.0
        changes = {name: value for name, value in config.retrieval.items() if name not in left}
        try:
            model = cls(config, retrofit(decoder, **changes))
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{folder}/config.json: corrupt (retrieval: {error})") from error
        expected = model.trained_state_dict()
        if state.keys() != expected.keys():
            got = f"{len(state)}, without or beside {min(state.keys() ^ expected.keys())}"
            raise ValueError(f"folder: expected the {len(expected)} weights of its configuration; got {got}")
        model.load_state_dict(state, strict=False)  # names a weight of another shape
        if (folder / GENERATION).exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model


#: Options besides the mode that part rows or tokens from their neighbours, and the values that do not.
PARTING = {
    "guidance_scale": (None, 1),
    "negative_prompt_ids": (None,),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "offloaded"),
    "custom_generate": (None,),
    "inputs_embeds": (None,),
    **dict.fromkeys(checks.RETRIEVED, (None,)),
}


def _check_generation(config: GenerationConfig, options: dict) -> None:
    """Raise ValueError for other modes than greedy decoding and sampling, and for an option in `PARTING`.

    config: resolved from all of the library's sources.
    """
    mode = config.get_generation_mode(options.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        wanted = "greedy decoding or sampling in a generation that retrieves"
        raise ValueError(f"generation_config: expected {wanted}; got {mode.value}")
    for name, served in PARTING.items():
        value = options.get(name, getattr(config, name, None))
        if not any(value is one or (isinstance(value, (int, float, str)) and value == one) for one in served):
            wanted = " or ".join(str(one) for one in served)
            got = value if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
            raise ValueError(f"{name}: expected {wanted} in a generation that retrieves; got {got}")


def _check_saved(model: FrozenDecoder) -> bool:
    """Return whether PEFT has to save adapters. Raises: ValueError for a decoder whose folder would not load."""
    decoder, base = model.decoder, base_of(model.decoder)
    layers = adapters(decoder)
    if layers and base is decoder:
        wanted = "the PeftModel whose adapters these are, to save them"
        raise ValueError(f"decoder: expected {wanted}; got the model within")
    if any(getattr(layer, "merged", False) for layer in layers):
        raise ValueError("decoder: expected adapters that are not merged; call unmerge_adapter() or merge_and_unload()")
    if base is not decoder and list(decoder.peft_config) != ["default"]:
        raise ValueError(f"decoder: expected one adapter, named 'default'; got {', '.join(decoder.peft_config)}")
    for ours, theirs in (("vocab_size", "vocab_size"), ("num_layers", "num_hidden_layers")):
        before, now = getattr(model.config, ours), getattr(base.config, theirs)
        if before != now:
            wanted = f"{theirs} = {before}, as when it was retrofitted"
            raise ValueError(f"decoder: expected {wanted}; got {now}; change the decoder before `from_decoder`")
    return base is not decoder


def _checked_origin(folder: Path, config: RetrofitConfig) -> str | Path:
    """Return the decoder's name or folder. Raises: FileNotFoundError, ValueError if its weights have changed."""
    origin = config.base or folder / DECODER
    if config.base_sha256 is None:
        return origin
    found = digest_of(origin)
    if found is None:
        got = "it is missing" if not Path(origin).is_dir() else "it holds no weights"
        raise FileNotFoundError(f"{origin}: expected the folder of the decoder that was retrofitted; {got}")
    if config.base_sha256 != found:
        raise ValueError(f"{origin}: expected the decoder that was retrofitted; its weights have changed")
    return origin


def _config_of(folder: Path) -> RetrofitConfig:
    """Return the saved configuration. Raises: ValueError naming the file, and the field of a wrong type."""
    kinds = {"decoder": dict, "retrieval": dict, "base": (str, type(None)), "sha256": str}
    kinds["adapters"] = (bool, type(None))
    file = folder / "config.json"
    content = disk.read_plain(file)
    try:
        said = disk.read_json(content)
        for name, kind in kinds.items():
            value = said.get(name) if isinstance(said, dict) else None
            if not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r}")
        config = RetrofitConfig.from_pretrained(folder)
        config.get_text_config()  # checks the decoder's fields; the library's exceptions have many types
    except Exception as error:
        raise ValueError(f"{file}: corrupt ({error})") from error
    return config


def _weights(file: Path, digest: str) -> dict[str, Tensor]:
    """Return the added weights, whose file must have this digest."""
    content = disk.read_plain(file)
    if digest != hashlib.sha256(content).hexdigest():
        raise ValueError(f"{file}: truncated or corrupt: its SHA-256 differs from the one in config.json")
    try:
        return load(content)
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated or corrupt ({error})") from None


def digest_of(folder: str | os.PathLike) -> str | None:
    """Return the SHA-256 over the digests of a decoder's weight files, sorted by name; None if there are none."""
    files = sorted(f for f in Path(folder).glob("*") if f.suffix in (".safetensors", ".bin"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(bytes.fromhex(disk.sha256_of(file)))
    return digest.hexdigest()


class NeighbourCollator:
    """Collator of rows of tokens and their neighbours: pads them on the right and makes labels.

    A row is a dict with input_ids, a list or tensor [n], and optionally `neighbours` [n//M,K,R] and `neighbour_mask`.
    `retrieve` is called for a row without neighbours.

    Args:
        chunk_len: M.
        retrieve: chunks int64 [n,M] -> neighbours [n,K,R] and a mask or None, as in `generate`.
        pad_token_id: id of padding, which is masked: any will do.
    """

    def __init__(self, chunk_len: int, retrieve: Retrieve | None = None, pad_token_id: int = 0):
        self.chunk_len, self.retrieve, self.pad = chunk_len, retrieve, pad_token_id

    def __call__(self, rows: Sequence[dict]) -> dict[str, Tensor]:
        tokens = [torch.as_tensor(row["input_ids"]) for row in rows]
        real = _padded([torch.ones_like(t) for t in tokens], 0)
        ids = _padded(tokens, self.pad)
        batch = {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, IGNORED)}
        found = [self._neighbours(row, t) for row, t in zip(rows, tokens)]
        some = next((f for f in found if len(f[0])), None)
        if some is None:
            return batch
        found = [f if len(f[0]) else tuple(t[:0] for t in some) for f in found]
        longest = ids.shape[1] // self.chunk_len
        return batch | {name: _padded(parts, 0, longest) for name, parts in zip(checks.RETRIEVED, zip(*found))}

    def _neighbours(self, row: dict, tokens: Tensor) -> tuple[Tensor, Tensor]:
        chunks = len(tokens) // self.chunk_len
        if row.get("neighbours") is not None:
            neighbours, mask = torch.as_tensor(row["neighbours"]), row.get("neighbour_mask")
            if len(neighbours) != chunks:
                wanted = f"[n//M,K,R] with n//M = {chunks} for n={len(tokens)}"
                raise ValueError(f"neighbours: expected {wanted}; got {list(neighbours.shape)}")
        elif self.retrieve is not None and chunks:
            neighbours, mask = self.retrieve(tokens[: chunks * self.chunk_len].view(chunks, self.chunk_len))
        else:
            neighbours, mask = tokens.new_zeros(0, 1, 1), None
        mask = None if mask is None else torch.as_tensor(mask)
        return neighbours, checks.token_mask(mask, neighbours)


def _padded(parts: list[Tensor], fill: int, length: int | None = None) -> Tensor:
    """Return [B,length,...] of parts [n,...]; the rest is `fill`. length: None: the longest part's."""
    length = max(len(p) for p in parts) if length is None else length
    out = parts[0].new_full((len(parts), length, *parts[0].shape[1:]), fill)
    for row, part in zip(out, parts):
        row[: len(part)] = part
    return out

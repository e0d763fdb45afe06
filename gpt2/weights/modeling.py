"""The model with the interface of transformers, for folders that ``make export`` writes.

An export contains this module in one file with the model's components: see ``bundle``. The options of
the model are in config.json.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from gpt2.kv_cache import KVCache
from gpt2.model import GPT

# Class name → class of each options object in config.json; an exported file fills it.
OPTION_CLASSES: dict[str, type] = {}


class KablateConfig(PretrainedConfig):
    """Content of config.json; ``model`` are the options of the model and its components."""

    # source.NATIVE_TYPE, which an exported file does not have.
    model_type = "kablate"


class GenerationCache:
    """KV caches of the sequences of a batch, for ``generate``.

    Sequences of different lengths are padded on the left by transformers. They then have separate
    caches, because the positions of their tokens differ.
    """

    def __init__(self, model: GPT, padding_B: list[int]) -> None:
        self.model = model
        # Padding of each sequence; one entry if no sequence of the batch is padded.
        self.padding_B = padding_B
        self.caches: list[KVCache] = []
        # All tokens so far, with padding.
        self.idx_BT = torch.empty(0, 0, dtype=torch.long)

    def decode(self, idx_BT: Tensor) -> Tensor:
        """Return the logits of the tokens that follow the cached ones; zeros for padding."""
        first = self.get_seq_length()
        self.idx_BT = torch.cat([self.idx_BT, idx_BT], 1) if first else idx_BT
        if not self.caches:
            self.caches = [self.model.new_cache() for _ in self.padding_B]
        if len(self.padding_B) == 1:
            return self.model.decode(idx_BT, self.caches[0])
        rows = zip(idx_BT, self.padding_B, self.caches, strict=True)
        logits = [
            self._row(idx_T, max(0, padding - first), cache) for idx_T, padding, cache in rows
        ]
        return torch.stack(logits)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, padding included."""
        return self.idx_BT.shape[1]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue the sequences ``beam_idx``: their tokens are decoded again."""
        idx_BT = self.idx_BT[beam_idx]
        if torch.equal(idx_BT, self.idx_BT):
            return
        if len(self.padding_B) > 1:
            self.padding_B = [self.padding_B[i] for i in beam_idx.tolist()]
        self.caches, self.idx_BT = [], self.idx_BT[:, :0]
        self.decode(idx_BT)

    def _row(self, idx_T: Tensor, padding: int, cache: KVCache) -> Tensor:
        logits_TV = self.model.decode(idx_T[None, padding:], cache)[0]
        return torch.cat([logits_TV.new_zeros(padding, logits_TV.shape[1]), logits_TV])


class KablateForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT-2 variant with a tied head; generates with a KV cache."""

    config_class = KablateConfig
    base_model_prefix = "transformer"

    def __init__(self, config: KablateConfig) -> None:
        super().__init__(config)
        # transformers builds models without data; constants of components need it.
        with torch.device("cpu"):
            self.transformer = GPT(read_options(config.to_dict()["model"]))
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the token embedding, which is the head too."""
        return self.transformer.wte

    def get_output_embeddings(self) -> None:
        """Return None: the head has no module."""
        return

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **settings: Any,
    ) -> dict[str, Any]:
        """Return the arguments of ``forward``: the tokens that are not cached."""
        first = past_key_values.get_seq_length() if past_key_values else 0
        return {
            "input_ids": input_ids[:, first:],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "use_cache": settings.get("use_cache"),
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **settings: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, the loss if there are ``labels``, and the cache if ``use_cache``.

        Only padding on the left is read from ``attention_mask``: later tokens affect no earlier one.
        """
        length = input_ids.shape[1] + (past_key_values.get_seq_length() if past_key_values else 0)
        if length > (limit := self.transformer.config.shape.block_size):
            raise ValueError(f"{length} tokens exceed the context of {limit}")
        cache = past_key_values
        if cache is None:
            padding = [0] if attention_mask is None else attention_mask.argmax(1).tolist()
            if any(padding):
                cache = GenerationCache(self.transformer, padding)
            elif use_cache and not self.training:
                cache = GenerationCache(self.transformer, [0])
        logits = self.transformer(input_ids) if cache is None else cache.decode(input_ids)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        kept: Any = cache if use_cache else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=kept)


def read_options(value: Any) -> Any:
    """Return the options that a JSON value of config.json describes."""
    if isinstance(value, list):
        return tuple(read_options(item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = {name: read_options(item) for name, item in value.items() if name != "class"}
    return OPTION_CLASSES[value["class"]](**fields)

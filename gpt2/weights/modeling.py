"""The model with the interface of transformers, for folders that ``make export`` writes.

Each argument takes effect as in transformers' GPT-2, or is refused by name.
Shapes: B batch, T tokens, C n_embd, V vocabulary.
"""

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from gpt2.attention.projections import ZeroInitLinear
from gpt2.kv_cache import KVCache
from gpt2.model import GPT
from gpt2.model_config import ModelConfig
from lib.pruning.layers import PaddedEmbedding, PaddedHead

# Class name → class of each options object in config.json; an exported file fills it.
OPTION_CLASSES: dict[str, type] = {}


class KablateConfig(PretrainedConfig):
    """Content of config.json; ``model`` are the options of the model and its components."""

    # source.NATIVE_TYPE, which an exported file does not have.
    model_type = "kablate"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    use_cache = True


class GenerationCache:
    """The sequences of a batch so far, and KV caches of their first tokens.

    Sequences with padding have separate KV caches, because the positions of their tokens differ. KV
    caches have no gradients: if gradients are enabled, and in training, all tokens are computed again.
    """

    is_compileable = False

    def __init__(self, model: GPT) -> None:
        self.model = model
        # One KV cache if no sequence is padded, or one for each sequence.
        self._caches: list[KVCache] = []
        self._cached_tokens = 0
        # Embeddings of all tokens, without positions, and False for padding.
        self.x_BTC = torch.empty(0, 0, 0)
        self.mask_BT = torch.empty(0, 0, dtype=torch.bool)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, padding included."""
        return self.mask_BT.shape[1]

    def append(self, x_BTC: Tensor, mask_BT: Tensor, *, all_layers: bool) -> list[Tensor]:
        """Append tokens and return their states: see ``hidden_states``."""
        earlier = self.get_seq_length()
        if earlier:
            x_BTC = torch.cat([self.x_BTC, x_BTC], 1)
            mask_BT = torch.cat([self.mask_BT, mask_BT], 1)
        self.x_BTC, self.mask_BT = x_BTC, mask_BT
        if not torch.is_grad_enabled() and not self.model.training:
            return self._decode(earlier, all_layers=all_layers)
        states = hidden_states(self.model, x_BTC, mask_BT, all_layers=all_layers)
        # A slice would not be what the logits are computed from.
        return [state_BTC[:, earlier:] for state_BTC in states] if earlier else states

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue the sequences ``beam_idx``; their KV caches are computed again."""
        if not torch.equal(beam_idx.cpu(), torch.arange(len(self.mask_BT))):
            self.x_BTC, self.mask_BT = self.x_BTC[beam_idx], self.mask_BT[beam_idx]
            self._caches = []

    def _decode(self, earlier: int, *, all_layers: bool) -> list[Tensor]:
        """Return the states of the tokens after ``earlier``, with those that a KV cache lacks."""
        padded = not self.mask_BT.all()
        count = len(self.mask_BT) if padded else 1
        if len(self._caches) != count:
            self._caches = [self.model.new_cache() for _ in range(count)]
            self._cached_tokens = 0
        first, self._cached_tokens = self._cached_tokens, self.get_seq_length()
        x_BTC, mask_BT = self.x_BTC[:, first:], self.mask_BT[:, first:]
        if not padded:
            states = _states(self.model, x_BTC, self._caches[0], all_layers=all_layers)
        else:
            states = [torch.zeros_like(x_BTC) for _ in range(1 + all_layers * len(self.model.h))]
            for row, (mask_T, cache) in enumerate(zip(mask_BT, self._caches, strict=True)):
                if mask_T.any():
                    x_1TC = x_BTC[row, mask_T][None]
                    new = _states(self.model, x_1TC, cache, all_layers=all_layers)
                    for state_BTC, new_1TC in zip(states, new, strict=True):
                        state_BTC[row, mask_T] = new_1TC[0].to(state_BTC.dtype)
        return [state_BTC[:, earlier - first :] for state_BTC in states]


def hidden_states(model: GPT, x_BTC: Tensor, mask_BT: Tensor, *, all_layers: bool) -> list[Tensor]:
    """Return the input of the head, after those of the blocks if ``all_layers``; zeros for padding.

    ``x`` are embeddings. Padding (False in ``mask_BT``) is moved behind the tokens of its sequence, where
    it affects none of them.
    """
    if mask_BT.all():
        return _states(model, x_BTC, all_layers=all_layers)
    order_BT = mask_BT.int().argsort(dim=1, descending=True, stable=True)
    order_BTC = order_BT[..., None].expand_as(x_BTC)
    states = _states(model, x_BTC.gather(1, order_BTC), all_layers=all_layers)
    places = [torch.zeros_like(each).scatter(1, order_BTC, each) for each in states]
    return [each.masked_fill(~mask_BT[..., None], 0) for each in places]


def _states(
    model: GPT, x_BTC: Tensor, cache: KVCache | None = None, *, all_layers: bool
) -> list[Tensor]:
    states: list[Tensor] = []

    def keep(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        states.append(inputs[0])

    hooks = [block.register_forward_pre_hook(keep) for block in model.blocks if all_layers]
    try:
        last_BTC = model.transform(x_BTC, cache)
    finally:
        for hook in hooks:
            hook.remove()
    return [*states, last_BTC]


class KablateForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT-2 variant; generates with a KV cache."""

    config_class = KablateConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    # The loss takes num_items_in_batch: accumulated gradients equal those of one batch.
    accepts_loss_kwargs = True
    # Refuses assisted generation, which would crop the cache.
    _is_stateful = True

    def __init__(self, config: KablateConfig) -> None:
        super().__init__(config)
        # transformers builds models without data; constants of components need it.
        with torch.device("cpu"):
            self.transformer = GPT(read_options(config.model))
        settings = config.to_dict()
        for name, value in summary(self.transformer.config).items():
            if settings[name] != value:
                raise ValueError(f"{name}: expected {value}, as trained, got {settings[name]}")
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        """Return whether the activations of blocks are recomputed in the backward pass."""
        return self.transformer.grad_checkpointing

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: partial[Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        if enable:
            assert gradient_checkpointing_func
            settings = gradient_checkpointing_func.keywords
            if settings != {"use_reentrant": False}:
                raise ValueError(f"use_reentrant: expected False and nothing else, got {settings}")
            if every_n_layers != 1 or gradient_checkpointing_func.func is not checkpoint:
                raise ValueError("every_n_layers, offload: gradients are recomputed in all blocks")
        self.transformer.grad_checkpointing = enable

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ZeroInitLinear):
            nn.init.zeros_(module.weight)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding, which may be the head too."""
        return self.transformer.wte

    def set_input_embeddings(self, value: PaddedEmbedding) -> None:
        """Replace the token embedding; its rows are the vocabulary."""
        model = self.transformer
        model.wte = value
        shape = replace(model.config.shape, vocab_size=value.num_embeddings, vocab_multiple=1)
        model.config = replace(model.config, shape=shape)
        self.config.model = write_options(model.config)

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the head; None if it is tied, and no module."""
        return self.transformer.lm_head

    def set_output_embeddings(self, new_embeddings: PaddedHead) -> None:
        """Replace the head. Raises ValueError if it is tied to the token embedding."""
        if self.transformer.lm_head is None:
            raise ValueError("set_output_embeddings: the head is tied to the input embeddings")
        self.transformer.lm_head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits, the loss if there are ``labels``, and the other outputs of GPT-2.

        The position of a token is the number of tokens before it that are not masked; masked tokens
        have the logits 0. Raises ValueError if an argument would have no effect.
        """
        config = self.config
        if config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions: attention weights are not computed as a whole")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: expected one of them")
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is not None and not whole:
            raise ValueError("logits_to_keep: not supported with labels")
        if past_key_values is not None and type(past_key_values) is not GenerationCache:
            what = type(past_key_values).__name__
            raise ValueError(f"past_key_values: expected those of an earlier call, got {what}")
        x_BTC = self.transformer.wte(input_ids) if inputs_embeds is None else inputs_embeds
        mask_BT = self._mask(x_BTC, attention_mask, past_key_values, position_ids)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if use_cache is None:
            use_cache = config.use_cache and not self.training
        cache = past_key_values
        if cache is None and use_cache:
            cache = GenerationCache(self.transformer)
        append = cache.append if cache else partial(hidden_states, self.transformer)
        states = append(x_BTC, mask_BT, all_layers=output_hidden_states)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.transformer.logits(states[-1][:, kept])
        loss = None
        if labels is not None:
            items = {"num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits_BTV, labels, logits_BTV.shape[-1], **items)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            past_key_values=cache if use_cache else None,
            hidden_states=tuple(states) if output_hidden_states else None,
        )
        as_tuple = not (config.return_dict if return_dict is None else return_dict)
        return output.to_tuple() if as_tuple else output

    def _mask(
        self,
        x_BTC: Tensor,
        attention_mask: Tensor | None,
        cache: GenerationCache | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Return False for padding among the new tokens. Raises ValueError for invalid arguments."""
        batch, new = x_BTC.shape[:2]
        seen = cache.get_seq_length() if cache else 0
        if seen + new > (limit := self.transformer.config.shape.block_size):
            raise ValueError(f"input_ids: {seen + new} tokens exceed the context of {limit}")
        earlier_BT = cache.mask_BT if cache else x_BTC.new_ones(batch, 0, dtype=torch.bool)
        if attention_mask is None:
            attention_mask = torch.cat([earlier_BT, earlier_BT.new_ones(batch, new)], 1)
        if attention_mask.shape != (batch, seen + new):
            what = f"expected the shape {[batch, seen + new]}, got {list(attention_mask.shape)}"
            raise ValueError(f"attention_mask: {what}")
        mask_BT = attention_mask.bool()
        if not torch.equal(mask_BT.to(attention_mask.dtype), attention_mask):
            raise ValueError("attention_mask: expected ones and zeros")
        if not torch.equal(mask_BT[:, :seen], earlier_BT):
            raise ValueError("attention_mask: differs from that of past_key_values")
        if position_ids is not None:
            own_BT = (mask_BT.long().cumsum(1) - 1)[:, seen:]
            if ((position_ids != own_BT) & mask_BT[:, seen:]).any():
                raise ValueError("position_ids: expected the number of earlier unmasked tokens")
        return mask_BT[:, seen:]


def summary(model: ModelConfig) -> dict[str, int | bool]:
    """Return the sizes of a model by their names in transformers, which config.json repeats."""
    shape = model.shape
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.n_embd,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "max_position_embeddings": shape.block_size,
        "tie_word_embeddings": not model.untied_head,
    }


def write_options(value: Any) -> Any:
    """Return options as JSON: objects with the name of their class."""
    if isinstance(value, tuple):
        return [write_options(item) for item in value]
    if not is_dataclass(value):
        return value
    options = {field.name: write_options(vars(value)[field.name]) for field in fields(value)}
    return {"class": type(value).__name__, **options}


def read_options(value: Any) -> Any:
    """Return the options that a JSON value of config.json describes."""
    if isinstance(value, list):
        return tuple(read_options(item) for item in value)
    if not isinstance(value, dict):
        return value
    options = {name: read_options(item) for name, item in value.items() if name != "class"}
    return OPTION_CLASSES[value["class"]](**options)

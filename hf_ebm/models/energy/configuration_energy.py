"""Configuration of `EnergyModel`, and its roles of tokens: as a tokenizer says, and for another number of ids."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import SubConfigSpec

from hf_ebm.checks import as_whole, check_choice
from hf_ebm.model_facts import num_embeddings
from hf_ebm.model_modes import evaluation_mode
from hf_ebm.models.checkpoints import CompositeConfig
from hf_ebm.models.energy.inputs import zero_inputs
from hf_ebm.random_state import random_state_kept
from hf_ebm.renamed import warn_of_rename
from hf_ebm.scoring.energies import ENERGIES
from hf_ebm.scoring.masking import MASKINGS

if TYPE_CHECKING:
    from transformers import ProcessorMixin


OLD_MASKING = "scoring_variant"  # what `masking` was called in configurations


class EnergyConfig(CompositeConfig):
    """What turns a masked language model into an energy model.

    Args:
        text_config: configuration of the masked language model.
        energy: a name of `hf_ebm.scoring.energies.ENERGIES`: `"local"` (minus the pseudo-log-likelihood), `"raw"`
            (minus the sum of logits) or another that is there.
        masking: which positions `score` masks in each row unless told otherwise, see `hf_ebm.scoring.masking`.
        mask_token_id: id of the mask token.
        pad_token_id: id written beyond the end of shorter sequences.
        special_token_ids: ids that are context wherever they stand: never masked, scored or proposed.
        excluded_token_ids: ids that may stand in a text and are scored there, but are never proposed: the unknown
            token, unused pieces, ids without a token.
        prefix_token_ids, suffix_token_ids: ids the tokenizer puts around a text; unconditional sampling does the same.
        max_sequence_length: the longest sequence in tokens, special ones included, in place of what the model's
            configuration and the tokenizer say; see `hf_ebm.model_facts`.
        tie_word_embeddings: of the wrapper itself, which ties nothing: each model inside follows its own configuration.

    Raises:
        ValueError: for an energy or a masking that doesn't exist, and ids that are no whole numbers from 0 up.
    """

    model_type = "hf_ebm_energy"
    sub_configs_defaults = {"text_config": SubConfigSpec(config_class=AutoConfig, model_type="bert")}  # noqa: RUF012

    text_config: PreTrainedConfig | dict | None = None
    energy: str = "local"
    masking: str = "exact"
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    special_token_ids: list[int] | None = None
    excluded_token_ids: list[int] | None = None
    prefix_token_ids: list[int] | None = None
    suffix_token_ids: list[int] | None = None
    max_sequence_length: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.masking = kwargs.pop(OLD_MASKING, self.masking)  # as models of before are saved
        super().__post_init__(**kwargs)
        for name, allowed in (("energy", ENERGIES), ("masking", MASKINGS)):
            check_choice(name, getattr(self, name), allowed)
        if self.max_sequence_length is not None:
            self.max_sequence_length = as_whole("max_sequence_length", self.max_sequence_length, 1)
        self._make_ids_plain(
            "mask_token_id", "pad_token_id", "special_token_ids", "excluded_token_ids", "prefix_token_ids",
            "suffix_token_ids",
        )  # fmt: skip

    @property
    def scoring_variant(self) -> str:
        """The old name of `masking`."""
        warn_of_rename(OLD_MASKING, "masking")
        return self.masking


def under_new_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a configuration that callers may give under their old names."""
    if OLD_MASKING not in fields:
        return fields
    warn_of_rename(OLD_MASKING, "masking")
    return {"masking" if name == OLD_MASKING else name: value for name, value in fields.items()}


# Placeholders that vocabularies carry for later use: BERT's [unused7], <unused7>, ESM's <null_1>, fairseq's
# madeupword0007, NOTUSED.
_PLACEHOLDER = re.compile(
    r"^(\[unused\d+\]|<unused_?\d+>|<null_\d+>|<\|?(reserved|extra)[\w ]*\d+\|?>|madeupword\d+|<s>NOTUSED|</s>NOTUSED)$"
)


def token_roles(
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin, vocab_size: int
) -> dict[str, int | list[int] | None]:
    """The token fields of `EnergyConfig` from a tokenizer.

    Args:
        tokenizer: any Transformers tokenizer, or a processor that holds one as `.tokenizer`.
        vocab_size: number of logits of the model; ids from the tokenizer's size up have no token.

    Raises:
        ValueError: if the tokenizer has no mask token, or more tokens than the model has embeddings.
    """
    tokenizer = tokenizer_of(tokenizer)
    mask_id = tokenizer.mask_token_id
    if mask_id is None:
        raise ValueError(
            f"tokenizer: {type(tokenizer).__name__} has no mask token, so it does not belong to a masked language model"
        )
    vocabulary = tokenizer.get_vocab()
    if mask_id >= vocab_size:
        raise ValueError(f"tokenizer: its mask token has id {mask_id}, the model's vocabulary has {vocab_size} ids")
    excluded = {i for token, i in vocabulary.items() if _PLACEHOLDER.match(token)}
    excluded |= set(range(vocab_size)) - set(vocabulary.values())
    # A `symbol_tokenizer` says which symbols targets are made of; the others occur in sources alone.
    excluded |= set(range(tokenizer.init_kwargs.get("num_target_ids", vocab_size), vocab_size))
    # Tokens added as special but without a role of their own (<|endoftext|>, say) are not among `all_special_ids`.
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = set(tokenizer.all_special_ids) | added
    if tokenizer.unk_token_id is not None:
        excluded.add(tokenizer.unk_token_id)
        special.discard(tokenizer.unk_token_id)
    template = tokenizer(tokenizer.mask_token)["input_ids"]
    middle = template.index(mask_id)
    return {
        "mask_token_id": mask_id,
        "pad_token_id": tokenizer.pad_token_id,
        "special_token_ids": sorted(i for i in special if i < vocab_size),
        "excluded_token_ids": sorted(i for i in excluded - special if i < vocab_size),
        "prefix_token_ids": [i for i in template[:middle] if i in special],
        "suffix_token_ids": [i for i in template[middle + 1 :] if i in special],
    }


def tokenizer_of(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> PreTrainedTokenizerBase:
    """The tokenizer itself, or that of a processor. Raises `ValueError` where there is none."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class
    tokenizer = getattr(processing_class, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"tokenizer: {type(processing_class).__name__} is none and holds none")
    return tokenizer


def resized_number(present: int, new_num_tokens: int | None, pad_to_multiple_of: int | None) -> int:
    """How many ids there will be, as Transformers counts them.

    Raises:
        ValueError: for what is no whole number from 1 up.
    """
    number = present if new_num_tokens is None else as_whole("new_num_tokens", new_num_tokens, 1)
    multiple = 1 if pad_to_multiple_of is None else as_whole("pad_to_multiple_of", pad_to_multiple_of, 1)
    return -(-number // multiple) * multiple


def resized_roles(
    config: EnergyConfig,
    present: int,
    number: int,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
) -> dict[str, Any]:
    """Token fields of `EnergyConfig` for another number of ids: a tokenizer's, or those there are.

    Without a tokenizer new ids have no token, so they are never proposed, and special and excluded ids that are no more
    are dropped.

    Raises:
        ValueError: for a tokenizer with more tokens than there will be ids, and where the mask token, the pad token or
            those around a text would be no more.
    """
    if processing_class is not None:
        count = len(tokenizer_of(processing_class))
        if count > number:
            raise ValueError(f"processing_class has {count} tokens, the model would have {number} ids")
        return token_roles(processing_class, number)
    needed: dict[str, list[int | None]] = {
        "mask_token_id": [config.mask_token_id],
        "pad_token_id": [config.pad_token_id],
        "prefix_token_ids": [*(config.prefix_token_ids or [])],
        "suffix_token_ids": [*(config.suffix_token_ids or [])],
    }
    for name, ids in needed.items():
        gone = [i for i in ids if i is not None and i >= number]
        if gone:
            raise ValueError(f"new_num_tokens: of {number} ids none would be {gone[0]}, which is in {name}")
    excluded = [i for i in config.excluded_token_ids or [] if i < number] + list(range(present, number))
    special = config.special_token_ids
    return {
        "special_token_ids": None if special is None else [i for i in special if i < number],
        "excluded_token_ids": sorted(set(excluded)) or None,
    }


def rehearse(mlm: PreTrainedModel, number: int, arguments: dict[str, Any]) -> None:
    """Resizes a copy that shares the weights, and runs it on five tokens: not every family's head follows.

    Raises:
        ValueError: for a model that can't be resized, or whose logits are of another number then.
    """
    shared: dict[int, Any] = {id(value): nn.Parameter(value.data, value.requires_grad) for value in mlm.parameters()}
    twin = copy.deepcopy(mlm, shared)
    ids = torch.arange(2, 7, device=mlm.device)[None] % number
    inputs = {"input_ids": ids, **zero_inputs(mlm, ids)} | (
        {"decoder_input_ids": ids} if mlm.config.is_encoder_decoder else {}
    )
    try:
        with random_state_kept(mlm.device), torch.no_grad():
            twin.resize_token_embeddings(**arguments)
            with evaluation_mode(twin):
                width = twin(**inputs).logits.shape[-1]
        sizes = {num_embeddings(twin), width}
    except Exception as error:  # whatever the model's own code raises on sizes it doesn't expect
        raise ValueError(f"resize_token_embeddings: {type(mlm).__name__} can't be resized: {error}") from error
    if sizes != {number}:
        raise ValueError(
            f"resize_token_embeddings: {type(mlm).__name__} can't be resized: of {number} ids it would have logits for "
            f"{width}"
        )

"""How a name, or a model object, becomes the model of a pipeline."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.models.adapters import saved_type, unwrapped
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.token_roles import token_roles

_HUB_ARGUMENTS = ("cache_dir", "local_files_only", "token", "revision", "subfolder")


class LoadFailure:
    """What a loader gives in place of a model, so that the pipeline can say why there is none.

    Were the error raised, Transformers would swallow it and go on to the class that the checkpoint names: that one
    makes up weights that are missing, and every energy would be wrong.
    """

    device = None  # `pipeline` reads it when it is given a device map

    def __init__(self, error: Exception):
        self.error = error


def loader_of(*model_classes: type[PreTrainedModel]) -> type:
    """A class for the registry of pipelines whose `from_pretrained` picks the model class by the checkpoint's type.

    Args:
        model_classes: classes of this project; what is of none of their types is left to the last one.
    """

    class Loader:
        @classmethod
        def from_pretrained(cls, name: str, **kwargs: Any) -> PreTrainedModel | LoadFailure:
            try:
                return _class_of(name, model_classes, kwargs).from_pretrained(name, **kwargs)
            except (OSError, ValueError, TypeError, RuntimeError) as error:
                return LoadFailure(error)

    return Loader


def _class_of(name: str, model_classes: tuple, kwargs: dict) -> type[PreTrainedModel]:
    hub = {k: kwargs[k] for k in _HUB_ARGUMENTS if k in kwargs}
    by_type = {model_class.config_class.model_type: model_class for model_class in model_classes}
    return by_type.get(saved_type(name, **hub), model_classes[-1])


def ready_model(model: object, tokenizer: object, model_classes: tuple[type[PreTrainedModel], ...]) -> PreTrainedModel:
    """The model itself, or a masked language model as an `EnergyModel`; with its token roles.

    Roles that an `EnergyModel` doesn't know, because no tokenizer lay beside its weights, are taken from `tokenizer`.

    Raises:
        ValueError: for a model that is neither, a tokenizer that is none, has no mask token or another one than the
            model, and one that Transformers has made up.
    """
    model = unwrapped("model", model)
    if not isinstance(model, model_classes):
        model = _wrapped(model, model_classes)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            f"tokenizer must be the model's tokenizer, got {type(tokenizer).__name__}; none could be loaded by the "
            f"name given, or from {model.name_or_path or 'the model'!r}"
        )
    if isinstance(model, EnergyModel):
        _give_roles(model, tokenizer)
    return model


def _wrapped(model: object, model_classes: tuple) -> EnergyModel:
    names = " or ".join(model_class.__name__ for model_class in model_classes)
    if EnergyModel not in model_classes or not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a name or folder, or of the class {names}, got {type(model).__name__}")
    try:
        return EnergyModel(model)
    except ValueError as error:
        raise ValueError(f"model must be of the class {names} or a masked language model; {error}") from error


def _give_roles(model: EnergyModel, tokenizer: PreTrainedTokenizerBase) -> None:
    if model.config.mask_token_id is None:
        if model.name_or_path and tokenizer.name_or_path == model.name_or_path:
            # The model has looked for a tokenizer there and found none, so this one is of no file.
            raise ValueError(f"tokenizer: none lies beside the weights in {model.name_or_path!r}; pass tokenizer=")
        for field, value in token_roles(tokenizer, model.vocab_size).items():
            setattr(model.config, field, value)
    if tokenizer.mask_token_id != model.config.mask_token_id:
        raise ValueError(
            f"tokenizer: its mask token has id {tokenizer.mask_token_id}, the model's is {model.config.mask_token_id}"
        )

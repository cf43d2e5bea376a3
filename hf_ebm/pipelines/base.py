"""What the pipelines share: how a name, or a model object, becomes their model, and how inputs make batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set, Sized
from contextlib import contextmanager
from typing import Any, ClassVar

from torch.utils.data import DataLoader, Dataset
from transformers import Pipeline, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pipelines.base import no_collate_fn
from transformers.pipelines.pt_utils import KeyDataset, PipelineDataset, PipelineIterator

from hf_ebm.checks import as_whole, check_choice, shown, whole
from hf_ebm.models.adapters import saved_type, unwrapped
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.configuration_energy import token_roles
from hf_ebm.models.energy.encoding import check_same_mask
from hf_ebm.texts import UNKNOWN_TOKENS, report_unknown

_HUB_ARGUMENTS = ("cache_dir", "local_files_only", "token", "revision", "subfolder")


class RowPipeline(Pipeline):
    """Base of the pipelines. A subclass says what a row is (`prepared`), what it takes (`arguments`), and runs a batch.

    Called with one input it gives one result; with a list, a list; with a `KeyDataset`, a column of a data set or any
    other iterable, an iterator over the results, in order, read as it goes. A batch of `batch_size=` inputs (1 unless
    given) is one call of the model's method.

    Every call takes `unknown_tokens`: `"warn"` logs a warning for the first input that holds something the tokenizer
    has no token for, `"error"` refuses each, `"ignore"` does neither.

    Args:
        model: a model object; `pipeline` hands over what it has loaded by name. A masked language model is wrapped as
            `EnergyModel` where one is needed.
        tokenizer: the model's; for a `ResidualEnergyModel` that of its language model, by default the one it holds.
        kwargs: of `Pipeline` (`device`, `batch_size`, …), and arguments of the calls.

    Raises:
        ValueError: for a model of another kind or that cannot be loaded, no tokenizer or another model's, arguments
            that don't exist; when called, naming the inputs, for what the model's method refuses.
    """

    _load_tokenizer = None  # if there is one; a model may bring its own, and its absence has a better message here
    # Annotated as None, which is their default alone.
    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = False  # type: ignore[assignment]

    model_classes: ClassVar[tuple[type[PreTrainedModel], ...]]
    _told_unknown = False  # whether the call has warned of unknown tokens

    def __init__(
        self,
        model: PreTrainedModel | LoadFailure,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ):
        kwargs.pop("local_files_only", None)  # `pipeline` has used it and hands it on
        if isinstance(model, LoadFailure):
            raise ValueError(f"model cannot be loaded: {model.error}") from model.error
        if tokenizer is None:
            tokenizer = getattr(model, "lm_tokenizer", None)
        model = ready_model(model, tokenizer, self.model_classes)
        # Annotated as a tokenizer in Python, though fast ones are taken as well.
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)  # type: ignore[arg-type]

    @property
    def spelling(self) -> PreTrainedTokenizerBase:
        """The tokenizer, which `__init__` has demanded."""
        if self.tokenizer is None:
            raise ValueError("tokenizer must be given")
        return self.tokenizer

    def __repr__(self) -> str:
        # The stock one asks a model that generates for its output modalities, which this project's don't state.
        return f"{type(self).__name__}(model={type(self.model).__name__}, dtype={self.dtype}, device={self.device})"

    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments of a call, which may also be given when the pipeline is made."""
        raise NotImplementedError

    def prepared(self, item: object) -> Any:
        """A checked row of one input, here of a text. Raises `ValueError`, naming what is wrong."""
        if not isinstance(item, str):
            raise ValueError(f"inputs must be texts, got {type(item).__name__}")
        return item

    def run_batch(self, rows: list, numbers: list[int], **arguments: Any) -> list:
        """One result per row; `numbers` are those of the inputs, counted from 0 in a call."""
        raise NotImplementedError

    def __call__(
        self, inputs: Any, *args: Any, num_workers: int | None = None, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        alone = getattr(inputs, "ndim", 1) == 0 and not isinstance(inputs, str)
        # Of bytes these would be numbers, and a set has no order.
        if isinstance(inputs, (bytes, bytearray, Set)) or (alone and whole(inputs) is None):
            raise ValueError(f"inputs must be one input, or a list or another iterable of them, got {shown(inputs)}")
        inputs = whole(inputs) if alone else inputs
        if isinstance(inputs, (list, KeyDataset)) and not len(inputs):
            self._sanitize_parameters(**kwargs)
            return []  # Transformers looks at the first input
        batch_size = self._batch_size if batch_size is None else batch_size
        if batch_size is not None:
            batch_size = as_whole("batch_size", batch_size, 1)
        self._told_unknown = False
        if isinstance(inputs, Iterable) and not isinstance(inputs, (str, Mapping, list)):
            inputs = (item for item in inputs)  # of iterables it streams generators alone
        return super().__call__(inputs, *args, num_workers=num_workers, batch_size=batch_size, **kwargs)

    def _sanitize_parameters(self, **given: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        known = (*self.arguments(), "unknown_tokens")
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"{type(self).__name__} has no argument {', '.join(unknown)}; it takes {', '.join(known)}")
        how = {"unknown_tokens": given.pop("unknown_tokens")} if "unknown_tokens" in given else {}
        for value in how.values():
            check_choice("unknown_tokens", value, UNKNOWN_TOKENS)
        return how, given, {}

    def preprocess(self, input_: tuple[int, Any], **parameters: Any) -> dict[str, Any]:
        number, item = input_
        unknown_tokens = parameters.get("unknown_tokens", "warn")
        with _inputs_named([number]):
            row = self.prepared(item)
            if unknown_tokens != "warn" or not self._told_unknown:  # once a call: a data set may have thousands
                self._told_unknown = report_unknown(
                    self.spelling, f"input {number}", self.texts_of(item), unknown_tokens
                )
            return {"number": number, "row": row}

    def texts_of(self, item: Any) -> list[str]:
        """The texts that an input holds."""
        return [item] if isinstance(item, str) else []

    def _forward(  # type: ignore[override]  # rows are no tensors, and results no model's output
        self, input_tensors: dict[str, Any], **arguments: Any
    ) -> dict[str, Any]:
        numbers, rows = input_tensors["number"], input_tensors["row"]
        is_batch = isinstance(numbers, list)
        numbers, rows = (numbers, rows) if is_batch else ([numbers], [rows])
        with _inputs_named(numbers):
            results = self.run_batch(rows, numbers, **arguments)
        return {"result": results if is_batch else results[0]}

    def postprocess(self, model_outputs: Any, **parameters: Any) -> Any:
        return model_outputs["result"]

    def run_single(
        self,
        inputs: Any,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> Any:
        return super().run_single((0, inputs), preprocess_params, forward_params, postprocess_params)

    def get_iterator(
        self,
        inputs: Any,
        num_workers: int,
        batch_size: int,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> PipelineIterator:
        """The stock one, but with numbered inputs, and batches that need no pad token: the model's methods pad."""
        rows: Dataset
        if isinstance(inputs, Sized):
            rows = PipelineDataset(_Numbered(inputs), self.preprocess, preprocess_params)
        else:
            rows, num_workers = PipelineIterator(enumerate(inputs), self.preprocess, preprocess_params), 0
        collate = no_collate_fn if batch_size == 1 else _collated
        batches = DataLoader(rows, num_workers=num_workers, batch_size=batch_size, collate_fn=collate)
        outputs = PipelineIterator(batches, self.forward, forward_params, loader_batch_size=batch_size)
        return PipelineIterator(outputs, self.postprocess, postprocess_params)


class _Numbered(Dataset):
    """Pairs of a number and an input."""

    def __init__(self, inputs: Any):
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, self.inputs[number]


def _collated(items: list[dict]) -> dict[str, list]:
    return {name: [item[name] for item in items] for name in items[0]}


@contextmanager
def _inputs_named(numbers: list[int]) -> Iterator[None]:
    """Adds to an error which inputs of the call it is about: rows are numbered by batch in the models' messages."""
    try:
        yield
    except ValueError as error:
        which = f"input {numbers[0]}" if len(numbers) == 1 else f"inputs {numbers[0]} to {numbers[-1]}"
        raise ValueError(f"{error} ({which})") from error


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
    check_same_mask(tokenizer, model.config.mask_token_id)

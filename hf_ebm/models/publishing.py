"""`push_to_hub` of this package's models, and their registration with Transformers' auto classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, ModelCard

    _Model = PreTrainedModel  # what this is mixed into
else:
    _Model = object


class PublishingMixin(_Model):
    """Gives a model `push_to_hub` with a card, a tokenizer, and its code for those without `hf_ebm`."""

    def card_facts(self) -> dict[str, Any]:
        """What the card says of this kind of model in place of what it says of any; all of it may be left out.

        Keys: `template` (a file of `hub_cards`), `tags`, `task` (of its results), `citations` (names in
        `hf_ebm.publishing.citations`), and what the template reads beside.
        """
        return {}

    def push_to_hub(  # type: ignore[override]  # Transformers' takes anything
        self,
        repo_id: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        card: ModelCard | None = None,
        **kwargs: Any,
    ) -> CommitInfo:
        """Uploads weights, configuration, generation settings, tokenizer, card and code as one commit.

        Args:
            repo_id: name of the repository, `"user/name"`; it is created if there is none.
            tokenizer: uploaded beside the model.
            card: a `ModelCard`; by default `hf_ebm.publishing.cards.model_card(self, name=…)`, which then states what
                can be seen from the model alone.
            kwargs: `commit_message`, `commit_description`, `private`, `token`, `revision`, `create_pr`,
                `max_shard_size`, `tags` as in Transformers.

        Raises:
            OSError: if the upload fails; it says what is still there.
        """
        try:
            from hf_ebm.publishing.hub import push_model
        except ImportError as error:  # the class came with a checkpoint's own code
            raise ImportError("push_to_hub needs the package hf_ebm, which is not installed") from error
        return push_model(self, repo_id, tokenizer=tokenizer, card=card, **kwargs)


def register(
    config_class: type[PreTrainedConfig],
    auto_classes: dict[Any, type[PreTrainedModel]],
    inside_a_checkpoint: bool = False,
) -> None:
    """Registers a configuration, and a model class with each auto class.

    The code of a checkpoint is found by its `auto_map`. Registered, it would stand in for the code of every other
    checkpoint of its type, so of it only models inside another model are, which are looked up by their type alone. An
    installed `hf_ebm` goes before.
    """
    remote = config_class.__module__.startswith("transformers_modules.")
    if remote and (config_class.model_type in CONFIG_MAPPING or not inside_a_checkpoint):
        return
    AutoConfig.register(config_class.model_type, config_class)
    for auto_class, model_class in auto_classes.items():
        auto_class.register(config_class, model_class)

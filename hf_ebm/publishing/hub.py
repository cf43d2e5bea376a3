"""Uploads: a model with its weights, configuration, tokenizer, code and card as one commit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import HTTPError  # of whichever client it uses
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ADAPTER_CONFIG_NAME

from hf_ebm.checks import as_path
from hf_ebm.publishing.cards import model_card
from hf_ebm.publishing.remote_code import is_own, write_remote_code


def save_for_hub(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    card: ModelCard,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_size: int | str = "50GB",
) -> None:
    """Writes what `push_to_hub` uploads: weights (safetensors), settings, tokenizer, card, and the model's code.

    Args:
        folder: an empty or new folder.
        card: see `hf_ebm.publishing.cards.model_card`.
    """
    folder = as_path("folder", folder)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if is_own(type(model)):
        write_remote_code(folder, model)
    card.save(folder / "README.md")


def push_model(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    card: ModelCard | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
) -> CommitInfo:
    """Creates the repository if there is none and uploads in one commit; see `PublishingMixin.push_to_hub`."""
    card = card or model_card(model, name=repo_id.rpartition("/")[2], repo_id=repo_id, tags=tags or ())
    with TemporaryDirectory() as folder:
        save_for_hub(model, folder, card=card, tokenizer=tokenizer, max_shard_size=max_shard_size)
        adapter = Path(folder) / ADAPTER_CONFIG_NAME
        settings = json.loads(adapter.read_text(encoding="utf-8")) if adapter.is_file() else {}
        base = settings.get("base_model_name_or_path", "")
        if Path(base).is_absolute():
            raise ValueError(
                f"the adapter's base model is a folder of this machine, {base}; upload that first and load it by name, "
                "or merge_and_unload() the adapter"
            )
        with upload_errors("the model in memory is unchanged; call push_to_hub again"):
            api = HfApi()
            repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/pr"):
                api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
            return api.upload_folder(
                repo_id=repo_id, folder_path=folder, token=token, revision=revision, create_pr=create_pr,
                commit_message=commit_message or f"Upload {type(model).__name__}",
                commit_description=commit_description,
            )  # fmt: skip


@contextmanager
def upload_errors(advice: str) -> Iterator[None]:
    """Says in an upload's error what is still there and what to do."""
    try:
        yield
    except (HTTPError, OSError) as error:
        raise OSError(f"the upload failed ({' '.join(str(error).split())}); {advice}") from error

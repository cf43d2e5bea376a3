"""Model cards of what was run: facts from a model, a trainer or finished chains into a template of `hub_cards`.

What isn't known isn't made up: the card says that it is not stated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FunctionLoader, StrictUndefined
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.checks import number
from hf_ebm.publishing.remote_code import auto_classes, is_own
from hf_ebm.sampling.convergence import energy_diagnostics
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.sampling.warm_start import DECODERS

_EXAMPLES = 10
# The papers behind models and trainers, as BibTeX.
CITATIONS = {
    "GOYAL_2021": """@phdthesis{goyal2021characterizing,
  title = {Characterizing and Overcoming the Limitations of Neural Autoregressive Models},
  author = {Goyal, Kartik},
  school = {Carnegie Mellon University},
  year = {2021}
}""",
    "GOYAL_2022": """@inproceedings{goyal2022exposing,
  title = {Exposing the Implicit Energy Networks behind Masked Language Models via {Metropolis--Hastings}},
  author = {Goyal, Kartik and Dyer, Chris and Berg-Kirkpatrick, Taylor},
  booktitle = {International Conference on Learning Representations},
  year = {2022}
}""",
    "GOYAL_2017": """@inproceedings{goyal2017differentiable,
  title = {Differentiable Scheduled Sampling for Credit Assignment},
  author = {Goyal, Kartik and Dyer, Chris and Berg-Kirkpatrick, Taylor},
  booktitle = {Annual Meeting of the Association for Computational Linguistics},
  year = {2017}
}""",
    "GOYAL_2019": """@inproceedings{goyal2019empirical,
  title = {An Empirical Investigation of Global and Local Normalization for Recurrent Neural Sequence Models Using a
    Continuous Relaxation to Beam Search},
  author = {Goyal, Kartik and Dyer, Chris and Berg-Kirkpatrick, Taylor},
  booktitle = {Conference of the North American Chapter of the Association for Computational Linguistics},
  pages = {1724--1733},
  year = {2019}
}""",
    "WELLECK_2021": """@inproceedings{welleck2021mle,
  title = {{MLE}-Guided Parameter Search for Task Loss Minimization in Neural Sequence Modeling},
  author = {Welleck, Sean and Cho, Kyunghyun},
  booktitle = {AAAI Conference on Artificial Intelligence},
  year = {2021}
}""",
    "SHEN_2016": """@inproceedings{shen2016minimum,
  title = {Minimum Risk Training for Neural Machine Translation},
  author = {Shen, Shiqi and Cheng, Yong and He, Zhongjun and He, Wei and Wu, Hua and Sun, Maosong and Liu, Yang},
  booktitle = {Annual Meeting of the Association for Computational Linguistics},
  year = {2016}
}""",
    "SHAO_2024": """@article{shao2024deepseekmath,
  title = {{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language Models},
  author = {Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and Song, Junxiao and Bi, Xiao and Zhang,
    Haowei and Zhang, Mingchuan and Li, Y. K. and Wu, Y. and Guo, Daya},
  journal = {arXiv preprint arXiv:2402.03300},
  year = {2024}
}""",
    "LIU_2025": """@article{liu2025understanding,
  title = {Understanding {R1-Zero}-Like Training: A Critical Perspective},
  author = {Liu, Zichen and Chen, Changyu and Li, Wenjun and Qi, Penghui and Pang, Tianyu and Du, Chao and Lee, Wee Sun
    and Lin, Min},
  journal = {arXiv preprint arXiv:2503.20783},
  year = {2025}
}""",
    "LIU_2022": """@inproceedings{liu2022brio,
  title = {{BRIO}: Bringing Order to Abstractive Summarization},
  author = {Liu, Yixin and Liu, Pengfei and Radev, Dragomir and Neubig, Graham},
  booktitle = {Annual Meeting of the Association for Computational Linguistics},
  pages = {2890--2903},
  year = {2022}
}""",
    "ZHAO_2023": """@article{zhao2023slic,
  title = {{SLiC-HF}: Sequence Likelihood Calibration with Human Feedback},
  author = {Zhao, Yao and Joshi, Rishabh and Liu, Tianqi and Khalman, Misha and Saleh, Mohammad and Liu, Peter J.},
  journal = {arXiv preprint arXiv:2305.10425},
  year = {2023}
}""",
    "DENG_2020": """@inproceedings{deng2020residual,
  title = {Residual Energy-Based Models for Text Generation},
  author = {Deng, Yuntian and Bakhtin, Anton and Ott, Myle and Szlam, Arthur and Ranzato, Marc'Aurelio},
  booktitle = {International Conference on Learning Representations},
  year = {2020}
}""",
}


@dataclass
class Training:
    """A training run.

    Args:
        trainer: name of the trainer class.
        objective: what was minimized, in a sentence.
        hyperparameters: by name.
        seed: of the run.
        data: what was trained on.
        train_rows: how many rows.
        steps, epochs: how long.
        seconds: how long, from step `resumed_at` on.
        resumed_at: 0, or the step of the checkpoint it last went on from.
        hardware: on what.
        metrics: final numbers by name, as the trainer logs them.
    """

    trainer: str
    objective: str
    hyperparameters: Mapping[str, Any]
    seed: int
    data: str | None = None
    train_rows: int | None = None
    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    resumed_at: int = 0
    hardware: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Sampling:
    """How samples were drawn and how the chains went; see `measured`."""

    settings: Mapping[str, Any]
    chains: int
    acceptance: float
    novel: float
    r_hat: float | None
    ess_bulk: float | None
    samples: Sequence[tuple[float, str]]

    @property
    def sampler(self) -> str:
        """The kernel or the decoder, and what it does."""
        name = self.settings.get("decoder") or self.settings["kernel"]
        return f"`{name}` {(KERNELS | DECODERS)[name].about}"

    @classmethod
    def measured(cls, output: ChainGenerationOutput, tokenizer: PreTrainedTokenizerBase) -> Sampling:
        """The settings and diagnostics of chains that were run with `EnergyModel.generate`.

        R-hat and effective sample size are the worst over prompts. `None` where no prompt has two chains or more, of
        one length, with four kept samples or more and energies that differ.
        """
        found = []
        for prompt in output.prompt_indices.unique():
            own = output.prompt_indices == prompt
            energies, alike = output.energies[own], len(output.attention_mask[own].sum(1).unique()) == 1
            if alike and energies.shape[0] >= 2 and energies.shape[1] >= 4 and len(energies.unique()) > 1:
                found.append(energy_diagnostics(energies))
        texts = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        final = output.run.cold.energy.double().tolist()
        return cls(
            settings=dict(output.run.run_config["settings"]),
            chains=len(output.sequences),
            acceptance=float(output.trace.acceptance_rate.nanmean()),
            novel=float(output.trace.novel_rate.nanmean()),
            r_hat=max((each.r_hat for each in found), default=None),
            ess_bulk=min((each.ess_bulk for each in found), default=None),
            samples=list(zip(final, texts, strict=True))[:_EXAMPLES],
        )


def model_card(
    model: PreTrainedModel,
    *,
    name: str,
    training: Training | None = None,
    sampling: Sampling | None = None,
    metrics: Mapping[str, float] | None = None,
    repo_id: str | None = None,
    dataset: str | None = None,
    dataset_name: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    tags: Sequence[str] = (),
    limits: str | None = None,
    bibtex: Sequence[str] = (),
) -> ModelCard:
    """The card of a model of this package, or of one that a trainer of this package trained.

    Args:
        name: title of the card.
        training: of the last training run, `Training`.
        sampling: of an `EnergyModel`'s chains that were run, `Sampling.measured(output, tokenizer)`.
        repo_id: name of the repository, for the example; default `name`.
        metrics: further evaluation results, by name. They and the run's own go into the card's `model-index`.
        dataset: Hub name of the data; `dataset_name`: what it is called in the results.
        base_model: Hub name of the model this one was made from.
        license, language, tags: metadata; a license that isn't given isn't stated.
        limits: what the model isn't for, in a sentence or more, beside what the template says of its kind.
        bibtex: citations beside the kind's own.

    Raises:
        ValueError: for metadata that the Hub's schema refuses (a name that is empty, a metric that is no number), and
            the sampling of chains with another model.
    """
    if not name or not isinstance(name, str):
        raise ValueError(f"name must be a text, got {name!r}")
    results = {**(training.metrics if training else {}), **(metrics or {})}
    for metric, value in results.items():
        if not isinstance(value, float) and number(value) is None:
            raise ValueError(f"metrics: {metric} must be a number, got {value!r}")
    kind = _kind(model)
    if sampling is not None and "energy" not in kind:
        raise ValueError(f"sampling is of the chains of an EnergyModel, got a {type(model).__name__}")
    results = {metric: float(value) for metric, value in results.items()}
    data_name = dataset_name or dataset or (training.data if training else None) or "not stated"
    evaluations = [
        EvalResult(
            task_type=kind["task"], dataset_type=dataset or "unknown", dataset_name=data_name, metric_type=metric,
            metric_value=value,
        )
        for metric, value in results.items()
        if math.isfinite(value)
    ]  # fmt: skip
    languages = language if language is None or isinstance(language, str) else list(language)
    data = ModelCardData(
        model_name=name, license=license, language=languages, base_model=base_model,
        datasets=dataset, library_name="transformers", tags=sorted({"hf_ebm", *kind["tags"], *tags}),
        eval_results=evaluations or None,
    )  # fmt: skip
    templates = Environment(loader=FunctionLoader(_template), undefined=StrictUndefined, keep_trailing_newline=True)
    templates.filters["cell"] = _cell
    content = templates.get_template(kind["template"]).render(
        card_data=data.to_yaml(),
        name=name,
        repo=repo_id or name,
        model={**_described(model), **kind},
        training=training,
        sampling=sampling,
        results=results,
        dataset=data_name,
        license_text=license or "not stated",
        base=base_model or "not stated",
        limits=limits,
        bibtex=list(dict.fromkeys([*(CITATIONS[name] for name in kind["citations"]), *bibtex])),
        date=time.strftime("%Y-%m-%d"),
    )
    return ModelCard(content)


def _cell(value: Any) -> str:
    """A value as a cell of a Markdown table."""
    text = " ".join(str(value).split())
    for character in "\\`|<*_":
        text = text.replace(character, f"\\{character}")
    return text


def _template(name: str) -> str:
    return (resources.files("hf_ebm.hub_cards") / name).read_text(encoding="utf-8")


def _kind(model: PreTrainedModel) -> dict[str, Any]:
    """What a model says of its kind (`card_facts` of `PublishingMixin`) over what is seen of any."""
    tasks = {"AutoModelForSeq2SeqLM": "text2text-generation", "AutoModelForMaskedLM": "fill-mask"}
    autos = auto_classes(type(model), required=False)
    task = next((tasks[auto] for auto in autos if auto in tasks), "text-generation")
    facts = {"template": "trained_model.md", "tags": [model.config.model_type], "task": task, "citations": []}
    return facts | getattr(model, "card_facts", dict)()


def _described(model: PreTrainedModel) -> dict[str, Any]:
    """What the templates say of a model itself."""
    return {
        "class": type(model).__name__,
        "architecture": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "auto_class": next(iter(auto_classes(type(model), required=False)), type(model).__name__),
        "own": is_own(type(model)),
    }


def hardware(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    return f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"

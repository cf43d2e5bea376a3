"""Corrects a language model by an energy of texts, and bounds its perplexity: `python examples/residual_model.py`."""

from argparse import ArgumentParser
from tempfile import TemporaryDirectory

import torch

from hf_ebm import ResidualEnergyModel
from hf_ebm.assets import KJV_CAUSAL_LM, KJV_MASKED_LM, held_out_verses, load_embedded_causal
from hf_ebm.data.conditional import split_continuations
from hf_ebm.models.residual.scoring_residual import residual_perplexity
from hf_ebm.trainers import ResidualNCEConfig, ResidualNCETrainer

parser = ArgumentParser(description=__doc__)
parser.add_argument("--num_train", type=int, default=400, help="verses to train on")
parser.add_argument("--num_test", type=int, default=20)
parser.add_argument("--max_steps", type=int, default=50)
parser.add_argument("--max_new_tokens", type=int, default=20, help="tokens of a continuation, after a prefix of 10")
parser.add_argument("--num_samples", type=int, default=32, help="samples of the language model for each prefix")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

_, tokenizer = load_embedded_causal()
model = ResidualEnergyModel.from_lm_and_encoder(KJV_CAUSAL_LM, KJV_MASKED_LM, dtype=torch.float32)
train, test = (
    split_continuations(verses[:count], tokenizer, model.end_ids, prefix_tokens=10, max_new_tokens=args.max_new_tokens)
    for verses, count in zip(held_out_verses(), (args.num_train, args.num_test), strict=True)
)
with TemporaryDirectory() as folder:
    config = ResidualNCEConfig(
        folder,
        online=True,  # negatives are sampled while it trains; `hf-ebm negatives` samples them beforehand
        max_new_tokens=args.max_new_tokens,
        max_steps=args.max_steps,
        learning_rate=4e-4,
        warmup_steps=0.1,
        per_device_train_batch_size=16,
        save_strategy="no",
        report_to=[],
        seed=args.seed,
    )
    trainer = ResidualNCETrainer(model, config, train_dataset=train, eval_dataset=test, processing_class=tokenizer)
    trainer.train()
    found = trainer.evaluate()
real, generated = found["eval_accuracy_real"], found["eval_accuracy_generated"]
print(f"energies have the right sign for {real:.0%} of the verses and {generated:.0%} of the samples")

sampling = dict(max_new_tokens=args.max_new_tokens, seed=args.seed)
out = model.generate([test[0]["prefix_ids"]], num_candidates=args.num_samples, num_samples=3, **sampling)
print(*tokenizer.batch_decode(out.sequences, skip_special_tokens=True), sep="\n")
print(f"chosen from {args.num_samples} candidates, of which {float(out.effective_sample_size[0]):.1f} count")

prefixes, continuations = ([row[name] for row in test] for name in ("prefix_ids", "continuation_ids"))
bounds = residual_perplexity(model, prefixes, continuations, num_samples=args.num_samples, **sampling)
lower, upper = float(bounds.lower), float(bounds.upper)
print(f"perplexity: language model {bounds.base_perplexity:.2f}, corrected {lower:.2f} to {upper:.2f}")

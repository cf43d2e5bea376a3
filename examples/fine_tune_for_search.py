"""Fine-tunes a sequence-to-sequence model for beam search, on stress of English words, after cross entropy:
`python examples/fine_tune_for_search.py` (needs the extra hf_ebm[data])."""

from argparse import ArgumentParser
from tempfile import TemporaryDirectory

from transformers import DataCollatorForSeq2Seq, set_seed

from hf_ebm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration, soft_beam_search
from hf_ebm.data.cmudict_tasks import load_stress
from hf_ebm.data.metrics import stress_scores
from hf_ebm.data.symbols import encode_pairs, num_target_ids, symbol_tokenizer
from hf_ebm.trainers import CrossEntropyTrainer, SoftBeamConfig, SoftBeamTrainer

parser = ArgumentParser(description=__doc__)
parser.add_argument("--num_train", type=int, default=8000, help="words to train on")
parser.add_argument("--num_test", type=int, default=300)
parser.add_argument("--pretraining_steps", type=int, default=350, help="with cross entropy")
parser.add_argument("--max_steps", type=int, default=150, help="with relaxed beam search")
parser.add_argument("--hidden_size", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

set_seed(args.seed)
data = load_stress(max_train=args.num_train)  # "HH AH L OW" -> "- 0 - 1"
tokenizer = symbol_tokenizer(data["train"]["target"], data["train"]["source"])
train, test = encode_pairs(data["train"], tokenizer), data["test"][: args.num_test]
sizes = dict(embedding_dim=args.hidden_size // 2, decoder_embedding_dim=16, hidden_size=args.hidden_size)
model = LSTMSeq2SeqForConditionalGeneration(  # or AutoModelForSeq2SeqLM.from_pretrained(…) with its own tokenizer
    LSTMSeq2SeqConfig(
        vocab_size=len(tokenizer),
        decoder_vocab_size=num_target_ids(tokenizer),
        attention="fixed",
        initial_state="zero",
        **sizes,
    )
)
shared = dict(per_device_train_batch_size=32, max_grad_norm=1.0, save_strategy="no", report_to=[], seed=args.seed)
given = dict(train_dataset=train, data_collator=DataCollatorForSeq2Seq(tokenizer), processing_class=tokenizer)


def wrong_vowels() -> float:
    """The share of vowels of test words whose stress a beam of three gets wrong."""
    inputs = tokenizer(test["source"], padding=True, return_tensors="pt")
    search = dict(custom_generate=soft_beam_search, num_beams=3, alpha=float("inf"), length_penalty=0.0)
    ids = model.eval().generate(**inputs, max_new_tokens=20, **search)
    return 1 - stress_scores(tokenizer.batch_decode(ids, skip_special_tokens=True), test["target"])["accuracy"]


with TemporaryDirectory() as folder:
    before = CrossEntropyTrainer.config_class(folder, max_steps=args.pretraining_steps, learning_rate=5e-3, **shared)
    CrossEntropyTrainer(model, before, **given).train()
    error_before = wrong_vowels()
    config = SoftBeamConfig(
        folder,
        beam_size=3,
        alpha_growth=1.05,
        schedule_unit="percent",
        max_steps=args.max_steps,
        learning_rate=1e-3,
        **shared,
    )
    trainer = SoftBeamTrainer(model, config, **given)
    trainer.train()
error_after = wrong_vowels()
print(f"wrong vowels: {error_before:.1%} after cross entropy, {error_after:.1%} after fine-tuning for search")

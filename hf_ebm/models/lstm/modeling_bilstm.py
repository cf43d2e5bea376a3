"""`BiLSTMForMaskedLM`: a masked language model of two LSTMs, for left and right contexts; log Z of its energy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedConfig
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from hf_ebm.checks import as_number, as_whole
from hf_ebm.models.checkpoints import PublishingMixin
from hf_ebm.models.lstm.modules_lstm import init_uniform, right_padded_lengths, run_lstm
from hf_ebm.registration import register
from hf_ebm.scoring.passes import gather_positions


class BiLSTMMaskedLMConfig(PreTrainedConfig):
    """Shape of a masked language model of two LSTMs (thesis section 6.2.3).

    Args:
        vocab_size: number of ids.
        embedding_dim: size of the embeddings.
        hidden_size: size of a state: of the left and of the right context together, so it is even.
        dropout: on embeddings and before the output layer.
        initializer_range: all parameters start uniform in ± this, those of padding at 0.
        pad_token_id: as in Transformers.
        tie_word_embeddings: without effect, as there are no weights that could be tied.

    Raises:
        ValueError: for a value that is not possible, naming it.
    """

    model_type = "hf_ebm_bilstm_masked_lm"

    vocab_size: int = 8000
    embedding_dim: int = 64
    hidden_size: int = 128
    dropout: float = 0.0
    initializer_range: float = 0.1
    pad_token_id: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in ("vocab_size", "embedding_dim", "hidden_size"):
            setattr(self, name, as_whole(name, getattr(self, name), 1))
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size must be even, half of it for each side, got {self.hidden_size}")
        self.dropout = as_number("dropout", self.dropout, least=0, below=1)
        self.initializer_range = as_number("initializer_range", self.initializer_range, above=0)
        self.pad_token_id = as_whole("pad_token_id", self.pad_token_id, 0, self.vocab_size - 1)


class BiLSTMPreTrainedModel(PublishingMixin):
    """What the two classes share."""

    config_class = BiLSTMMaskedLMConfig
    base_model_prefix = "bilstm"
    main_input_name = "input_ids"

    def _init_weights(self, module: nn.Module) -> None:
        init_uniform(module, self.config.initializer_range)


class BiLSTMModel(BiLSTMPreTrainedModel):
    """The contexts of every position: a state of what stands before it, and one of what stands after it.

    A position's own token is in neither, so a masked language model on top needs no mask token: one pass gives the
    logits of all positions, each as if it alone were masked.

    Args:
        config: sizes.
    """

    def __init__(self, config: BiLSTMMaskedLMConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_dim, config.pad_token_id)
        self.dropout = nn.Dropout(config.dropout)
        self.left = nn.LSTM(config.embedding_dim, config.hidden_size // 2, batch_first=True)
        self.right = nn.LSTM(config.embedding_dim, config.hidden_size // 2, batch_first=True)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.add_module("embed_tokens", value)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool = True
    ) -> BaseModelOutput | tuple[Tensor]:
        """Context states (B, T, hidden_size), the left one first; 0 where there is no context.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 at padding, which stands on the right.

        Raises:
            ValueError: for padding on the left or in between.
        """
        embeds = self.dropout(self.embed_tokens(input_ids))
        length = input_ids.shape[1]
        if attention_mask is None:
            backwards = torch.arange(length - 1, -1, -1, device=input_ids.device).expand(len(input_ids), -1)
        else:
            lengths = right_padded_lengths("attention_mask", attention_mask)[:, None]
            positions = torch.arange(length, device=input_ids.device)
            backwards = torch.where(positions < lengths, lengths - 1 - positions, positions)
        before = run_lstm(self.left, embeds)[0]
        behind = gather_positions(run_lstm(self.right, gather_positions(embeds, backwards))[0], backwards)
        nothing = before.new_zeros(len(before), 1, before.shape[2])
        states = [torch.cat([nothing, before[:, :-1]], 1), torch.cat([behind[:, 1:], nothing], 1)]
        if attention_mask is not None:  # after a row's last token there is nothing, whatever the batch is padded with
            last = (positions == lengths - 1)[..., None]
            states[1] = states[1].masked_fill(last, 0)
        hidden = torch.cat(states, -1)
        return BaseModelOutput(last_hidden_state=hidden) if return_dict else (hidden,)


class BiLSTMForMaskedLM(BiLSTMPreTrainedModel):
    """The context states with a linear output layer: its logits are a sum over left and right context.

    Args:
        config: sizes.
    """

    reads_own_token = False  # so that nothing need be masked

    def __init__(self, config: BiLSTMMaskedLMConfig):
        super().__init__(config)
        self.bilstm = BiLSTMModel(config)
        self.dropout = nn.Dropout(config.dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool = True,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Logits (B, T, V), and with `labels` (-100 where there is none) the mean cross entropy in nats."""
        hidden = self.bilstm(input_ids, attention_mask)[0]
        logits = self.lm_head(self.dropout(hidden))
        loss = None
        if labels is not None:
            count = num_items_in_batch  # may be an int as well, whatever the annotation says
            loss = fixed_cross_entropy(logits.float().flatten(0, 1), labels.flatten(), count)  # type: ignore[arg-type]
        output = MaskedLMOutput(loss=loss, logits=logits)
        return output if return_dict else output.to_tuple()

    def context_logits(self, before: list[int], behind: list[int], tokens: Tensor, length: int) -> list[Tensor]:
        """Logits of the whole vocabulary at each of `length` free positions, for all contexts of free tokens.

        Each context is read once: V + … + V^(T-1) steps of either LSTM in place of T V^(T-1) whole rows. Without
        dropout.

        Args:
            before, behind: ids that stand around the free positions.
            tokens: (V,) ids that a free position may hold.
            length: T.

        Returns:
            T tensors (V^(T-1), vocab_size), contexts in lexicographic order of the other free positions.
        """
        left = self._contexts(self.bilstm.left, before, tokens, length, grows_left=False)
        right = self._contexts(self.bilstm.right, behind[::-1], tokens, length, grows_left=True)
        half = self.config.hidden_size // 2
        weight = self.lm_head.weight
        # Left and right contexts meet in a sum, so each is multiplied once, and not once for every pair.
        before_scores = [states @ weight[:, :half].T for states in left]
        behind_scores = [states @ weight[:, half:].T + self.lm_head.bias for states in right]
        return [(before_scores[t][:, None] + behind_scores[length - 1 - t][None]).flatten(0, 1) for t in range(length)]

    def _contexts(
        self, lstm: nn.LSTM, around: list[int], tokens: Tensor, length: int, grows_left: bool
    ) -> list[Tensor]:
        """States (V^n, H) after `around` and every sequence of n free tokens, for n from 0 to `length` - 1."""
        embed = self.bilstm.embed_tokens
        size = lstm.hidden_size
        nothing = embed.weight.new_zeros(1, 1, size)
        state = nothing, nothing
        if around:
            _, state = run_lstm(lstm, embed(torch.tensor([around], device=tokens.device)), state)
        found, count = [state[0][0]], len(tokens)
        for _ in range(length - 1):
            known = state[0].shape[1]
            if grows_left:  # the token read next stands in front of those read, so it varies slowest
                ids = tokens.repeat_interleave(known)
                state = state[0].repeat(1, count, 1), state[1].repeat(1, count, 1)
            else:
                ids = tokens.repeat(known)
                state = state[0].repeat_interleave(count, 1), state[1].repeat_interleave(count, 1)
            _, state = run_lstm(lstm, embed(ids)[:, None], state)
            found.append(state[0][0])
        return found


State = tuple[Tensor, Tensor]


@torch.no_grad()
def factored_log_partition(
    model: BiLSTMForMaskedLM, before: list[int], behind: list[int], tokens: Tensor, length: int
) -> float:
    """log Z in nats over all sequences of `length` of `tokens` (V,), between the ids `before` and `behind`.

    Raises:
        ValueError: for a length below 1.
    """
    if length < 1:
        raise ValueError(f"length must be 1 or more, got {length}")
    return _Sweep(model.eval(), tokens, length // 2).run(before, behind, length)


class _Sweep:
    """Sums over all prefixes at once, for one suffix but its last token after another."""

    def __init__(self, model: BiLSTMForMaskedLM, tokens: Tensor, prefix_length: int):
        self.embed, self.left, self.right = model.bilstm.embed_tokens, model.bilstm.left, model.bilstm.right
        half = model.config.hidden_size // 2
        weight = model.lm_head.weight[tokens]
        self.before_weight, self.behind_weight, self.bias = (
            weight[:, :half],
            weight[:, half:],
            model.lm_head.bias[tokens],
        )
        self.tokens, self.prefix_length = tokens, prefix_length

    def run(self, before: list[int], behind: list[int], length: int) -> float:
        """The whole sum."""
        state, sums = self._start(self.left, before), self.bias.new_zeros(1)
        for _ in range(self.prefix_length):
            sums = (sums[:, None] + self._scores(state, self.before_weight) + self.bias).flatten()
            state = self._branch(self.left, state)
        opening = self._start(self.right, behind[::-1])
        inner = length - self.prefix_length - 1
        parts = [self._leaf(*found, opening) for found in self._suffixes(state, sums, [], inner)]
        return float(torch.stack(parts).logsumexp(0))

    def _suffixes(
        self, state: State, sums: Tensor, suffix: list[int], more: int
    ) -> Iterator[tuple[State, Tensor, list[int]]]:
        """Left states and sums of all prefixes followed by each suffix that lacks its last token."""
        if not more:
            yield state, sums, suffix
            return
        scores = self._scores(state, self.before_weight) + self.bias
        for index in range(len(self.tokens)):
            token = self.tokens[index].expand(state[0].shape[1])
            yield from self._suffixes(
                self._read(self.left, token, state), sums + scores[:, index], [*suffix, index], more - 1
            )

    def _leaf(self, state: State, sums: Tensor, suffix: list[int], opening: State) -> Tensor:
        """log of the sum over all prefixes and all last tokens, float64."""
        left = sums[:, None] + self._scores(state, self.before_weight) + self.bias  # (V^h, V): prefix, last token
        count = len(self.tokens)
        right = self._scores(opening, self.behind_weight)[0]  # of the last token
        behind = self._branch(self.right, opening)
        for index in reversed(suffix):
            right = right + self._scores(behind, self.behind_weight)[:, index]
            behind = self._read(self.right, self.tokens[index].expand(count), behind)
        for position in range(self.prefix_length):  # from the last of the prefix to its first
            right = right[..., None] + self._scores(behind, self.behind_weight).view(*right.shape, count)
            if position + 1 < self.prefix_length:
                behind = self._branch(self.right, behind)
        # Axes are the last token, then the prefix from its end: turned round they are the prefix, then the last token.
        right = right.permute(*reversed(range(right.dim()))).reshape(-1, count)
        return (left + right).double().flatten().logsumexp(0)

    def _start(self, lstm: torch.nn.LSTM, ids: list[int]) -> State:
        nothing = self.bias.new_zeros(1, 1, lstm.hidden_size)
        if not ids:
            return nothing, nothing
        return run_lstm(lstm, self.embed(torch.tensor([ids], device=self.tokens.device)))[1]

    def _branch(self, lstm: torch.nn.LSTM, state: State) -> State:
        """Every state after every token: (N, …) to (N V, …), tokens varying fastest."""
        count, known = len(self.tokens), state[0].shape[1]
        repeated = state[0].repeat_interleave(count, 1), state[1].repeat_interleave(count, 1)
        return self._read(lstm, self.tokens.repeat(known), repeated)

    def _read(self, lstm: torch.nn.LSTM, ids: Tensor, state: State) -> State:
        return run_lstm(lstm, self.embed(ids)[:, None], state)[1]

    @staticmethod
    def _scores(state: State, weight: Tensor) -> Tensor:
        return state[0][0] @ weight.T


register(BiLSTMMaskedLMConfig, {AutoModel: BiLSTMModel, AutoModelForMaskedLM: BiLSTMForMaskedLM})

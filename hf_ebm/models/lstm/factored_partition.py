"""log Z of a `BiLSTMForMaskedLM`'s raw energy over spaces far too large to hold.

Its logits are a score of the left context plus one of the right context, so the energy of a sequence is a part that is
read from left to right plus a part that is read from right to left. Every context is then read once: V^(T-1) steps of
either LSTM, in place of T V^(T-1) whole rows, and nothing larger than V^(T/2 + 1) is held. All V^T sequences are still
summed over: with V = 39 and T = 6 they are 3.5 * 10^9.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_ebm.models.lstm.modeling_bilstm import BiLSTMForMaskedLM
from hf_ebm.models.lstm.modules_lstm import run_lstm

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
        """Left states and sums of all prefixes behind each suffix that lacks its last token."""
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

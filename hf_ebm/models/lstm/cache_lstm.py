"""What an LSTM decoder carries from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class LSTMCache:
    """State of a decoder after `length` tokens.

    Every decoder step returns a new cache, and no method writes into a tensor, so gradients flow through any number of
    steps, and a cache can be kept, or mixed with others, while decoding goes on.

    Args:
        hidden, cell: (decoder_layers, B, hidden_size) states of the LSTM.
        length: number of decoder tokens read so far.
        keys: (B, S, hidden_size) the source's projections that additive attention compares with; `None` with fixed
            attention, and to have them computed.
    """

    hidden: Tensor
    cell: Tensor
    length: int
    keys: Tensor | None = None

    # What `generate` asks of a cache that a caller hands in.
    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def to_tensors(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None]]:
        """What depends on the tokens so far, (B, layers, hidden_size) each, and what depends on the source alone."""
        return (self.hidden.transpose(0, 1), self.cell.transpose(0, 1)), (self.keys,)

    @classmethod
    def from_tensors(cls, own: tuple[Tensor, Tensor], shared: tuple[Tensor | None], length: int) -> LSTMCache:
        """The cache whose `to_tensors()` these are."""
        hidden, cell = (tensor.transpose(0, 1).contiguous() for tensor in own)
        return cls(hidden, cell, length, *shared)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of decoder tokens read so far, the same for all layers."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row i what row `beam_idx[i]` was; (B,) integers."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, in that order."""
        indices = indices.to(self.hidden.device)
        self.hidden, self.cell = self.hidden.index_select(1, indices), self.cell.index_select(1, indices)
        if self.keys is not None:
            self.keys = self.keys.index_select(0, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times, copies beside each other."""
        self.hidden, self.cell = self.hidden.repeat_interleave(repeats, 1), self.cell.repeat_interleave(repeats, 1)
        if self.keys is not None:
            self.keys = self.keys.repeat_interleave(repeats, 0)

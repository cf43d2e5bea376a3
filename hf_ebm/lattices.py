"""Ising and Potts models: energies of token ids of which log Z, marginals and mean energies are known.

The transfer matrix sums over the lattice row by row, site by site: `K^width` numbers for K states, so 10 x 10 spins
take milliseconds where all 2^100 states could not be listed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ebm.checks import as_ids, as_number, as_truth, as_whole, is_dense, shown
from hf_ebm.runtime import check_fits


@dataclass(frozen=True)
class Lattice:
    """`E(y) = -Σ_(i,j) pair[y_i, y_j] - Σ_i field_i[y_i]` over neighbours (i, j), each pair once, on a grid of sites.

    Site (r, c) is position `r columns + c` of ids (n, T), which are states 0 to K - 1. Called, it is an energy.

    Attributes:
        pair: (K, K) symmetric, float64.
        field: (rows, columns, K), float64.
        periodic: whether the last row and column are neighbours of the first, a torus; open ends otherwise.
    """

    pair: Tensor
    field: Tensor
    periodic: bool = False

    @property
    def length(self) -> int:
        """T, the number of sites."""
        return self.field.shape[0] * self.field.shape[1]

    @property
    def states(self) -> int:
        """K."""
        return len(self.pair)

    def __call__(self, ids: Tensor) -> Tensor:
        """Energies (n,) of ids (n, T), float64, where the ids are.

        Raises:
            ValueError: for ids of another length, and for those that are no states.
        """
        ids = as_ids("ids", ids)
        if ids.shape[1] != self.length:
            raise ValueError(f"ids must have a state for each of {self.length} sites, got {shown(ids)}")
        outside = (ids < 0) | (ids >= self.states)
        if bool(outside.any()):
            raise ValueError(f"ids must be states from 0 to {self.states - 1}, got {int(ids[outside][0])}")
        pair, field = self.pair.to(ids.device), self.field.to(ids.device)
        grid = ids.unflatten(1, field.shape[:2])
        total = field.gather(-1, grid.movedim(0, -1)).sum((0, 1))
        for axis in (1, 2):
            neighbour = grid.roll(-1, axis)
            edges = pair[grid, neighbour]
            total += (edges if self.periodic else edges.narrow(axis, 0, grid.shape[axis] - 1)).sum((1, 2))
        return -total

    def log_partition(self, temperature: float = 1.0) -> Tensor:
        """log Z of `exp(-E/τ)`, a scalar, by the transfer matrix.

        Raises:
            ValueError: for a temperature that is none, and for a lattice whose shorter side is too long for the memory.
        """
        scale = 1 / as_number("temperature", temperature, above=0)
        return self._log_partition(self.pair * scale, self.field * scale)

    def marginals(self, temperature: float = 1.0) -> Tensor:
        """(T, K) probability of each state at each site: the gradient of log Z by the field."""
        scale = 1 / as_number("temperature", temperature, above=0)
        with torch.enable_grad():
            field = (self.field * scale).requires_grad_()
            (found,) = torch.autograd.grad(self._log_partition(self.pair * scale, field), field)
        return found.flatten(0, 1)

    def mean_energy(self, temperature: float = 1.0) -> Tensor:
        """Mean of E under `exp(-E/τ)`, a scalar: minus the derivative of log Z by 1/τ."""
        scale = 1 / as_number("temperature", temperature, above=0)
        with torch.enable_grad():
            beta = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
            (found,) = torch.autograd.grad(self._log_partition(self.pair * beta, self.field * beta), beta)
        return -found

    def _log_partition(self, pair: Tensor, field: Tensor) -> Tensor:
        field = field if field.shape[0] >= field.shape[1] else field.transpose(0, 1)
        rows, width, states = field.shape
        axes = width * (2 if self.periodic else 1)
        check_fits(16 * rows * width * states ** (axes + 1), f"rows of {width} sites of {states} states")
        # One axis for each site of the last row, and before them on a torus for each of the first.
        found, first = self._row(pair, field[0]), 1
        if self.periodic:
            found = found.view(*found.shape, *[1] * width) + self._row(pair, field[1])
            found, first = self._between_rows(pair, found), 2
        for row in range(first, rows):
            for column in range(axes - width, axes):
                before = found.movedim(column, -1)
                found = (before[..., None] + pair).logsumexp(-2).movedim(-1, column)
            found = found + self._row(pair, field[row])
        if self.periodic:
            found = self._between_rows(pair, found)
        return found.flatten().logsumexp(0)

    def _row(self, pair: Tensor, field: Tensor) -> Tensor:
        """(K,) * columns: what the sites of one row and the edges between them add."""
        width, states = field.shape
        total = field.new_zeros([states] * width)
        for column in range(width):
            total = total + _along(field[column], (column,), width)
            if column or self.periodic:
                total = total + _along(pair, ((column - 1) % width, column), width)
        return total

    def _between_rows(self, pair: Tensor, found: Tensor) -> Tensor:
        """The edges between the first row and the last one added."""
        width = found.dim() // 2
        for column in range(width):
            found = found + _along(pair, (column, width + column), 2 * width)
        return found


def _along(values: Tensor, axes: tuple[int, ...], dimensions: int) -> Tensor:
    """Values, symmetric if there are two axes, along some of the axes."""
    return values.view([values.shape[-1] if axis in axes else 1 for axis in range(dimensions)])


def ising(rows: int, columns: int, strength: float, field: Tensor | None = None, periodic: bool = False) -> Lattice:
    """The Ising model `E(y) = -2λ Σ_(i,j) s_i s_j - Σ_i h_i s_i` of spins `s = 2y - 1`, ids 0 and 1.

    Args:
        strength: λ; each edge counts twice, as where every site adds λ times its neighbours, in DISCS (Goshvadi et al.
            2023, `models/ising.py` of its code, where ends are open). The infinite lattice is critical at 2λ = 0.4407.
        field: h (rows, columns), 0 by default.

    Raises:
        ValueError: for sizes and numbers out of range.

    Example:
        >>> model = ising(10, 10, strength=0.2)
        >>> round(float(model.log_partition()), 3), round(float(model.mean_energy()), 3)
        (85.624, -36.988)
        >>> model(torch.ones(1, 100).long())  # 180 edges
        tensor([-72.], dtype=torch.float64)
    """
    spins = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    pair = 2 * as_number("strength", strength) * spins[:, None] * spins
    return _lattice(rows, columns, pair, None if field is None else _checked_field(field)[..., None] * spins, periodic)


def potts(
    rows: int, columns: int, states: int, strength: float, field: Tensor | None = None, periodic: bool = False
) -> Lattice:
    """The Potts model `E(y) = -2λ Σ_(i,j) [y_i = y_j] - Σ_i h_i[y_i]` of ids 0 to `states - 1`.

    Args:
        strength: λ, each edge counting twice as in `ising` and in DISCS's `models/potts.py`.
        field: h (rows, columns, states), 0 by default.

    Raises:
        ValueError: for sizes and numbers out of range.

    Example:
        >>> round(float(potts(1, 2, states=3, strength=0.5).log_partition()), 4)  # log of 3 e + 6
        2.6501
    """
    pair = 2 * as_number("strength", strength) * torch.eye(as_whole("states", states, 2), dtype=torch.float64)
    return _lattice(rows, columns, pair, None if field is None else _checked_field(field), periodic)


def _checked_field(field: object) -> Tensor:
    if not is_dense(field) or field.is_complex() or not bool(field.isfinite().all()):
        raise ValueError(f"field must be a tensor of finite numbers, got {shown(field)}")
    return field.to("cpu", torch.float64)


def _lattice(rows: int, columns: int, pair: Tensor, field: Tensor | None, periodic: bool) -> Lattice:
    least = 3 if as_truth("periodic", periodic) else 1  # else some sites would be neighbours twice
    shape = as_whole("rows", rows, least), as_whole("columns", columns, least), len(pair)
    field = torch.zeros(shape, dtype=torch.float64) if field is None else field
    if tuple(field.shape) != shape:
        raise ValueError(f"field must have a number for each of {rows} x {columns} sites, got {shown(field)}")
    return Lattice(pair, field, periodic)

"""The best shared base with low-rank updates: W_k ≈ base + A_k B_kᵀ for several matrices at once.

For two matrices there is a closed form. For given updates, the best base is the mean of the W_k
minus their updates, and the residual is ½ ‖D - (A₁B₁ᵀ - A₂B₂ᵀ)‖² with D = W₁ - W₂. The difference
of two rank-r updates can be any matrix of rank 2r, so the optimum is the singular value
decomposition of D, truncated at 2r and divided between the two; the residual is ½ Σ_{i>2r} σᵢ².

For more than two matrices there is no closed form: from their mean, the base and the updates are
improved by turns.

Where the matrices differ by less than the rank, A is random and B is zero, as in LoRA (Hu et al.,
arXiv 2106.09685): zeros in both would never get a gradient.

All matrices are tall (inputs × outputs, many more inputs), and D V_k V_kᵀ is the best approximation
of rank k, with V_k the leading right singular vectors: left vectors are never formed. If squared
condition numbers do no harm, V is the eigenvectors of Dᵀ D, which takes one matrix product;
otherwise it comes from R of a QR factorisation, which is backward stable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from growkit.algebra.splits import noise
from growkit.base.lazy import Tensor, np, torch
from growkit.results.proof_result import MAX_VALUES, Spectrum

TURNS = 200
BEYOND = 1.9
"""How far the base goes towards the best one for the updates; below 2, no turn loses anything."""

WELL_CONDITIONED = 1e-4
"""Dᵀ D is accurate if its smallest eigenvalue is above this part of its largest: the squares of
singular values, accurate to some 1e-16 of the largest, are then accurate to 1e-11 (measured)."""

UNDERFLOW = 1e-280
"""Squares up to this have lost digits."""


@dataclass(frozen=True)
class Shared:
    """A base and the updates of the matrices that share it.

    Attributes:
        base: [..., inputs, outputs].
        down: [..., members, inputs, rank], the A of every member.
        up: [..., members, outputs, rank], the B of every member.
        residual: squared Frobenius norm of the residual, [...]; weighted by a moment if one was
            given.
    """

    base: Tensor
    down: Tensor
    up: Tensor
    residual: Tensor


def share(members: Tensor, rank: int, moment: Tensor | None = None) -> Shared:
    """Find the best base and updates.

    Args:
        members: [..., members, inputs, outputs], in float64.
        rank: rank of every update.
        moment: second moment C of the inputs, [inputs, inputs]; a residual R is then measured as
            tr Rᵀ C R, its mean square on such inputs. None for the Frobenius norm.

    Returns:
        The optimum for two members. For more, the residual is never larger than with the mean as
        the base and the best update of each member.
    """
    mean = members.mean(-3)
    if members.shape[-3] == 2:
        first, second = members.unbind(-3)
        down, up, values = truncated(first - second, 2 * rank, moment)
        # Assigned by turns, so that both updates have similar sizes; the second is subtracted.
        sign = torch.tensor([1.0, -1.0], dtype=members.dtype, device=members.device)
        up = up.unflatten(-1, (rank, 2)) * sign
        mean -= down @ (up / 2).flatten(-2).transpose(-1, -2)
        down = down.unflatten(-1, (rank, 2))
        residual = values[..., 2 * rank :].square().sum(-1) / 2
        return Shared(mean, down.movedim(-1, -3), up.movedim(-1, -3), residual)
    rests = members - mean[..., None, :, :]
    moved = torch.zeros_like(mean)
    for _ in range(TURNS):
        left = rests - moved[..., None, :, :]
        down, up, _ = truncated(left, rank, moment)
        moved += BEYOND * (left - down @ up.transpose(-1, -2)).mean(-3)
    rests = rests - moved[..., None, :, :]
    down, up, _ = truncated(rests, rank, moment)
    residual = _size(rests - down @ up.transpose(-1, -2), moment).sum(-1)
    return Shared(mean + moved, down, up, residual)


def spread(members: Tensor, moment: Tensor | None = None) -> Tensor:
    """Residual of matrices with their mean as the base and no updates, [...]; see ``share``."""
    return _size(members - members.mean(-3, keepdim=True), moment).sum(-1)


def truncated(
    matrix: Tensor, rank: int, moment: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the best approximation of tall matrices by low rank.

    Args:
        matrix: matrices D, [..., inputs, outputs], in float64.
        rank: rank of the approximation.
        moment: second moment of the inputs, see ``share``.

    Returns:
        A and B with A Bᵀ the best approximation, [..., inputs, rank] and [..., outputs, rank]
        (with zeros if the rank of D is smaller), and all singular values of D, or of C^½ D with a
        moment C, in descending order, [..., min(inputs, outputs)].
    """
    values, right = _right_vectors(matrix, moment)
    leading = right[..., :rank]
    # A and B each get the root of ‖D v‖, which is σ without a moment; with one, σ is the weighted
    # size of D v. Sizes below rounding are noise, by which nothing must be divided.
    sizes = values[..., :rank] if moment is None else (matrix @ leading).norm(dim=-2)
    least = torch.finfo(values.dtype).eps * sizes.amax(-1, keepdim=True)
    root = sizes.maximum(least).sqrt()[..., None, :]
    down = matrix @ (leading / root.where(root > 0, 1))
    up = leading * root
    missing = rank - leading.shape[-1]
    if missing > 0:
        down, up = (torch.nn.functional.pad(factor, (0, missing)) for factor in (down, up))
    return down, up, values


def _right_vectors(matrix: Tensor, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Singular values of D, or of C^½ D, in descending order, and right vectors as columns.

    The best approximation is D V_k V_kᵀ either way: C^½ need not be undone. Each matrix of a batch
    takes the fast method if that is accurate for it.
    """
    inputs, outputs = matrix.shape[-2:]
    if moment is not None:
        squares = matrix.transpose(-1, -2) @ (moment @ matrix)
    elif inputs <= outputs:
        _, values, right = torch.linalg.svd(matrix, full_matrices=False)
        return values, right.transpose(-1, -2)
    else:
        # An overflow becomes a zero on the diagonal, which the smallest eigenvalue cannot exceed.
        squares = (matrix.transpose(-1, -2) @ matrix).nan_to_num(0, 0, 0)
    eigenvalues, eigenvectors = torch.linalg.eigh(squares)  # in ascending order
    values, right = eigenvalues.flip(-1).clamp(min=0).sqrt(), eigenvectors.flip(-1)
    least, largest = eigenvalues[..., 0], eigenvalues[..., -1]
    inaccurate = least <= (WELL_CONDITIONED * largest).clamp(min=UNDERFLOW)
    if moment is None and bool(inaccurate.any()):
        _, exact, transposed = torch.linalg.svd(torch.linalg.qr(matrix[inaccurate], mode="r").R)
        values[inaccurate], right[inaccurate] = exact, transposed.transpose(-1, -2)
    return values, right


def _size(rest: Tensor, moment: Tensor | None) -> Tensor:
    """Weighted sum of squares of a rest, [...] for [..., inputs, outputs]."""
    return (rest * (rest if moment is None else moment @ rest)).sum((-1, -2))


@dataclass(frozen=True)
class HeadGroups:
    """The heads of a projection, signal heads first, and the scope of their shared bases.

    With the scope ``head``, a noise head and the signal heads of its group share a base; with
    ``layer``, the matrix of all signal heads and that of all noise heads; with ``all_heads``, all
    heads of a layer. Cang et al., "Shared DIFF Transformer", equations 3 and 4 and section 2.4.

    Attributes:
        signal: number of signal heads.
        noise: number of noise heads.
        scope: ``head``, ``layer`` or ``all_heads``.
    """

    signal: int
    noise: int
    scope: str

    def members(self, weight: Tensor) -> Tensor:
        """Group matrices by their shared base: [groups, members, hidden, outputs].

        Args:
            weight: [(signal + noise) · head_dim, hidden].
        """
        hidden = weight.shape[1]
        if self.scope == "layer":
            return weight.view(1, 2, -1, hidden).transpose(-1, -2)
        heads = weight.view(self.signal + self.noise, -1, hidden).transpose(1, 2)
        if self.scope == "all_heads":
            return heads[None]
        groups = heads[: self.signal].unflatten(0, (self.noise, -1))
        return torch.cat([groups, heads[self.signal :, None]], dim=1)

    def full_rank(self, shape: Sequence[int]) -> int:
        """The rank with which updates can represent any matrices.

        Args:
            shape: shape of the projection, [(signal + noise) · head_dim, hidden].
        """
        rows, inputs = shape
        heads = self.signal + self.noise
        pairs = self.scope == "layer" or (self.scope == "head" and self.signal == self.noise)
        limit = min(inputs, rows // 2 if self.scope == "layer" else rows // heads)
        return (limit + 1) // 2 if pairs else limit

    def factorise(
        self,
        weight: Tensor,
        rank: int,
        moment: Tensor | None = None,
        dtype: Any = None,
        seed: str = "",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Factorise a projection into base, down and up, as the DIFF Transformer stores them.

        Args:
            weight: [(signal + noise) · head_dim, hidden], in float64.
            rank: rank of the updates.
            moment: second moment of the inputs, [hidden, hidden]; None to weigh all inputs equally.
            dtype: dtype of the rounded parts; None for float64. The base is the best one for the
                rounded updates.
            seed: seed of the down parts of updates that are zero.
        """
        dtype = dtype or weight.dtype
        shared = share(self.members(weight), rank, moment)
        down = self._by_head(shared.down).transpose(-1, -2).to(dtype)  # [heads, rank, inputs]
        up = self._by_head(shared.up).to(dtype)  # [heads, outputs, rank]
        # Updates below the rounding of what they are added to are noise.
        sizes = down.double().norm(dim=-1) * up.double().norm(dim=-2)
        zero = sizes <= torch.finfo(weight.dtype).eps * max(weight.shape) * weight.norm()
        drawn = noise(seed, np.arange(down[..., 0].numel()), weight.shape[1])
        random = torch.from_numpy(drawn).double().view_as(down) / (2**15 * weight.shape[1] ** 0.5)
        down = random.to(down).where(zero[..., None], down).reshape(-1, weight.shape[1])
        up = up.masked_fill(zero[:, None], 0).reshape(-1, rank)
        return self.best_base(weight, down.double(), up.double()).to(dtype), down, up

    def best_base(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The best base for given updates, in float64, with the same bits on every machine.

        Args:
            weight: the projection, [(signal + noise) · head_dim, hidden].
            down: the down part of all updates, as stored.
            up: the up part of all updates, as stored.
        """
        rests = self.members(self._updated(weight, down, -up))
        mean = reduce(add, rests.unbind(1)) / rests.shape[1]
        return mean.transpose(-1, -2).reshape(-1, weight.shape[1])

    def multiplied_out(self, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Multiply parts out to the projection, [(signal + noise) · head_dim, hidden].

        The result is in float64, with the same bits on every machine.
        """
        hidden = base.shape[1]
        bases = base.view(-1, up.shape[0] // (self.signal + self.noise), hidden)
        counts = (self.signal, self.noise)
        repeated = torch.cat([bases.repeat_interleave(n // len(bases), 0) for n in counts])
        return self._updated(repeated.reshape(-1, hidden), down, up)

    def _updated(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Add updates to a projection.

        Products are rounded, and added in the order of the rank. A matrix product would be summed
        in an order, and have last bits, that depend on the library and the number of threads.
        """
        updated = weight.clone()
        heads = updated.view(self.signal + self.noise, -1, weight.shape[1])
        ups = up.view(len(heads), -1, up.shape[1])
        downs = down.view(-1, up.shape[1], weight.shape[1])
        if self.scope == "layer":
            downs = downs.repeat_interleave(torch.tensor([self.signal, self.noise]), 0)
        for head, tall, wide in zip(heads, ups, downs, strict=True):
            for column, row in zip(tall.unbind(1), wide, strict=True):
                head += column[:, None] * row
        return updated

    def _by_head(self, parts: Tensor) -> Tensor:
        """[groups, members, …] to [heads, …], signal heads first."""
        if self.scope != "head":
            return parts[0]
        return torch.cat([parts[:, :-1].flatten(0, 1), parts[:, -1]])


def judge_parts(
    module: str,
    heads: HeadGroups,
    calibrated: bool,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> tuple[bool, Spectrum]:
    """Check that the base fits the updates, and that no better updates exist.

    The residual of a group must not exceed the optimum by more than rounding explains
    (``docs/explanation/numerics.md``). The optimum comes from torch's singular values, and not from
    ``share``, which is under proof. With more than two members the optimum is not known; the
    residual with the mean as the base, where the turns begin, takes its place.

    Args:
        module: name of the projection.
        heads: heads of the projection.
        calibrated: whether the updates are the best ones for the inputs of a text, so that better
            ones for the weights may exist.
        sources: the projection, [(signal + noise) · head_dim, hidden].
        targets: base, down and up, in their rounded dtypes.
    """
    (weight,), (base, down, up) = sources, targets
    exact, wide, tall = weight.double(), down.double(), up.double()
    rank, members = up.shape[1], heads.members(exact)
    if members.shape[1] == 2:
        values, kept = torch.linalg.svdvals(members[:, 0] - members[:, 1]), 2 * rank
        best = values[:, kept:].square().sum(-1) / 2
    else:
        values, kept = torch.linalg.svdvals(members - members.mean(1, keepdim=True)), rank
        best = values[..., kept:].square().sum((-1, -2))
    rests = heads.members(exact - heads.multiplied_out(base.double(), wide, tall))
    residual = _norm(rests).square()
    # The largest effect of rounding the parts to their dtypes on the norm of the rests.
    of_base, of_down, of_up = (_half_step(part) for part in (base, down, up))
    nothing = torch.zeros_like(of_base)
    updates = heads.multiplied_out(nothing, of_down, tall.abs() + of_up)
    updates += heads.multiplied_out(nothing, wide.abs(), of_up)
    bases = heads.multiplied_out(of_base, torch.zeros_like(wide), tall.abs())
    rounding = _norm(heads.members(updates)) + _norm(heads.members(bases))
    # The error of a QR factorisation in float64, by far the largest of all errors.
    size = rests.shape[-2] * rests.shape[-1]
    rounding += size * torch.finfo(torch.float64).eps * _norm(members)
    optimal = bool((residual.sqrt() <= best.sqrt() + rounding).all())
    spectrum = Spectrum(
        module=module,
        singular_values=values.flatten(0, -2).square().mean(0).sqrt()[:MAX_VALUES].tolist(),
        rank=rank,
        kept=min(values.shape[-1], kept),
        residual=float(residual.sum()),
        best=float(best.sum()),
        unit="squared Frobenius norm",
    )
    fitting = heads.best_base(exact, wide, tall).to(base.dtype)
    return fitting.double().equal(base.double()) and (optimal or calibrated), spectrum


def _half_step(rounded: Tensor) -> Tensor:
    """The largest rounding error of numbers that were rounded to these."""
    of = torch.finfo(rounded.dtype)
    return of.eps / 2 * (rounded.double().abs() + of.smallest_normal)


def _norm(members: Tensor) -> Tensor:
    """Frobenius norm of all members together, [groups]."""
    return members.square().sum((-1, -2, -3)).sqrt()

"""Draws tokens from logits: Gumbel-max over the tokens that truncation keeps.

A token depends on its row's logits, settings, seed and position, never on other rows: noise is a
pure function (see `noise`), and every reduction runs over one row, in an order that does not depend
on the number of rows.
"""

from dataclasses import dataclass

import torch

from gpuworker.kernels.ops import Draws
from gpuworker.sampling.noise import gumbel, gumbel_argmax
from gpuworker.sampling.truncate import Truncation, exact_thresholds, thresholds

# Most top_p nuclei have fewer tokens than the first number, nearly all fewer than the second.
_NUM_CANDIDATES = (64, 1024)


def draw(scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Chooses a token for each row of [num_samples, vocab_size]; see `kernels.ops.Ops.sample`.

    Returns:
        [num_samples] int64.
    """
    token_ids = scaled.argmax(-1)
    drawn = draws.is_drawn.nonzero().squeeze(1)
    if len(drawn) == len(scaled):
        return _draw(_Rows.of(scaled, draws))
    if len(drawn):
        token_ids[drawn] = _draw(_Rows.of(scaled, draws).some(drawn))
    return token_ids


@dataclass(frozen=True, slots=True)
class _Rows:
    """The samples that are drawn at random; [num_drawn] each, or [num_drawn, vocab_size]."""

    scaled: torch.Tensor  # logits divided by temperature
    seeds: torch.Tensor
    positions: torch.Tensor
    truncation: Truncation

    @staticmethod
    def of(scaled: torch.Tensor, draws: Draws) -> "_Rows":
        """All samples of a step."""
        truncation = Truncation.of_numbers(draws.numbers)
        return _Rows(scaled, draws.seeds, draws.positions, truncation)

    def some(self, index: torch.Tensor) -> "_Rows":
        """The samples with these indices."""
        return _Rows(
            self.scaled[index],
            self.seeds[index],
            self.positions[index],
            self.truncation.of(index),
        )


def _draw(draws: _Rows) -> torch.Tensor:
    """Gumbel-max over the tokens that truncation keeps: [num_drawn] token ids."""
    token_ids = torch.empty_like(draws.positions)
    is_off = draws.truncation.is_off
    whole = is_off.nonzero().squeeze(1)
    if len(whole):
        token_ids[whole] = gumbel_argmax(
            draws.scaled[whole], draws.seeds[whole], draws.positions[whole]
        )
    left = (~is_off).nonzero().squeeze(1)
    for num_candidates in _NUM_CANDIDATES:
        if len(left):
            left = _draw_from_candidates(draws, left, num_candidates, token_ids)
    if len(left):
        scaled = draws.scaled[left]
        threshold = exact_thresholds(scaled, draws.truncation.of(left))
        scaled.masked_fill_(scaled < threshold[:, None], -torch.inf)
        token_ids[left] = gumbel_argmax(scaled, draws.seeds[left], draws.positions[left])
    return token_ids


def _draw_from_candidates(
    draws: _Rows, rows: torch.Tensor, num_candidates: int, token_ids: torch.Tensor
) -> torch.Tensor:
    """Draws truncated rows from their largest logits, so that noise is computed for few tokens.

    The number of candidates never changes which token is drawn.

    Args:
        draws: all drawn samples.
        rows: [num_rows] the rows of `draws` to draw now.
        num_candidates: how many of the largest logits are candidates.
        token_ids: [num_drawn] the output.

    Returns:
        The rows that were not drawn, because tokens outside the candidates may be drawn, too.
    """
    scaled, truncation = draws.scaled[rows], draws.truncation.of(rows)
    values, ids = scaled.topk(min(num_candidates, scaled.shape[1]), dim=-1)
    threshold, is_enough = thresholds(scaled, values, truncation)
    done = rows[is_enough]
    values, ids, threshold = values[is_enough], ids[is_enough], threshold[is_enough]
    if len(done):
        is_kept = values >= threshold[:, None]
        num_kept = max(int(is_kept.sum(1).max()), 1)
        scores = gumbel(draws.seeds[done], draws.positions[done], ids[:, :num_kept])
        scores.add_(values[:, :num_kept]).masked_fill_(~is_kept[:, :num_kept], -torch.inf)
        token_ids[done] = ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
    return rows[~is_enough]

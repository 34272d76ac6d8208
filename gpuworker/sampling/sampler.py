"""The batched sampler: one token for each place of a step that samples.

A token depends on its row's logits and settings, its seed and its position, never on the other
rows: noise is a function (see `noise`), and every reduction is over one row in an order that the
number of rows does not change.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.core.input_batch import FlatBatch, InputBatch
from gpuworker.core.plan import Int32Array
from gpuworker.core.request_slots import BoolArray
from gpuworker.sampling.adjust import adjust_logits
from gpuworker.sampling.noise import gumbel, gumbel_argmax
from gpuworker.sampling.truncate import Truncation, exact_thresholds, thresholds

# Colder than this is greedy: dividing by it would leave only rounding.
MIN_TEMPERATURE = 1e-5
# Most nuclei are smaller than the first, nearly all than the second.
_NUM_CANDIDATES = (64, 1024)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was chosen: [num_samples] each; where not is_finite the token means nothing."""

    token_ids: Int32Array
    is_finite: BoolArray


def sample(logits: torch.Tensor, batch: FlatBatch, rows: InputBatch) -> SampledTokens:
    """Chooses a token for each of a step's samples.

    Args:
        logits: [num_samples, vocab_size] float32; changed in place.
        batch: whose sample columns say which row and position each is of.
        rows: settings and tokens of every row.
    """
    # A sum is not finite when a term is not, and reads the logits once.
    is_finite = torch.isfinite(logits.sum(-1))
    adjust_logits(logits, batch, rows)
    token_ids = logits.argmax(-1)
    temperature = rows.slots.temperature[batch.sample_rows]
    drawn = np.flatnonzero(temperature >= MIN_TEMPERATURE)
    if len(drawn):
        index = torch.from_numpy(drawn).to(logits.device)
        token_ids[index] = _draw(_draws(logits[index], drawn, batch, rows))
    return SampledTokens(
        token_ids.cpu().numpy().astype(np.int32), is_finite.cpu().numpy().astype(np.bool_)
    )


@dataclass(frozen=True, slots=True)
class _Draws:
    """Places whose token is drawn; [num_drawn] each, or [num_drawn, vocab_size]."""

    scaled: torch.Tensor  # logits over temperature
    seeds: torch.Tensor
    positions: torch.Tensor
    truncation: Truncation


def _draws(
    logits: torch.Tensor, drawn: NDArray[np.intp], batch: FlatBatch, rows: InputBatch
) -> _Draws:
    """Gathers what drawing needs; logits is [num_drawn, vocab_size] and is changed in place."""
    device, slots = logits.device, rows.slots
    row = batch.sample_rows[drawn]

    def column(values: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values[row]).to(device, dtype)

    return _Draws(
        scaled=logits.div_(column(slots.temperature, torch.float32)[:, None]),
        seeds=torch.from_numpy(slots.seed[row].view(np.int64)).to(device),
        positions=torch.from_numpy(batch.sample_positions[drawn]).to(device),
        truncation=Truncation(
            column(slots.top_p, torch.float64),
            column(slots.top_k, torch.int64),
            column(slots.min_p, torch.float64),
        ),
    )


def _draw(draws: _Draws) -> torch.Tensor:
    """Gumbel-max over what truncation leaves: [num_drawn] token ids."""
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
    draws: _Draws, rows: torch.Tensor, num_candidates: int, token_ids: torch.Tensor
) -> torch.Tensor:
    """Draws truncated rows from their largest logits, so that noise is made for few tokens only.

    How many candidates are looked at never changes what is drawn.

    Args:
        draws: all places.
        rows: [num_rows] the ones to draw.
        num_candidates: how many of the largest logits to look at.
        token_ids: [num_drawn] where the tokens go.

    Returns:
        Those of `rows` that may be given other tokens than the candidates: not drawn.
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

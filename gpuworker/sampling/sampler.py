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
from gpuworker.sampling.noise import gumbel
from gpuworker.sampling.truncate import NUM_CANDIDATES, Truncation, thresholds

# Colder than this is greedy: dividing by it would leave only rounding.
MIN_TEMPERATURE = 1e-5


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
    cut = (~is_off).nonzero().squeeze(1)
    if len(cut):
        whole = torch.cat([whole, _draw_from_candidates(draws, cut, token_ids)])
    if len(whole):
        every = torch.arange(draws.scaled.shape[1], device=whole.device)[None]
        noise = gumbel(draws.seeds[whole], draws.positions[whole], every)
        token_ids[whole] = noise.add_(draws.scaled[whole]).argmax(-1)
    return token_ids


def _draw_from_candidates(
    draws: _Draws, cut: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Draws truncated rows from their largest logits, so that noise is made for few tokens only.

    Args:
        draws: all places; `scaled` of rows that are left over becomes minus infinity where cut.
        cut: [num_cut] the truncated ones.
        token_ids: [num_drawn] where the tokens go.

    Returns:
        Those of `cut` with drawable tokens beyond the candidates, to be drawn from the whole.
    """
    scaled = draws.scaled[cut]
    truncation = Truncation(
        draws.truncation.top_p[cut], draws.truncation.top_k[cut], draws.truncation.min_p[cut]
    )
    values, ids = scaled.topk(_num_candidates(truncation.top_k, scaled.shape[1]), dim=-1)
    threshold = thresholds(scaled, values, truncation)[:, None]
    is_kept = values >= threshold
    num_kept = max(int(is_kept.sum(1).max()), 1)
    values, ids, is_kept = values[:, :num_kept], ids[:, :num_kept], is_kept[:, :num_kept]
    scores = gumbel(draws.seeds[cut], draws.positions[cut], ids).add_(values)
    best = scores.masked_fill_(~is_kept, -torch.inf).argmax(-1, keepdim=True)
    token_ids[cut] = ids.gather(1, best).squeeze(1)

    is_left_over = (scaled >= threshold).sum(1) > is_kept.sum(1)
    left_over = cut[is_left_over]
    draws.scaled[left_over] = scaled[is_left_over].masked_fill(
        scaled[is_left_over] < threshold[is_left_over], -torch.inf
    )
    return left_over


def _num_candidates(top_k: torch.Tensor, vocab_size: int) -> int:
    """Few when every row has a top_k; how many never changes what is drawn."""
    is_limited = bool((top_k > 0).all())
    return min(int(top_k.max()) if is_limited else NUM_CANDIDATES, NUM_CANDIDATES, vocab_size)

"""Feature vectors of the adaptive sampler for `credit.py`: agreement of cheaper vectors with the full one."""

from typing import Any

import numpy as np
import torch
from credit_ways import Array, Moment
from torch import Tensor

from kairos_timesteps.base import Observation
from kairos_timesteps.samplers.adaptive import select_timesteps

FEATURES = {  # name: timesteps (None: all), images, which of the independent draws of image and noise
    "all T, one image": (None, "one", 0),
    "all T, another image": (None, "one", 1),
    "all T, the batch": (None, "batch", 2),
    "100, one image": (100, "one", 3),
    "100, the batch": (100, "batch", 4),
    "32, one image": (32, "one", 5),
    "32, the batch": (32, "batch", 6),
}


def feature_vectors(moment: Moment, count: int) -> dict[str, tuple[Array, Array]]:
    """Measure every feature vector in `FEATURES`: its timesteps (n,) and the c_t-weighted loss changes, (count, n).

    All vectors are measured around the same optimiser steps, on batches with uniform timesteps. Images and noise differ
    between vectors.
    """
    timesteps, size = moment.schedule.timesteps, moment.size
    coefficients = torch.from_numpy(moment.schedule.vlb)
    sets = {}
    for name, (wanted, images, draw) in FEATURES.items():
        number = min(wanted or timesteps, timesteps)
        sets[name] = (((np.arange(number) + 0.5) * timesteps / number).astype(np.int64), images, draw)
    vectors: dict[str, list[Array]] = {name: [] for name in sets}

    def look(observation: Observation) -> dict[str, Tensor]:
        looks = {}
        for name, (t, images, draw) in sets.items():
            one = torch.full((len(t),), (observation.step * 7 + draw * 13) % size)
            index = one if images == "one" else torch.arange(len(t)) * size // len(t)
            fractions = torch.from_numpy((t + 0.5) / timesteps)
            looks[name] = observation.meter.errors(index, fractions, name) * coefficients[t]
        return looks

    for step in range(count):
        observation = moment.observation(*moment.batch(step), step)
        before = look(observation)
        moment.backward(moment.losses(step, moment.draws(step)))
        moment.optimizer.step()
        after = look(observation)
        moment.restore()
        for name in sets:
            vectors[name].append((before[name] - after[name]).numpy())
    return {name: (sets[name][0], np.array(rows)) for name, rows in vectors.items()}


def agreement(vectors: dict[str, tuple[Array, Array]], queue: int, selected: int, share: float) -> list[dict[str, Any]]:
    """Compare the feature vectors, one row each.

    Delta is the mean of a feature vector; S is the set of selected timesteps. Row "S at random" selects S at random.
    Columns:

    - forwards: forward passes of a batch per measurement.
    - delta_with_one_image: correlation over steps of Delta with Delta of all T on one image.
    - delta_with_batch: correlation over steps of Delta with Delta of all T on the batch.
    - distance_of_S: mean distance of S from the S of all T on one image, as a share of T.
    - S_predicts: correlation of the mean change at S, measured on another image, with Delta of all T on the batch. Only
      steps from which S was not selected count.

    Args:
        vectors: from `feature_vectors`.
        queue: steps that each S is selected from.
        selected: number of timesteps in S.
        share: forward passes of a batch that one sample costs.
    """
    names = list(vectors)
    delta = {name: rows.mean(1) for name, (_, rows) in vectors.items()}
    timesteps, other = vectors[names[1]]
    count = len(other)
    parts = [np.arange(k, k + queue) for k in range(0, count - queue + 1, queue)]
    random = np.random.default_rng(0)

    def pick(name: str, part: Array) -> Array:
        t, rows = vectors[name]
        return t[select_timesteps(torch.from_numpy(rows[part]), selected).numpy()]

    def predicts(selected_timesteps: Array, part: Array) -> float:
        rest = np.setdiff1d(np.arange(count), part)
        return correlation(
            other[rest][:, np.searchsorted(timesteps, selected_timesteps)].mean(1), delta[names[2]][rest]
        )

    rows = []
    anything = [np.sort(random.choice(timesteps, selected, replace=False)) for _ in range(20 * len(parts))]
    for name in [*names, "S at random"]:
        known = name in vectors
        selected_timesteps = [pick(name, part) for part in parts] if known else anything
        full = [pick(names[0], part) for part in parts] * (1 if known else 20)
        scores = [predicts(s, part) for s, part in zip(selected_timesteps, parts * (1 if known else 20), strict=True)]
        rows.append(
            {
                "features": name,
                "forwards": 2 * len(vectors[name][0]) * share if known else "",
                "delta_with_one_image": correlation(delta[name], delta[names[0]]) if known else "",
                "delta_with_batch": correlation(delta[name], delta[names[2]]) if known else "",
                "distance_of_S": float(
                    np.mean([np.abs(s - f).mean() for s, f in zip(selected_timesteps, full, strict=True)])
                )
                / len(timesteps),
                "S_predicts": float(np.mean(scores)),
            }
        )
    return rows


def correlation(x: Array, y: Array) -> float:
    """Return Pearson's correlation coefficient; 0 if either array is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale > 0 else 0.0

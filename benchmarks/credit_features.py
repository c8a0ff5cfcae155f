"""What `credit.py` measures of the adaptive sampler's feature vector: does a cheaper one say what the full one says?"""

from typing import Any

import numpy as np
import torch
from credit_ways import Array, Moment
from torch import Tensor

from kairos_timesteps.base import Observation
from kairos_timesteps.meter import errors
from kairos_timesteps.samplers.policy import select_timesteps

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
    """For each way of taking the feature vector its timesteps (n,) and c_t-weighted changes, (count, n).

    All are taken around the same steps, of batches with uniform timesteps, each with its own image and noise.
    """
    timesteps, size = moment.schedule.timesteps, moment.size
    coefficients = torch.from_numpy(moment.schedule.vlb)
    sets = {}
    for name, (wanted, images, draw) in FEATURES.items():
        number = min(wanted or timesteps, timesteps)
        sets[name] = (((np.arange(number) + 0.5) * timesteps / number).astype(np.int64), images, draw)
    found: dict[str, list[Array]] = {name: [] for name in sets}

    def look(observation: Observation) -> dict[str, Tensor]:
        looks = {}
        for name, (t, images, draw) in sets.items():
            one = torch.full((len(t),), (observation.step * 7 + draw * 13) % size)
            index = one if images == "one" else torch.arange(len(t)) * size // len(t)
            fractions = torch.from_numpy((t + 0.5) / timesteps)
            looks[name] = errors(observation, index, fractions, name) * coefficients[t]
        return looks

    for step in range(count):
        observation = moment.observation(*moment.batch(step), step)
        before = look(observation)
        moment.backward(moment.losses(step, moment.draws(step)))
        moment.optimizer.step()
        after = look(observation)
        moment.restore()
        for name in sets:
            found[name].append((before[name] - after[name]).numpy())
    return {name: (sets[name][0], np.array(rows)) for name, rows in found.items()}


def agreement(vectors: dict[str, tuple[Array, Array]], queue: int, selected: int, share: float) -> list[dict[str, Any]]:
    """How the ways of taking the feature vector agree, one row each.

    Columns: correlation over steps of Delta, the vector's mean, with that of all T on one image, and with that of all T
    on the batch; mean distance of the selected timesteps from those of all T on one image, as a share of T; and what
    the selection is for: how the mean change at the selected timesteps, measured on another image, correlates with
    Delta on the batch over the steps that S was not selected from.
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

    def predicts(chosen: Array, part: Array) -> float:
        rest = np.setdiff1d(np.arange(count), part)
        return correlation(other[rest][:, np.searchsorted(timesteps, chosen)].mean(1), delta[names[2]][rest])

    rows = []
    anything = [np.sort(random.choice(timesteps, selected, replace=False)) for _ in range(20 * len(parts))]
    for name in [*names, "S at random"]:
        known = name in vectors
        chosen = [pick(name, part) for part in parts] if known else anything
        full = [pick(names[0], part) for part in parts] * (1 if known else 20)
        scores = [predicts(s, part) for s, part in zip(chosen, parts * (1 if known else 20), strict=True)]
        rows.append(
            {
                "features": name,
                "forwards": 2 * len(vectors[name][0]) * share if known else "",
                "delta_with_one_image": correlation(delta[name], delta[names[0]]) if known else "",
                "delta_with_batch": correlation(delta[name], delta[names[2]]) if known else "",
                "distance_of_S": float(np.mean([np.abs(s - f).mean() for s, f in zip(chosen, full, strict=True)]))
                / len(timesteps),
                "S_predicts": float(np.mean(scores)),
            }
        )
    return rows


def correlation(x: Array, y: Array) -> float:
    """Pearson's; 0 where one does not vary."""
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale > 0 else 0.0

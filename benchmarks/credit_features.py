"""Feature vectors of the adaptive sampler for `credit.py`: agreement of cheaper vectors with the full one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from credit_estimators import Array, FrozenRun
from torch import Tensor

from kairos_timesteps.base import Observation
from kairos_timesteps.samplers.adaptive import select_timesteps, stratify_timesteps

FEATURES = {  # name: timesteps (None: all), images, which of the independent draws of image and noise
    "all T, one image": (None, "one", 0),
    "all T, another image": (None, "one", 1),
    "all T, the batch": (None, "batch", 2),
    "100, one image": (100, "one", 3),
    "100, the batch": (100, "batch", 4),
    "32, one image": (32, "one", 5),
    "32, the batch": (32, "batch", 6),
}


@dataclass(frozen=True)
class FeatureVector:
    """Measurements of a feature vector around several optimizer steps.

    Attributes:
        timesteps: measured timesteps, (n,).
        shares: share of all timesteps that each one represents, (n,).
        losses: c_t-weighted losses before each step, (steps, n).
        changes: how far each step lowers these losses, (steps, n).
    """

    timesteps: Array
    shares: Array
    losses: Array
    changes: Array


def feature_vectors(run: FrozenRun, count: int) -> dict[str, FeatureVector]:
    """Measure every feature vector in `FEATURES` around `count` optimizer steps, each of which is undone.

    All vectors are measured around the same optimizer steps, on batches with uniform timesteps. Images and noise differ
    between vectors.
    """
    total = run.schedule.timesteps
    batch_size = run.size
    coefficients = torch.from_numpy(run.schedule.vlb)
    strata = {}  # timesteps of each vector and their shares
    for name, (wanted_count, _, _) in FEATURES.items():
        strata[name] = stratify_timesteps(run.schedule, min(wanted_count or total, total))

    def measure_losses(observation: Observation) -> dict[str, Tensor]:
        losses = {}
        for name, (_, images, draw) in FEATURES.items():
            t, _ = strata[name]
            if images == "one":  # another image of the batch for each step and draw
                indices = torch.full((len(t),), (observation.step * 7 + draw * 13) % batch_size)
            else:  # spread over the batch
                indices = torch.arange(len(t)) * batch_size // len(t)
            fractions = torch.from_numpy((t + 0.5) / total)
            losses[name] = observation.meter.errors(indices, fractions, name) * coefficients[t]
        return losses

    losses: dict[str, list[Array]] = {name: [] for name in FEATURES}
    changes: dict[str, list[Array]] = {name: [] for name in FEATURES}
    for step in range(count):
        observation = run.observation(*run.batch(step), step)
        before = measure_losses(observation)
        run.backward(run.losses(step, run.draws(step)))
        run.optimizer.step()
        after = measure_losses(observation)
        run.restore()
        for name in FEATURES:
            losses[name].append(before[name].numpy())
            changes[name].append((before[name] - after[name]).numpy())
    return {name: FeatureVector(*strata[name], np.array(losses[name]), np.array(changes[name])) for name in FEATURES}


def agreement(vectors: dict[str, FeatureVector], queue: int, selected: int, share: float) -> list[dict[str, Any]]:
    """Return a row of the table for each feature vector, and a row "S at random" for random timesteps.

    Delta is the mean of a feature vector, weighted by the shares; S is the set of selected timesteps. Columns:

    - forwards: forward passes of a batch per measurement.
    - vlb_ratio: the VLB before the steps as estimated by the vector, over its value by all T on the batch.
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
    one_image, another_image, whole_batch = list(vectors)[:3]  # the vectors of all T
    delta = {name: vector.changes @ vector.shares for name, vector in vectors.items()}
    vlb = {name: float((vector.losses @ vector.shares).mean()) for name, vector in vectors.items()}
    all_timesteps, changes_of_another_image = vectors[another_image].timesteps, vectors[another_image].changes
    count = len(changes_of_another_image)
    queues = [np.arange(start, start + queue) for start in range(0, count - queue + 1, queue)]  # steps
    random = np.random.default_rng(0)

    def select(name: str, steps: Array) -> Array:
        vector = vectors[name]
        shares = torch.from_numpy(vector.shares)
        return vector.timesteps[select_timesteps(torch.from_numpy(vector.changes[steps]), selected, shares).numpy()]

    def score_prediction(selected_timesteps: Array, steps: Array) -> float:
        other_steps = np.setdiff1d(np.arange(count), steps)
        columns = np.searchsorted(all_timesteps, selected_timesteps)
        mean_changes = changes_of_another_image[other_steps][:, columns].mean(1)
        return correlation(mean_changes, delta[whole_batch][other_steps])

    rows = []
    repetitions = 20  # of the random selection, for each queue
    random_sets = [
        np.sort(random.choice(all_timesteps, selected, replace=False)) for _ in range(repetitions * len(queues))
    ]
    for name in [*vectors, "S at random"]:
        is_vector = name in vectors
        sets = [select(name, steps) for steps in queues] if is_vector else random_sets
        full_sets = [select(one_image, steps) for steps in queues]
        queues_of_sets = queues
        if not is_vector:  # several random sets for each queue
            full_sets, queues_of_sets = full_sets * repetitions, queues * repetitions
        distances = [np.abs(one - full).mean() for one, full in zip(sets, full_sets, strict=True)]
        scores = [score_prediction(one, steps) for one, steps in zip(sets, queues_of_sets, strict=True)]
        rows.append(
            {
                "features": name,
                "forwards": 2 * len(vectors[name].timesteps) * share if is_vector else "",
                "vlb_ratio": vlb[name] / vlb[whole_batch] if is_vector else "",
                "delta_with_one_image": correlation(delta[name], delta[one_image]) if is_vector else "",
                "delta_with_batch": correlation(delta[name], delta[whole_batch]) if is_vector else "",
                "distance_of_S": float(np.mean(distances)) / len(all_timesteps),
                "S_predicts": float(np.mean(scores)),
            }
        )
    return rows


def correlation(x: Array, y: Array) -> float:
    """Return Pearson's correlation coefficient; 0 if either array is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale > 0 else 0.0

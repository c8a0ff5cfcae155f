"""Mean and repeatability of the rewards of `adaptive_paper`, for `credit.py`."""

from typing import Any

import numpy as np
import torch
from credit_estimators import FrozenRun
from torch.distributions import Beta

from kairos_timesteps.strategy import Strategy

NOISES = ("first", "second")  # the reward of a step is measured twice, with independent noise


def reward_noise(run: FrozenRun, count: int) -> dict[str, Any]:
    """Measure the rewards of `count` updates of `adaptive_paper`, each twice; return a row for the table.

    All updates start from the same weights and are undone. S is selected from a full queue before the first of them.
    The columns: ``reward``, the mean over images and updates. ``sd_updates``, the standard deviation over updates of
    the mean over images. ``sd_images``, the standard deviation over the images of an update. ``correlation_of_means``
    and ``correlation_of_deviations`` are those of the two measurements: of the means over images, and of the images'
    deviations from them. ``entropy_term``, coefficient times entropy of a new policy, which is added to the reward.
    """
    strategy = Strategy("adaptive_paper", run.process, sampler={"frequency": 1, "lr": 1e-30}, seed=run.first)
    sampler: Any = strategy.sampler
    for number in range(sampler.queue):
        run.observe_step(strategy, number)
    timesteps = sampler.reward_timesteps
    index = torch.arange(run.size).repeat_interleave(len(timesteps))
    t = timesteps.repeat(run.size)
    fractions = (t + 0.5).double() / run.schedule.timesteps

    rewards = np.zeros((count, len(NOISES), run.size))
    for number in range(count):
        update = sampler.queue + number
        x0, conditions = run.batch(update)
        observation = run.observation(x0, conditions, update)

        def measure_losses(observation: Any = observation, values: int = x0[0].numel()) -> torch.Tensor:
            errors = [observation.meter.errors(index, fractions, noise) for noise in NOISES]
            losses = torch.stack(errors) * values * sampler.coefficients[t]
            return losses.reshape(len(NOISES), run.size, len(timesteps)).mean(-1)

        draw = strategy.draw(x0)
        before = measure_losses()
        run.backward(strategy.weighted(draw, run.losses(update, draw.fractions)))
        run.optimizer.step()
        rewards[number] = (before - measure_losses()).numpy()
        run.restore()

    update_means = rewards.mean(-1)  # (count, noises)
    deviations = rewards - update_means[..., None]
    a, b = sampler.policy(x0)
    return {
        "S": " ".join(str(timestep) for timestep in sorted(timesteps.tolist())),
        "reward": rewards.mean(),
        "sd_updates": update_means.std(0).mean(),
        "sd_images": float(np.sqrt(deviations.var(-1).mean())),
        "correlation_of_means": np.corrcoef(update_means.T)[0, 1],
        "correlation_of_deviations": np.corrcoef(deviations[:, 0].ravel(), deviations[:, 1].ravel())[0, 1],
        "entropy_term": sampler.entropy * Beta(a, b).entropy().mean().item(),
    }

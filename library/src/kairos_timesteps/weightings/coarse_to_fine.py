"""Weighting that follows what the network can predict so far, from coarse to fine."""

from typing import Any

import numpy as np

from kairos_timesteps.base import Learned, Observation
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.lazy import torch
from kairos_timesteps.numeric import Values, interp, namespace
from kairos_timesteps.options import parse
from kairos_timesteps.registry import weighting
from kairos_timesteps.samplers.losses import ErrorOfEpsilon
from kairos_timesteps.weightings.fixed import AutoWeighting

_EVERY = 50  # steps between changes of the weights
_LEAST = 0.05  # smallest c


@weighting("coarse_to_fine", "kairos: auto, less where the network hardly improves on a guess from the noise level")
class CoarseToFine(Learned, AutoWeighting):
    r"""Weighting ``auto``, with less weight on clean levels where the network hardly improves on a guess.

    $$w_\epsilon = \frac{c(\lambda)}{\sqrt{1 + \mathrm{SNR}}} \left|\frac{d \lambda}{d t}\right|, \qquad
    c = \max\left(\frac{f(\lambda)}{\max f}, \frac{1}{20}\right) \text{ for less noise than where } f
    \text{ is largest, else } 1$$

    $$f = 1 - \frac{1 + \mathrm{SNR}}{\mathrm{SNR}} \, E\left[\|\hat\epsilon - \epsilon\|^2 \mid \lambda\right]$$

    A method of kairos. f is 1 minus the network's error over that of the best guess from the noise level alone, for
    data of unit variance. It follows from the losses of the training step. Where detail resembles noise, as
    in latents, the network improves little, and training there changes next to nothing. As the network learns, f
    grows from coarse to fine, and so does c. c is 1 until step 100, and as long as nothing is predicted. The errors are
    copied to the CPU every 50 steps, which synchronises with the device once.
    """

    state_names = ("_share",)

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule, prediction)
        self._errors = ErrorOfEpsilon(parse(ErrorOfEpsilon, {"decay": 0.99, "frequency": _EVERY}), schedule)
        self._share = np.ones(schedule.timesteps)  # c of every timestep

    def formula(self, snr: Values) -> Values:
        """Return the weight of ``auto`` times c."""
        return super().formula(snr) * interp(-namespace(snr).log(snr), -np.log(self.schedule.snr), self._share)

    def step(self, observation: Observation) -> None:
        """Learn from the errors of the step, and every 50 steps update c; do nothing if the errors are not known.

        c is unchanged if no error is below that of the best guess.
        """
        if observation.errors is None:
            return
        self._errors.group = self.group
        self._errors.learn(observation)
        if (observation.step + 1) % _EVERY == 0 and observation.step + 1 >= 2 * _EVERY:
            snr = self.schedule.snr
            gain = 1 - self._errors.mean() * (1 + 1 / snr)
            best = gain.argmax()
            if gain[best] > 0:
                self._share = np.where(snr > snr[best], (gain / gain[best]).clip(_LEAST, 1), 1.0)
                self.invalidate_table()

    def state_dict(self) -> dict[str, Any]:
        """Return c, and the errors that it follows."""
        return {**super().state_dict(), "errors": self._errors.state_dict()}

    def load_state_dict(self, state: dict[str, Any], device: "torch.device | str" = "cpu") -> None:
        """Restore a state that `state_dict` returned."""
        super().load_state_dict(state, device)
        self._errors.load_state_dict(state["errors"], device)

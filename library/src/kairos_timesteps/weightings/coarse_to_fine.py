"""A weighting that follows what a network can predict by now, from coarse to fine."""

from typing import Any

import numpy as np

from kairos_timesteps import component_options as every
from kairos_timesteps.base import Observation
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.numeric import Values, interp, of
from kairos_timesteps.samplers.losses import Predicted
from kairos_timesteps.weightings.fixed import Auto

_EVERY = 50  # steps between changes of the weights
_LEAST = 0.05  # of c


class CoarseToFine(Auto):
    r"""As `auto`, with less at the clean levels where the network can take little off its error: ours.

    $$w_\epsilon = \frac{c(\lambda)}{\sqrt{1 + \mathrm{SNR}}} \left|\frac{d \lambda}{d t}\right|, \qquad
    c = \max\left(\frac{f(\lambda)}{\max f}, \frac{1}{20}\right) \text{ for less noise than where } f
    \text{ is largest, else } 1$$

    $$f = 1 - \frac{1 + \mathrm{SNR}}{\mathrm{SNR}} \, E\left[\|\hat\epsilon - \epsilon\|^2 \mid \lambda\right]$$

    f is what the network takes, by the losses of the training itself, off the error of a guess that knows no more than
    the noise level, for data of unit variance. Where detail is itself like noise, as in latents, it can take little,
    and what is weighed there trains next to nothing. As a network learns, f grows from coarse to fine, and so does c.
    It is 1 until step 100, and as long as nothing is predicted. Every 50 steps the errors come to the CPU: one wait for
    a device.
    """

    learned = True
    kept = ("_share",)

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule, prediction)
        self._errors = Predicted(every.InfoRate(decay=0.99, frequency=_EVERY), schedule)
        self._share = np.ones(schedule.timesteps)  # c of every timestep

    def of_snr(self, snr: Values) -> Values:
        """That of `auto`, times c."""
        return super().of_snr(snr) * interp(-of(snr).log(snr), -np.log(self.schedule.snr), self._share)

    def step(self, observation: Observation) -> None:
        """Take in the step's errors, and every 50 steps follow them."""
        if observation.errors is None:
            return
        self._errors.group = self.group
        with self._errors.observe(observation):
            pass
        if (observation.step + 1) % _EVERY == 0 and observation.step + 1 >= 2 * _EVERY:
            snr = self.schedule.snr
            gain = 1 - self._errors.mean() * (1 + 1 / snr)
            best = gain.argmax()
            if gain[best] > 0:
                self._share = np.where(snr > snr[best], (gain / gain[best]).clip(_LEAST, 1), 1.0)
                self.restored()

    def state_dict(self) -> dict[str, Any]:
        """Shares, and the errors that they follow."""
        return {**super().state_dict(), "errors": self._errors.state_dict()}

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state, device)
        self._errors.load_state_dict(state["errors"], device)

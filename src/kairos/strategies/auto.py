"""`auto`, one strategy without options: a weighting and a sampler that read what the training shows anyway. Ours."""

from typing import Any

import numpy as np

from kairos.diffusion.schedule import NoiseSchedule
from kairos.strategies import options as every
from kairos.strategies.base import Observation, Weighting
from kairos.strategies.gradients import GradientNorm
from kairos.strategies.history import Predicted
from kairos.strategies.laws import LogSnr
from kairos.strategies.numeric import Array, Values, interp, of
from kairos.strategies.weightings import measure

_EVERY = 50  # steps between changes of the weights
_LEAST = 0.05  # of c


class Auto(GradientNorm):
    r"""As `gradient_norm`, from a prior that is uniform in the angle of v-diffusion, with nothing to choose.

    $$p(t) \propto p_0(t) \left(\sqrt{E\left[g^\top D g \mid t\right]} + \frac{1}{9} \mathrm{mean}\right), \qquad
    p_0(\lambda) = \frac{1}{2 \pi \cosh(\lambda / 2)}$$

    Ours, to go with the weighting ``auto``. A tenth of the draws stay the prior's, which bounds the corrections. Points
    are even. It is measured every 100 steps, which is 1 % of the passes.
    """

    def __init__(self, options: Any, schedule: NoiseSchedule, seed: int = 0):
        super().__init__(options, schedule, seed, LogSnr(every.LogSnr(law="secant", scale=1.0), schedule))

    def relative(self, values: Array) -> Array:
        """The root, and the prior's share."""
        roots = super().relative(values)
        return 0.9 * roots + 0.1 * np.average(roots, weights=self.prior.masses())


class AutoWeighting(Weighting):
    r"""The error of epsilon over all of ln SNR, less where little noise is left, and where noise cannot be told.

    $$w_\epsilon = \frac{c(\lambda)}{\sqrt{1 + \mathrm{SNR}}} \left|\frac{d \lambda}{d t}\right|, \qquad
    c = \max\left(\frac{f(\lambda)}{\max f}, \frac{1}{20}\right) \text{ for less noise than where } f
    \text{ is largest, else } 1$$

    $$f = 1 - \frac{1 + \mathrm{SNR}}{\mathrm{SNR}} \, E\left[\|\hat\epsilon - \epsilon\|^2 \mid \lambda\right]$$

    Where noise prevails this is the error of epsilon in the measure of lambda = ln SNR; where the image does, that over
    sqrt(SNR), the error of v with every angle alike (tan(angle) = sigma), which v-prediction with a cosine schedule and
    a linear flow have without a weight (Kingma and Gao 2023, table 1).

    f is what the network takes, by the losses of the training itself, off the error of a guess that knows no more than
    the noise level, for data of unit variance. Where detail is itself like noise, as in latents, it can take little, and
    what is weighed there trains next to nothing. As a network learns, f grows from coarse to fine, and so does c. It is
    1 until step 100, and as long as nothing is predicted.
    """

    learned = True
    kept = ("_share",)

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule, prediction)
        self._errors = Predicted(every.InfoRate(decay=0.99, frequency=_EVERY), schedule)
        self._share = np.ones(schedule.timesteps)  # c of every timestep

    def of_snr(self, snr: Values) -> Values:
        """The formula between the schedule's ends."""
        known = self.schedule.snr
        inside = snr.clip(known.min(), known.max())
        share = interp(-of(inside).log(inside), -np.log(known), self._share)
        return share * (1 + inside) ** -0.5 * measure(inside, known)

    def converted(self, factor: Values, snr: Values) -> Values:
        """Within the schedule's ends, too."""
        return super().converted(factor, snr.clip(self.schedule.snr.min(), self.schedule.snr.max()))

    def step(self, observation: Observation) -> None:
        """Take in the step's errors, and every 50 steps follow them."""
        if observation.errors is None:
            return
        with self._errors.observe(observation):
            pass
        if (observation.step + 1) % _EVERY == 0 and observation.step + 1 >= 2 * _EVERY:
            snr = self.schedule.snr
            gain = 1 - self._errors.mean() * (1 + 1 / snr)
            best = gain.argmax()
            if gain[best] > 0:
                self._share = np.where(snr > snr[best], (gain / gain[best]).clip(_LEAST, 1), 1.0)
                self.restored()

    def restored(self) -> None:
        """Weights of a discrete process are computed anew."""
        self._tables.clear()

    def state_dict(self) -> dict[str, Any]:
        """Shares, and the errors that they follow."""
        return {**super().state_dict(), "errors": self._errors.state_dict()}

    def load_state_dict(self, state: dict[str, Any], device: Any = "cpu") -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state, device)
        self._errors.load_state_dict(state["errors"], device)

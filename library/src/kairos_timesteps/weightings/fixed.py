"""Loss weightings: a factor per timestep on the squared error of what the network predicts."""

import math
from typing import Any

import numpy as np

from kairos_timesteps.base import Weighting
from kairos_timesteps.diffusion.schedule import NoiseSchedule
from kairos_timesteps.errors import demand
from kairos_timesteps.lazy import Tensor
from kairos_timesteps.numeric import Array, Values, interp, namespace, sigmoid
from kairos_timesteps.options import option
from kairos_timesteps.registry import weighting
from kairos_timesteps.samplers.combined import evaluate_table


@weighting("none", "every timestep alike")
class Unweighted(Weighting):
    r"""Equal weights, for whatever is predicted.

    $$w = 1$$
    """

    stated_for = "predicted"

    def formula(self, snr: Values) -> Values:
        """Return ones."""
        return namespace(snr).ones_like(snr)


@weighting("vlb", "coefficient c_t of the variational bound")
class Vlb(Weighting):
    r"""Coefficient of the variational bound (Kim et al. 2025, eq. 7), for sigma_t² of the reverse process.

    $$w_\epsilon(t) = \frac{\beta_t^2}{2 \sigma_t^2 (1 - \beta_t) (1 - \bar\alpha_t)}, \qquad \sigma_t^2 = \beta_t$$
    """

    def weights(self, step: Any = 0) -> Array:
        """Convert c_t to the prediction."""
        return self.schedule.in_prediction(self.schedule.vlb, self.prediction)


class CappedWeighting(Weighting):
    """Base of functions of an SNR that some trainers limit, in the formula and in its conversion to a prediction."""

    largest_snr: float | None = option(None, "upper limit of the SNR (kohya: 1000); null: none", gt=0)

    def __call__(self, snr: Values, step: Any = 0) -> Values:
        """Return the weights at the limited SNR."""
        return super().__call__(snr if self.largest_snr is None else snr.clip(None, self.largest_snr), step)


@weighting("p2", "perception prioritised (Choi et al. 2022)")
class P2(CappedWeighting):
    r"""Perception prioritised (Choi et al. 2022, eq. 8), on the error of epsilon; gamma 0 is no weighting.

    $$w_\epsilon = \frac{1}{(k + \mathrm{SNR})^\gamma}$$

    OneTrainer applies the formula without a conversion to networks that predict v: ``convert: false``.
    """

    k: float = option(1.0, "offset of the SNR", gt=0)
    gamma: float = option(1.0, "exponent; 0 switches the weighting off", ge=0)
    convert: bool = option(True, "convert to the network's prediction; false: the formula for whatever is predicted")

    def formula(self, snr: Values) -> Values:
        """Return (k + SNR)^-gamma, elementwise."""
        return (self.k + snr) ** -self.gamma

    def converted(self, factor: Values, snr: Values) -> Values:
        """Convert the factor if ``convert`` is set."""
        return super().converted(factor, snr) if self.convert else factor


@weighting("min_snr", "Min-SNR-gamma (Hang et al. 2023)")
class MinSnr(Weighting):
    r"""Min-SNR-gamma (Hang et al. 2023, eq. 3 and appendix).

    $$w_\epsilon = \frac{\min(\mathrm{SNR}, \gamma)}{\mathrm{SNR}}, \qquad w_{x_0} = \min(\mathrm{SNR}, \gamma), \qquad
    w_v = \frac{\min(\mathrm{SNR}, \gamma)}{\mathrm{SNR} + 1}$$

    SNR = 0 gives 1, 0 and 0.
    """

    gamma: float = option(5.0, "cap of the SNR", gt=0)

    def formula(self, snr: Values) -> Values:
        """Return min(SNR, gamma)/SNR, without the division by 0."""
        return self.gamma / snr.clip(self.gamma, None)


@weighting("soft_min_snr", "Min-SNR without the kink (Crowson et al. 2024)")
class SoftMinSnr(Weighting):
    r"""Min-SNR without the kink, on the error of epsilon (Crowson et al. 2024, section 3.4).

    $$w_\epsilon = \frac{\gamma}{\mathrm{SNR} + \gamma}$$
    """

    gamma: float = option(5.0, "cap of the SNR", gt=0)

    def formula(self, snr: Values) -> Values:
        """Return gamma/(SNR + gamma), elementwise."""
        return self.gamma / (snr + self.gamma)


@weighting("debiased", "debiased estimation (Yu et al. 2023)")
class Debiased(CappedWeighting):
    r"""Debiased estimation (Yu et al. 2023).

    $$w_\epsilon = \frac{1}{\sqrt{\min(\mathrm{SNR}, 1000)}}, \qquad w_v = \frac{1}{\mathrm{SNR} + 1}$$

    For v-prediction public trainers use 1/(SNR + 1), which is not the conversion of the epsilon form,
    sqrt(SNR)/(SNR + 1); ``convert: true`` selects the conversion. The weight for x0 is converted. SNR = 0 gives an
    infinite weight for epsilon, and 0 for x0.
    """

    convert: bool = option(False, "for v: convert the epsilon form instead of the published 1/(SNR + 1)")

    stated_for = "x0"  # the form that is finite

    def formula(self, snr: Values) -> Values:
        """Return SNR/sqrt(min(SNR, 1000))."""
        square: Values = snr * snr.clip(1000.0, None) / 1000.0
        return square**0.5

    def converted(self, factor: Values, snr: Values) -> Values:
        """Return the published form of each prediction."""
        if self.prediction == "v" and not self.convert:
            return 1 / (snr + 1)
        return super().converted(factor, snr)


@weighting("edm", "EDM's, on the error of x0 (Karras et al. 2022)")
class EdmWeighting(Weighting):
    r"""Weighting of EDM, on the error of x0 (Karras et al. 2022, table 1), sigma² = 1/SNR.

    $$w_{x_0} = \frac{\sigma^2 + \sigma_{\mathrm{data}}^2}{(\sigma \, \sigma_{\mathrm{data}})^2}$$

    During a warm-up the weight is capped at 5 * 100^(step/warmup), which grows from 5 to 500 (Wu et al. 2023).
    Afterwards there is no cap. The weight is never below 1/sigma_data² = 4, so the first steps weigh almost alike.
    """

    sigma_data: float | None = option(
        None, "standard deviation of the data; null: that of process edm, else 0.5, as of pixels", gt=0
    )
    warmup: int | None = option(
        None, "steps in which a cap of the weight grows from 5 to 500 (FDM); null: no cap", ge=1
    )

    stated_for = "x0"

    @property
    def depends_on_step(self) -> bool:  # type: ignore[override]  # computed from an option, not set
        """True with a warm-up."""
        return self.warmup is not None

    def formula(self, snr: Values) -> Values:
        """Return 1/sigma_data² + SNR, elementwise."""
        return 1 / (self.sigma_data or 0.5) ** 2 + snr

    def __call__(self, snr: Values, step: Any = 0) -> Values:
        """Return the weights, capped in the warm-up; `step` is a number or a tensor that broadcasts with `snr`."""
        weight, warmup = self.formula(snr), self.warmup
        if warmup is None or (isinstance(step, int) and step >= warmup):
            return self.converted(weight, snr)
        capped = namespace(weight).minimum(weight, 5 * 100 ** (step / warmup) + 0 * weight)
        if not isinstance(step, int):
            capped = namespace(weight).where(step >= warmup, weight, capped)
        return self.converted(capped, snr)


@weighting("sigmoid", "sigmoid of ln SNR, integrated over ln SNR (VDM++, SiD2)")
class Sigmoid(Weighting):
    r"""Sigmoid on the error of epsilon (Kingma and Gao 2023; SiD2), of the integral over lambda = ln SNR.

    $$w_\epsilon = \frac{1}{1 + e^{\lambda - b}} \left|\frac{d \lambda}{d t}\right|$$

    The measure is |d ln SNR/dt| of the schedule, mean 1, so that uniform timesteps give that integral.
    """

    bias: float = option(0.0, "ln SNR where it is 1/2")
    measure: bool = option(True, "times |d ln SNR/dt|, mean 1: on any process the integral over ln SNR, with uniform t")

    def formula(self, snr: Values) -> Values:
        """Return the sigmoid of bias - ln SNR, times its measure if `measure` is set."""
        weight = sigmoid(self.bias - namespace(snr).log(snr))
        return weight * level_measure(snr, self.schedule.snr) if self.measure else weight


@weighting("auto", "kairos: the error of epsilon over ln SNR, less where little noise is left")
class AutoWeighting(Weighting):
    r"""Weights the epsilon error evenly in ln SNR, damped by 1/sqrt(1 + SNR) at low noise.

    $$w_\epsilon = \frac{1}{\sqrt{1 + \mathrm{SNR}}} \left|\frac{d \lambda}{d t}\right|$$

    A method of kairos. Where noise prevails it is the error of epsilon in the measure of lambda = ln SNR. Where the
    image prevails it is that error over sqrt(SNR): the error of v with all angles alike (tan(angle) = sigma).
    v-prediction with a cosine schedule, and a linear flow, have that weight already (Kingma and Gao 2023, table 1).
    """

    def formula(self, snr: Values) -> Values:
        """Return `auto`'s weights at SNRs clipped to the schedule's range."""
        inside = snr.clip(self.schedule.snr.min(), self.schedule.snr.max())
        return (1 + inside) ** -0.5 * level_measure(inside, self.schedule.snr)

    def converted(self, factor: Values, snr: Values) -> Values:
        """Convert the factor at SNRs clipped to the schedule's range."""
        return super().converted(factor, snr.clip(self.schedule.snr.min(), self.schedule.snr.max()))


def level_measure(snr: Values, schedule: Array) -> Values:
    """Return |d ln SNR/dt| of a schedule at any SNR, elementwise, divided by its mean over the timesteps.

    Args:
        snr: where to evaluate.
        schedule: SNR of every timestep, (T,).
    """
    level = -np.log(schedule)
    slope = np.gradient(level, edge_order=2)
    return interp(-namespace(snr).log(snr), level, slope / slope.mean())


@weighting("snr", "a power of the SNR, with bounds")
class Snr(CappedWeighting):
    r"""Power of the SNR within bounds, on the error of epsilon (Hang et al. 2023; Salimans and Ho 2022: x0).

    $$w_\epsilon = \mathrm{scale} \cdot \min(\max(\mathrm{SNR}, \mathrm{low}), \mathrm{high})^{\mathrm{power}}$$
    """

    power: float = option(0.0, "exponent of the SNR: 0 none, 1 the error of x0, -1 inverse")
    low: float = option(0.0, "lower bound of the SNR", ge=0)
    high: float | None = option(None, "upper bound of the SNR; null: no bound", gt=0)
    scale: float = option(1.0, "factor of the weight", gt=0)

    def formula(self, snr: Values) -> Values:
        """Return scale times the clipped SNR to the power, elementwise."""
        return self.scale * snr.clip(self.low, self.high) ** self.power


class SigmaWeighting(Weighting):
    """Base of functions of sigma = 1/(1 + sqrt(SNR)), t of a linear flow, on the error of whatever is predicted."""

    stated_for = "predicted"

    def formula(self, snr: Values) -> Values:
        """Return the weights at SNRs, each converted to sigma, the noise share of a linear flow."""
        return self.sigma_formula(1 / (1 + snr**0.5))

    def sigma_formula(self, sigma: Values) -> Values:
        """Return the weight at sigma, elementwise."""
        raise NotImplementedError


@weighting("linear", "1 + 3 sigma (NeMo)")
class Linear(SigmaWeighting):
    r"""Line in sigma, t of a linear flow (NeMo: 1 and 3; OneTrainer's SIGMA: 0 and 1).

    $$w = \mathrm{offset} + \mathrm{slope} \cdot \sigma, \qquad \sigma = \frac{1}{1 + \sqrt{\mathrm{SNR}}}$$
    """

    offset: float = option(1.0, "weight at sigma = 0", ge=0)
    slope: float = option(3.0, "change of the weight per sigma")

    @staticmethod
    def check(options: Any) -> None:
        """Reject weights below 0."""
        offset, slope = options.offset, options.slope
        demand(offset + slope >= 0, "slope", slope, f"at least -{offset}: no weight below 0")

    def sigma_formula(self, sigma: Values) -> Values:
        """Return offset + slope · sigma, elementwise."""
        return self.offset + self.slope * sigma


@weighting("power", "sigma^-2 (sigma_sqrt of diffusers)")
class Power(SigmaWeighting):
    r"""Power of sigma, t of a linear flow (diffusers' sigma_sqrt: -2).

    $$w = \sigma^{\mathrm{power}}, \qquad \sigma = \frac{1}{1 + \sqrt{\mathrm{SNR}}}$$
    """

    power: float = option(-2.0, "exponent of sigma; -2 is sigma_sqrt of diffusers")
    least: float = option(0.0, "lower bound of sigma", ge=0, lt=1)

    def sigma_formula(self, sigma: Values) -> Values:
        """Return sigma, at least `least`, to the power, elementwise."""
        return sigma.clip(self.least, None) ** self.power


@weighting("cosmap_weight", "the density of a uniform angle as a weight (SD3)")
class CosMapWeighting(SigmaWeighting):
    r"""Density of a uniform angle as a weight, sigma as in `Linear` (Esser et al. 2024).

    $$w = \frac{2}{\pi (1 - 2 \sigma + 2 \sigma^2)}$$
    """

    def sigma_formula(self, sigma: Values) -> Values:
        """Return 2/(π (1 - 2 sigma + 2 sigma²)), elementwise."""
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))


@weighting("bell", "the middle (DiffSynth)")
class Bell(SigmaWeighting):
    r"""Bell less its ends, of mean 1 on [0, 1], sigma as in `Linear` (DiffSynth; NeMo's bsmntw).

    $$w \propto e^{-2 (\sigma - 1/2)^2} - e^{-1/2}$$
    """

    flat: bool = option(False, "flat at its largest from the middle to the image")

    def sigma_formula(self, sigma: Values) -> Values:
        """Return the bell at sigma, elementwise; with `flat` (ai-toolkit), its maximum for sigma below 1/2."""
        sigma = sigma.clip(0.5, None) if self.flat else sigma
        mean = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - math.exp(-0.5)
        return (namespace(sigma).exp(-2 * (sigma - 0.5) ** 2) - math.exp(-0.5)) / mean


@weighting("v_like_loss", "v_pred_like_loss (kohya)")
class VLikeLoss(CappedWeighting):
    r"""Part of the error of v added to the error of epsilon (kohya's v_pred_like_loss); converted for others.

    $$w_\epsilon = 1 + c \, \frac{\mathrm{SNR} + 1}{\mathrm{SNR}}$$

    kohya has it for networks that predict epsilon only.
    """

    c: float = option(0.1, "factor of the added error", ge=0)

    def formula(self, snr: Values) -> Values:
        """Return 1 + c (SNR + 1)/SNR, elementwise."""
        return 1 + self.c * (snr + 1) / snr


@weighting("table_weight", "weights by numbers: cells, lines or a spline")
class TableWeighting(Weighting):
    r"""Table of numbers evenly spread over the process, on the error of whatever is predicted.

    $$w(t) = f(t / T), \qquad f \text{ through the numbers}$$

    Raises:
        ConfigError: there are no numbers, or they are not finite, below 0 or all 0.
    """

    values: list[float] = option([1.0, 1.0], "weights, t/T from 0 to 1")
    file: str | None = option(None, "a file of them instead, comma or line separated")
    between: str = option("lines", "numbers are of equal cells, or knots", choices=("cells", "lines", "spline"))

    def __init__(self, options: Any, schedule: NoiseSchedule, prediction: str = "epsilon"):
        super().__init__(options, schedule, prediction)
        middles = (np.arange(schedule.timesteps) + 0.5) / schedule.timesteps
        self._weights = evaluate_table(options, middles)

    def weights(self, step: Any = 0) -> Array:
        """Return the table at the middles of the timesteps, (T,)."""
        return self._weights


@weighting("robust", "1/(loss + c)^p (MeanFlow)")
class Robust(Weighting):
    r"""Function of a sample's loss L, through which no gradient flows (Geng et al. 2025, MeanFlow).

    $$w = \frac{1}{(L + c)^p}$$
    """

    p: float = option(1.0, "power; 0.5 is a pseudo-Huber loss, 1 a logarithm", ge=0)
    c: float = option(1e-3, "offset that keeps the weight finite", gt=0)

    stated_for = "predicted"

    def formula(self, snr: Values) -> Values:
        """Return ones: the weight depends on the loss alone."""
        return namespace(snr).ones_like(snr)

    def apply(self, losses: Tensor, weights: Tensor, importance: Tensor, fractions: Tensor) -> Tensor:
        """Divide each loss by its power."""
        return importance * losses / (losses.detach() + self.c) ** self.p

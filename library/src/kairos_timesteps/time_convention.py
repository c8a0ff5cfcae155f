"""Conventions of time: what a trainer's t means, and whether its x_t agrees."""

import logging
import math

import torch
from torch import Tensor

from kairos_timesteps.diffusion.processes import Discrete, Edm, Flow, Process
from kairos_timesteps.errors import demand, rejection

LOG = logging.getLogger("kairos_timesteps")
_USERS = {
    "noise_is_one": "kohya, musubi, NeMo, REPA",
    "data_is_one": "SiT, LightningDiT, flow_matching",
    "index": "index of scheduler.timesteps, 0 is noise",
}


class TimeConvention:
    """Translation between the trainer's t and times of the process.

    Args:
        process: forward process.
        name: ``noise_is_one``, ``data_is_one``, ``index``, ``sigma``, or None if the process has one convention.

    Raises:
        ConfigError: the process does not have the convention, or has several and none is named.
    """

    def __init__(self, process: Process, name: str | None = None):
        self.process, allowed = process, self.allowed(process)
        users = {**_USERS, "index": "timestep, 0 is data"} if isinstance(process, Discrete) else _USERS
        described = ", ".join(
            f"{convention} ({users[convention]})" if convention in users else convention for convention in allowed
        )
        self.name = allowed[0] if name is None and len(allowed) == 1 else str(name)
        demand(self.name in allowed, f"time of process {type(process).__name__}", repr(name), described)

    @property
    def count(self) -> int:
        """Number of indices, of convention ``index``."""
        return int(self.process.time_scale) if isinstance(self.process, Flow) else self.process.schedule.timesteps

    @staticmethod
    def allowed(process: Process) -> tuple[str, ...]:
        """Return the conventions that a process can have.

        A flow has ``index`` only with a `time_scale` above 1, as from a scheduler of diffusers.
        """
        if isinstance(process, Discrete):
            return ("index",)
        if isinstance(process, Edm):
            return ("sigma",)
        is_from_scheduler = isinstance(process, Flow) and process.time_scale > 1
        return ("noise_is_one", "data_is_one", *(("index",) if is_from_scheduler else ()))

    def to_trainer(self, t: Tensor) -> Tensor:
        """Convert times of the process to the trainer's: an int64 index, or float32."""
        if self.name != "index":
            return (1 - t if self.name == "data_is_one" else t).float()
        if isinstance(self.process, Discrete):
            return t
        return (self.count - 1 - (self.process.fractions(t) * self.count).long()).clamp(0, self.count - 1)

    def to_process(self, t: Tensor) -> Tensor:
        """Convert the trainer's times to times of the process: float64, or int64 timesteps of a discrete process."""
        if self.name != "index":
            return 1 - t.double() if self.name == "data_is_one" else t.double()
        if isinstance(self.process, Discrete):
            return t.long()
        return self.process.times((self.count - t.double()) / self.count)

    def describe(self) -> str:
        """Return what the trainer's t = 0.1 means; for indices, the index at a tenth of the schedule."""
        t, shown = torch.tensor([0.1]), "0.1"
        if self.name == "index":
            t = (t * self.count).long()
            shown = f"{int(t)} of {self.count}"
        signal, noise = (float(coefficient) for coefficient in self.process.coefficients(self.to_process(t)))
        level = 2 * math.log(signal / noise)
        return f"t = {shown} ({self.name}) is x_t = {signal:.3g} x0 + {noise:.3g} noise, ln SNR {level:.3g}"

    def angles(self, t: Tensor) -> Tensor:
        """Return atan(noise/signal) of the process at the trainer's t, float64 (batch,)."""
        signal, noise = self.process.coefficients(self.to_process(t))
        return torch.atan2(noise, signal).double()

    def check(self, x0: Tensor, noise: Tensor, x_t: Tensor, t: Tensor, tolerance: float = 0.01) -> None:
        """Compare the signal-to-noise ratio of the trainer's x_t with that of the process at t.

        Signal a and noise s are fitted to x_t = a x0 + s noise, sample by sample. Their angle atan(s/a) must be that of
        the process.

        Args:
            x0: latents, (batch, ...).
            noise: noise, (batch, ...).
            x_t: noised latents, (batch, ...), up to a factor.
            t: the trainer's t, (batch,).
            tolerance: largest difference of angles, in radians; data and noise differ by pi/2.

        Raises:
            ConfigError: an angle differs by more, x_t is no combination of x0 and noise, or t is out of range
                or not (batch,).
        """
        demand(
            t.ndim == 1, "check: t", f"shape {tuple(t.shape)}", "(batch,): frames with times of their own one by one"
        )
        last = self.count - 1 if self.name == "index" else math.inf if self.name == "sigma" else 1
        inside = bool(((t >= 0) & (t <= last)).all())
        demand(
            inside, "check: t", f"{t.min().item():.4g} to {t.max().item():.4g}", f"0 to {last}, as timesteps() returns"
        )
        columns = [tensor.detach().flatten(1).double().cpu() for tensor in (x0, noise, x_t)]
        for name, values in zip(("x0", "noise", "x_t"), columns):
            demand(values.isfinite().all(), f"check: {name}", "NaN or infinity", "finite values")
        basis, values, t = torch.stack(columns[:2], 2), columns[2][:, :, None], t.cpu()  # (batch, size, 2 or 1)
        # x0 and noise of a sample must differ in direction: a latent of zeros, or a single value, has no ratio
        largest, smallest = torch.linalg.matrix_norm(basis, 2), _smallest_singular_values(basis)
        rows = (smallest > 1e-6 * largest).nonzero()[:, 0]
        if not len(rows):
            LOG.warning("check: no ratio of x0 and noise can be measured, as every sample has zeros or a single value")
            return
        basis, values, t, smallest = basis[rows], values[rows], t[rows], smallest[rows]
        fitted = torch.linalg.lstsq(basis, values).solution
        lengths = values.norm(dim=(1, 2))
        rounding = max(torch.finfo(tensor.dtype).eps for tensor in (x0, noise, x_t))
        worst = float(((basis @ fitted - values).norm(dim=(1, 2)) / lengths.clamp(1e-300)).max())
        demand(worst < 0.1, "check: x_t", f"{worst:.0%} of it unexplained", "a x0 + s noise, of the same batch")
        angles = torch.atan2(fitted[:, 1, 0], fitted[:, 0, 0])
        # an error of x_t by rounding changes the angle more if x0 and noise are nearly parallel
        allowed_differences = tolerance + 2 * rounding * lengths / (smallest * fitted.norm(dim=(1, 2)).clamp(1e-300))
        off = (angles - self.angles(t)).abs() - allowed_differences
        if float(off.max()) <= 0:
            return
        row, fits = int(off.argmax()), ""
        for name in self.allowed(self.process):
            same_kind = t.is_floating_point() == (name != "index")
            if same_kind:
                differences = (angles - TimeConvention(self.process, name).angles(t)).abs()
                fits = f"; time={name!r} fits" if bool((differences <= allowed_differences).all()) else fits
        level = -2 * float(angles[row].tan().abs().log())
        expected = -2 * float(self.angles(t)[row].tan().log())
        got = f"ln SNR {level:.3g} at t = {t[row].item():.4g}"
        raise rejection("check: x_t", got, f"ln SNR {expected:.3g}, with time={self.name!r}{fits}")


def _smallest_singular_values(basis: Tensor) -> Tensor:
    """Return the smaller of two singular values of each matrix (batch, size, 2); 0 if it has a single row."""
    return basis.new_zeros(len(basis)) if basis.shape[1] < 2 else torch.linalg.matrix_norm(basis, -2)

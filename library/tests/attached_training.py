"""Training code for the tests of `attach`: a loop in attached or explicit form, steps, validations and checkpoints."""

import io

import pytest
import torch
from torch import nn

from kairos_timesteps import Strategy, attach
from kairos_timesteps.base import Learned, MeasuresNetwork
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.time_convention import TimeConvention
from small_loop import IMAGES, TinyNetwork
from specifications import Call, Specification, context_of, options_without_name

LEARNED = sorted(name for name, entry in SAMPLERS.items() if issubclass(entry.component, Learned))
MEASURING = sorted(name for name, entry in SAMPLERS.items() if issubclass(entry.component, MeasuresNetwork))
COUNT = 4  # samples of a micro-batch
MASK, WEIGHTS = torch.tensor([True, False, True, False]), torch.tensor([0.5, 1.0, 2.0, 0.0])

# noised images by convention of the trainer's time
CONVENTIONS = {
    "noise_is_one": lambda x0, noise, t: (1 - t) * x0 + t * noise,
    "data_is_one": lambda x0, noise, t: t * x0 + (1 - t) * noise,
}

# strategies that learn, or measure the network, in each step
LOSS_RMS_EDM2 = Specification({"name": "loss_rms", "frequency": 1, "start": 1}, {"name": "edm2", "channels": 8})
GRADIENT_NORM = Specification({"name": "gradient_norm", "frequency": 1, "start": 1, "bins": 4})
ADAPTIVE = Specification({"name": "adaptive", "frequency": 1, "feature_timesteps": 5, "width": 4})
ADAPTIVE_EDM2 = Specification(
    {"name": "adaptive", "frequency": 1, "feature_timesteps": 5, "width": 4}, {"name": "edm2"}
)
INFO_NOISE = Specification({"name": "info_noise", "frequency": 1, "start": 1})

# torch.distributed.checkpoint warns if there is no process group
IN_ONE_PROCESS = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Trainer:
    """Training loop with micro-batches, validations, steps, skipped steps and checkpoints.

    Args:
        specification: options of the strategy.
        attached: use `attach`; otherwise the explicit form.
        time: convention of the trainer's t.
        late: clear gradients between the loss and its backward pass, not after the step.
        optimizer: class and arguments.
        scaler: GradScaler, or None.
        to_none: True if `zero_grad` removes gradients.
        more: further arguments of `attach` and `Strategy`.
    """

    def __init__(
        self, specification, attached, time=None, late=False, optimizer=None, scaler=None, to_none=True, **more
    ):
        torch.manual_seed(0)
        self.network, self.late, self.scaler, self.to_none = TinyNetwork(), late, scaler, to_none
        self.optimizer = (optimizer or torch.optim.Adam)(self.network.parameters(), lr=1e-2)
        self.strategy = specification.build(**more)
        self.time = TimeConvention(self.strategy.process, time)
        self.context = context_of(specification, Call(), COUNT).arguments
        self.timesteps, self.draws, self.cleared, self.batches = None, [], True, 0
        self.t, self.losses = [], []
        if attached:
            options = dict(
                sampler=options_without_name(specification.sampler),
                weighting=options_without_name(specification.weighting),
            )
            name, process = self.strategy.name, self.strategy.process
            predict = self.predict if name.split("+")[0] in MEASURING else None
            self.timesteps = attach(
                name, process, self.optimizer, self.network, time=time, predict=predict, **options, **more
            )  # fmt: skip
            self.strategy = self.timesteps.strategy

    def predict(self, x_t, t):
        return Strategy("uniform", self.time.process).process.predict(self.network, x_t, t)

    def batch(self, train=True, weights=None, mask=None, factor=1.0, backward=True, count=COUNT):
        """Run one micro-batch of `count` samples, forward and backward."""
        self.batches += train
        x0 = IMAGES[(self.batches % 2) * COUNT :][:count]
        context = {**self.context, **({"epoch": self.batches} if "item" in self.context else {})}
        for name, value in context.items():
            if hasattr(value, "__len__") and len(value) == COUNT:
                context[name] = value[:count]
        if self.timesteps:
            self.network.train(train)
            t = self.timesteps(x0, **context)
        else:
            draw = self.strategy.draw(x0, **context)
            t = self.time.to_trainer(draw.t)
        process, at = self.time.process, self.time.to_process(t)
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(self.batches))
        output = process.predict(self.network, process.noised(x0, noise, at), at)
        errors = factor * (output - process.target(x0, noise, at)).square().mean((1, 2, 3))
        if self.timesteps:
            loss = self.timesteps.loss(errors, weights=weights, mask=mask)
        else:
            terms = self.strategy.weighted(draw, errors, mask)
            loss = (terms if weights is None else terms * weights).mean()
        if train:
            self.t.append(t)
            self.losses.append(loss.detach())
        if train and backward:
            if self.late and self.cleared:
                self.optimizer.zero_grad()
            self.cleared = False
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if not self.timesteps:
                self.draws.append(draw)

    def step(self, skipped=False):
        """Run the optimizer's step; the explicit form does not observe a skipped step."""

        def call():
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif not skipped:
                self.optimizer.step()

        if self.timesteps or skipped:
            call()
        else:
            with self.strategy.observe(self.draws, self.network, self.optimizer):
                call()
        if skipped and not self.timesteps:
            self.strategy.weighting.zero_grad()
        self.draws, self.cleared = [], True
        if not self.late:
            self.optimizer.zero_grad(self.to_none)

    def checkpoint(self):
        """Return the states of strategy, network, optimizer and scaler as bytes."""
        file = io.BytesIO()
        components = (self.timesteps, self.network, self.optimizer, self.scaler or nn.Identity())
        torch.save([component.state_dict() for component in components], file)
        return file.getvalue()

    def load(self, content, previous):
        """Load a checkpoint, and take the count of batches, times and losses from the trainer `previous`."""
        state = torch.load(io.BytesIO(content), weights_only=True)
        for component, values in zip(
            (self.timesteps, self.network, self.optimizer, self.scaler or nn.Identity()), state
        ):
            component.load_state_dict(values)
        self.batches, self.t, self.losses = previous.batches, previous.t, previous.losses
        return self

    def results(self):
        """Return the drawn times, the losses, and the states of strategy and network."""
        state = self.timesteps.state_dict()["strategy"] if self.timesteps else self.strategy.state_dict()
        return {"t": self.t, "losses": self.losses, "state": state, "network": self.network.state_dict()}


class TinyTraining:
    """Network, optimizer and attached strategy; `step` takes one optimizer step."""

    def __init__(self, name="loss_rms", process="linear", **arguments):
        self.network = TinyNetwork()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        self.timesteps = attach(name, process, self.optimizer, self.network, **arguments)

    def errors(self, t):
        return (self.network(IMAGES[: len(t)], t) - 1).square().mean((1, 2, 3))

    @property
    def state(self):
        return self.timesteps.state_dict()["strategy"]

    def step(self, count=8, **arguments):
        self.timesteps.loss(self.errors(self.timesteps(IMAGES[:count])), **arguments).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def observed(self):
        """Number of losses that the sampler has learned from, if none has decayed."""
        return self.timesteps.strategy.sampler._sums[1].sum().item()


def validate(training, batches=4, count=5):
    """Run a validation; returns its times and its loss."""
    training.network.eval()
    with torch.no_grad():
        times = torch.cat([training.timesteps(IMAGES[:count]) for _ in range(batches)])
        loss = training.timesteps.loss(training.errors(times[-count:]))
    training.network.train()
    return times, loss


def sampler_name(specification):
    """Return the name of a specification's sampler, for the ids of parametrized tests."""
    return specification.sampler["name"]


def save_distributed(values, folder):
    """Save values in a checkpoint of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as checkpoint  # takes a second

    checkpoint.save(values, storage_writer=checkpoint.FileSystemWriter(folder))


def load_distributed(values, folder):
    """Load a checkpoint of torch.distributed.checkpoint into values."""
    import torch.distributed.checkpoint as checkpoint

    checkpoint.load(values, storage_reader=checkpoint.FileSystemReader(folder))

"""State of a training run: model, average of its weights, optimiser, strategy, and the code that updates them."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kairos import models
from kairos.data.batches import Batches
from kairos.data.latents import Latents
from kairos.forward_process import build_process
from kairos.losses.registries import LOSSES
from kairos.milestones import load_start_weights
from kairos.training.lengths import length_in_steps
from kairos.training.optim import Average
from kairos.training.passes import cut
from kairos.training.registries import AVERAGES, OPTIMIZERS, PROBES, SCHEDULES
from kairos_timesteps import distributed
from kairos_timesteps.errors import KairosError
from kairos_timesteps.randomness import derived_seed
from kairos_timesteps.registry import Registry, split
from kairos_timesteps.strategy import Strategy


class TrainingState:
    """State of a training run, with the components that its configuration selects.

    Args:
        plain: the whole resolved experiment as plain values.
        method: name of the method.
        seed: of the training.
        latents: what is trained on.
        device: where it is computed.
    """

    def __init__(self, plain: dict[str, Any], method: str, seed: int, latents: Latents, device: torch.device):
        self.plain, self.method, self.seed, self.latents, self.device = plain, method, seed, latents, device
        self.settings = settings = plain["training"]
        self.dtype = torch.float64 if settings["precision"] == "fp64" else torch.float32
        self.passes = cut(settings["batch_size"], settings["microbatch"], distributed.rank(), distributed.ranks())
        index = range(self.passes[0][1].start, self.passes[-1][1].stop)
        self.conditions = tuple(plain["model"].get("conditions") or [])
        size, dropout, augment = (settings[name] for name in ("batch_size", "condition_dropout", "augment"))
        self.batches = Batches(latents, seed, size, index, self.conditions, dropout, device, self.dtype, augment)
        self.sigma_data = latents.measure_sigma_data()
        self.process = build_process(plain["diffusion"], self.sigma_data)
        chosen = {"coupling": "independent", **plain["methods"][method]}
        (sampler, options), (weighting, more) = (split(chosen[part]) for part in ("sampler", "weighting"))
        given = {"sampler": options, "weighting": more, "coupling": chosen["coupling"]}
        self.strategy = Strategy(f"{sampler}+{weighting}", self.process, **given, seed=seed)
        self.losses = [(loss["name"], *_part(LOSSES, loss)) for loss in plain["diffusion"]["losses"]]
        self.probes = {probe["name"]: PROBES.build(*split(probe)) for probe in settings["probes"]}
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(derived_seed(seed, "weights"))
            outputs = self.process.channels(latents.shape[0])
            model = models.build(plain["model"], latents.shape, latents.condition_kinds, outputs)
        if settings["start_from"]:
            model.load_weights(load_start_weights(Path(settings["start_from"]), model.weights()))
        self.model: Any = model.to(device, self.dtype)
        if self.dtype == torch.float64:
            for module in self.model.modules():  # times are embedded in float32 whatever the model is in
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(_as_double)
        share, share_of = _part(AVERAGES, settings["ema"])
        self.average = Average(self.model.weights(), lambda step: share_of(share, step, size))
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        options, make = _part(OPTIMIZERS, settings["optimizer"])
        self.optimizer: torch.optim.Optimizer = make(options, self.parameters)
        self.grad_clip = math.inf if options.grad_clip is None else options.grad_clip
        self._optimizer_options = options
        self._schedule, self._factor = _part(SCHEDULES, settings["schedule"])
        self.length = None  # that the schedule knows
        if hasattr(self._schedule, "length"):
            whole = length_in_steps(settings["milestones"][-1], size, plain["dataset"]["train_images"])
            self.length = self._schedule.length or whole
        self.network = torch.compile(self.model) if settings["compile"] else self.model
        self.trained: Any = self.network  # adds up gradients over the ranks; `network` is for measurements
        if distributed.ranks() > 1:
            # buffers are alike on all ranks, and a second pass must not write what the first one's backward pass reads
            self.trained = nn.parallel.DistributedDataParallel(self.network, broadcast_buffers=False)
        self.step = 0  # steps completed
        self.sound = torch.ones((), dtype=torch.bool, device=device)  # whether all gradients so far were finite

    def autocast(self) -> Any:
        """The context that the network is called in."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings["precision"] == "bf16")

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: linear warm-up times the schedule."""
        options = self._optimizer_options
        rate: float = options.lr * self._factor(self._schedule, step, self.length or 0)
        first = 0 if options.warmup_from_zero else 1
        return rate * min(1.0, (step + first) / options.warmup_steps) if options.warmup_steps else rate

    def density_images(self) -> Tensor:
        """The fixed images that a learned sampler's p(t) is averaged over, up to 256, the first of the training set."""
        return self.latents.load_x0(self.latents.train[:256]).to(self.device, self.dtype)

    def state(self) -> dict[str, Any]:
        """Everything but data and configuration."""
        return {
            "model": self.model.state_dict(),
            "ema": self.average.weights,
            "optimizer": self.optimizer.state_dict(),
            "strategy": self.strategy.state_dict(),
            "length": self.length,
        }

    def load(self, state: dict[str, Any], step: int) -> None:
        """Go on from a state after `step` completed steps.

        Raises:
            KairosError: its learning rate followed another length.
        """
        if state["length"] != self.length:
            raise KairosError(
                f"training.schedule: the state after step {step} followed a length of {state['length']}, got "
                f"{self.length}; allowed: that length ({self.settings['schedule']['name']} knows its end), or --restart"
            )
        self.model.load_state_dict(state["model"])
        self.average.load(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.strategy.load_state_dict(state["strategy"], self.device)
        self.step = step


def _as_double(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.double() if isinstance(value, Tensor) else value for value in inputs)


def _part(registry: Registry, named: dict[str, Any]) -> tuple[Any, Any]:
    """Options and code of a named component."""
    name, options = split(named)
    return registry.parse(name, options), registry.entry(name).load()

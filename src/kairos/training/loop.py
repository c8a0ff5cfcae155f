"""One training step, and the state it moves. Everything random in step k is a function of (seed, k).

Several processes share a step: each draws what is random for the global batch and computes its part of it, so that
their number, like that of microbatches, changes nothing but the order of sums.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kairos import conditions as conditioning
from kairos import distributed, models
from kairos.data.latents import Latents
from kairos.diffusion.losses import Prediction
from kairos.diffusion.processes import build_process
from kairos.diffusion.registries import LOSSES
from kairos.errors import DivergedError
from kairos.randomness import derived_seed, generator
from kairos.strategies.meter import Meter
from kairos.strategies.strategy import Draw, Strategy
from kairos.training.order import batch_positions, passes
from kairos.training.probes import Moment, Probe
from kairos.training.registries import PROBES


@dataclass(frozen=True)
class Computed:
    """What forward and backward passes leave.

    Attributes:
        prediction: batch, noise, timesteps and output.
        terms: per-sample losses by name, each (batch,).
        objective: what these samples add to the mean over the global batch, times the number of ranks.
    """

    prediction: Prediction
    terms: dict[str, Tensor]
    objective: Tensor


class Trainer:
    """Model, EMA, optimiser and strategy of one training, and how they move by one step.

    Args:
        plain: the whole resolved experiment as plain values.
        method: name of the method.
        seed: of the training.
        latents: what is trained on.
        device: where it is computed.
    """

    def __init__(self, plain: dict[str, Any], method: str, seed: int, latents: Latents, device: torch.device):
        self.settings = plain["training"]
        self.seed, self.latents, self.device = seed, latents, device
        self.dtype = torch.float64 if self.settings["precision"] == "fp64" else torch.float32
        self.passes = passes(
            self.settings["batch_size"], self.settings["microbatch"], distributed.rank(), distributed.ranks()
        )
        self.mine = slice(self.passes[0][1].start, self.passes[-1][1].stop)  # this rank's part of the global batch
        self.process = build_process(plain["diffusion"])
        chosen = plain["methods"][method]
        named = [chosen[part] for part in ("sampler", "weighting")]
        options = [{key: value for key, value in part.items() if key != "name"} for part in named]
        self.strategy = Strategy(
            "+".join(part["name"] for part in named), self.process, sampler=options[0], weighting=options[1], seed=seed
        )
        self.losses = [_component(LOSSES, loss) for loss in plain["diffusion"]["losses"]]
        self.probes: dict[str, Probe] = {
            probe["name"]: PROBES.build(probe["name"], {k: v for k, v in probe.items() if k != "name"})
            for probe in self.settings["probes"]
        }
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(derived_seed(seed, "weights"))
            self.model = models.build(plain["model"], latents.shape, latents.condition_kinds).to(device, self.dtype)
        self.wanted = plain["model"].get("conditions") or []
        self.kinds = conditioning.build({name: latents.condition_kinds[name] for name in self.wanted})
        self.ema = {name: value.detach().clone() for name, value in self.model.weights().items()}
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        options = self.settings["optimizer"]
        cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options["name"]]
        self.optimizer = cls(
            self.parameters,
            lr=options["lr"],
            betas=tuple(options["betas"]),
            eps=options["eps"],
            weight_decay=options["weight_decay"],
        )
        if self.dtype == torch.float64:
            for module in self.model.modules():  # times are embedded in float32 whatever the model is in
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(_as_double)
        self.network = torch.compile(self.model) if self.settings["compile"] else self.model
        self.trained: Any = self.network  # adds up gradients over the ranks; `network` is for measurements
        if distributed.ranks() > 1:
            self.trained = nn.parallel.DistributedDataParallel(self.network)
        self.step = 0  # steps completed

    def batch(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """x0 (batch, c, h, w) and conditions of this rank's part of a step, on the device."""
        seed, size, latents, mine = self.seed, self.settings["batch_size"], self.latents, self.mine
        index = latents.train[batch_positions(seed, step, len(latents.train), size)[mine].numpy()]
        flips = None
        if latents.can_flip:
            flips = torch.rand(size, generator=generator(seed, "flips", step))[mine] < 0.5
        noise = None
        if latents.stochastic:
            noise = self._noise("latents", step, "cpu")
        x0 = latents.batch(index, flips, noise).to(self.device, self.dtype)
        every = latents.conditions(index)
        conditions = {name: every[name].to(self.device) for name in self.wanted}
        if conditions and self.settings["condition_dropout"]:
            chance = torch.rand(size, generator=generator(seed, "condition_dropout", step))[mine]
            dropped = (chance < self.settings["condition_dropout"]).to(self.device)
            conditions = conditioning.drop(conditions, self.kinds, dropped)
        return x0, conditions

    def _noise(self, stream: str, step: int, device: torch.device | str) -> Tensor:
        """Standard normal (batch, c, h, w): this rank's part of what is drawn for the global batch."""
        shape = (self.settings["batch_size"], *self.latents.shape)
        random = generator(self.seed, stream, step, device)
        return torch.randn(shape, generator=random, device=device, dtype=self.dtype)[self.mine]

    def advance(self) -> dict[str, Any]:
        """Do the next step; returns its line of metrics, which is of the global batch.

        Raises:
            DivergedError: the loss or the gradient is not finite; nothing has been changed by the step then.
        """
        step, seed = self.step, self.seed
        x0, conditions = self.batch(step)
        draw = self.strategy.draw(x0)
        noise = self._noise("noise", step, self.device)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        computed = self._passes(draw, noise, conditions)
        clip = self.settings["optimizer"]["grad_clip"]
        norm = nn.utils.clip_grad_norm_(self.parameters, math.inf if clip is None else clip)
        share = len(x0) / self.settings["batch_size"]
        means = [term.mean().item() * share for term in computed.terms.values()]
        loss, *means = distributed.add([computed.objective.item() / distributed.ranks(), *means])
        grad_norm = norm.item()
        self._refuse_non_finite(step, loss, grad_norm)
        line: dict[str, Any] = {}
        meter = Meter(self.process, self.network, x0, conditions, autocast=self._autocast())
        for name, probe in self.probes.items():
            moment = Moment(
                step, self.model, computed.prediction, next(iter(computed.terms.values())), draw.weights, meter.error,
                generator(seed, f"probe {name}", step),
            )  # fmt: skip
            line[name] = probe(moment)
        rate = self._learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.strategy.observe(draw, self.network, self.optimizer, conditions, self._autocast()):
            self.optimizer.step()
        self._update_ema(step)
        self.step += 1
        return {
            "step": self.step,
            "images": self.step * self.settings["batch_size"],
            "loss": loss,
            **dict(zip(computed.terms, means, strict=True)),
            "lr": rate,
            "grad_norm": grad_norm,
            "sampler": self.strategy.sampler.statistics(),
            **line,
        }

    def _passes(self, draw: Draw, noise: Tensor, conditions: dict[str, Tensor]) -> Computed:
        """Forward and backward passes of this rank's part, in microbatches; gradients add up over passes and ranks."""
        if len(self.passes) == 1:
            return self._pass(self.passes[0][0], draw, noise, conditions)
        done = []
        for number, place in self.passes:
            here = slice(place.start - self.mine.start, place.stop - self.mine.start)
            tensors = ("x0", "fractions", "t", "weights", "fixed_weights")
            part = replace(draw, **{name: getattr(draw, name)[here] for name in tensors})
            last = number == self.passes[-1][0]
            with nullcontext() if last or self.trained is self.network else self.trained.no_sync():
                chosen = {name: values[here] for name, values in conditions.items()}
                done.append(self._pass(number, part, noise[here], chosen))
        terms = {name: torch.cat([one.terms[name] for one in done]) for name in done[0].terms}
        if weighted := self._scaled(terms, weighted=True):
            with torch.no_grad():
                self.strategy.weighted(draw, torch.stack(weighted).sum(0))  # what it observes is the whole batch
        x_t, output = (torch.cat([getattr(one.prediction, name) for one in done]) for name in ("x_t", "output"))
        prediction = Prediction(self.process, draw.x0, noise, draw.t, x_t, output)
        return Computed(prediction, terms, torch.stack([one.objective for one in done]).sum())

    def _pass(self, number: int, draw: Draw, noise: Tensor, conditions: dict[str, Tensor]) -> Computed:
        """Forward and backward pass number `number` of the global batch."""
        torch.manual_seed(derived_seed(self.seed, f"dropout {number}" if number else "dropout", self.step))
        x_t = self.process.noised(draw.x0, noise, draw.t)
        with self._autocast():
            output = self.process.predict(self.trained, x_t, draw.t, conditions)
        prediction = Prediction(self.process, draw.x0, noise, draw.t, x_t, output)
        terms = {name: function(options, prediction) for name, options, function in self.losses}
        weighted, plain = self._scaled(terms, weighted=True), self._scaled(terms, weighted=False)
        total = torch.stack(
            [
                *([self.strategy.loss(draw, torch.stack(weighted).sum(0))] if weighted else []),
                *(p.mean() for p in plain),
            ]
        ).sum()
        share = len(draw.t) / self.settings["batch_size"]
        objective = total * (share * distributed.ranks())  # DistributedDataParallel takes the mean over the ranks
        objective.backward()
        terms = {name: term.detach() for name, term in terms.items()}
        return Computed(replace(prediction, output=output.detach()), terms, objective.detach())

    def _scaled(self, terms: dict[str, Tensor], weighted: bool) -> list[Tensor]:
        return [options.scale * terms[name] for name, options, _ in self.losses if options.weighted is weighted]

    def _refuse_non_finite(self, step: int, loss: float, grad_norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DivergedError(
                f"step {step + 1}: loss {loss}, gradient norm {grad_norm}: not finite, stopped before the step was "
                "taken; the last good state is kept. A lower training.optimizer.lr, warm-up or precision fp32 may help"
            )

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings["precision"] == "bf16")

    def _learning_rate(self, step: int) -> float:
        options = self.settings["optimizer"]
        warmup = options["warmup_steps"]
        return options["lr"] * min(1.0, (step + 1) / warmup) if warmup else options["lr"]

    def _update_ema(self, step: int) -> None:
        options = self.settings["ema"]
        decay = min(options["decay"], (1 + step) / (10 + step)) if options["warmup"] else options["decay"]
        live = self.model.weights()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.values()), [live[name] for name in self.ema], 1 - decay)

    def density_images(self) -> Tensor:
        """The fixed images that a learned sampler's p(t) is averaged over, up to 256, the first of the training set."""
        return self.latents.means(self.latents.train[:256]).to(self.device, self.dtype)

    def state(self) -> dict[str, Any]:
        """Everything but data and configuration."""
        return {
            "model": self.model.state_dict(),
            "ema": self.ema,
            "optimizer": self.optimizer.state_dict(),
            "strategy": self.strategy.state_dict(),
        }

    def load(self, state: dict[str, Any], step: int) -> None:
        """Go on from a state after `step` completed steps."""
        self.model.load_state_dict(state["model"])
        for name, value in state["ema"].items():
            self.ema[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.strategy.load_state_dict(state["strategy"], self.device)
        self.step = step


def _as_double(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.double() if isinstance(value, Tensor) else value for value in inputs)


def _component(registry: Any, named: dict[str, Any]) -> tuple[str, Any, Any]:
    """Name, options and code of a named component."""
    options = registry.parse(named["name"], {key: value for key, value in named.items() if key != "name"})
    return named["name"], options, registry.entry(named["name"]).load()

"""One training step, and the state it moves. Everything random in step k is a function of (seed, k)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kairos import conditions as conditioning
from kairos import models
from kairos.data.latents import Latents
from kairos.diffusion.losses import Prediction
from kairos.diffusion.processes import build_process
from kairos.diffusion.registries import LOSSES
from kairos.errors import KairosError
from kairos.randomness import derived_seed, generator
from kairos.strategies.meter import Meter
from kairos.strategies.strategy import Strategy
from kairos.training.order import batch_positions
from kairos.training.probes import Moment, Probe
from kairos.training.registries import PROBES


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
            self.model = models.build(plain["model"], latents.shape, latents.condition_kinds).to(device)
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
        self.network = torch.compile(self.model) if self.settings["compile"] else self.model
        self.step = 0  # steps completed

    def batch(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """x0 (batch, c, h, w) and conditions of a step, on the device."""
        seed, size, latents = self.seed, self.settings["batch_size"], self.latents
        index = latents.train[batch_positions(seed, step, len(latents.train), size).numpy()]
        flips = torch.rand(size, generator=generator(seed, "flips", step)) < 0.5 if latents.can_flip else None
        noise = None
        if latents.stochastic:
            noise = torch.randn((size, *latents.shape), generator=generator(seed, "latents", step))
        x0 = latents.batch(index, flips, noise).to(self.device)
        every = latents.conditions(index)
        conditions = {name: every[name].to(self.device) for name in self.wanted}
        if conditions and self.settings["condition_dropout"]:
            chance = torch.rand(size, generator=generator(seed, "condition_dropout", step))
            dropped = (chance < self.settings["condition_dropout"]).to(self.device)
            conditions = conditioning.drop(conditions, self.kinds, dropped)
        return x0, conditions

    def advance(self) -> dict[str, Any]:
        """Do the next step; returns its line of metrics.

        Raises:
            KairosError: the loss or the gradient is not finite; nothing has been changed by the step then.
        """
        step, seed = self.step, self.seed
        x0, conditions = self.batch(step)
        draw = self.strategy.draw(x0)
        t = draw.t
        noise = torch.randn(x0.shape, generator=generator(seed, "noise", step, self.device), device=self.device)
        torch.manual_seed(derived_seed(seed, "dropout", step))
        self.model.train()
        x_t = self.process.noised(x0, noise, t)
        with self._autocast():
            output = self.process.predict(self.network, x_t, t, conditions)
        prediction = Prediction(self.process, x0, noise, t, x_t, output)
        terms = {name: function(options, prediction) for name, options, function in self.losses}
        scaled = [(options.weighted, options.scale * terms[name]) for name, options, _ in self.losses]
        weighted, plain = ([term for is_weighted, term in scaled if is_weighted is which] for which in (True, False))
        total = torch.stack(
            [
                *([self.strategy.loss(draw, torch.stack(weighted).sum(0))] if weighted else []),
                *(p.mean() for p in plain),
            ]
        ).sum()
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        clip = self.settings["optimizer"]["grad_clip"]
        norm = nn.utils.clip_grad_norm_(self.parameters, math.inf if clip is None else clip)
        loss, grad_norm = total.item(), norm.item()
        self._refuse_non_finite(step, loss, grad_norm)
        line: dict[str, Any] = {}
        meter = Meter(self.process, self.network, x0, conditions, autocast=self._autocast())
        for name, probe in self.probes.items():
            moment = Moment(
                step, self.model, prediction, next(iter(terms.values())).detach(), draw.weights, meter.error,
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
            **{name: term.mean().item() for name, term in terms.items()},
            "lr": rate,
            "grad_norm": grad_norm,
            "sampler": self.strategy.sampler.statistics(),
            **line,
        }

    def _refuse_non_finite(self, step: int, loss: float, grad_norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise KairosError(
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
        return self.latents.means(self.latents.train[:256]).to(self.device)

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


def _component(registry: Any, named: dict[str, Any]) -> tuple[str, Any, Any]:
    """Name, options and code of a named component."""
    options = registry.parse(named["name"], {key: value for key, value in named.items() if key != "name"})
    return named["name"], options, registry.entry(named["name"]).load()

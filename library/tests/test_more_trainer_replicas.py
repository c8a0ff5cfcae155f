"""Lines of further pages of trainers, executed in replicas of the trainers' loops.

They are kohya sd-scripts, ai-toolkit, torchtitan, musubi-tuner and diffusion-pipe. See `test_trainer_replicas`; no code
of a trainer runs here.
"""

import os
import re
import sys
import textwrap
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import kairos_timesteps
from attached_training import load_distributed, save_distributed
from test_trainer_replicas import (
    BATCH,
    OPTIONS,
    PAGES,
    SAVED_STEP,
    STEPS,
    Accelerator,
    Network,
    Record,
    assert_equal,
    batch_of,
    mean_flat,
)

VALIDATED_STEPS = (2, 5)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process, without a group


class Parts:
    """Lines of a page, divided where a comment names a file, with a strategy in the place of the page's.

    Attributes:
        name: name of the page.
        text: text of the page.
        parts: code, in the order of the page.
        executed: indices of the parts that have run.
    """

    def __init__(self, name: str, strategy: str = ""):
        self.text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        self.name, self.executed, code = name, set(), []
        for block in re.findall(r"```python\n(.*?)```", self.text, re.DOTALL):
            code += [part for part in re.split(r"^(?=# \S+\.py\b)", block, flags=re.MULTILINE) if part]
        self.parts: list[str] = [self._with_strategy(part, strategy) if strategy else part for part in code]

    def _with_strategy(self, code: str, strategy: str) -> str:
        """Return the code with the strategy and its options."""
        code = re.sub(r'attach\(\s*"[^"]+"', f'attach("{strategy}"', code)
        return code.replace("seed=", f"sampler={OPTIONS.get(strategy, {})}, seed=") if "attach(" in code else code

    def inline(self, start: str) -> str:
        """Return the code within a sentence of the page that begins with `start`."""
        matches = re.findall(rf"`({re.escape(start)}[^`]*)`", self.text)
        assert len(matches) == 1, start
        return str(matches[0])

    def run(self, index: int, variables: SimpleNamespace) -> None:
        """Execute a part among the variables of a function or a file of the trainer."""
        exec(compile(self.parts[index], f"docs/trainers/{self.name}.md", "exec"), vars(variables))
        self.executed.add(index)


class Switch:
    """Page whose lines can be switched off, for the loss of the unmodified trainer on equal weights.

    Attributes:
        parts: the page; None for the unmodified trainer.
        times: times of the unmodified trainer, one tensor per micro-batch.
        is_on: whether the lines of the page run.
    """

    def __init__(self, parts: Parts | None, times: Any):
        self.parts, self.times, self.is_on = parts, iter(times), parts is not None

    def __bool__(self) -> bool:
        return self.is_on

    def run(self, index: int, variables: SimpleNamespace) -> None:
        assert self.parts is not None
        self.parts.run(index, variables)

    def validate(self, record: Record, evaluate: Callable[[], Tensor]) -> None:
        """Store the losses of a validation with and without the lines of the page."""
        record.validation.append(evaluate())
        was_on, self.is_on = self.is_on, False
        record.unmodified_validation.append(evaluate())
        self.is_on = was_on


def expanded(t: Tensor, like: Tensor) -> Tensor:
    return t.view(-1, *[1] * (like.ndim - 1))


def alphas_of_kohya(zero_terminal_snr: bool) -> Tensor:
    """Return the cumulative products of SD 1, float32; with ``--zero_terminal_snr`` the last one is 0."""
    alphas = torch.from_numpy(kairos_timesteps.make_schedule("scaled_linear").alphas_cumprod)
    if zero_terminal_snr:
        roots = alphas.sqrt()
        alphas = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    return alphas.float()


class KohyaTrainer:
    """Trainer of kohya sd-scripts, for SD with predictions of noise or of v, and for Flux."""

    def __init__(self, page: Switch, form: str):
        self.page, self.form, self.alphas = page, form, alphas_of_kohya(form == "v")
        if page and form == "flux":
            self._change_to_flux()

    def _change_to_flux(self) -> None:
        """Change the first step of the page as its paragraph on Flux describes."""
        assert self.page.parts is not None
        assert 'pass `"flow"` and `time="noise_is_one"` instead of `alphas` and `prediction`' in self.page.parts.text
        code = re.sub(r"(?m)^(alphas|prediction) = .*\n", "", self.page.parts.parts[0])
        code = code.replace(" alphas,", ' "flow",').replace("prediction=prediction", 'time="noise_is_one"')
        assert "alphas" not in code and "prediction" not in code
        self.page.parts.parts[0] = code

    def get_noise_scheduler(self, args: Namespace, device: str) -> SimpleNamespace:
        return SimpleNamespace(alphas_cumprod=self.alphas, config=SimpleNamespace(num_train_timesteps=1000))

    def get_noise_noisy_latents_and_timesteps(self, args, scheduler, latents, draw=None, is_train=True):
        noise = torch.randn_like(latents)
        local = SimpleNamespace(draw=draw, latents=latents, b_size=len(latents))
        local.min_timestep = 0 if args.min_timestep is None else args.min_timestep
        local.max_timestep = 1000 if args.max_timestep is None else args.max_timestep
        local.get_timesteps = lambda low, high, size, device: (
            torch.randint(low, high, (size,)) if low < high else torch.full((size,), high)
        )
        if self.page:
            self.page.run(1, local)
        elif is_train:
            local.timesteps = next(self.page.times)
        else:
            local.timesteps = local.get_timesteps(local.min_timestep, local.max_timestep, len(latents), "cpu")
        alpha = expanded(scheduler.alphas_cumprod[local.timesteps], latents)
        return noise, alpha.sqrt() * latents + (1 - alpha).sqrt() * noise, local.timesteps

    def get_noisy_model_input_and_timesteps(self, args, latents, noise, draw=None, is_train=True):
        local = SimpleNamespace(draw=draw, latents=latents, num_timesteps=1000)
        if draw:
            assert self.page.parts is not None
            lines = [self.page.parts.inline(start) for start in ("sigmas = draw", "timesteps = sigmas")]
            exec("\n".join(lines), vars(local))
            self.page.parts.executed.add(1)
        else:
            evaluates = self.page or not is_train
            local.sigmas = torch.sigmoid(torch.randn(len(latents))) if evaluates else next(self.page.times)
            local.timesteps = 1000 * local.sigmas
        sigmas = local.sigmas.view(-1, 1, 1, 1)
        return (1 - sigmas) * latents + sigmas * noise, local.timesteps, sigmas

    def get_noise_pred_and_target(self, args, accelerator, scheduler, latents, batch, network, is_train):
        draw = self.timesteps if self.page and is_train else None
        if self.form == "flux":
            noise = torch.randn_like(latents)
            noisy, timesteps, sigmas = self.get_noisy_model_input_and_timesteps(args, latents, noise, draw, is_train)
        else:
            noise, noisy, timesteps = self.get_noise_noisy_latents_and_timesteps(
                args, scheduler, latents, draw=draw, is_train=is_train
            )
        self.times_of_strategy = sigmas.flatten() if self.form == "flux" else timesteps
        if draw:
            assert self.page.parts is not None
            local = SimpleNamespace(self=self, latents=latents, noise=noise, noisy_latents=noisy, timesteps=timesteps)
            if self.form == "flux":
                local.noisy_model_input, local.sigmas = noisy, sigmas
            name = "noisy_model_input" if self.form == "flux" else "noisy_latents"
            exec(self.page.parts.inline(f"self.timesteps.check(latents, noise, {name}"), vars(local))
        with torch.set_grad_enabled(is_train):
            output = accelerator.unwrap_model(network)(noisy, timesteps / 1000, batch["labels"])
        if self.form == "flux":  # the default --model_prediction_type and --weighting_scheme
            return output * (-sigmas) + noisy, noise - latents, torch.ones_like(sigmas)
        if not args.v_parameterization:
            return output, noise, None
        alpha = expanded(self.alphas[timesteps], latents)
        return output, alpha.sqrt() * noise - (1 - alpha).sqrt() * latents, None

    def process_batch(self, batch, network, scheduler, accelerator, args, record=None, is_train=True) -> Tensor:
        prediction, target, weighting = self.get_noise_pred_and_target(
            args, accelerator, scheduler, batch["latents"], batch, network, is_train
        )
        loss = nn.functional.mse_loss(prediction.float(), target.float(), reduction="none")
        if weighting is not None:
            loss = loss * weighting
        loss = loss.mean(dim=list(range(1, loss.ndim)))
        trainer_loss = (loss * batch["loss_weights"]).mean()
        if is_train and self.page:
            local = SimpleNamespace(self=self, loss=loss, batch=batch)
            self.page.run(2, local)
            result = local.loss
        else:
            result = trainer_loss
        if record is not None:
            record.add(self.times_of_strategy, result, trainer_loss)
        return result

    def validate(self, accelerator, network, scheduler, args) -> Tensor:
        """Return losses at the trainer's times, in evaluation mode and with another random state."""
        accelerator.unwrap_model(network).eval()
        random_state = torch.get_rng_state()
        losses = []
        batch = kohya_batch(99)
        torch.manual_seed(args.seed)
        for timestep in (200, 400, 600, 800):
            args.min_timestep = args.max_timestep = timestep
            losses.append(self.process_batch(batch, network, scheduler, accelerator, args, is_train=False).detach())
        torch.set_rng_state(random_state)
        args.min_timestep = args.max_timestep = None
        accelerator.unwrap_model(network).train()
        return torch.stack(losses)


def kohya_batch(step: int, part: int = 0) -> dict[str, Tensor]:
    latents, labels = batch_of(step, part)
    return {"latents": latents, "labels": labels, "loss_weights": torch.tensor([1.0, 1.0, 0.5, 1.0, 0.5, 1.0])}


def train_kohya(form, parts, folder, first=0, times=(), validate=True) -> Record:
    record, v = Record(), SimpleNamespace()
    torch.manual_seed(0)
    page = Switch(parts, times)
    self = v.self = KohyaTrainer(page, form)
    args = v.args = Namespace(v_parameterization=form == "v", seed=5, min_timestep=None, max_timestep=None)
    accelerator = v.accelerator = Accelerator(accumulation=2)
    accelerator.device = "cpu"
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    network, optimizer = v.network, v.optimizer = accelerator.prepare(network, optimizer)
    if page:
        page.run(0, v)
    if first:
        accelerator.load_state(torch.load(folder / "state.pt"))
    scheduler = self.get_noise_scheduler(args, accelerator.device)
    accelerator.unwrap_model(network).train()
    for step in range(first, STEPS):
        for part in range(2):
            batch = kohya_batch(step, part)
            with accelerator.accumulate(network):
                loss = self.process_batch(batch, network, scheduler, accelerator, args, record)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            record.log.append(loss.detach().item())
        if step + 1 == SAVED_STEP:
            torch.save(accelerator.state_dicts(), folder / "state.pt")
        if validate and step in VALIDATED_STEPS:
            page.validate(record, lambda: self.validate(accelerator, network, scheduler, args))
    return record.finish(network=network.module)


class SDTrainer:
    """Trainer of ai-toolkit, for flow matching."""

    def __init__(self, page: Switch, save_root: Path, network: Network):
        self.page, self.save_root, self.network = page, str(save_root), network
        self.sd = SimpleNamespace(unet=nn.Identity(), network=network)
        self.accelerator = Accelerator()
        self.optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-2)

    def hook_before_train_loop(self) -> None:
        self.sd.network, self.optimizer = self.accelerator.prepare(self.sd.network, self.optimizer)
        if self.page:
            self.page.run(0, SimpleNamespace(self=self, os=os, torch=torch))

    def process_general_training_batch(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        local = SimpleNamespace(self=self, latents=latents)
        with torch.no_grad():
            if self.page:
                self.page.run(1, local)
            else:
                local.timesteps = next(self.page.times)
            noise, t = torch.randn_like(latents), expanded(local.timesteps / 1000, latents)
            noisy = (1 - t) * latents + t * noise
        if self.page:
            self.timesteps.check(latents, noise, noisy, local.timesteps / 1000)
        return noisy, noise, local.timesteps

    def train_single_accumulation(self, latents: Tensor, labels: Tensor, record: Record) -> Tensor:
        noisy, noise, timesteps = self.process_general_training_batch(latents)
        prediction = self.network(noisy, timesteps / 1000, labels)
        loss = nn.functional.mse_loss(prediction.float(), (noise - latents).float(), reduction="none")
        loss = loss.mean([1, 2, 3]) * torch.linspace(0.5, 1.5, len(latents))  # loss_multiplier
        errors = loss.detach()
        local = SimpleNamespace(self=self, loss=loss)
        if self.page:
            self.page.run(2, local)
        else:
            local.loss = loss.mean()
        record.add(timesteps, local.loss, errors)
        self.accelerator.backward(local.loss)
        return local.loss.detach()

    def hook_train_loop(self, step: int, record: Record) -> None:
        """Take a step with two micro-batches, those of ``gradient_accumulation``."""
        self.optimizer.zero_grad()
        total: Any = None
        for part in range(2):
            loss = self.train_single_accumulation(*batch_of(step, part), record)
            total = loss if total is None else total + loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        record.log.append((total / 2).item())

    def save(self) -> None:
        torch.save(self.network.state_dict(), os.path.join(self.save_root, "lora.pt"))
        torch.save(self.optimizer.optimizer.state_dict(), os.path.join(self.save_root, "optimizer.pt"))
        if self.page:
            self.page.run(3, SimpleNamespace(self=self, os=os, torch=torch))

    def sample(self) -> None:
        """Call the network in evaluation mode, as for images of samples, and restore the random state."""
        random_state = torch.get_rng_state()
        self.network.eval()
        with torch.no_grad():
            self.network(torch.randn(2, 2, 4, 4), torch.rand(2), torch.tensor([0, 1]))
        torch.set_rng_state(random_state)
        self.network.train()

    def validate(self) -> Tensor:
        """Return the loss at fixed noise levels, with the network in training mode, as the trainer has it."""
        random_state = torch.get_rng_state()
        latents, labels = batch_of(99)
        noise, losses = torch.randn_like(latents), []
        with torch.no_grad():
            for sigma in (0.25, 0.5, 0.75):
                noisy = (1 - sigma) * latents + sigma * noise
                prediction = self.network(noisy, torch.full((len(latents),), sigma), labels)
                losses.append(nn.functional.mse_loss(prediction, noise - latents))
        torch.set_rng_state(random_state)
        return torch.stack(losses)


def train_ai_toolkit(parts, folder, first=0, times=(), validate=True) -> Record:
    record, page = Record(), Switch(parts, times)
    torch.manual_seed(0)
    trainer = SDTrainer(page, folder, Network())
    if first:  # before the hook
        trainer.network.load_state_dict(torch.load(folder / "lora.pt"))
        trainer.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    trainer.hook_before_train_loop()
    for step in range(first, STEPS):
        trainer.hook_train_loop(step, record)
        if validate and step in VALIDATED_STEPS:
            page.validate(record, trainer.validate)
        if step + 1 == SAVED_STEP:
            trainer.save()
            trainer.optimizer.zero_grad()
        if validate and step in VALIDATED_STEPS:
            trainer.sample()
    return record.finish(network=trainer.network)


class OptimizersContainer(torch.optim.Optimizer):
    """Stand-in for torchtitan's optimizer of optimizers, whose load first takes a step without gradients."""

    def __init__(self, model: nn.Module):
        self.model, self.options = model, StateDictOptions(flatten_optimizer_state_dict=True)
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
        super().__init__(list(model.parameters()), {})

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizers[0], options=self.options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizers[0], state, options=self.options)


class TitanTrainer:
    """Trainer of torchtitan, reduced to its state and its calls for Flux; Flux has no accumulation."""

    def __init__(self, page: Switch):
        self.page, self.step, self.ntokens_seen = page, 0, 0
        self.config = SimpleNamespace(debug=SimpleNamespace(seed=None))
        self.parallel_dims = SimpleNamespace(dp_enabled=False)
        self.model_parts = [Network()]
        self.optimizers = OptimizersContainer(self.model_parts[0])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    def forward_backward_step(self, labels: Tensor, classes: Tensor, record: Record) -> Tensor:
        local = SimpleNamespace(self=self, labels=labels)
        with torch.no_grad(), torch.device("cpu"):
            noise = torch.randn_like(labels)
            if self.page:
                self.page.run(1, local)
            else:
                local.timesteps = next(self.page.times)
            sigmas = local.timesteps.view(-1, 1, 1, 1)
            latents = (1 - sigmas) * labels + sigmas * noise
        if self.page:
            self.timesteps.check(labels, noise, latents, local.timesteps)
        prediction = self.model_parts[0](latents, local.timesteps, classes)
        loss = nn.functional.mse_loss(prediction, noise - labels, reduction="sum") / labels.numel()
        record.add(local.timesteps, loss, loss)
        loss.backward()
        return loss

    def train_step(self, record: Record) -> None:
        self.optimizers.zero_grad()
        loss = self.forward_backward_step(*batch_of(self.step - 1), record)
        nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), 1.0)
        self.optimizers.step()
        record.log.append(loss.detach().item())
        self.ntokens_seen += BATCH

    def validate(self) -> Tensor:
        """Return the loss at the trainer's times, in evaluation mode."""
        random_state = torch.get_rng_state()
        model = self.model_parts[0]
        model.eval()
        labels, classes = batch_of(99)
        noise, t = torch.randn_like(labels), (torch.arange(BATCH) % 8 + 0.5) / 8
        with torch.no_grad():
            latents = (1 - expanded(t, labels)) * labels + expanded(t, labels) * noise
            loss = nn.functional.mse_loss(model(latents, t, classes), noise - labels)
        model.train()
        torch.set_rng_state(random_state)
        return loss


def flux_trainer_of(page: Switch) -> Any:
    """Return the trainer for Flux with the attributes and methods of the page."""
    names: dict[str, Any] = {"TitanTrainer": TitanTrainer, "pass_attach": lambda trainer: None}
    body = "pass"
    if page:
        assert page.parts is not None
        body = page.parts.parts[2]
        page.parts.executed.add(2)
        names["pass_attach"] = lambda trainer: page.run(0, SimpleNamespace(self=trainer))
    head = "class FluxTrainer(TitanTrainer):\n    def __init__(self, page):\n        super().__init__(page)\n"
    exec(f"{head}        pass_attach(self)\n{textwrap.indent(body, '    ')}", names)
    return names["FluxTrainer"](page)


def train_torchtitan(parts, folder, first=0, times=(), validate=True) -> Record:
    record, page = Record(), Switch(parts, times)
    torch.manual_seed(0)
    trainer = flux_trainer_of(page)
    states = {"train_state": trainer, "model": trainer.model_parts[0], "optimizer": trainer.optimizers}
    if first:
        load_distributed(states, folder / "checkpoint")
        assert trainer.step == first
    while trainer.step < STEPS:
        trainer.step += 1
        trainer.train_step(record)
        if trainer.step == SAVED_STEP:
            save_distributed(states, folder / "checkpoint")
        if validate and trainer.step - 1 in VALIDATED_STEPS:
            page.validate(record, trainer.validate)
    return record.finish(model=trainer.model_parts[0])


class MusubiTrainer:
    """Trainer of musubi-tuner, with the methods that the page overrides; it has no validation."""

    def __init__(self) -> None:
        self.times: Iterator[Tensor] = iter(())

    def on_train_start(self, args, accelerator, network, transformer, optimizer) -> None: ...

    def on_post_save(self, args, accelerator, network, transformer, name, save_dtype, metadata, upload) -> None: ...

    def get_noisy_model_input_and_timesteps(self, args, noise, latents, timesteps, scheduler, device, dtype):
        times = next(self.times)
        t = expanded((times - 1) / 1000, latents)
        return (1 - t) * latents + t * noise, times

    def compute_loss(self, args, output, timesteps, scheduler, dit_dtype, network_dtype, global_step):
        return nn.functional.mse_loss(output.pred.to(network_dtype), output.target), {}

    def process_batch(self, args, accelerator, network, latents, labels, noise, step, record):
        noisy, times = self.get_noisy_model_input_and_timesteps(
            args, noise, latents, None, None, accelerator.device, torch.float32
        )
        if hasattr(self, "timesteps"):
            self.timesteps.check(latents, noise, noisy, (times - 1) / 1000)
        output = SimpleNamespace(target=noise - latents)
        output.pred = accelerator.unwrap_model(network)(noisy, times / 1000, labels)
        loss, metrics = self.compute_loss(args, output, times, None, torch.float32, torch.float32, step)
        assert metrics == {}
        record.add(times, loss, mean_flat((output.pred - output.target) ** 2))
        return loss

    def train(self, args, record, first, validate) -> Record:
        torch.manual_seed(0)
        accelerator = Accelerator(accumulation=2)
        accelerator.device = "cpu"
        network = Network()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        network, optimizer = accelerator.prepare(network, optimizer)
        if args.resume:
            accelerator.load_state(torch.load(os.path.join(args.resume, "state.pt")))
        self.on_train_start(args, accelerator, network, None, optimizer)
        for step in range(first, STEPS):
            for part in range(2):
                latents, labels = batch_of(step, part)
                with accelerator.accumulate(network):
                    noise = torch.randn_like(latents)
                    loss = self.process_batch(args, accelerator, network, latents, labels, noise, step, record)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                record.log.append(loss.detach().item())
            if step + 1 == SAVED_STEP and not args.resume:
                name = f"lora-step{step + 1:08d}"
                self.on_post_save(args, accelerator, network, None, f"{name}.safetensors", None, {}, False)
                os.makedirs(os.path.join(args.output_dir, f"{name}-state"))
                torch.save(accelerator.state_dicts(), os.path.join(args.output_dir, f"{name}-state", "state.pt"))
            if validate and step in VALIDATED_STEPS:  # samples
                network.module.eval()
                network.module(latents, torch.rand(BATCH), labels)
                network.module.train()
        return record.finish(network=network.module)


def train_musubi(parts, folder, first=0, times=(), validate=True) -> Record:
    script: Any = types.ModuleType("qwen_image_train_network")
    script.QwenImageNetworkTrainer, script.trainers = MusubiTrainer, []
    script.main = lambda: script.trainers.append(script.QwenImageNetworkTrainer())
    package: Any = types.ModuleType("musubi_tuner")
    package.qwen_image_train_network = script
    if parts:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "musubi_tuner", package)
            parts.run(0, SimpleNamespace(__name__="__main__"))
    else:
        script.main()
    (trainer,) = script.trainers
    assert (type(trainer) is MusubiTrainer) == (parts is None)
    trainer.times = iter(times)
    resume = str(folder / f"lora-step{SAVED_STEP:08d}-state") + "/" if first else None
    return trainer.train(Namespace(seed=4, output_dir=str(folder), resume=resume), Record(), first, validate)


class FluxPipeline:
    """Model of diffusion-pipe: it prepares inputs with random times, or at a quantile for an evaluation."""

    def __init__(self, page: Switch):
        self.page, self.module = page, SimpleNamespace(torch=torch)
        if page:
            page.run(0, self.module)

    def prepare_inputs(self, latents: Tensor, timestep_quantile: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        bs = len(latents)
        if self.page:
            local = SimpleNamespace(**vars(self.module), bs=bs, latents=latents, timestep_quantile=timestep_quantile)
            self.page.run(1, local)
            t = local.t
        elif timestep_quantile is None:
            torch.rand(bs)  # the trainer has another number of random numbers here
            t = next(self.page.times)
        else:  # timestep_sample_method = logit_normal, shift = 3
            t = torch.sigmoid(torch.distributions.Normal(0, 1).icdf(torch.full((bs,), timestep_quantile)))
            t = (t * 3) / (1 + (3 - 1) * t)
        x_0 = torch.randn_like(latents)
        x_t = (1 - expanded(t, latents)) * latents + expanded(t, latents) * x_0
        return x_t, t, x_0 - latents


def train_diffusion_pipe(parts, folder, first=0, times=(), validate=True) -> Record:
    record, page = Record(), Switch(parts, times)
    torch.manual_seed(0)
    model, network = FluxPipeline(page), Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    if first:
        network_state, optimizer_state = torch.load(folder / "state.pt")
        network.load_state_dict(network_state)
        optimizer.load_state_dict(optimizer_state)

    def evaluate() -> Tensor:
        random_state, losses = torch.get_rng_state(), []
        latents, labels = batch_of(99)
        torch.manual_seed(0)
        network.eval()
        with torch.no_grad():
            for quantile in (0.1, 0.5, 0.9):
                x_t, t, target = model.prepare_inputs(latents, timestep_quantile=quantile)
                losses.append(nn.functional.mse_loss(network(x_t, t, labels), target))
        network.train()
        torch.set_rng_state(random_state)
        return torch.stack(losses)

    for step in range(first, STEPS):
        for part in range(2):
            latents, labels = batch_of(step, part)
            x_t, t, target = model.prepare_inputs(latents)
            loss = nn.functional.mse_loss(network(x_t, t, labels), target)
            record.add(t, loss, loss)
            (loss / 2).backward()
            record.log.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SAVED_STEP:
            torch.save([network.state_dict(), optimizer.state_dict()], folder / "state.pt")
        if validate and step in VALIDATED_STEPS:
            page.validate(record, evaluate)
    return record.finish(network=network)


LEARNING = ["uniform", "loss_rms"]
TRAINERS: dict[str, tuple[str, Callable[..., Record], list[str]]] = {
    "kohya": ("kohya", partial(train_kohya, "epsilon"), LEARNING),
    "kohya, v": ("kohya", partial(train_kohya, "v"), ["uniform"]),
    "kohya, Flux": ("kohya", partial(train_kohya, "flux"), LEARNING),
    "ai-toolkit": ("ai-toolkit", train_ai_toolkit, [*LEARNING, "log_normal"]),
    "torchtitan": ("torchtitan", train_torchtitan, ["uniform", "log_normal"]),
    "musubi": ("musubi", train_musubi, LEARNING),
    "diffusion-pipe": ("diffusion-pipe", train_diffusion_pipe, [""]),
}
CASES = [(trainer, strategy) for trainer, (_, _, strategies) in TRAINERS.items() for strategy in strategies]


def run_of(trainer: str, strategy: str, folder: Path, **arguments: Any) -> tuple[Parts, Record]:
    """Return the page with the strategy, and the record of a run."""
    name, train, _ = TRAINERS[trainer]
    parts = Parts(name, strategy)
    return parts, train(parts, folder, **arguments)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Callable[[str, str], tuple[Parts, Record, Path]]:
    """Return a function that returns page, record and folder of an uninterrupted run, which tests share."""

    @cache
    def run(trainer: str, strategy: str) -> tuple[Parts, Record, Path]:
        folder = tmp_path_factory.mktemp("whole")
        return *run_of(trainer, strategy, folder), folder

    return run


@pytest.mark.parametrize("trainer, strategy", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(trainer, strategy, whole_run):
    parts, whole, folder = whole_run(trainer, strategy)
    resumed_parts, resumed = run_of(trainer, strategy, folder, first=SAVED_STEP)
    half = len(whole.times) // 2
    assert_equal(resumed.times, whole.times[half:])
    assert_equal(resumed.losses, whole.losses[half:])
    assert_equal(resumed.weights, whole.weights)
    assert_equal(resumed.log, whole.log[len(whole.log) // 2 :])
    assert not torch.equal(whole.times[half], whole.times[0])
    assert all(isinstance(value, float) for value in whole.log)
    assert parts.executed == {*range(len(parts.parts))}
    assert resumed_parts.executed | {3 if trainer == "ai-toolkit" else 0} == parts.executed
    learns = strategy == "loss_rms"
    assert any(not torch.allclose(a, b) for a, b in zip(whole.losses, whole.errors)) == learns


@pytest.mark.parametrize("trainer, strategy", CASES)
def test_validations_keep_the_training_and_the_losses_of_the_trainer(trainer, strategy, whole_run, tmp_path):
    _, without = run_of(trainer, strategy, tmp_path, validate=False)
    _, record, _ = whole_run(trainer, strategy)
    assert_equal(record.times, without.times)
    assert_equal(record.losses, without.losses)
    assert_equal(record.weights, without.weights)
    assert len(record.validation) == len(VALIDATED_STEPS) * (trainer != "musubi")
    for values, expected in zip(record.validation, record.unmodified_validation):
        torch.testing.assert_close(values, expected, rtol=1e-5 if trainer == "diffusion-pipe" else 0, atol=0)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_uniform_trains_as_the_unmodified_trainer_at_equal_times(trainer, whole_run, tmp_path):
    """Losses of musubi differ by the order of sums: the page averages the errors of each sample first."""
    _, train, strategies = TRAINERS[trainer]
    _, record, _ = whole_run(trainer, strategies[0])
    unmodified = train(None, tmp_path, times=record.times)
    assert_equal(record.times, unmodified.times)
    if trainer == "musubi":
        torch.testing.assert_close(record.losses, unmodified.losses)
        torch.testing.assert_close(record.weights, unmodified.weights, rtol=1e-4, atol=1e-5)
        return
    assert_equal(record.losses, unmodified.losses)
    assert_equal(record.log, unmodified.log)
    assert_equal(record.weights, unmodified.weights)
    torch.testing.assert_close(record.losses, record.errors)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in TRAINERS.values()}))
def test_pages_state_the_number_of_their_lines_and_the_test(name):
    parts = Parts(name)
    count = sum(bool(line.strip()) and not line.startswith("#") for part in parts.parts for line in part.splitlines())
    number = {7: "seven", 8: "eight"}.get(count, str(count))
    first = parts.text.partition("## Change")[0].lower()
    assert count == 8 if name == "kohya" else f"{number} lines" in first
    tested = parts.text.partition("## Tested")[2].partition("## Limits")[0]
    assert "read, not run" in tested.lower() and "replica of the trainer's loop" in " ".join(tested.split())
    assert max(len(line) for line in parts.text.splitlines()) <= 140

"""Lines of the pages of trainers, executed in replicas of the trainers' loops.

A replica has the variables of a trainer and calls in the trainer's order: a small network, averaged weights, losses for
the log, validation, a checkpoint and its restore. It is written for these tests. No code of a trainer runs here.
"""

import copy
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kairos_timesteps
from kairos_timesteps import Strategy

PAGES = Path(__file__).parents[2] / "docs/trainers"
if not PAGES.exists():
    pytest.skip("the source distribution does not contain docs/", allow_module_level=True)
BATCH, STEPS, SAVED_STEP = 6, 8, 4
AUTO = "gradient_norm+auto"  # `auto`, with measurements in each step
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "loss_rms": {"frequency": 1, "start": 1},
    "gradient_norm": {"frequency": 1, "start": 1, "bins": 4},
    "adaptive": {"frequency": 1, "feature_timesteps": 5, "width": 4},
}


class Page:
    """Blocks of a page by their location, such as ``train.py:182``, with a strategy in the place of the page's.

    Attributes:
        text: text of the page.
        blocks: code by location.
        executed: locations whose code has run.
    """

    def __init__(self, name: str, strategy: str = ""):
        self.text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        self.name, self.blocks, self.executed = name, {}, set()
        for code in re.findall(r"```python\n(.*?)```", self.text, re.DOTALL):
            heading = re.match(r"# (\S+\.py:\d+(?: to \d+)?), \S", code)
            assert heading is not None, code
            self.blocks[heading.group(1)] = self._with_strategy(code, strategy) if strategy else code

    def _with_strategy(self, code: str, strategy: str) -> str:
        """Return the code with the strategy and its options; `predict` is that of the page's text."""
        if self.name == "onetrainer":
            code = re.sub(r"\.density\(.*\)", f'.density("{strategy}")', code)
            return code.replace('.weighting("bell"', '.weighting("none"') if strategy == "uniform" else code
        if "attach(" not in code:
            return code
        bare = strategy.partition("+")[0]
        options = f"sampler={OPTIONS[bare]}"
        if bare in ("gradient_norm", "adaptive"):
            options = f"{self.inline('predict=')}, {options}"
            if self.name == "k-diffusion":
                code = f"{self.inline('wrapper = ')}\n{code}"
        code = re.sub(r'attach\(\s*"[^"]+"', f'attach("{strategy}"', code)
        return code.replace("seed=", f"{options}, seed=")

    def inline(self, start: str) -> str:
        """Return the code within a sentence of the page that begins with `start`."""
        matches = re.findall(rf"`({re.escape(start)}[^`]*)`", self.text)
        assert len(matches) == 1, start
        return str(matches[0])

    def run(self, location: str, variables: SimpleNamespace) -> None:
        """Execute a block among the variables of a function of the trainer."""
        exec(compile(self.blocks[location], f"docs/trainers/{self.name}.md", "exec"), vars(variables))
        self.executed.add(location)

    def call(self, location: str, module: Mapping[str, Any], /, **arguments: Any) -> Any:
        """Execute a block as the beginning of a function of a module; return what its ``return`` returns, or None."""
        names = dict(module)
        body = textwrap.indent(self.blocks[location], "    ")
        exec(compile(f"def function({', '.join(arguments)}):\n{body}", f"docs/trainers/{self.name}.md", "exec"), names)
        self.executed.add(location)
        return names["function"](**arguments)


class Record:
    """Values that a run leaves.

    Attributes:
        times: drawn times, one tensor per micro-batch, in the trainer's convention.
        losses: losses that were backpropagated, without auxiliary losses.
        errors: mean unweighted losses, as the unmodified trainer would have used.
        log: what the trainer keeps for its log.
        validation: losses of validations.
        unmodified_validation: the same, of the trainer without the page, on equal weights.
        weights: final weights of the network and averaged weights.
        checkpoint: bytes of the last checkpoint.
    """

    def __init__(self) -> None:
        self.times, self.losses, self.errors, self.log = [], [], [], []
        self.validation, self.unmodified_validation = [], []
        self.weights: dict[str, Tensor] = {}
        self.checkpoint = b""

    def add(self, t: Tensor, loss: Tensor, errors: Tensor) -> None:
        """Append the values of a micro-batch."""
        self.times.append(t.detach().flatten().clone())
        self.losses.append(loss.detach().clone())
        self.errors.append(errors.detach().mean())

    def save(self, checkpoint: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        self.checkpoint = buffer.getvalue()

    def finish(self, **networks: nn.Module) -> "Record":
        """Store the weights and return the record."""
        for name, network in networks.items():
            self.weights |= {f"{name}.{key}": value.clone() for key, value in network.state_dict().items()}
        return self


class Network(nn.Module):
    """Convolution with a shift that depends on time and label; labels are dropped at random in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.labels = nn.Conv2d(2, 2, 3, padding=1), nn.Embedding(4, 2)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        if self.training:
            y = torch.where(torch.rand(len(y)) < 0.1, 3, y)
        return self.layer(x) + (self.labels(y) * torch.tanh(t)[:, None])[:, :, None, None]


class Parallel(nn.Module):
    """Stand-in for DistributedDataParallel; it rejects calls other than those of the trainer."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.called_by_trainer = module, False

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        assert self.called_by_trainer, "the wrapper is called in a measurement"
        if isinstance(self.module, Parallel):
            with by_trainer(self.module):
                return self.module(*arguments, **keywords)
        return self.module(*arguments, **keywords)


@contextmanager
def by_trainer(model: nn.Module) -> Iterator[None]:
    """Allow calls of the stand-in for DistributedDataParallel."""
    model.called_by_trainer = True
    yield
    model.called_by_trainer = False


class Averaged(nn.Module):
    """Network with averaged weights, which ``train(False)`` gives to the network, as the class EMA of flow_matching."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.network, self.backup = module, []
        self.averages = nn.ParameterList(
            nn.Parameter(value.detach().clone(), requires_grad=False) for value in module.parameters()
        )

    def forward(self, x: Tensor, t: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return self.network(x, t, extra.get("label", torch.full((len(x),), 3)))

    def train(self, mode: bool = True) -> "Averaged":
        parameters = list(self.network.parameters())
        if self.training and not mode:
            self.backup = [parameter.detach().clone() for parameter in parameters]
            values = list(self.averages)
        elif mode and not self.training:
            values = self.backup
        else:
            values = parameters
        for parameter, value in zip(parameters, values):
            parameter.data.copy_(value.data)
        return super().train(mode)

    def update_ema(self) -> None:
        for average, parameter in zip(self.averages, self.network.parameters()):
            average.data.lerp_(parameter.data, 0.5)


class PreparedOptimizer:
    """Stand-in for the optimizer that accelerate wraps: it steps once per accumulated step."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: "Accelerator"):
        self.optimizer, self.accelerator = optimizer, accelerator
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        if self.accelerator.sync_gradients:
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)


class Accelerator:
    """Stand-in for the Accelerator of accelerate, with gradient accumulation and checkpoints."""

    def __init__(self, accumulation: int = 1):
        self.accumulation, self.count, self.sync_gradients = accumulation, 0, True
        self.registered: list[Any] = []
        self.prepared: list[Any] = []

    def prepare(self, *objects: Any) -> Any:
        result = [Parallel(item) if isinstance(item, nn.Module) else PreparedOptimizer(item, self) for item in objects]
        self.prepared += result
        return result

    @contextmanager
    def accumulate(self, _: Any) -> Iterator[None]:
        self.count += 1
        self.sync_gradients = self.count % self.accumulation == 0
        yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        yield

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()

    def gather(self, values: Tensor) -> Tensor:
        return values

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        while isinstance(model, Parallel):
            model = model.module
        return model

    def register_for_checkpointing(self, item: Any) -> None:
        self.registered.append(item)

    def state_dicts(self) -> list[Any]:
        return [item.state_dict() for item in (*self.prepared, *self.registered)]

    def load_state(self, states: list[Any]) -> None:
        for item, state in zip((*self.prepared, *self.registered), states, strict=True):
            item.load_state_dict(state)


def batch_of(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Return images and labels, and set the global random state, since trainers do not restore it."""
    torch.manual_seed(1000 + 10 * step + part)
    return torch.randn(BATCH, 2, 4, 4), torch.randint(0, 3, (BATCH,))


def mean_flat(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


@torch.no_grad()
def update_ema(averaged: nn.Module, network: nn.Module, decay: float = 0.5) -> None:
    for average, parameter in zip(averaged.parameters(), network.parameters()):
        average.lerp_(parameter, 1 - decay)


def load(checkpoint: bytes, weights_only: bool = True) -> Any:
    return torch.load(io.BytesIO(checkpoint), map_location="cpu", weights_only=weights_only)


class Transport:
    """Losses of SiT and LightningDiT on the linear path, where t = 1 is data."""

    def __init__(self, page: Page | None, location: str, times: Iterator[Tensor]):
        self.page, self.location, self.earlier_times = page, location, times

    def training_losses(self, model, x1, model_kwargs, sp_timesteps=None) -> dict[str, Tensor]:
        x0, t = torch.randn_like(x1), torch.rand(len(x1))
        if self.page is not None:
            local = SimpleNamespace(self=self, x1=x1, t=t, model_kwargs=model_kwargs, sp_timesteps=sp_timesteps)
            self.page.run(self.location, local)
            t = local.t
        elif sp_timesteps is None:
            t = next(self.earlier_times)
        at = t.view(-1, 1, 1, 1)
        xt, ut = at * x1 + (1 - at) * x0, x1 - x0
        if self.page is not None and sp_timesteps is None:
            self.timesteps.check(x1, x0, xt, t)
        with by_trainer(model):
            output = model(xt, t, **model_kwargs)
        cosine = 1 - nn.functional.cosine_similarity(output, ut, dim=1)
        return {"loss": mean_flat((output - ut) ** 2), "cos_loss": mean_flat(cosine), "t": t}


def train_sit(page, first=0, last=STEPS, checkpoint=b"", times=(), validate=True) -> Record:
    record, v = Record(), SimpleNamespace(torch=torch)
    v.args = SimpleNamespace(ckpt=io.BytesIO(checkpoint) if checkpoint else None, global_seed=3)
    torch.manual_seed(0)
    v.model = Network()
    v.ema = copy.deepcopy(v.model).requires_grad_(False)
    v.model = Parallel(v.model)
    v.transport = Transport(page, "transport/transport.py:132", iter(times))
    v.opt = torch.optim.AdamW(v.model.parameters(), lr=1e-2, weight_decay=0)
    if page:
        page.run("train.py:182", v)
    update_ema(v.ema, v.model.module, decay=0)
    if page:
        page.run("train.py:211", v)
    v.model.train()
    v.ema.eval()
    v.running_loss = 0
    for step in range(first, last):
        x, y = batch_of(step)
        v.loss_dict = v.transport.training_losses(v.model, x, {"y": y})
        if page:
            page.run("train.py:250", v)
        else:
            v.loss = v.loss_dict["loss"].mean()
        v.opt.zero_grad()
        v.loss.backward()
        v.opt.step()
        update_ema(v.ema, v.model.module)
        v.running_loss += v.loss.item()
        record.log.append(v.running_loss)
        record.add(v.loss_dict["t"], v.loss, v.loss_dict["loss"])
        if step + 1 == SAVED_STEP:
            v.checkpoint = {"model": v.model.module.state_dict(), "ema": v.ema.state_dict()}
            v.checkpoint |= {"opt": v.opt.state_dict(), "args": v.args}
            v.args.ckpt = None  # a buffer instead of the trainer's path, which cannot be stored
            if page:
                page.run("train.py:289", v)
            record.save(v.checkpoint)
        if validate:  # samples of the averaged network
            with torch.no_grad():
                v.ema(x, torch.rand(len(x)), y)
    return record.finish(model=v.model, ema=v.ema)


def train_lightningdit(page, first=0, last=STEPS, checkpoint=b"", times=(), validate=True, cosine=False) -> Record:
    record, v = Record(), SimpleNamespace(torch=torch, accelerator=Accelerator())
    v.train_config = {"train": {"resume": bool(checkpoint)}}
    torch.manual_seed(0)
    v.model = Network()
    v.ema = copy.deepcopy(v.model).requires_grad_(False)
    v.model = Parallel(v.model)
    v.transport = Transport(page, "transport/transport.py:187", iter(times))
    v.opt = torch.optim.AdamW(v.model.parameters(), lr=1e-2, weight_decay=0)
    v.model.train()
    v.ema.eval()
    if v.train_config["train"]["resume"]:
        v.checkpoint_files = ["0000004.pt"]
        v.checkpoint = load(checkpoint)
        v.model.load_state_dict(v.checkpoint["model"])
        v.opt.load_state_dict(v.checkpoint["opt"])  # line 172 without its #
        v.ema.load_state_dict(v.checkpoint["ema"])
    v.model, v.opt = v.accelerator.prepare(v.model, v.opt)
    if page:
        page.run("train.py:181", v)
    v.running_loss = 0
    for step in range(first, last):
        x, y = batch_of(step)
        v.loss_dict = v.transport.training_losses(v.model, x, {"y": y})
        if cosine:
            if page:
                page.run("train.py:203", v)
            else:
                v.mse_loss = v.loss_dict["loss"].mean()
            v.loss = v.loss_dict["cos_loss"].mean() + v.mse_loss
        else:
            if page:
                page.run("train.py:206", v)
            else:
                v.loss = v.loss_dict["loss"].mean()
        v.opt.zero_grad()
        v.accelerator.backward(v.loss)
        v.opt.step()
        update_ema(v.ema, v.model.module)
        v.running_loss += v.mse_loss.item() if cosine else v.loss.item()
        record.log.append(v.running_loss)
        record.add(v.loss_dict["t"], v.mse_loss if cosine else v.loss, v.loss_dict["loss"])
        if step + 1 == SAVED_STEP:
            v.checkpoint = {"model": v.model.module.state_dict(), "ema": v.ema.state_dict()}
            v.checkpoint |= {"opt": v.opt.state_dict(), "config": v.train_config}
            if page:
                page.run("train.py:248", v)
            record.save(v.checkpoint)
        if validate and step in (2, 5):
            record.validation.append(evaluate_lightningdit(v.model, v.transport))
            unmodified = Transport(None, "", iter(()))
            record.unmodified_validation.append(evaluate_lightningdit(v.model, unmodified))
            v.model.train()
    return record.finish(model=v.model, ema=v.ema)


@torch.no_grad()
def evaluate_lightningdit(model: nn.Module, transport: Transport) -> Tensor:
    model.eval()
    x, y = batch_of(99)
    return transport.training_losses(model, x, {"y": y}, sp_timesteps=(0.0, 1.0))["loss"].mean()


def train_lightningdit_with_cosine_loss(page, **arguments) -> Record:
    return train_lightningdit(page, cosine=True, **arguments)


class ProjectedNetwork(Network):
    """Network that also returns features, for REPA's projection loss."""

    def forward(self, x, t, y):
        output = super().forward(x, t, y)
        return output, torch.tanh(output)


class SiLoss:
    """Losses of REPA on the linear path, where t = 1 is noise."""

    def __init__(self, page: Page | None, times: Iterator[Tensor]):
        self.page, self.earlier_times, self.last_time = page, times, None

    def __call__(self, model, images, model_kwargs, zs):
        local = SimpleNamespace(self=self, images=images, model_kwargs=model_kwargs)
        if self.page:
            self.page.run("loss.py:56 to 65", local)
        else:
            local.time_input = next(self.earlier_times).view(-1, 1, 1, 1)
        t = local.time_input.to(images.dtype)
        noises = torch.randn_like(images)
        model_input = (1 - t) * images + t * noises
        if self.page:
            self.timesteps.check(images, noises, model_input, t.flatten())
        with by_trainer(model):
            output, features = model(model_input, t.flatten(), **model_kwargs)
        self.last_time = t.flatten()
        return mean_flat((output - (noises - images)) ** 2), -(features * zs).flatten(1).mean(1)


def train_repa(page, first=0, last=STEPS, checkpoint=b"", times=(), validate=True) -> Record:
    record, v = Record(), SimpleNamespace(torch=torch, accelerator=Accelerator(accumulation=2))
    v.args = SimpleNamespace(seed=3, resume_step=first, proj_coeff=0.5)
    torch.manual_seed(0)
    v.model = ProjectedNetwork()
    v.ema = copy.deepcopy(v.model).requires_grad_(False)
    v.loss_fn = SiLoss(page, iter(times))
    v.optimizer = torch.optim.AdamW(v.model.parameters(), lr=1e-2)
    update_ema(v.ema, v.model, decay=0)
    v.model.train()
    v.ema.eval()
    if v.args.resume_step > 0:
        v.ckpt = load(checkpoint, weights_only=False)
        v.model.load_state_dict(v.ckpt["model"])
        v.ema.load_state_dict(v.ckpt["ema"])
        v.optimizer.load_state_dict(v.ckpt["opt"])
    v.model, v.optimizer = v.accelerator.prepare(v.model, v.optimizer)
    if page:
        page.run("train.py:247", v)
    for step in range(first, last):
        for part in range(2):
            x, y = batch_of(step, part)
            with v.accelerator.accumulate(v.model):
                v.loss, v.proj_loss = v.loss_fn(v.model, x, {"y": y}, zs=x)
                errors = v.loss
                if page:
                    page.run("train.py:309", v)
                else:
                    v.loss_mean = v.loss.mean()
                v.loss = v.loss_mean + v.proj_loss.mean() * v.args.proj_coeff
                v.accelerator.backward(v.loss)
                if v.accelerator.sync_gradients:
                    nn.utils.clip_grad_norm_(v.model.parameters(), 1.0)
                v.optimizer.step()
                v.optimizer.zero_grad(set_to_none=True)
                if v.accelerator.sync_gradients:
                    update_ema(v.ema, v.model)
            record.log.append(v.accelerator.gather(v.loss_mean).mean().detach().item())
            record.add(v.loss_fn.last_time, v.loss_mean, errors)
        if step + 1 == SAVED_STEP:
            v.checkpoint = {"model": v.model.module.state_dict(), "ema": v.ema.state_dict()}
            v.checkpoint |= {"opt": v.optimizer.state_dict(), "args": v.args, "steps": step + 1}
            if page:
                page.run("train.py:337", v)
            record.save(v.checkpoint)
        if validate and step in (2, 5):  # samples of the network in training mode
            with torch.no_grad(), by_trainer(v.model):
                v.model(x, torch.rand(len(x)), y)
    return record.finish(model=v.model, ema=v.ema)


class ImageNetwork(nn.Module):
    """Network of k-diffusion: its condition of the augmentation is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.augmentation = nn.Linear(3, 2)

    def forward(self, x: Tensor, sigma: Tensor, aug_cond: Tensor, class_cond: Tensor) -> Tensor:
        return self.network(x, sigma.log() / 4, class_cond) + self.augmentation(aug_cond)[:, :, None, None]


class Denoiser(nn.Module):
    """Preconditioned denoiser with sigma_data 0.7, with the error of the preconditioned target as its loss."""

    def __init__(self, inner_model: nn.Module, sigma_data: float = 0.7):
        super().__init__()
        self.inner_model, self.sigma_data = inner_model, sigma_data

    def scalings(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sigma = sigma.view(-1, 1, 1, 1)
        total = sigma**2 + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data / total.sqrt(), 1 / total.sqrt()

    def forward(self, x: Tensor, sigma: Tensor, **conditions: Tensor) -> Tensor:
        skip, out, scale = self.scalings(sigma)
        return self.inner_model(x * scale, sigma, **conditions) * out + x * skip

    def loss(self, reals: Tensor, noise: Tensor, sigma: Tensor, **conditions: Tensor) -> Tensor:
        skip, out, scale = self.scalings(sigma)
        noised = reals + noise * sigma.view(-1, 1, 1, 1)
        output = self.inner_model(noised * scale, sigma, **conditions)
        return mean_flat((output - (reals - skip * noised) / out) ** 2)


def train_k_diffusion(page, first=0, last=STEPS, checkpoint=b"", times=(), validate=True) -> Record:
    record, v, before = Record(), SimpleNamespace(torch=torch, accelerator=Accelerator()), iter(times)
    v.config, v.model_config, v.args = {}, {"sigma_data": 0.7}, SimpleNamespace(seed=None)
    v.K = SimpleNamespace(config=SimpleNamespace(make_denoiser_wrapper=lambda config: Denoiser))
    v.unwrap = v.accelerator.unwrap_model
    torch.manual_seed(0)
    v.inner_model = ImageNetwork()
    v.inner_model_ema = copy.deepcopy(v.inner_model)
    v.opt = torch.optim.AdamW(v.inner_model.parameters(), lr=1e-2)
    v.inner_model, v.inner_model_ema, v.opt = v.accelerator.prepare(v.inner_model, v.inner_model_ema, v.opt)
    if page:
        page.run("train.py:265", v)
    v.model, v.model_ema = Denoiser(v.inner_model), Denoiser(v.inner_model_ema)
    v.ema_stats = {}
    v.step = 0
    if checkpoint:
        v.ckpt = load(checkpoint)
        v.unwrap(v.model.inner_model).load_state_dict(v.ckpt["model"])
        v.unwrap(v.model_ema.inner_model).load_state_dict(v.ckpt["model_ema"])
        v.opt.load_state_dict(v.ckpt["opt"])
        v.ema_stats = v.ckpt.get("ema_stats", v.ema_stats)
        v.step = v.ckpt["step"]  # the trainer adds 1, which the order of the images of this replica does not allow
        if page:
            page.run("train.py:292", v)
        del v.ckpt
    losses_since_last_print = []
    while v.step < last:
        with v.accelerator.accumulate(v.model):
            v.reals, class_cond = batch_of(v.step)
            v.aug_cond, v.extra_args = torch.randn(BATCH, 3), {"class_cond": class_cond}
            v.noise = torch.randn_like(v.reals)
            if page:
                page.run("train.py:454", v)
                v.timesteps.check(v.reals, v.noise, v.reals + v.noise * v.sigma.view(-1, 1, 1, 1), v.sigma)
            else:
                v.sigma = next(before)
            with by_trainer(v.inner_model):
                v.losses = v.model.loss(v.reals, v.noise, v.sigma, aug_cond=v.aug_cond, **v.extra_args)
            v.loss = v.accelerator.gather(v.losses).mean().item()
            losses_since_last_print.append(v.loss)
            if page:
                page.run("train.py:459", v)
            else:
                v.accelerator.backward(v.losses.mean())
            v.opt.step()
            v.opt.zero_grad()
            v.ema_stats["loss"] = 0.5 * v.ema_stats.get("loss", v.loss) + 0.5 * v.loss
            update_ema(v.model_ema, v.model)
        record.log += [losses_since_last_print[-1], v.ema_stats["loss"], v.loss]
        record.add(v.sigma, torch.tensor(v.loss), v.losses)
        v.step += 1
        if validate:  # samples of the averaged network
            with torch.no_grad(), by_trainer(v.inner_model_ema):
                v.model_ema(v.reals, v.sigma, aug_cond=v.aug_cond, **v.extra_args)
        if v.step == SAVED_STEP:
            save_k_diffusion(page, v, record)
    return record.finish(model=v.model, ema=v.model_ema)


def save_k_diffusion(page: Page | None, v: SimpleNamespace, record: Record) -> None:
    local = SimpleNamespace(timesteps=getattr(v, "timesteps", None))
    local.obj = {"model": v.unwrap(v.model.inner_model).state_dict(), "step": v.step, "ema_stats": v.ema_stats}
    local.obj |= {"model_ema": v.unwrap(v.model_ema.inner_model).state_dict(), "opt": v.opt.state_dict()}
    if page:
        page.run("train.py:417", local)
    record.save(local.obj)


def train_flow_matching(page, first=0, last=STEPS, checkpoint=b"", times=(), validate=True) -> Record:
    record, v, before = Record(), SimpleNamespace(torch=torch), iter(times)
    v.args = SimpleNamespace(seed=3, accum_iter=2)
    torch.manual_seed(0)
    v.model = Averaged(Network())
    v.model = Parallel(v.model)
    v.model_without_ddp = v.model.module
    v.optimizer = torch.optim.AdamW(v.model_without_ddp.parameters(), lr=1e-2)
    v.lr_schedule = torch.optim.lr_scheduler.ConstantLR(v.optimizer, total_iters=9, factor=1.0)
    v.loss_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if page:
        page.run("examples/image/train.py:138", v)
    if checkpoint:
        local = SimpleNamespace(checkpoint=load(checkpoint, weights_only=False), optimizer=v.optimizer)
        v.model_without_ddp.load_state_dict(local.checkpoint["model"])
        v.optimizer.load_state_dict(local.checkpoint["optimizer"])
        if page:
            page.run("examples/image/training/load_and_save.py:63", local)
        v.lr_schedule.load_state_dict(local.checkpoint["lr_schedule"])
        v.loss_scaler.load_state_dict(local.checkpoint["scaler"])
    for epoch in range(first // 2, last // 2):
        v.model.train(True)
        for number in range(4):
            train_flow_matching_batch(page, v, before, record, epoch, number)
        v.lr_schedule.step()
        if 2 * epoch + 2 == SAVED_STEP:
            local = SimpleNamespace(optimizer=v.optimizer)
            local.to_save = {"model": v.model_without_ddp.state_dict(), "optimizer": v.optimizer.state_dict()}
            local.to_save |= {"lr_schedule": v.lr_schedule.state_dict(), "args": v.args}
            local.to_save["scaler"] = v.loss_scaler.state_dict()
            if page:
                page.run("examples/image/training/load_and_save.py:36", local)
            record.save(local.to_save)
        if validate:  # samples of the averaged weights
            v.model.train(False)
            with torch.no_grad(), by_trainer(v.model):
                v.model(batch_of(99)[0], torch.rand(BATCH), extra={})
    v.model.train(True)
    return record.finish(model=v.model)


def train_flow_matching_batch(page, v, before, record, epoch: int, number: int) -> None:
    """Train on one of the four micro-batches of an epoch."""
    e = SimpleNamespace(torch=torch, model=v.model, optimizer=v.optimizer)
    if number % v.args.accum_iter == 0:
        e.optimizer.zero_grad()
    e.samples, e.labels = batch_of(2 * epoch + number // 2, number % 2)
    e.conditioning = {} if torch.rand(1) < 0.3 else {"label": e.labels}
    noise = torch.randn_like(e.samples)
    if page:
        page.run("examples/image/training/train_loop.py:92 to 95", e)
    else:
        e.t = next(before)
    at = e.t.view(-1, 1, 1, 1)
    e.x_t, e.u_t = at * e.samples + (1 - at) * noise, e.samples - noise
    if page:
        e.optimizer.timesteps.check(e.samples, noise, e.x_t, e.t)
    with by_trainer(e.model):
        state = torch.get_rng_state()
        errors = (e.model(e.x_t, e.t, extra=e.conditioning) - e.u_t) ** 2
        torch.set_rng_state(state)
        if page:
            page.run("examples/image/training/train_loop.py:101", e)
        else:
            e.loss = mean_flat((e.model(e.x_t, e.t, extra=e.conditioning) - e.u_t) ** 2).mean()
    record.log.append(e.loss.item())
    record.add(e.t, e.loss, mean_flat(errors))
    e.loss /= v.args.accum_iter
    v.loss_scaler.scale(e.loss).backward()
    if (number + 1) % v.args.accum_iter == 0:
        v.loss_scaler.unscale_(e.optimizer)
        v.loss_scaler.step(e.optimizer)
        v.loss_scaler.update()
        v.model_without_ddp.update_ema()


class ModelFoundation:
    """Model of SimpleTuner: it samples σ and computes the loss."""

    def __init__(self, page: Page | None, times: Iterator[Tensor]):
        self.page, self.earlier_times, self.network = page, times, Network()

    def get_trained_component(self, unwrap_model: bool = True) -> nn.Module:
        return self.network.module if unwrap_model else self.network

    def sample_flow_sigmas(self, batch: dict[str, Any], state: Any) -> tuple[Tensor, Tensor]:
        if self.page:
            times = self.page.call("simpletuner/helpers/models/common.py:5000", {}, self=self, batch=batch, state=state)
            if times is not None:
                return times
        elif not batch["evaluates"]:
            sigmas = next(self.earlier_times)
            return sigmas, 1000.0 * sigmas
        sigmas = torch.sigmoid(torch.randn(len(batch["latents"])))
        return sigmas, sigmas * 1000.0

    def prepare_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch["noise"] = torch.randn_like(batch["latents"])
        batch["sigmas"], batch["timesteps"] = self.sample_flow_sigmas(batch=batch, state={})
        return self.add_noise(batch)

    def add_noise(self, batch: dict[str, Any]) -> dict[str, Any]:
        at = batch["sigmas"].view(-1, 1, 1, 1)
        return batch | {"noisy_latents": (1 - at) * batch["latents"] + at * batch["noise"]}

    def model_predict(self, batch: dict[str, Any], custom_timesteps: Tensor | None = None) -> Tensor:
        if custom_timesteps is not None:
            batch = self.add_noise(batch | {"sigmas": custom_timesteps / 1000, "timesteps": custom_timesteps})
        with by_trainer(self.network):
            return self.network(batch["noisy_latents"], batch["timesteps"] / 1000, batch["labels"])

    def loss(self, prepared_batch: dict[str, Any], model_output: Tensor) -> Tensor:
        target = prepared_batch["noise"] - prepared_batch["latents"]
        local = SimpleNamespace(self=self, loss=mean_flat((model_output - target) ** 2))
        self.last_errors = local.loss
        if self.page:
            self.page.run("simpletuner/helpers/models/common.py:6429", local)
            return local.loss
        return local.loss.mean()


def evaluate_simpletuner(model: ModelFoundation) -> Tensor:
    """Return the validation loss at the trainer's times, with the network in training mode, as the trainer has it."""
    random_state = torch.get_rng_state()
    latents, labels = batch_of(99)
    torch.manual_seed(0)
    batch = model.prepare_batch({"latents": latents, "labels": labels, "evaluates": True})
    losses = []
    with torch.no_grad():
        for time in (250.0, 500.0, 750.0):
            torch.manual_seed(0)
            output = model.model_predict(batch, custom_timesteps=torch.full((BATCH,), time))
            losses.append(model.loss(prepared_batch=batch, model_output=output))
    torch.set_rng_state(random_state)
    return torch.stack(losses)


def train_simpletuner(page, first=0, last=STEPS, checkpoint=b"", times=(), validate=True) -> Record:
    record, local = Record(), SimpleNamespace(torch=torch)
    torch.manual_seed(0)
    trainer = local.self = SimpleNamespace(config=SimpleNamespace(seed=None), accelerator=Accelerator(accumulation=2))
    model = trainer.model = ModelFoundation(page, iter(times))
    optimizer = torch.optim.AdamW(model.network.parameters(), lr=1e-2)
    model.network, trainer.optimizer = trainer.accelerator.prepare(model.network, optimizer)
    if page:
        page.run("simpletuner/helpers/training/trainer.py:4591", local)
    if checkpoint:
        trainer.accelerator.load_state(load(checkpoint)["accelerator"])
    model.network.train()
    for step in range(first, last):
        for part in range(2):
            latents, labels = batch_of(step, part)
            batch = model.prepare_batch({"latents": latents, "labels": labels, "evaluates": False})
            if page:
                model.timesteps.check(latents, batch["noise"], batch["noisy_latents"], batch["sigmas"])
                assert torch.equal(batch["timesteps"], 1000 * batch["sigmas"])
            with trainer.accelerator.accumulate(model.network):
                loss = model.loss(prepared_batch=batch, model_output=model.model_predict(batch))
                record.log.append(loss.detach().item())
                record.add(batch["sigmas"], loss, model.last_errors)
                trainer.accelerator.backward(loss)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad(set_to_none=True)
        if step + 1 == SAVED_STEP:
            record.save({"accelerator": trainer.accelerator.state_dicts()})
        if validate and step in (2, 5):
            if page:
                page.run("simpletuner/helpers/training/trainer.py:7483", local)
            record.validation.append(evaluate_simpletuner(model))
            if page:
                page.run("simpletuner/helpers/training/trainer.py:7490", local)
            model.page = None
            record.unmodified_validation.append(evaluate_simpletuner(model))
            model.page = page
    return record.finish(model=model.network)


MIXIN = "modules/modelSetup/mixin/"


class ModelSetup:
    """Model setup of OneTrainer: it draws indices with its own generator, and weights losses per sample."""

    def __init__(self, page: Page | None):
        self.page, self.network = page, Network()
        self.noise_module, self.loss_module = SimpleNamespace(torch=torch), SimpleNamespace(torch=torch)
        if page:
            page.run(f"{MIXIN}ModelSetupNoiseMixin.py:10", self.noise_module)
            page.run(f"{MIXIN}ModelSetupDiffusionLossMixin.py:13", self.loss_module)

    def timestep(self, deterministic: bool, generator: torch.Generator, batch_size: int) -> Tensor:
        if deterministic:
            return torch.tensor([499])
        if self.page:
            arguments = {"num_train_timesteps": 1000, "generator": generator, "batch_size": batch_size}
            return self.page.call(f"{MIXIN}ModelSetupNoiseMixin.py:142", vars(self.noise_module), **arguments)
        return (1000 * torch.rand(batch_size, generator=generator)).int()

    def predict(self, batch: dict[str, Tensor], step: int, deterministic: bool = False) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0 if deterministic else step)
        image = batch["latent_image"]
        noise = torch.randn(image.shape, generator=generator)
        index = self.timestep(deterministic, generator, len(image))
        sigma = (torch.arange(1, 1001, dtype=torch.int32) / 1000)[index].expand(len(image))
        noised = noise * sigma.view(-1, 1, 1, 1) + image * (1 - sigma).view(-1, 1, 1, 1)
        output = self.network(noised, index.expand(len(image)) / 1000, batch["labels"])
        return {"timestep": index, "sigma": sigma, "predicted": output, "target": noise - image}

    def losses(self, batch: dict[str, Tensor], data: dict[str, Tensor]) -> Tensor:
        local = SimpleNamespace(**vars(self.loss_module), data=data)
        local.losses = mean_flat((data["predicted"] - data["target"]) ** 2)
        local.losses *= batch["loss_weight"]
        if self.page:
            self.page.run(f"{MIXIN}ModelSetupDiffusionLossMixin.py:332", local)
        return local.losses


def train_onetrainer(page, first=0, last=STEPS, checkpoint=b"", times=(), validate=True) -> Record:
    record = Record()
    torch.manual_seed(0)
    setup = ModelSetup(page)
    optimizer = torch.optim.AdamW(setup.network.parameters(), lr=1e-2)
    if checkpoint:
        state = load(checkpoint)
        setup.network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, last):
        latents, labels = batch_of(step)
        batch = {"latent_image": latents, "labels": labels, "loss_weight": torch.linspace(0.5, 1.5, BATCH)}
        data = setup.predict(batch, step)
        loss = setup.losses(batch, data).mean()
        loss.backward()
        record.log.append(loss.detach().clone())
        record.add(data["timestep"], loss, mean_flat((data["predicted"] - data["target"]) ** 2) * batch["loss_weight"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step + 1 == SAVED_STEP:
            record.save({"network": setup.network.state_dict(), "optimizer": optimizer.state_dict()})
        if validate and step in (2, 5):
            for module_page, losses in ((page, record.validation), (None, record.unmodified_validation)):
                random_state = torch.get_rng_state()
                setup.page = module_page
                with torch.no_grad():
                    losses.append(setup.losses(batch, setup.predict(batch, step, deterministic=True)).mean())
                torch.set_rng_state(random_state)
            setup.page = page
    return record.finish(model=setup.network)


TRAINERS: dict[str, tuple[str, Callable[..., Record], list[str]]] = {
    "sit": ("sit", train_sit, ["uniform", "loss_rms", "adaptive"]),
    "lightningdit": ("lightningdit", train_lightningdit, ["uniform", "loss_rms", AUTO]),
    "lightningdit, cosine": (
        "lightningdit",
        train_lightningdit_with_cosine_loss,
        ["uniform", "loss_rms", AUTO],
    ),
    "repa": ("repa", train_repa, ["uniform", "loss_rms", AUTO]),
    "k-diffusion": ("k-diffusion", train_k_diffusion, ["uniform+edm", "loss_rms+edm", "adaptive"]),
    "flow_matching": ("flow_matching", train_flow_matching, ["uniform", "loss_rms", "adaptive"]),
    "simpletuner": ("simpletuner", train_simpletuner, ["uniform", "loss_rms"]),
    "onetrainer": ("onetrainer", train_onetrainer, ["uniform", "log_normal"]),
}
CASES = [(trainer, strategy) for trainer, (_, _, strategies) in TRAINERS.items() for strategy in strategies]
# the example of flow_matching trains on CUDA, and torch.autocast warns without it
WITHOUT_CUDA = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'", "ignore:CUDA is not available")


def case_of(trainer: str, strategy: str) -> tuple[Page, Callable[..., Record]]:
    """Return the page with the strategy, and the replica."""
    name, train, _ = TRAINERS[trainer]
    return Page(name, strategy), train


def assert_equal(values: Any, expected: Any) -> None:
    """Compare lists or dictionaries of tensors and numbers bit for bit."""
    if isinstance(values, dict):
        assert values.keys() == expected.keys()
        values, expected = list(values.values()), list(expected.values())
    assert len(values) == len(expected) > 0
    for value, other in zip(values, expected):
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other))


@cache
def record_of(trainer: str, strategy: str) -> tuple[Page, Record]:
    """Return the page and the record of an uninterrupted run, which tests share."""
    page, train = case_of(trainer, strategy)
    return page, train(page)


@WITHOUT_CUDA
@pytest.mark.parametrize("trainer, strategy", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(trainer, strategy):
    page, whole = record_of(trainer, strategy)
    resumed_page, train = case_of(trainer, strategy)
    resumed = train(resumed_page, first=SAVED_STEP, checkpoint=whole.checkpoint)
    half = len(whole.times) // 2
    assert_equal(resumed.times, whole.times[half:])
    assert_equal(resumed.losses, whole.losses[half:])
    assert_equal(resumed.weights, whole.weights)
    assert not torch.equal(whole.times[half], whole.times[0])  # a strategy without its state would begin anew
    other_block = {"lightningdit": "train.py:203", "lightningdit, cosine": "train.py:206"}.get(trainer)
    assert page.executed | resumed_page.executed == page.blocks.keys() - {other_block}


@WITHOUT_CUDA
@pytest.mark.parametrize("trainer", TRAINERS)
def test_uniform_trains_as_the_unmodified_trainer_at_equal_times(trainer):
    _, record = record_of(trainer, TRAINERS[trainer][2][0])
    unmodified = TRAINERS[trainer][1](None, times=record.times)
    if trainer == "k-diffusion":  # multiplies and divides by c_out squared
        np.testing.assert_allclose(record.losses, unmodified.losses, rtol=1e-3)
        np.testing.assert_allclose(record.log, unmodified.log, rtol=1e-3)
        for name, value in record.weights.items():
            torch.testing.assert_close(value, unmodified.weights[name], rtol=1e-3, atol=1e-4)
        return
    assert_equal(record.times, unmodified.times)
    assert_equal(record.losses, unmodified.losses)
    assert_equal(record.losses, record.errors)
    assert_equal(record.log, unmodified.log)
    assert_equal(record.weights, unmodified.weights)
    if record.validation:
        assert_equal(record.validation, unmodified.validation)


@WITHOUT_CUDA
@pytest.mark.parametrize("trainer, strategy", CASES)
def test_validations_keep_the_training_and_the_losses_of_the_trainer(trainer, strategy):
    _, record = record_of(trainer, strategy)
    page, train = case_of(trainer, strategy)
    without = train(page, validate=False)
    assert_equal(record.times, without.times)
    assert_equal(record.losses, without.losses)
    assert_equal(record.weights, without.weights)
    has_validation = TRAINERS[trainer][0] in ("lightningdit", "simpletuner", "onetrainer")
    assert len(record.validation) == 2 * has_validation
    if has_validation:
        assert_equal(record.validation, record.unmodified_validation)


@WITHOUT_CUDA
@pytest.mark.parametrize("trainer, strategy", CASES)
def test_the_log_keeps_no_graph(trainer, strategy):
    _, record = record_of(trainer, strategy)
    assert len(record.log) >= STEPS
    for value in record.log:
        assert isinstance(value, float) or (isinstance(value, Tensor) and value.grad_fn is None)


def saved_strategy(trainer: str, record: Record) -> dict[str, Any]:
    """Return the state of the strategy in the checkpoint of a run."""
    saved = load(record.checkpoint, weights_only=False)
    return (saved["accelerator"][-1] if trainer == "simpletuner" else saved["timesteps"])["strategy"]


def leaves(state: Any) -> list[Any]:
    """Return the values in nested dictionaries and lists as arrays."""
    if isinstance(state, Mapping):
        return [leaf for value in state.values() for leaf in leaves(value)]
    if isinstance(state, (list, tuple)):
        return [leaf for value in state for leaf in leaves(value)]
    return [np.asarray(state)]


@WITHOUT_CUDA
@pytest.mark.parametrize("trainer, strategy", [case for case in CASES if case[0] != "onetrainer"])
def test_strategies_learn_in_each_step(trainer, strategy):
    """The states of two strategies differ after training, unless the strategy is fixed."""
    _, record = record_of(trainer, strategy)
    state = saved_strategy(trainer, record)
    assert state["step"] == SAVED_STEP
    options = OPTIONS[strategy.partition("+")[0]]
    process = kairos_timesteps.Edm(sigma_data=0.7) if trainer == "k-diffusion" else "flow"
    untrained = Strategy(strategy, process, sampler=options).state_dict()["sampler"]
    pairs = zip(leaves(untrained), leaves(state["sampler"]))
    equal = len(leaves(untrained)) == len(leaves(state["sampler"])) and all(np.array_equal(a, b) for a, b in pairs)
    assert equal == strategy.startswith("uniform")


def test_the_indices_and_weights_of_onetrainer_belong_to_its_noise_levels():
    """Indices have the density of kairos, σ is the upper end of an index, and the weight is that of σ."""
    page = Page("onetrainer")
    setup = ModelSetup(page)
    count, generator = 200_000, torch.Generator().manual_seed(0)
    index = setup.timestep(False, generator, count)
    assert index.dtype == torch.int32 and index.min() >= 0 and index.max() < 1000
    below = (index[:, None] < torch.tensor([100, 500, 900])).double().mean(0)
    expected = setup.noise_module.density.cdf(np.array([0.1, 0.5, 0.9]))
    np.testing.assert_allclose(below, expected, atol=5 * (0.25 / count) ** 0.5)
    largest = torch.tensor(1 - 2.0**-24)
    for number in (1000, 10_000):  # the largest random number does not give an index beyond the last
        for name in ("uniform", "log_normal", "mode"):
            assert (number * kairos_timesteps.density(name).quantile(largest)).int() < number

    all_sigmas = torch.arange(1, 1001, dtype=torch.int32) / 1000  # of the trainer
    data = {"timestep": torch.arange(1000, dtype=torch.int32), "target": torch.zeros(1000, 1)}
    data["predicted"] = torch.ones(1000, 1, requires_grad=True)
    weights = setup.losses({"loss_weight": torch.ones(1000)}, data)
    bell = (-2 * (all_sigmas.double() - 0.5) ** 2).exp() - np.exp(-0.5)
    torch.testing.assert_close(weights.detach().double(), bell / bell.mean(), rtol=1e-3, atol=1e-5)
    draws = (index.double() + 1) / 1000
    u = torch.rand(count, generator=torch.Generator().manual_seed(0))
    difference = (draws - setup.noise_module.density.quantile(u).double()).mean()
    assert difference == pytest.approx(0.0005, abs=1e-5)
    linear = kairos_timesteps.weighting("linear", prediction="flow")
    assert float(linear(((1 - all_sigmas) / all_sigmas) ** 2).mean()) == pytest.approx(2.5, abs=0.01)
    assert "`linear` has mean 2.5" in page.text


@pytest.mark.parametrize("trainer", ["lightningdit, cosine", "repa"])
def test_the_mean_weight_of_auto_is_that_of_the_page(trainer):
    """The mean weight stays 0.037 while the density changes, and the division on the page makes it 1."""
    page, record = record_of(trainer, AUTO)
    (factor,) = {float(value) for value in re.findall(r"/ (0\.\d+)`", page.text)}
    assert f"weights of mean {factor}, " in page.text
    state = saved_strategy(trainer, record)
    strategy = Strategy(AUTO, "flow", seed=state["settings"]["seed"], sampler=OPTIONS["gradient_norm"])
    tables = [Strategy("auto", "flow").table(), strategy.table()]
    strategy.load_state_dict(state)
    tables.append(strategy.table())
    assert not np.allclose(tables[1]["p"], tables[2]["p"])
    for table in tables:
        weights = np.where(table["p"] > 0, table["w"], 0)
        assert float((table["p"] * weights).sum()) / factor == pytest.approx(1, abs=0.01)
    location = "train.py:203" if page.name == "lightningdit" else "train.py:309"
    division = next(code for code in re.findall(r"`([^`\n]*)`", page.text) if code.endswith(f"/ {factor}"))
    assert division == f"{page.blocks[location].splitlines()[-1]} / {factor}"


@pytest.mark.parametrize("name", sorted({name for name, _, _ in TRAINERS.values()}))
def test_pages_state_the_number_of_their_lines(name):
    page = Page(name)
    count = 0
    for code in page.blocks.values():
        count += sum(bool(line.strip()) and not line.startswith("#") for line in code.splitlines())
    assert re.search(rf"^About {count} lines", page.text, re.MULTILINE), count
    assert max(len(line) for line in page.text.splitlines()) <= 140

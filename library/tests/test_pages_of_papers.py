"""Lines of the pages of DiT, EDM, improved-diffusion, guided-diffusion and SpeeD, run in replicas of their loops.

A replica has the variables of the trainer and its order of calls, with a small network. The lines of a page run where
its comments say. No code of a trainer runs here.
"""

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kairos_timesteps
from kairos_timesteps import Strategy
from small_loop import equal_bits

PAGES = Path(__file__).parents[2] / "docs/trainers"
if not PAGES.exists():
    pytest.skip("the source distribution does not contain docs/", allow_module_level=True)
NAMES = ["dit", "edm", "improved-diffusion", "guided-diffusion", "speed"]
LOCATION = re.compile(r"^# (\S+\.py:\d+)\b.*\n", re.MULTILINE)
BATCH, CLASSES, STEPS = 6, 3, 10
ADAPTS_EARLY = {"start": 3, "frequency": 1}
Record = dict[str, Tensor]


@pytest.fixture(autouse=True)
def one_thread():
    """Compute on one thread: the tensors are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Lines:
    """Lines of a page by their places, such as ``train.py:155``, which run once or more."""

    def __init__(self, page: str):
        self.page, self.text = page, (PAGES / f"{page}.md").read_text(encoding="utf-8")
        self.code: dict[str, str] = {}
        self.not_run: set[str] = set()
        for block in re.findall(r"```python\n(.*?)```", self.text, re.DOTALL):
            before, *parts = LOCATION.split(block)
            assert not before, f"{page}: the block begins without a location"
            for location, code in zip(parts[::2], parts[1::2], strict=True):
                assert location not in self.code, location
                self.code[location] = code
        self.not_run = set(self.code)

    def run(self, location: str, names: dict[str, Any]) -> None:
        """Run the lines of a location in the trainer's scope `names`."""
        self.not_run.discard(location)
        exec(compile(self.code[location], f"docs/trainers/{self.page}.md", "exec"), names)

    def inline(self, pattern: str) -> str:
        """Return the only inline code of the page that matches a pattern."""
        (code,) = [code for code in re.findall(r"`([^`\n]+)`", self.text) if re.match(pattern, code)]
        return code


class Network(nn.Module):
    """1x1 convolution with shifts by time and class; the second half of its `outputs` channels is the variance."""

    def __init__(self, outputs: int = 6):
        super().__init__()
        self.layer = nn.Conv2d(3, outputs, 1)
        self.classes = nn.Embedding(CLASSES, outputs)

    def forward(self, x_t: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        shift = torch.tanh(t.float() / 100).view(-1, 1)
        if y is not None:
            shift = shift + self.classes(y)
        return self.layer(x_t) + shift[:, :, None, None]


class Wrapper(nn.Module):
    """Stand-in for DistributedDataParallel, whose calls the measurements must avoid."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *inputs: Tensor, **keywords: Tensor) -> Tensor:
        self.calls += 1
        return self.module(*inputs, **keywords)


class Diffusion:
    """Diffusion with a linear schedule and a learned variance, whose loss has the terms ``mse`` and ``vb``."""

    def __init__(self) -> None:
        self.num_timesteps = 1000
        self.alphas_cumprod = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000, dtype=np.float64))

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        alpha = torch.from_numpy(self.alphas_cumprod)[t].float().view(-1, 1, 1, 1)
        return alpha.sqrt() * x_start + (1 - alpha).sqrt() * noise

    def _wrap_model(self, model: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, t, **keywords: model(x, t, **keywords)

    def training_losses(
        self, model: Any, x_start: Tensor, t: Tensor, model_kwargs: Any = None, weights: Any = None
    ) -> Record:
        noise = torch.randn_like(x_start)
        output, variance = model(self.q_sample(x_start, t, noise), t, **(model_kwargs or {})).chunk(2, 1)
        squares = (output - noise) ** 2
        factors = 1.0 if weights is None else torch.from_numpy(weights)[t].float().view(-1, 1, 1, 1)
        terms = {"mse": (factors * squares).mean((1, 2, 3))}
        terms["vb"] = (variance - squares.detach()).square().mean((1, 2, 3)) / 100
        return {**terms, "loss": terms["mse"] + terms["vb"]}


def use_strategy(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Attach strategy `name` in place of the page's, which None keeps; ``loss_rms`` learns after a few steps."""
    original = kairos_timesteps.attach
    options: dict[str, Any] = {"sampler": None, "weighting": None} if name else {}
    if name and name.startswith("loss_rms"):
        options["sampler"] = ADAPTS_EARLY

    def attach(name_of_page: str, *arguments: Any, **keywords: Any) -> Any:
        return original(name or name_of_page, *arguments, **{**keywords, **options})

    monkeypatch.setattr(kairos_timesteps, "attach", attach)


def batch(step: int, count: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return images and classes of a step, and seed the random numbers that the trainer draws in the step."""
    generator = torch.Generator().manual_seed(step)
    torch.manual_seed(step)
    return torch.randn(count, 3, 4, 4, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def record(timesteps: Any, t: Tensor, losses: Tensor, loss: Tensor, trainer_loss: Tensor) -> Record:
    """Return copies of the values of a micro-batch."""
    values = {"t": t, "weights": timesteps.weights, "losses": losses, "loss": loss, "trainer's loss": trainer_loss}
    return {name: value.detach().clone() for name, value in values.items()}


def check_runs(whole: list[Record], first: list[Record], second: list[Record], strategy: str) -> None:
    """Compare an interrupted run with the whole one, and the losses with the trainer's."""
    assert len(first) < len(whole) == len(first) + len(second)
    assert equal_bits(first + second, whole)
    adapted = any((values["weights"] != 1).any() for values in second)
    assert adapted == strategy.startswith("loss_rms")


def train_dit(folder: Path, last: int, resume: str = "") -> tuple[list[Record], Lines, Any]:
    """Train as train.py does until step `last`, and save the last step."""
    lines, records = Lines("dit"), []
    parser = ArgumentParser()
    parser.add_argument("--global-seed", type=int, default=0)
    lines.run("train.py:267", {"parser": parser})
    names = {"torch": torch, "args": parser.parse_args(["--resume", resume] if resume else [])}
    torch.manual_seed(1 if resume else 0)
    names |= {"model": Wrapper(Network()), "ema": Network(), "diffusion": Diffusion()}
    model, ema, diffusion = names["model"], names["ema"], names["diffusion"]
    names["opt"] = opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    lines.run("train.py:155", names)
    ema.load_state_dict(model.module.state_dict())
    model.train()
    ema.eval()
    names["train_steps"] = 0
    if resume:
        lines.run("train.py:192", names)
    else:
        lines.not_run.discard("train.py:192")
    while names["train_steps"] < last:
        names["x"], names["y"] = batch(names["train_steps"])
        lines.run("train.py:204", names)
        names["loss_dict"] = diffusion.training_losses(model, names["x"], names["t"], dict(y=names["y"]))
        trainer_loss = names["loss_dict"]["loss"].mean()
        lines.run("train.py:207", names)
        opt.zero_grad()
        names["loss"].backward()
        values = record(names["timesteps"], names["t"], names["loss_dict"]["loss"], names["loss"], trainer_loss)
        records.append(values)
        opt.step()
        with torch.no_grad():
            for mean, parameter in zip(ema.parameters(), model.module.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        names["train_steps"] += 1
    names["checkpoint"] = {"model": model.module.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()}
    names["checkpoint"]["args"] = names["args"]
    lines.run("train.py:240", names)
    torch.save(names["checkpoint"], folder / f"{last:07d}.pt")
    return records, lines, names


@pytest.mark.parametrize("strategy", ["uniform", "log_normal", "loss_rms"])
def test_the_lines_of_dit_resume_and_keep_the_loss(strategy, tmp_path, monkeypatch):
    use_strategy(monkeypatch, strategy)
    whole, lines, names = train_dit(tmp_path, STEPS)
    first, _, _ = train_dit(tmp_path, 6)
    second, resumed_lines, resumed = train_dit(tmp_path, STEPS, str(tmp_path / "0000006.pt"))
    check_runs(whole, first, second, strategy)
    assert not lines.not_run | resumed_lines.not_run
    assert equal_bits(resumed["ema"].state_dict(), names["ema"].state_dict())
    if strategy == "uniform":
        assert all(torch.equal(values["loss"], values["trainer's loss"]) for values in whole)


def train_edm(folder: Path, last: int, resume: int = 0, rounds: int = 2) -> tuple[list[Record], Lines]:
    """Train as training_loop.py does until step `last`, and save the last step.

    Each step accumulates `rounds` micro-batches. Losses of the records are accumulated gradients, also those of the
    trainer's expression.
    """
    lines, records = Lines("edm"), []
    torch.manual_seed(1 if resume else 0)

    class Denoiser(Network):
        def forward(self, x_t, sigma, class_labels=None, augment_labels=None):
            output = super().forward(x_t, sigma.flatten(), class_labels)
            return output if augment_labels is None else output + augment_labels[:, :, None, None]

    class EdmLoss:
        P_mean, P_std, sigma_data = -1.2, 1.2, 0.5

        def __call__(self, net, images, labels=None, augment_pipe=None, sigma=None):
            normal = torch.randn(len(images), 1, 1, 1)
            scope = {"self": self, "rnd_normal": normal, "sigma": sigma}
            lines.run("training/loss.py:74", scope)
            sigma = scope["sigma"]
            y, augment_labels = augment_pipe(images)
            output = net(y + sigma * torch.randn_like(y), sigma, labels, augment_labels=augment_labels)
            return (output - y) ** 2 * (sigma**-2 + self.sigma_data**-2)

    net = Denoiser(3).train()
    names = {"torch": torch, "os": os, "seed": 5, "net": net, "loss_fn": EdmLoss(), "run_dir": str(folder)}
    names["optimizer"] = optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    names |= {"ddp": Wrapper(net), "loss_scaling": 2, "batch_gpu_total": BATCH * rounds}
    names["augment_pipe"] = lambda images: (images.flip(3), images.mean((2, 3)))
    lines.run("training/training_loop.py:90", names)
    if resume:
        names["data"] = torch.load(folder / f"training-state-{resume:06d}.pt", weights_only=False)
        net.load_state_dict(names["data"]["net"])
        optimizer.load_state_dict(names["data"]["optimizer_state"])
        lines.run("training/training_loop.py:108", names)
        del names["data"]
    lines.not_run.discard("training/training_loop.py:108")
    for step in range(resume, last):
        optimizer.zero_grad(set_to_none=True)
        images, labels = batch(step, BATCH * rounds)
        for names["images"], names["labels"] in zip(images.chunk(rounds), labels.chunk(rounds), strict=True):
            before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]
            lines.run("training/training_loop.py:130", names)
            loss, sigma = names["loss"], names["sigma"].flatten()
            trainer_loss = loss.sum().mul(names["loss_scaling"] / names["batch_gpu_total"])
            expected = torch.autograd.grad(trainer_loss, list(net.parameters()), retain_graph=True)
            lines.run("training/training_loop.py:132", names)
            expected = torch.cat([(old + new).flatten() for old, new in zip(before, expected, strict=True)])
            gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
            records.append(record(names["timesteps"], sigma, loss, gradient, expected))
        optimizer.step()
    names["cur_nimg"] = last * 1000
    torch.save, save = lambda state, path: save(state | {"net": net.state_dict()}, path), torch.save
    try:  # a network class of a test cannot be pickled
        lines.run("training/training_loop.py:193", names)
    finally:
        torch.save = save
    return records, lines


@pytest.mark.parametrize("strategy", [None, "uniform+edm", "uniform", "loss_rms+edm"])
def test_the_lines_of_edm_resume_and_keep_the_gradient(strategy, tmp_path, monkeypatch):
    use_strategy(monkeypatch, strategy)
    whole, lines = train_edm(tmp_path, STEPS)
    first, _ = train_edm(tmp_path, 6)
    second, _ = train_edm(tmp_path, STEPS, resume=6)
    assert equal_bits(first + second, whole) and len(second) == 2 * (STEPS - 6)
    assert not lines.not_run
    for number, values in enumerate(whole):
        weights = values["weights"].double() / (values["t"].double() ** -2 + 4)
        is_trainers = bool((weights - 1).abs().max() < 1e-5)  # EDM's weight times no importance weight
        if strategy in (None, "uniform+edm") or number < 4:
            assert is_trainers == (strategy != "uniform")
        difference = (values["loss"] - values["trainer's loss"]).norm() / values["trainer's loss"].norm()
        assert difference < 1e-5 if is_trainers else difference > 1e-3
    assert is_trainers == (strategy in (None, "uniform+edm"))  # at the end, when `loss_rms` has adapted
    assert all((values["t"] > 0.001).all() and (values["t"] < 81).all() for values in whole)


LINE_NUMBERS = {
    "improved-diffusion": (112, 197, 218, 226, 292),
    "guided-diffusion": (108, 189, 210, 214, 253),
}


class TrainLoop:
    """Loop of improved-diffusion and guided-diffusion, with a float32 copy of the parameters as their fp16.

    Args:
        page: name of the page.
        folder: folder of the checkpoints.
        resume_checkpoint: path of the network's checkpoint.
        use_fp16: True if the optimizer has copies of the parameters.
        overflows: steps whose gradients overflow.
    """

    def __init__(
        self,
        page: str,
        folder: Path,
        resume_checkpoint: str = "",
        use_fp16: bool = False,
        overflows: tuple[int, ...] = (),
    ):
        self.lines, self.folder, self.use_fp16, self.overflows = Lines(page), folder, use_fp16, overflows
        self.is_guided = page == "guided-diffusion"
        self.file = f"{page.replace('-', '_')}/train_util.py"
        self.resume_checkpoint, self.step, self.resume_step, self.microbatch = resume_checkpoint, 0, 0, 4
        torch.manual_seed(1 if resume_checkpoint else 0)
        self.diffusion, self.model = Diffusion(), Network()
        if resume_checkpoint:
            self.resume_step = int(resume_checkpoint.split("model")[-1].split(".")[0])
            self.model.load_state_dict(torch.load(resume_checkpoint))
        self.model_params = list(self.model.parameters())
        copies = [nn.Parameter(parameter.detach().clone()) for parameter in self.model_params]
        self.master_params = copies if use_fp16 else self.model_params
        self.opt = torch.optim.AdamW(self.master_params, lr=1e-2)
        if self.resume_step:
            self.opt.load_state_dict(torch.load(folder / f"opt{self.resume_step:06d}.pt"))
        if self.is_guided:
            self.mp_trainer = Namespace(master_params=self.master_params)
            del self.master_params
        self.records: list[Record] = []
        self.run(0)

    def run(self, number: int, **names: Any) -> dict[str, Any]:
        """Run the lines of a location with the names of the module and of the method."""
        blobs = Namespace(BlobFile=open, join=os.path.join, dirname=os.path.dirname)
        module = {"th": torch, "bf": blobs, "get_blob_logdir": lambda: str(self.folder)}
        module |= {"find_resume_checkpoint": lambda: None, "dist_util": Namespace(load_state_dict=torch.load)}
        names = {**module, "self": self, **names}
        self.lines.run(f"{self.file}:{LINE_NUMBERS[self.lines.page][number]}", names)
        return names

    def run_step(self, images: Tensor, classes: Tensor) -> None:
        """Take a step of micro-batches, whose last one is smaller; an overflow skips the optimizer."""
        params = self.mp_trainer.master_params if self.is_guided else self.master_params
        for parameter in self.model_params:
            if parameter.grad is not None:
                parameter.grad.zero_()
        if not self.is_guided:
            self.lines.run(f"{self.file}:189", {"self": self})
        for micro, y in zip(images.split(self.microbatch), classes.split(self.microbatch), strict=True):
            names = self.run(1, micro=micro, micro_cond={"y": y})
            losses = self.diffusion.training_losses(self.model, micro, names["t"], names["micro_cond"])
            names = self.run(2, losses=losses)
            logged = {key: (values * self.timesteps.weights).mean().item() for key, values in losses.items()}
            names["loss"].backward()
            trainer_loss = (losses["loss"] * 1).mean()
            values = record(self.timesteps, self.timesteps._draw.t, losses["loss"], names["loss"], trainer_loss)
            assert logged["loss"] == pytest.approx(names["loss"].item(), rel=1e-5)
            self.records.append(values)
            self.run(3)
        overflow = self.step + self.resume_step in self.overflows
        if self.use_fp16 and not (overflow and not self.is_guided):
            for copy, parameter in zip(params, self.model_params, strict=True):
                copy.grad = parameter.grad.clone()
        if not overflow:
            self.opt.step()
        if self.use_fp16:
            with torch.no_grad():
                for copy, parameter in zip(params, self.model_params, strict=True):
                    parameter.copy_(copy)
            if self.is_guided:
                for copy in params:
                    copy.grad = None

    def run_loop(self, last: int) -> None:
        """Train until step `last`, and save the step."""
        while self.step + self.resume_step < last:
            self.run_step(*batch(self.step + self.resume_step))
            self.step += 1
        torch.save(self.model.state_dict(), self.folder / f"model{last:06d}.pt")
        torch.save(self.opt.state_dict(), self.folder / f"opt{last:06d}.pt")
        self.run(4)


OPENAI = ["improved-diffusion", "guided-diffusion"]


@pytest.mark.parametrize("page", OPENAI)
@pytest.mark.parametrize("strategy", ["uniform", "log_normal", "loss_rms"])
def test_the_lines_of_openais_trainers_resume_and_keep_the_loss(page, strategy, tmp_path, monkeypatch):
    use_strategy(monkeypatch, strategy)
    whole, first = TrainLoop(page, tmp_path), TrainLoop(page, tmp_path)
    whole.run_loop(STEPS)
    first.run_loop(6)
    second = TrainLoop(page, tmp_path, str(tmp_path / "model000006.pt"))
    second.run_loop(STEPS)
    check_runs(whole.records, first.records, second.records, strategy)
    assert not whole.lines.not_run
    if strategy == "uniform":
        assert all(torch.equal(values["loss"], values["trainer's loss"]) for values in whole.records)


@pytest.mark.parametrize("page", OPENAI)
def test_the_lines_of_openais_trainers_learn_from_all_micro_batches_but_those_of_overflows(page, tmp_path, monkeypatch):
    """Compare with `Strategy` that observes the micro-batches of the steps without an overflow."""
    use_strategy(monkeypatch, "loss_rms")
    overflows = (0, 4, 5)
    loop = TrainLoop(page, tmp_path, use_fp16=True, overflows=overflows)
    loop.run_loop(STEPS)
    strategy, records = Strategy("loss_rms", Diffusion().alphas_cumprod, sampler=ADAPTS_EARLY), iter(loop.records)
    for step in range(STEPS):
        draws = []
        for micro in batch(step)[0].split(loop.microbatch):
            values = next(records)
            draws.append(strategy.draw(micro))
            assert torch.equal(values["t"], draws[-1].t) and torch.equal(values["weights"], draws[-1].weights)
            strategy.weighted(draws[-1], values["losses"])
        if step not in overflows:
            with strategy.observe(draws):
                pass
    assert strategy.step == STEPS - len(overflows)
    assert equal_bits(loop.timesteps.state_dict()["strategy"], strategy.state_dict())


class Experiment:
    """Experiment of SpeeD, reduced to the methods that its page changes."""

    def __init__(self, folder: Path, resume_training: str | None = None, runner: str = "runner/base.py:199"):
        self.lines, self.folder, self.runner = Lines("speed"), folder, runner
        torch.manual_seed(1 if resume_training else 0)
        self.config = {"resume_training": resume_training}
        self.config = type("Config", (dict,), {"seed": 0})(self.config)
        self.model, self.diffusion, self.start_step = Network(), Diffusion(), 0
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if resume_training:
            state = torch.load(resume_training, weights_only=False)
            self.model.load_state_dict(state["model"])
            self.opt.load_state_dict(state["opt"])
            self.lines.run("runner/base.py:132", {"self": self, "state": state})
            state = list(self.opt.state.values())[-1]  # the trainer's loop over the optimizer overwrites `state`
            self.start_step = int(state["step"].item())
        self.lines.not_run.discard("runner/base.py:132")
        self.model = Wrapper(self.model)
        self.model.train()
        self.records: list[Record] = []
        self.lines.run("runner/base.py:191", {"self": self})

    def train_step(self, model: nn.Module, z: Tensor, y: Any) -> tuple[Tensor, Record]:
        """Draw t and compute the loss, as `Speed_IDDPM` does."""
        names = {"self": self.diffusion, "z": z, "device": "cpu"}
        self.lines.run("speed/diffusion/speed/__init__.py:156", names)
        self.lines.run("speed/diffusion/speed/__init__.py:157", names)
        return names["t"], self.diffusion.training_losses(model, z, names["t"], y, weights=names["weights"])

    def train(self, last: int) -> None:
        """Train until step `last`, and save the step."""
        for step in range(self.start_step, last):
            x, y = batch(step)
            t, loss_dict = self.train_step(self.model, x, {"y": y})
            names = {"self": self, "loss_dict": loss_dict}
            self.lines.run(self.runner, names)
            self.opt.zero_grad()
            names["loss"].backward()
            mean = loss_dict["loss"].mean()
            self.records.append(record(self.timesteps, t, loss_dict["mse"], names["loss"], mean))
            self.opt.step()
        checkpoint = {"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "step": last}
        self.lines.run("runner/base.py:152", {"self": self, "checkpoint": checkpoint})
        torch.save(checkpoint, self.folder / f"{last:07d}.pt")


OFFICIAL = "speed_official+change_aware_official"


@pytest.mark.parametrize("strategy", [None, OFFICIAL, "uniform", "log_normal", "loss_rms"])
def test_the_lines_of_speed_resume_and_keep_the_loss(strategy, tmp_path, monkeypatch):
    use_strategy(monkeypatch, strategy)
    whole, first = Experiment(tmp_path), Experiment(tmp_path)
    whole.train(STEPS)
    first.train(6)
    second = Experiment(tmp_path, str(tmp_path / "0000006.pt"))
    second.train(STEPS)
    assert equal_bits(first.records + second.records, whole.records) and len(second.records) == STEPS - 6
    assert not whole.lines.not_run
    fixed = strategy in ("uniform", "log_normal")
    assert all((values["weights"] == 1).all() for values in whole.records) == fixed
    if strategy == "uniform":
        for values in whole.records:
            torch.testing.assert_close(values["loss"], values["trainer's loss"], rtol=1e-6, atol=0)


def test_the_official_strategy_of_speed_has_the_weights_and_the_density_of_the_trainer():
    """Compare with the trainer's formulas, written here again: weights by differences, half of the batch reflected."""
    k, tau, largest, count = 2, 700, 0.6, 200_000
    diffusion = Diffusion()
    strategy = Strategy(
        OFFICIAL,
        diffusion.alphas_cumprod,
        sampler={"k": k, "tau": tau},
        weighting={"lambda": largest, "tau": tau},
    )
    slope = np.gradient(1 - diffusion.alphas_cumprod)
    weights = 1 - largest + (2 * largest - 1) * (slope - slope.min()) / np.ptp(slope)
    weights[tau:] = 1
    np.testing.assert_allclose(strategy.weighting.weights(), weights, atol=2e-3)
    masses = np.where(np.arange(1000) < tau, k, 1.0)
    samples = np.random.default_rng(0).choice(1000, count // 2 + 1, p=masses / masses.sum())
    reflected = np.abs(samples - 642)
    expected = np.concatenate([samples, reflected])[:count]
    t = strategy.draw(torch.empty(count, 1)).t.numpy()
    edges = [0, 100, 300, 642, 643, 700, 900, 1000]
    shares, expected_shares = (np.histogram(values, edges)[0] / count for values in (t, expected))
    np.testing.assert_allclose(shares, expected_shares, atol=6e-3)


@pytest.mark.parametrize("page", ["dit", "edm", *OPENAI])
def test_a_strategy_measures_the_network_with_the_function_of_the_page(page, tmp_path, monkeypatch):
    """Run the page's `predict` and its draw with conditions; the wrapper of DistributedDataParallel is not called."""
    lines = Lines(page)
    predict, draw = lines.inline("predict="), lines.inline(r"(self\.)?timesteps\(.*conditions=")
    torch.manual_seed(0)
    network = Network(3 if page == "edm" else 6)
    wrapper, diffusion = Wrapper(network), Diffusion()
    self = Namespace(diffusion=diffusion, model=network)
    names: dict[str, Any] = {"model": wrapper, "net": network, "self": self, "diffusion": diffusion}
    optimizer = torch.optim.AdamW(network.parameters())
    process = kairos_timesteps.Edm() if page == "edm" else diffusion.alphas_cumprod
    options = {"frequency": 1, "start": 1}
    keywords = eval(f"dict({predict})", names)
    timesteps = kairos_timesteps.attach("gradient_norm", process, optimizer, wrapper, sampler=options, **keywords)
    names["timesteps"] = self.timesteps = timesteps
    for step in range(4):
        x, y = batch(step)
        names |= {"x": x, "images": x, "micro": x, "y": y, "labels": y, "micro_cond": {"y": y}}
        t = eval(draw, names)
        if page == "edm":
            errors = (network(x + t.view(-1, 1, 1, 1) * torch.randn_like(x), t, y) - x) ** 2
        else:
            errors = diffusion.training_losses(network, x, t, {"y": y})["loss"]
        optimizer.zero_grad()
        timesteps.loss(errors).backward()
        optimizer.step()
    assert not wrapper.calls and (timesteps.strategy.draw(x).weights != 1).any()


@pytest.mark.parametrize("page", NAMES)
def test_a_page_has_the_form_of_all_pages_of_trainers(page):
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == ["Change", "Strategies", "Time", "Tested", "Limits"]
    assert len(lines) < 70 and max(map(len, lines)) <= 140
    assert "Read, not run" in text.partition("## Tested")[2].partition("## Limits")[0]
    introduction = text.partition("\n## Change")[0]
    assert introduction.endswith("[Install, checklist, costs](index.md).\n")

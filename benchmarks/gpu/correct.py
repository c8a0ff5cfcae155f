"""Compare training and sampling on a GPU with the CPU, and test resume, memory and NCCL on the GPU.

    make gpu PART=correct

There is one row per backbone and precision, and one row per process, sampler and weighting in all precisions. Each row
trains a few steps on the CPU in fp32 and on the device, with equal weights, data, noise and timesteps. The weights are
perturbed from their initial values, so that no gradient is zero. Each row compares the loss and the gradient of the
first step (relative L2 distance over all parameters), then the losses of the later steps. Tolerances, derived from the
unit roundoff u of the products:

- fp32: 1e-4 of both. u = 6e-8; sums of some thousand terms in another order, through tens of layers: 1e-6 to 1e-5.
- bf16: 2e-3 of the loss, 3e-2 of the gradient. u = 4e-3; autocast on a CPU shows 1e-4 and 3e-3 to 7e-3 here.
- tf32: a sixth of that, as u = 5e-4 is an eighth: 5e-4 and 5e-3.
- compiled: against the same precision's reference, the same allowances.
- later steps: Adam's first steps are signs of gradients, which differ where those are near 0; ten times the loss'
  allowance. Samplers that learn choose by numbers that differ in the last bit: there it must be finite.

Images of a sampling scheme may differ by 1e-3: ten steps in fp32, the first of which divide by little signal. Resume
after a kill and NCCL with one process are compared bit for bit, on the device with itself.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from gpu_kit import Data, Part, Skipped, arguments, experiment, free, location, move, setup, training_of
from sample import SampledBatch

from kairos.files import read_json, write_record
from kairos.training.checkpoint import component_hashes
from kairos.training.job import StopRequest
from kairos.training.loop import train_steps
from kairos.training.run import train
from kairos.training.settings import read_run_settings
from kairos_timesteps.base import FixedDensity
from kairos_timesteps.components import PROCESSES, SAMPLERS, WEIGHTINGS
from kairos_timesteps.errors import KairosError
from kairos_timesteps.strategy import Strategy

ALLOWED = {"fp32": (1e-4, 1e-4), "tf32": (5e-4, 5e-3), "bf16": (2e-3, 3e-2)}  # of loss and gradient
SHAPE, TINY = (3, 16, 16), (3, 8, 8)
DIT = {"name": "dit", "patch": 2, "width": 64, "depth": 4, "heads": 4}
UNET = {"name": "unet", "channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [8], "norm_groups": 8}
BACKBONES = {
    "dit": DIT,
    "dit with classes": {**DIT, "conditions": ["class"]},
    "unet": {**UNET, "dropout": 0.0},  # dropout draws other numbers on another device
    "unet with classes": {**UNET, "dropout": 0.0, "conditions": ["class"]},
}
SCHEMES = [
    ("discrete", "ddpm"),
    ("discrete", "ddim"),
    ("edm", "heun"),
    ("edm", "euler"),
    ("flow", "euler"),
    ("vp", "heun"),
]
MEASURES = {
    "adaptive": {"frequency": 2, "feature_timesteps": 20},
    "adaptive_official": {"frequency": 2, "feature_timesteps": 20},
    "gradient_norm": {"frequency": 2, "start": 1}, "gradient_variance": {"frequency": 2, "start": 1},
    "first_order": {"frequency": 2, "start": 1}, "loss_rms": {"frequency": 2, "start": 1},
}  # fmt: skip


class Correct:
    """Rows of the part `correct`."""

    def __init__(self, part: Part, data: Data):
        self.part, self.data, self.device = part, data, part.device
        self.steps, self.batch, self.shape = (2, 8, TINY) if part.short else (5, 32, SHAPE)
        self.children: list[ForkServerProcess] = []
        self.forks = get_context("forkserver")
        self.forks.set_forkserver_preload(["torch._dynamo", "kairos.training.run", "kairos.models.dit"])
        self._references: dict[str, dict[str, Any]] = {}

    def rows(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return the function that measures each row, by the label of the row, the most valuable first."""
        rows: dict[str, Callable[[], dict[str, Any]]] = {}
        short = self.part.short
        for name, model in BACKBONES.items():
            rows[f"{name} fp32"] = lambda model=model: self.against_cpu(experiment(model))
        rows |= {"resume after a kill": lambda: self.resume("dit", precision="bf16")}
        rows |= {"out of memory": self.out_of_memory, "one process of NCCL": self.nccl}
        for name, model in BACKBONES.items():
            for precision in ("bf16", "tf32"):
                rows[f"{name} {precision}"] = lambda model=model, precision=precision: self.against_cpu(
                    experiment(model, precision=precision)
                )
        for name, changes in processes().items():
            rows[f"process {name}"] = lambda changes=changes: self.all_precisions(experiment(DIT, **changes))
        for name in SAMPLERS:
            rows[f"sampler {name}"] = lambda name=name: self.sampler(name)
        for name in WEIGHTINGS:
            rows[f"weighting {name}"] = lambda name=name: self.all_precisions(experiment(DIT, weighting={"name": name}))
        for process, scheme in SCHEMES:
            rows[f"scheme {scheme} of {process}"] = lambda names=(process, scheme): self.scheme(*names)
        rows |= {
            "draws in a CUDA graph": self.graphed,
            "unweighted vlb term": lambda: self.against_cpu(
                experiment(DIT, losses=({"name": "mse"}, {"name": "vlb", "weighted": False, "scale": 0.001}))
            ),
            "dropped classes": lambda: self.against_cpu(
                experiment(BACKBONES["dit with classes"], condition_dropout=0.5)
            ),
            "microbatch": self.microbatch,
            "fp64": lambda: self.against_cpu(experiment(DIT, precision="fp64"), reference="fp64"),
        }
        resumed = {
            "unet": {"backbone": "unet"},
            "adaptive": {"sampler": {"name": "adaptive", **MEASURES["adaptive"]}},
            "gradient_norm and edm2": {
                "sampler": {"name": "gradient_norm", **MEASURES["gradient_norm"]},
                "weighting": {"name": "edm2"},
            },
            "tf32": {"precision": "tf32"},
            "compiled": {"precision": "bf16", "compile": True},
        }
        for name, changes in resumed.items():
            rows[f"resume after a kill, {name}"] = lambda changes=changes: self.resume(**changes)
        for name in ("dit", "unet"):
            for precision in ("fp32", "bf16", "tf32"):
                rows[f"{name} {precision} compiled"] = lambda name=name, precision=precision: self.against_cpu(
                    experiment(BACKBONES[name], precision=precision, compile=True)
                )
        if short:  # compilation takes half a minute of a CPU, and one resume shows that the machinery works
            rows = {name: row for name, row in rows.items() if "compiled" not in name and "kill," not in name}
        return rows

    def all_precisions(self, plain: dict[str, Any], judged: bool = True) -> dict[str, Any]:
        """Run `against_cpu` in fp32, tf32 and bf16, and return the results by precision; the short form runs fp32 only.

        Raises:
            AssertionError: at least one precision fails; all of them have run.
        """
        results, failures = {}, []
        for precision in ("fp32",) if self.part.short else ("fp32", "tf32", "bf16"):
            plain["training"]["precision"] = precision
            try:
                results[precision] = self.against_cpu(plain, judged)
            except Exception as error:  # the other precisions are measured too
                failures.append(f"{precision}: {error} ({location(error)})")
        assert not failures, f"{'; '.join(failures)}; {json.dumps(results)}"
        return results

    def against_cpu(self, plain: dict[str, Any], judged: bool = True, reference: str = "fp32") -> dict[str, Any]:
        """Train some steps on the CPU and on the device; return the relative differences of losses and gradients.

        The result also contains ``norm``, the norm of the gradient on the CPU. Results of the CPU are kept for other
        rows with equal settings.

        Args:
            plain: the experiment; its batch size and clipping are changed.
            judged: True if the steps after the first have to agree too.
            reference: precision on the CPU.

        Raises:
            AssertionError: a difference exceeds its tolerance.
        """
        settings = plain["training"]
        settings["batch_size"] = self.batch
        settings["optimizer"]["grad_clip"] = None
        # reference on the CPU
        key = json.dumps([plain["model"], plain["diffusion"], plain["methods"], settings["condition_dropout"]])
        key += reference
        if key not in self._references:
            reference_plain = {**plain, "training": {**settings, "precision": reference, "compile": False}}
            self._references[key] = self.trained(reference_plain, torch.device("cpu"))
        expected = self._references[key]

        # relative differences
        measured = self.trained(plain, self.device)
        gradient_norm = expected["gradient"].norm()
        gradient_difference = (measured["gradient"] - expected["gradient"]).norm() / gradient_norm
        loss_differences = []
        for loss, expected_loss in zip(measured["losses"], expected["losses"], strict=True):
            loss_differences.append(abs(loss - expected_loss) / abs(expected_loss))
        differences = {
            "loss": loss_differences[0],
            "gradient": float(gradient_difference),
            "later losses": max(loss_differences[1:]),
            "norm": float(gradient_norm),
        }

        # tolerances
        fp64_tolerances = (1e-5, 1e-5)  # times are embedded in float32
        allowed_loss, allowed_gradient = ALLOWED.get(settings["precision"], fp64_tolerances)
        tolerances = {
            "loss": allowed_loss,
            "gradient": allowed_gradient,
            "later losses": 10 * allowed_loss if judged else float("inf"),
        }
        failures = []
        for name, tolerance in tolerances.items():
            if not differences[name] <= tolerance:  # also true for NaN
                failures.append(f"{name} {differences[name]:.3g}, allowed {tolerance:g}")
        if failures:
            raise AssertionError("; ".join(failures))
        return {name: float(f"{value:.3g}") for name, value in differences.items()}

    def trained(self, plain: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Train some steps on a device; return the losses of all steps, and the gradient of the first step."""
        setup(device, True, plain["training"]["precision"])
        plain = {**plain, "training": {**plain["training"], "log_every": 1}}  # else a GPU logs every tenth step
        training = training_of(plain, self.data.open(self.shape, 64, pixels=True), device)
        move(training.parameters)
        losses, gradient = [], torch.empty(0)
        for line in train_steps(training, self.steps):
            if not losses:
                gradient = torch.cat([p.grad.detach().double().cpu().flatten() for p in training.parameters])
            losses.append(line["loss"])
        return {"losses": losses, "gradient": gradient}

    def sampler(self, name: str) -> dict[str, Any]:
        """Run `all_precisions` with a sampler; if it learns, later losses need not agree."""
        sampler = {"name": name, **MEASURES.get(name, {})}
        learned = name in MEASURES or name.startswith(("loss", "info"))
        return self.all_precisions(experiment(DIT, sampler=sampler), judged=not learned)

    def graphed(self) -> dict[str, Any]:
        """Check that a CUDA graph of a fixed strategy's draw gives the draw of another step when it is replayed."""
        largest_difference = 0.0
        names = [name for name, entry in SAMPLERS.items() if issubclass(entry.component, FixedDensity)]
        x0 = torch.zeros(self.batch, *self.shape)
        x0_on_device = x0.to(self.device)
        for name in names:
            strategy = Strategy(name, "cosine")
            step = torch.zeros((), dtype=torch.int64, device=self.device)
            expected = strategy.draw(x0, step=torch.tensor(7)).fractions
            strategy.draw(x0_on_device, step=step)  # moves tables to the device once
            if self.device.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    draw = strategy.draw(x0_on_device, step=step)
                step.fill_(7)
                graph.replay()
            else:
                draw = strategy.draw(x0_on_device, step=step.fill_(7))
            difference = float((draw.fractions.cpu() - expected).abs().max())
            largest_difference = max(largest_difference, difference)
        assert largest_difference <= 1e-6, f"fractions {largest_difference:.3g}, allowed 1e-6"
        return {"strategies": len(names), "fractions": largest_difference}

    @torch.inference_mode()
    def scheme(self, process: str, scheme: str) -> dict[str, Any]:
        """Check that guided images of ten steps are equal to 1e-3 on CPU and device, from equal noise."""
        plain = experiment(BACKBONES["dit with classes"], process={"name": process})
        images = []  # of the CPU and of the device
        for device in (torch.device("cpu"), self.device):
            setup(device, True)
            batch_of_images = SampledBatch(
                plain, self.shape, self.batch, scheme, 3 if self.part.short else 10, 1.5, "fp32", device
            )
            images.append(batch_of_images.images().cpu())
        distance = float((images[0] - images[1]).norm() / images[0].norm())
        assert distance <= 1e-3, f"images {distance:.3g}, allowed 1e-3"
        return {"images": float(f"{distance:.3g}")}

    def microbatch(self) -> dict[str, Any]:
        """Check that micro-batches of an eighth give the gradient of the whole batch."""
        whole_batch = self.trained(experiment(DIT, batch_size=self.batch, microbatch=None), self.device)
        micro_batches = self.trained(experiment(DIT, batch_size=self.batch, microbatch=self.batch // 8), self.device)
        expected, measured = whole_batch["gradient"], micro_batches["gradient"]
        distance = float((expected - measured).norm() / expected.norm())
        assert distance <= 1e-4, f"gradient {distance:.3g}, allowed 1e-4"
        return {"gradient": float(f"{distance:.3g}")}

    def resume(self, backbone: str = "dit", **changes: Any) -> dict[str, Any]:
        """Check that a training run that is killed between two checkpoints ends bit for bit as an undisturbed one.

        Differences of compiled models are reported, but are no failure. `changes` are arguments of `experiment`.
        """
        count, every, killed_at = (12, 5, 8) if self.part.short else (60, 20, 50)
        model = DIT if backbone == "dit" else UNET  # with its dropout
        plain = experiment(
            model, device=str(self.device), batch_size=self.batch, checkpoint_every=every, milestones=[count], **changes
        )
        folder = self.data.folder / f"resume {backbone} {len(list(self.data.folder.iterdir()))}"
        order = {"plain": plain, "latents": str(self.data.path(self.shape, 64, pixels=True)), "milestones": [0, count]}
        undisturbed = self.child(order | {"out": str(folder / "undisturbed")})
        self.wait(self.child(order | {"out": str(folder / "killed"), "kill_at": killed_at}), -signal.SIGKILL)
        self.wait(self.child(order | {"out": str(folder / "killed")}))
        self.wait(undisturbed)
        hashes, resumed_hashes = (
            read_json(folder / name / "training.json")["components"] for name in ("undisturbed", "killed")
        )
        differ = [name for name, digest in hashes.items() if resumed_hashes[name] != digest]
        if differ and plain["training"]["compile"]:
            return {"differ": differ, "note": "compiled: not promised to be bit-exact (provenance says so)"}
        assert not differ, f"{', '.join(differ)} differ from the undisturbed training's"
        return {"steps": count, "killed_at": killed_at, "bit_exact": not differ}

    def nccl(self) -> dict[str, Any]:
        """Check that DistributedDataParallel of one process, over NCCL on a GPU, changes no bit."""
        outs, processes = [], []
        for wrapped in (False, True):
            out = self.data.folder / f"wrapped {wrapped}"
            order = {"steps": self.steps, "wrapped": wrapped, "device": str(self.device), "out": str(out)}
            latents, plain = self.data.path(self.shape, 64, pixels=True), experiment(DIT, batch_size=self.batch)
            processes.append(self.child(order | {"latents": str(latents), "plain": plain}))
            outs.append(out)
        for process in processes:
            self.wait(process)
        hashes, wrapped_hashes = (read_json(out / "hashes.json") for out in outs)
        assert hashes == wrapped_hashes, f"{hashes} {wrapped_hashes}"
        return {"backend": "nccl" if self.device.type == "cuda" else "gloo", "bit_exact": True}

    def out_of_memory(self) -> dict[str, Any]:
        """Check that a batch that does not fit is rejected with a micro-batch that fits, and that this one trains."""
        if self.device.type != "cuda":
            raise Skipped("the CPU's allocator has no limit to set; tests/test_memory.py goes the same way")
        large = {**DIT, "width": 384, "depth": 12, "heads": 6}
        latents, out = self.data.path((4, 32, 32), 1024), self.data.folder / "memory"
        total = torch.cuda.get_device_properties(self.device).total_memory
        # the function needs an index
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        torch.cuda.set_per_process_memory_fraction(min(1.0, 6 * 2**30 / total), index)
        plain = experiment(large, batch_size=1024, milestones=[2], device=str(self.device))
        try:
            try:
                train(read_run_settings(plain, "method", 0), out / "whole", latents, [0, 2])
            except KairosError as error:
                message = str(error)
            else:
                raise AssertionError("a batch of 1,024 images fits into 6 GiB")
            free(self.device)
            size = int(message.split("training.microbatch: ")[1].split(" ")[0])
            plain["training"]["microbatch"] = size
            torch.cuda.reset_peak_memory_stats(self.device)
            train(read_run_settings(plain, "method", 0), out / "parts", latents, [0, 2])
            peak = torch.cuda.max_memory_allocated(self.device)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
        return {"message": message, "microbatch": size, "gib": round(peak / 2**30, 2)}

    def child(self, order: dict[str, Any]) -> ForkServerProcess:
        """Start a process that runs `order`: a fork of a process that has imported torch and uses no device."""
        self.children.append(self.forks.Process(target=obey, args=(order,)))
        self.children[-1].start()
        return self.children[-1]

    def wait(self, process: ForkServerProcess, status: int = 0) -> None:
        """Wait for the end of a process; raise AssertionError if its exit status is another one."""
        process.join()
        assert process.exitcode == status, f"status {process.exitcode}, expected {status}; see standard error"


class Killed(StopRequest):
    """Stop request that kills its process after a number of steps."""

    def __init__(self, after: int):
        super().__init__()
        self._left = after

    def reason_to_stop(self, saving: float) -> str:
        """Count a step, and kill the process at the last one; before that, return "", which means to continue."""
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""


def processes() -> dict[str, dict[str, Any]]:
    """Return keyword arguments of `experiment` for every process with every prediction, and for noise schedules.

    The keys are labels of rows, such as ``edm`` or ``discrete cosine``.
    """
    settings = {}
    for name, entry in PROCESSES.items():
        for prediction in entry.facts.get("predictions", (None,)):  # None: the process has one prediction target
            settings[f"{name} {prediction or ''}".strip()] = {"process": {"name": name}, "prediction": prediction}
    for schedule in ("cosine", "quadratic"):
        settings[f"discrete {schedule}"] = {"process": {"name": "discrete", "schedule": schedule}}
    return settings


def obey(order: dict[str, Any]) -> None:
    """Run the order of `Correct.child` in this process.

    An order without ``steps`` is a training run, which is killed after ``kill_at`` steps if the order contains them. An
    order with ``steps`` trains some steps, with DistributedDataParallel if ``wrapped``, and writes hashes.json.
    """
    latents = Path(order["latents"])
    if "steps" not in order:
        stop_request = Killed(order["kill_at"]) if "kill_at" in order else None
        train(
            read_run_settings(order["plain"], "method", 0),
            Path(order["out"]),
            latents,
            order["milestones"],
            stop_request=stop_request,
        )
        return
    from kairos.data.latents import open_latents

    device = torch.device(order["device"])
    setup(device, True)
    training = training_of(order["plain"], open_latents(latents), device)
    if order["wrapped"]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]  # a free port
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        training.ddp_network = torch.nn.parallel.DistributedDataParallel(training.network)
    for _ in train_steps(training, order["steps"]):
        pass
    write_record(Path(order["out"]) / "hashes.json", component_hashes(training.state_dict()))
    if order["wrapped"]:
        torch.distributed.destroy_process_group()


def main() -> int:
    """Run the part; return 1 if a row fails, else 0."""
    part = Part("correct", "CPU against device, resume, memory, NCCL", arguments(__doc__))
    with Data() as data:
        correct = Correct(part, data)
        try:
            return part.run(correct.rows())
        finally:
            for child in correct.children:  # a row that failed or was out of time waited for none
                child.kill()


if __name__ == "__main__":
    sys.exit(main())

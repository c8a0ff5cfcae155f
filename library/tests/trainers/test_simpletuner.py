"""SimpleTuner: released functions with the lines of the page in them, with a small network, on a CPU.

The file of the models is the released one. Of the files of the trainer and of the validation, which import packages
such as torchao and spacy, the functions that the page changes or that call them are run. The loop is written here.
"""

import ast
import copy
import inspect
import logging
import random
import sys
import textwrap
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import pytest
import torch
from training_runs import (
    LOSSES,
    Run,
    blocks,
    differences,
    digits,
    explicit,
    new_process,
    quicken,
    released,
    with_strategy,
)

from kairos_timesteps.errors import ConfigError
from small_loop import TinyNetwork

accelerate, simpletuner = released("accelerate"), released("simpletuner")
HELPERS = Path(simpletuner.__file__).parent / "helpers"
# the package of all models imports those of speech, which need spacy and others; the overrides change diffusers
models_package = types.ModuleType("simpletuner.helpers.models")
models_package.__path__ = [str(HELPERS / "models")]
sys.modules[models_package.__name__] = models_package
overrides = "simpletuner.helpers.training.diffusers_overrides"
sys.modules[overrides] = types.ModuleType(overrides)

from diffusers import FlowMatchEulerDiscreteScheduler  # noqa: E402
from simpletuner.helpers.data_backend.dataset_types import DatasetType, ensure_dataset_type  # noqa: E402
from simpletuner.helpers.models import common  # noqa: E402
from tqdm import tqdm  # noqa: E402

pytestmark = pytest.mark.trainers
ACCUMULATE, BATCH, STEPS, SAVED_STEP = 2, 8, 16, 8
IMAGES = digits(64)
MEAN = "        loss = loss.mean(dim=list(range(1, len(loss.shape)))).mean()\n"
DRAW = '        bsz = batch["latents"].shape[0]\n        if not self.config.flux_fast_schedule'
PREPARED = "                self.train_dataloaders = [prepared]\n"
EVALUATE = "all_accumulated_losses = self.evaluation.execute_eval("


def replaced(source, line, new):
    """Replace text that the source must contain once."""
    assert source.count(line) == 1, line
    return source.replace(line, new)


def model_source(strategy):
    """Return the released file of the models with the lines of the page; without a strategy, the released file."""
    source = inspect.getsource(common)
    if not strategy:
        return source
    draw, loss = blocks("simpletuner")[3:]
    source = replaced(source, DRAW, f"{textwrap.indent(draw, ' ' * 8)}{DRAW}")
    mean_of_samples = MEAN.replace(".mean()\n", "\n")
    return replaced(source, MEAN, f"{mean_of_samples}{textwrap.indent(loss, ' ' * 8)}")


def functions(path, *names):
    """Return the source of functions of a released file, which it must contain once, by name."""
    lines = (HELPERS / path).read_text(encoding="utf-8").splitlines(keepends=True)
    nodes = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.FunctionDef)]
    definitions = {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes if node.name in names}
    assert sum(node.name in names for node in nodes) == len(definitions) == len(names)
    return {name: textwrap.dedent(source) for name, source in definitions.items()}


def evaluation_statement(strategy):
    """Return the statement of the trainer's loop that evaluates, as a method, with the lines of the page."""
    source = functions("training/trainer.py", "train")["train"]
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)]
    (statement,) = [node for node in statements if "would_evaluate" in ast.unparse(node.test)]
    code = ast.unparse(statement)
    if strategy:
        before, after = blocks("simpletuner")[1:3]
        (call,) = [line for line in code.splitlines(keepends=True) if EVALUATE in line]
        code = replaced(code, call, textwrap.indent(before, " " * 4) + call + textwrap.indent(after, " " * 4))
    return f"def evaluate(self, wandb_logs):\n{textwrap.indent(code, ' ' * 4)}\n"


def trainer_source(strategy):
    """Return functions of the released trainer as a class, with the lines of the page."""
    code = functions("training/trainer.py", "init_prepare_models", "model_predict", "_detect_batch_dataset_type")
    code |= functions("training/trainer.py", "prepare_batch")
    if strategy:
        attach = with_strategy(blocks("simpletuner")[0], strategy)
        prepare = textwrap.indent(code["init_prepare_models"], "    ")
        end = f"{PREPARED}        if self.config.use_ema"
        prepare = replaced(prepare, end, end.replace(PREPARED, PREPARED + textwrap.indent(attach, " " * 8)))
        code["init_prepare_models"] = textwrap.dedent(prepare)
    return "class Trainer:\n" + textwrap.indent("\n".join([*code.values(), evaluation_statement(strategy)]), "    ")


def evaluation_source():
    names = ("execute_eval", "_evaluate_dataset_pass", "get_timestep_schedule", "generate_tracker_table")
    code = functions("training/validation.py", *names, "total_eval_batches").values()
    return "class Evaluation:\n" + textwrap.indent("\n".join(code), "    ")


def micro_batches(first=0, last=STEPS * ACCUMULATE):
    return [(number, IMAGES[number * BATCH % len(IMAGES) :][:BATCH]) for number in range(first, last)]


class Options(SimpleNamespace):
    """Options of the trainer; those that are not given are off."""

    def __getattr__(self, name):
        return None


def configuration(folder):
    FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    return Options(
        flow_matching=True, flow_sigmoid_scale=1.0, flow_schedule_shift=3.0, input_perturbation=0,
        weight_dtype=torch.float32, model_type="full", model_family="flux", pretrained_model_name_or_path=str(folder),
        eval_timesteps=3, eval_dataset_pooling=True,
    )  # fmt: skip


class Backends:
    """Data sets of the trainer: one batch for each evaluation, and a loader that the loop does not use."""

    get_data_backends = staticmethod(
        lambda _type=None, _types=None: {"data": {"sampler": [0]} if _type else {"train_dataloader": None}}
    )
    get_model = staticmethod(lambda: None)


def released_code(source, **more):
    """Execute released code in a namespace with the modules that it uses."""
    nothing = lambda *_, **__: None  # noqa: E731
    names = {
        "torch": torch, "inspect": inspect, "random": random, "tqdm": tqdm, "Optional": Optional, "sys": sys,
        "logger": logging.getLogger("simpletuner"), "training_logger": logging.getLogger("simpletuner"),
        "StateTracker": Backends, "lifecycle_stage_event": nothing, "DatasetType": DatasetType,
        "ensure_dataset_type": ensure_dataset_type, "reset_eval_datasets": nothing,
        "MultiDatasetExhausted": StopIteration, "__name__": common.__name__,
    }  # fmt: skip
    names |= more
    exec(compile(source, "simpletuner", "exec"), names)
    return names


class Training:
    """The released model, trainer and evaluation, with a small network and the trainer's order of calls.

    Args:
        strategy: strategy of the page; empty for the released functions without the page.
        folder: folder of the noise schedule.
        times: times of the released trainer without the page, one tensor per micro-batch.
    """

    def __init__(self, strategy, folder, times=(), change=lambda source: source):
        new_process()
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        models = released_code(model_source(strategy))

        class Model(models["ImageModelFoundation"]):
            PREDICTION_TYPE = models["PredictionTypes"].FLOW_MATCHING
            _encode_prompts = convert_text_embed_for_pipeline = convert_negative_text_embed_for_pipeline = None

            def model_predict(self, prepared_batch, custom_timesteps=None):
                return {"model_prediction": self.model(prepared_batch["noisy_latents"], prepared_batch["timesteps"])}

        if times:
            Model.sample_flow_sigmas = lambda self, batch, state: (sigmas := next(times), 1000.0 * sigmas)
        torch.manual_seed(0)
        self.model = Model(configuration(folder), self.accelerator)
        self.model.model = TinyNetwork()
        more = {"retrieve_eval_images": self.evaluation_batch}
        evaluation = released_code(evaluation_source(), **more)["Evaluation"]()
        evaluation.accelerator, evaluation.config = self.accelerator, self.model.config
        evaluation.would_evaluate = lambda state: True
        self.trainer = released_code(change(trainer_source(strategy)))["Trainer"]()
        vars(self.trainer).update(
            model=self.model, accelerator=self.accelerator, config=self.model.config, evaluation=evaluation, state={},
            optimizer=torch.optim.AdamW(self.model.model.parameters(), lr=1e-2), sidecar_optimizer=None, job_id="",
            sidecar_lr_scheduler=None, ema_model=None, noise_scheduler=self.model.noise_schedule,
            get_prediction_target=None, _get_noise_schedule=lambda: self.model.noise_schedule,
        )  # fmt: skip
        calls = "_send_webhook_msg _emit_event _finalize_deepspeed_config_auto_values _recalculate_training_steps "
        for name in (calls + "mark_optimizer_eval mark_optimizer_train").split():
            setattr(self.trainer, name, lambda *_, **__: None)
        self.trainer.init_prepare_models(None)
        self.model.model.train()

    def batch(self, x0):
        return {"latent_batch": x0, "prompt_embeds": None}

    def evaluation_batch(self, dataset_name):
        return self.batch(IMAGES[:BATCH])

    def train(self, batches, evaluate=False):
        """Train on micro-batches, with evaluations in between; return the run and the losses of evaluations."""
        run, evaluations, model, trainer = Run(), [], self.model, self.trainer
        for number, x0 in batches:
            torch.manual_seed(number)
            with self.accelerator.accumulate(model.model):
                batch = trainer.prepare_batch(self.batch(x0))
                if hasattr(model, "timesteps"):
                    model.timesteps.check(x0, batch["noise"], batch["noisy_latents"], batch["sigmas"].flatten())
                output = trainer.model_predict(prepared_batch=batch)
                loss = model.loss(prepared_batch=batch, model_output=output, apply_conditioning_mask=True)
                loss, _ = model.auxiliary_loss(prepared_batch=batch, model_output=output, loss=loss)
                self.accelerator.backward(loss)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad(set_to_none=True)
            run.t.append(batch["sigmas"].flatten())
            run.losses.append(loss.detach())
            if evaluate and number % 5 == 3:
                trainer.evaluate(logs := {})
                evaluations.append(logs)
        if hasattr(model, "timesteps"):
            run.strategy = model.timesteps.state_dict()["strategy"]
        run.network = copy.deepcopy(model.get_trained_component().state_dict())
        return run, evaluations

    def quick(self):
        """Let the strategy learn within the run."""
        quicken(self.model.timesteps.strategy)
        return self


def plain_loop(strategy):
    torch.manual_seed(0)
    network = TinyNetwork()

    def errors(number, x0, sigmas):
        torch.manual_seed(number)
        noise, at = torch.randn_like(x0), sigmas.view(-1, 1, 1, 1)
        return ((network((1 - at) * x0 + at * noise, 1000.0 * sigmas) - (noise - x0)) ** 2).mean((1, 2, 3))

    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    batches = [x0 for _, x0 in micro_batches()]
    return explicit(strategy, "flow", "noise_is_one", network, optimizer, batches, errors, ACCUMULATE)


@pytest.mark.parametrize("name", ["log_normal", LOSSES])
def test_the_functions_train_as_a_plain_loop_and_evaluation_changes_nothing(name, tmp_path):
    run, evaluations = Training(name, tmp_path).quick().train(micro_batches(), evaluate=True)
    assert differences(run, plain_loop(name)) == [] and len(evaluations) == 6


@pytest.mark.parametrize("name", ["log_normal", LOSSES])
def test_a_resume_equals_an_uninterrupted_run(name, tmp_path):
    whole, _ = Training(name, tmp_path).quick().train(micro_batches())
    stopped = Training(name, tmp_path).quick()
    first, _ = stopped.train(micro_batches(0, SAVED_STEP * ACCUMULATE))
    stopped.accelerator.save_state(tmp_path / "state")
    resumed = Training(name, tmp_path).quick()
    resumed.accelerator.load_state(tmp_path / "state")
    second, _ = resumed.train(micro_batches(SAVED_STEP * ACCUMULATE))
    second.t, second.losses = first.t + second.t, first.losses + second.losses
    assert differences(second, whole) == []


def test_uniform_trains_as_the_released_functions_at_equal_times(tmp_path):
    changed, _ = Training("uniform", tmp_path).train(micro_batches())
    expected, _ = Training("", tmp_path, iter(changed.t)).train(micro_batches())
    changed.strategy = {}
    assert differences(changed, expected) == []


def test_evaluations_have_the_losses_of_the_released_functions(tmp_path):
    changed, unchanged = Training("log_normal", tmp_path), Training("", tmp_path)
    changed.train(micro_batches(0, 4))
    unchanged.model.get_trained_component().load_state_dict(changed.model.get_trained_component().state_dict())
    for training in (changed, unchanged):
        training.trainer.evaluate(logs := {})
        assert list(logs) == ["loss/val/pooled"]
        training.logs = logs
    assert changed.logs == unchanged.logs


def test_another_convention_of_time_is_caught(tmp_path):
    training = Training("log_normal", tmp_path, change=lambda source: source.replace("noise_is_one", "data_is_one"))
    with pytest.raises(ConfigError, match="with time='data_is_one'; time='noise_is_one' fits"):
        training.train(micro_batches(0, 1))

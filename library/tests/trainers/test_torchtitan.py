"""torchtitan: the released Flux trainer with the lines of the page in its file, on a CPU.

Flux, its encoders and its autoencoder are small, with random weights. Images are random, and no tokenizer is loaded.
Functions that need a GPU are replaced: of its memory, of the timeout of processes and of the sum of gradients.
"""

import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from training_runs import Run, blocks, differences, released, with_strategy

import rank_groups
from kairos_timesteps import Strategy
from kairos_timesteps.errors import ConfigError
from small_loop import equal_bits

with pytest.MonkeyPatch.context() as patch:  # torchtitan takes cuda where there is no accelerator
    released("torchtitan")  # skips the file where it is not installed; names of a recent torch follow
    patch.setattr("torch._utils._get_available_device_type", lambda: "cpu")
    flux_trainer = released("torchtitan.models.flux.trainer")

import torchtitan.trainer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import MSELoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config.configs import DebugConfig, TrainingConfig
from torchtitan.distributed import utils as distributed_utils
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import flux
from torchtitan.models.flux import parallelize
from torchtitan.models.flux.configs import FluxEncoderConfig
from torchtitan.models.flux.tokenizer import FluxTokenizerContainer
from torchtitan.models.flux.validate import FluxValidator
from transformers import CLIPTextConfig, T5Config

pytestmark = pytest.mark.trainers
SEED, BATCH, SIDE, WORDS, STEPS, SAVED_STEP = 3, 6, 32, 8, 8, 4
DRAW = "            timesteps = torch.rand((bsz,))\n"
NOISED = "            latents = (1 - sigmas) * labels + sigmas * noise\n"
AFTER_INIT = "    def batch_generator("
# sizes of the released configuration for tests, whose hidden size is 1536
SMALL = {
    "hidden_size = 1536": "hidden_size = 32", "num_heads = 12": "num_heads = 2", "vec_in_dim = 768": "vec_in_dim = 16",
    "context_in_dim = 4096": "context_in_dim = 16", "depth = 2": "depth = 1",
    "depth_single_blocks = 2": "depth_single_blocks = 1", "(16, 56, 56)": "(4, 6, 6)", "dim=128": "dim=16",
    "ch=128": "ch=32", "(1, 2, 4, 4)": "(1, 1, 1, 1)", "num_res_blocks=2": "num_res_blocks=1",
}  # fmt: skip


class Images(torch.utils.data.IterableDataset):
    """Random images and random words of captions, in an order that a checkpoint continues."""

    def __init__(self, rank, ranks):
        self.index, self.ranks = rank, ranks

    def __iter__(self):
        while True:
            random = torch.Generator().manual_seed(self.index)
            words = {name: torch.randint(0, 32, (1, WORDS), generator=random) for name in ("clip", "t5")}
            self.index += self.ranks
            yield words | {"prompt": "a digit"}, torch.randn(3, SIDE, SIDE, generator=random)

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


class Loader(flux.FluxDataLoader):
    """torchtitan's loader of random images."""

    @dataclass(kw_only=True, slots=True)
    class Config(flux.FluxDataLoader.Config):
        img_size: int = SIDE

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
        dataset = Images(dp_rank, dp_world_size)
        ParallelAwareDataloader.__init__(self, dataset, dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(FluxTokenizerContainer):
    """Tokenizer that `Images` does not need."""

    @dataclass(kw_only=True, slots=True)
    class Config(FluxTokenizerContainer.Config):
        max_t5_encoding_len: int = WORDS

    def __init__(self, config, **_): ...


def replaced(source, line, new):
    """Replace a line that the source must contain once."""
    assert source.count(line) == 1, line
    return source.replace(line, new)


def trainer_of(source):
    """Execute the file of the trainer; return a trainer that records its losses.

    torchtitan does not store the state of the random numbers of the noise, so each step sets it.
    """
    names = {"__name__": flux_trainer.__name__}
    exec(compile(source, "torchtitan/models/flux/trainer.py", "exec"), names)

    class Recorded(names["FluxTrainer"]):
        def forward_backward_step(self, **batch):
            torch.manual_seed(self.step)
            loss = super().forward_backward_step(**batch)
            self.run.losses.append(loss.detach().clone())
            return loss

    return Recorded


def changed_trainer(strategy, time="noise_is_one"):
    """Write the lines of the page into the released file, and a check of the trainer's x_t; return its trainer."""
    code = with_strategy("\n".join(blocks("torchtitan")), strategy).replace("noise_is_one", time)
    attach, draw, methods = re.split(r"^# torchtitan/models/flux/trainer\.py:\d+, .*\n", code, flags=re.MULTILINE)[1:]
    source = inspect.getsource(flux_trainer)
    source = replaced(source, DRAW, textwrap.indent(draw, " " * 12))
    source = replaced(source, NOISED, f"{NOISED}            self.timesteps.check(labels, noise, latents, timesteps)\n")
    after = f"{textwrap.indent(attach, ' ' * 8)}\n{textwrap.indent(methods, ' ' * 4)}\n{AFTER_INIT}"
    return trainer_of(replaced(source, AFTER_INIT, after))


def unchanged_trainer(times=None):
    """Return the released trainer, with given times if there are any."""
    source = inspect.getsource(flux_trainer)
    if times is None:
        return trainer_of(source)
    trainer = trainer_of(replaced(source, DRAW, f"{DRAW}            timesteps = next(self.times)\n"))
    trainer.times = iter(times)
    return trainer


def small_flux():
    """Return the specification of the released configuration for tests, with smaller sizes."""
    source, names = inspect.getsource(flux._flux_debug), dict(vars(flux))
    for size, smaller in SMALL.items():
        assert size in source, size
        source = source.replace(size, smaller)
    exec(source, names)
    flux.flux_configs["small"] = names["_flux_debug"]
    return flux.model_registry("small")


def configuration(folder, load_step, validate):
    encoders = folder / f"encoders_of_rank_{os.environ['RANK']}"
    CLIPTextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=WORDS,
    ).save_pretrained(encoders / "clip")  # fmt: skip
    T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2).save_pretrained(encoders / "t5")
    return flux_trainer.FluxTrainer.Config(
        dump_folder=str(folder),
        loss=MSELoss.Config(),
        tokenizer=NoTokenizer.Config(),
        encoder=FluxEncoderConfig(
            random_init=True, t5_encoder=str(encoders / "t5"), clip_encoder=str(encoders / "clip")
        ),
        model_spec=small_flux(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, decay_ratio=0.0),
        training=TrainingConfig(local_batch_size=BATCH, steps=STEPS, disable_cuda_graphs=True),
        dataloader=Loader.Config(),
        activation_checkpoint=FullAC.Config(),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=SAVED_STEP, last_save_model_only=False, load_step=load_step
        ),
        validator=FluxValidator.Config(
            enable=validate, freq=3, steps=2, save_img_count=0, all_timesteps=True, dataloader=Loader.Config()
        ),
        debug=DebugConfig(seed=SEED),
    )


def sum_gradients(model):
    """Let FSDP sum gradients over ranks, as torchtitan does, without a factor of 1: gloo has no such sum."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@contextmanager
def torchtitan_on_a_cpu() -> Iterator[None]:
    """Replace what needs a GPU, and restore what torchtitan changes in the process."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({name: value for name, value in alone.items() if name not in os.environ})
    memory = SimpleNamespace(device_name="cpu", reset_peak_stats=lambda: None)
    memory.get_peak_stats = lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    clock = SimpleNamespace(perf_counter=torchtitan.trainer.time.perf_counter, sleep=lambda seconds: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "build_device_memory_monitor", lambda: memory)
        patch.setattr(parallelize, "disable_fsdp_gradient_division", sum_gradients)
        patch.setattr(distributed_utils, "set_pg_timeouts", lambda **_: None)
        patch.setattr(torchtitan.trainer, "time", clock)  # the end of the training waits for 2 s
        try:
            yield
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
            torch.autograd.set_multithreading_enabled(True)
            torchtitan.trainer.utils.gc.enable()


def train(trainer_class, folder, load_step=-1, validate=False):
    """Train with the released `train`; return the run, the trainer and the times of validations.

    Times are those that the network gets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with torchtitan_on_a_cpu():
        trainer, run, validation = trainer_class(configuration(folder, load_step, validate)), Run(), []
        trainer.run, (model,) = run, trainer.model_parts

        def record(module, _, arguments):
            (run.t if module.training else validation).append(arguments["timesteps"].clone())

        model.register_forward_pre_hook(record, prepend=True, with_kwargs=True)  # FSDP rounds them to bfloat16
        trainer.train()
        run.network = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        if hasattr(trainer, "timesteps"):
            run.strategy = trainer.timesteps.state_dict()["strategy"]
        trainer.close()
    return run, trainer, validation


def resumed_from(folder, other):
    """Copy the checkpoint in the middle of a run to another folder, and return that folder."""
    shutil.copytree(folder / f"checkpoint/step-{SAVED_STEP}", other / f"checkpoint/step-{SAVED_STEP}")
    return other


def second_half(run):
    """Return the run without the steps before its checkpoint."""
    return Run(run.t[SAVED_STEP:], run.losses[SAVED_STEP:], run.strategy, run.network)


def test_the_trainer_draws_the_times_of_a_plain_loop(tmp_path):
    run, trainer, _ = train(changed_trainer("log_normal"), tmp_path)
    strategy = Strategy("log_normal", "flow", seed=SEED)
    for t in run.t:
        draw = strategy.draw(torch.empty(BATCH, 16, SIDE // 8, SIDE // 8))
        assert equal_bits(t, draw.t.float())
        with strategy.observe(draw):
            pass
    assert len(run.t) == trainer.step == run.strategy["step"] == strategy.step == STEPS


def test_the_drawn_density_is_that_of_the_strategy(tmp_path):
    """log_normal: the logit of t is normal with mean 0 and standard deviation 1."""
    _, trainer, _ = train(changed_trainer("log_normal"), tmp_path)
    logits = torch.logit(trainer.timesteps(torch.empty(20_000, 1)).double())
    assert abs(logits.mean()) < 0.03 and abs(logits.std() - 1) < 0.03


@pytest.mark.parametrize("name", ["log_normal", "mode", "shift", "uniform"])
def test_a_resume_equals_an_uninterrupted_run(name, tmp_path):
    whole, _, _ = train(changed_trainer(name), tmp_path)
    resumed, trainer, _ = train(changed_trainer(name), resumed_from(tmp_path, tmp_path / "other"))
    assert trainer.step == STEPS and len(resumed.t) == STEPS - SAVED_STEP
    assert differences(resumed, second_half(whole)) == []
    assert not equal_bits(whole.t[0], whole.t[SAVED_STEP])


def test_uniform_trains_as_the_released_trainer_at_equal_times(tmp_path):
    changed, _, _ = train(changed_trainer("uniform"), tmp_path / "changed")
    released_run, _, _ = train(unchanged_trainer(changed.t), tmp_path / "released")
    changed.strategy = {}
    assert differences(changed, released_run) == []
    assert changed.losses[-1] < changed.losses[0]


def test_validations_keep_the_times_of_the_trainer_and_change_nothing(tmp_path):
    run, _, validation = train(changed_trainer("log_normal"), tmp_path / "with", validate=True)
    without, _, nothing = train(changed_trainer("log_normal"), tmp_path / "without")
    assert differences(run, without) == [] and nothing == []
    middles = (torch.arange(8) + 0.5) / 8
    assert len(validation) == 6 and all(equal_bits(t, middles.repeat(BATCH)) for t in validation)


def test_a_checkpoint_without_the_lines_does_not_load(tmp_path):
    train(unchanged_trainer(), tmp_path)
    with pytest.raises(CheckpointException, match=r"train_state\.timesteps\.state"):
        train(changed_trainer("log_normal"), resumed_from(tmp_path, tmp_path / "other"))


def test_another_convention_of_time_is_caught(tmp_path):
    with pytest.raises(ConfigError, match="with time='data_is_one'; time='noise_is_one' fits"):
        train(changed_trainer("log_normal", "data_is_one"), tmp_path)


def train_on_a_rank(folder, load_step):
    run, _, _ = train(changed_trainer("log_normal"), folder, load_step)
    return vars(run)


def test_two_ranks_draw_the_halves_of_a_global_batch_and_resume(tmp_path):
    """FSDP divides the network, whose checkpoint both ranks write."""
    modules = ("test_torchtitan",)
    whole = rank_groups.run(train_on_a_rank, tmp_path, 2, tmp_path / "run", -1, join=False, preloaded=modules)
    resumed = rank_groups.run(train_on_a_rank, tmp_path, 2, tmp_path / "run", SAVED_STEP, join=False)
    for one, other in zip(whole, resumed, strict=True):
        assert differences(Run(**other), second_half(Run(**one))) == []
    assert equal_bits(whole[0]["strategy"], whole[1]["strategy"])
    strategy = Strategy("log_normal", "flow", seed=SEED)
    for halves in zip(whole[0]["t"], whole[1]["t"], strict=True):
        draw = strategy.draw(torch.empty(2 * BATCH, 16, SIDE // 8, SIDE // 8))
        assert equal_bits(torch.stack(halves, 1).flatten(), draw.t.float())
        with strategy.observe(draw):
            pass

"""attach on two ranks: draws, masks, sharded networks and resumes from a distributed checkpoint."""

import copy

import pytest
import torch
from torch import nn

import rank_groups
from attached_training import (
    ADAPTIVE_EDM2,
    COUNT,
    IN_ONE_PROCESS,
    INFO_NOISE,
    LOSS_RMS_EDM2,
    Trainer,
    load_distributed,
    save_distributed,
)
from kairos_timesteps import Strategy, attach
from kairos_timesteps.components import SAMPLERS
from kairos_timesteps.distributed import rank, ranks
from kairos_timesteps.integrations.distributed_checkpoint import PackedState
from small_loop import IMAGES, equal_bits
from specifications import Specification


def train_with_fsdp(attached, synchronised):
    """Accumulate two micro-batches with fully_shard, which reduces gradients once or twice a step."""
    import torch.distributed.fsdp  # takes a second

    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        return {}
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
    torch.distributed.fsdp.fully_shard(network, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    options = {"frequency": 1, "start": 1}
    strategy = Strategy("loss_rms", sampler=options)
    timesteps = attach("loss_rms", "linear", optimizer, network, sampler=options) if attached else None
    for _ in range(3):
        for micro_batch in range(2):
            network.set_requires_gradient_sync(synchronised or micro_batch == 1)
            x0 = IMAGES[rank() * 4 :][:4].flatten(1)
            draw = None if attached else strategy.draw(x0)
            t = timesteps(x0) if attached else draw.t
            errors = (network(x0 + t[:, None] / 1000) - x0).square().mean(1)
            (timesteps.loss(errors) if attached else strategy.loss(draw, errors)).backward()
        if attached:
            optimizer.step()
        else:
            with strategy.observe(draw):
                optimizer.step()
        optimizer.zero_grad()
    return timesteps.state_dict()["strategy"] if attached else strategy.state_dict()


def train_with_masks():
    """Train with masks on one rank or two; returns the state."""
    strategy = Strategy("loss_rms", sampler={"frequency": 1, "start": 1})
    mask = torch.tensor([True, False, False, True, False, True, True, True])
    rows = slice(rank(), None, ranks())
    for _ in range(3):
        draw = strategy.draw(IMAGES[rows])
        strategy.loss(draw, 1 + draw.fractions.float(), mask[rows])
        with strategy.observe(draw):
            pass
    return strategy.state_dict()


def resume_on_two_ranks(specification, group, folder):
    """Compare a training run with its resume from a distributed checkpoint; returns the state at the checkpoint."""

    def train_two_steps(trainer):
        for _ in range(2):
            trainer.batch()
            for parameter in trainer.network.parameters():
                torch.distributed.all_reduce(parameter.grad)
            trainer.step()

    trainer, resumed = (Trainer(specification, True, process_group=group) for _ in range(2))
    trainer.batches = rank()
    train_two_steps(trainer)
    save_distributed({"timesteps": PackedState(trainer.timesteps), "network": trainer.network.state_dict()}, folder)
    saved = copy.deepcopy(trainer.timesteps.state_dict())
    network = resumed.network.state_dict()
    load_distributed({"timesteps": PackedState(resumed.timesteps), "network": network}, folder)
    resumed.network.load_state_dict(network)
    resumed.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    resumed.batches = trainer.batches
    trainer.t, trainer.losses = [], []
    for continued in (trainer, resumed):
        train_two_steps(continued)
    return {"equal": equal_bits(resumed.results(), trainer.results()), "saved": saved}


def train_on_two_ranks(specifications, resumed, folder):
    """Train each specification attached and explicit; ranks have different images and masks.

    The specifications `resumed` are trained once more with a resume from a checkpoint in `folder`.
    """
    group = torch.distributed.new_group([0, 1])
    results = []
    for specification in specifications:
        pair = []
        for attached in (True, False):
            trainer = Trainer(specification, attached, process_group=group)
            trainer.batches = rank()
            for step in range(3):
                for micro_batch in range(2):
                    mask = torch.arange(COUNT) <= rank() + micro_batch if step == 1 else None
                    trainer.batch(mask=mask)
                for parameter in trainer.network.parameters():
                    torch.distributed.all_reduce(parameter.grad)
                if step == 1 and attached:
                    trainer.batch(train=False)
                    trainer.network.train()
                trainer.step()
            pair.append(trainer.results())
        results.append({"equal": equal_bits(*pair), "state": pair[0]["state"], "t": torch.stack(pair[0]["t"])})
    sharded = []
    for synchronised in (True, False):
        sharded.append(equal_bits(train_with_fsdp(True, synchronised), train_with_fsdp(False, synchronised)))
    resumes = []
    for number, specification in enumerate(resumed):
        resumes.append(resume_on_two_ranks(specification, group, folder / str(number)))
    return {"trainings": results, "sharded": sharded, "masked": train_with_masks(), "resumes": resumes}


def small_sampler(name):
    """Return a sampler with options for a few steps."""
    small_options = {
        "frequency": 1,
        "start": 1,
        "history": 1,
        "feature_timesteps": 5,
        "width": 4,
        "bins": 4,
        "min_count": 1,
    }
    if name in ("loss_rms", "loss_mean", "info_rate"):
        small_options["width"] = 0.1
    if name == "by_group":
        small_options["parts"] = [{"name": "uniform", "group": "all"}]
    fields = SAMPLERS[name].component.options
    return {"name": name, **{key: value for key, value in small_options.items() if key in fields}}


@pytest.mark.long
@IN_ONE_PROCESS
def test_two_ranks_equal_the_explicit_form_and_each_other(tmp_path):
    cases = [Specification(small_sampler(name)) for name in sorted(SAMPLERS)]
    cases += [Specification(weighting={"name": name}) for name in ("min_snr", "edm2", "coarse_to_fine")]
    resumed = [LOSS_RMS_EDM2, ADAPTIVE_EDM2, INFO_NOISE]
    first, second = rank_groups.run(train_on_two_ranks, tmp_path, 2, cases, resumed, tmp_path / "checkpoints")
    assert first["sharded"] == second["sharded"] == [True, True]
    assert equal_bits(first["masked"], train_with_masks()) and equal_bits(second["masked"], train_with_masks())
    for case, one, other in zip(cases, first["trainings"], second["trainings"]):
        with rank_groups.case(repr(case)):
            assert one["equal"] and other["equal"]
            assert equal_bits(one["state"], other["state"])
            assert not equal_bits(one["t"], other["t"])
    for number, (case, one, other) in enumerate(zip(resumed, first["resumes"], second["resumes"], strict=True)):
        with rank_groups.case(f"resume of {case!r}"):
            assert one["equal"] and other["equal"]
            on_one_rank = Trainer(case, True)
            load_distributed({"timesteps": PackedState(on_one_rank.timesteps)}, tmp_path / "checkpoints" / str(number))
            assert equal_bits(on_one_rank.timesteps.state_dict(), one["saved"])

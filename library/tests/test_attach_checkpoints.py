"""attach: states, torch.distributed.checkpoint and accelerate."""

import copy

import pytest
import torch

from attached_training import (
    ADAPTIVE_EDM2,
    COUNT,
    GRADIENT_NORM,
    IN_ONE_PROCESS,
    INFO_NOISE,
    LOSS_RMS_EDM2,
    TinyTraining,
    Trainer,
    load_distributed,
    sampler_name,
    save_distributed,
)
from kairos_timesteps import Strategy, attach
from kairos_timesteps.errors import ConfigError
from kairos_timesteps.integrations.distributed_checkpoint import PackedState
from small_loop import IMAGES, TinyNetwork, equal_bits
from specifications import Specification


def test_loading_a_state_discards_the_current_step():
    training = TinyTraining()
    training.step()
    state = training.timesteps.state_dict()
    training.timesteps.loss(training.errors(training.timesteps(IMAGES))).backward()
    training.timesteps.load_state_dict(state)
    training.optimizer.step()
    assert equal_bits(training.timesteps.state_dict(), state)


def test_a_state_of_another_strategy_or_convention_is_rejected():
    state = TinyTraining("loss_rms", "flow", time="data_is_one").timesteps.state_dict()
    with pytest.raises(ConfigError, match="state: time: got 'data_is_one', allowed: 'noise_is_one'"):
        TinyTraining("loss_rms", "flow", time="noise_is_one").timesteps.load_state_dict(state)
    with pytest.raises(ConfigError, match="state: sampler: got 'loss_rms', allowed: 'uniform'"):
        TinyTraining("uniform", "flow", time="data_is_one").timesteps.load_state_dict(state)


@pytest.mark.parametrize("other", [{"seed": 1}, {"sampler": {"decay": 0.5}}, {"weighting": {"channels": 4}}])
def test_a_state_of_other_settings_is_rejected(other):
    def attached(seed=0, sampler=None, weighting=None):
        network = TinyNetwork()
        optimizer = torch.optim.Adam(network.parameters())
        options = {"sampler": sampler, "weighting": weighting or {"channels": 8}}
        return attach("loss_rms+edm2", "cosine", optimizer, network, seed=seed, **options)

    state = attached().state_dict()
    attached().load_state_dict(state)
    with pytest.raises(ConfigError, match=f"state: {next(iter(other))}"):
        attached(**other).load_state_dict(state)
    with pytest.raises(ConfigError, match="state: time: got None"):
        attached().load_state_dict({})


@IN_ONE_PROCESS
@pytest.mark.parametrize("without_backward", [True, False])
@pytest.mark.parametrize("specification", [LOSS_RMS_EDM2, ADAPTIVE_EDM2, INFO_NOISE], ids=sampler_name)
def test_a_distributed_checkpoint_within_a_step_contains_the_last_complete_step(
    specification, without_backward, tmp_path
):
    """A resume equals the training that drops the unfinished step, which a draw alone or a micro-batch began."""
    trainer = Trainer(specification, True)
    for _ in range(2):
        trainer.batch()
        trainer.step()
    learned = copy.deepcopy(trainer.timesteps.state_dict()["strategy"])
    trainer.batch(backward=not without_backward)
    save_distributed({"timesteps": PackedState(trainer.timesteps), "network": trainer.network.state_dict()}, tmp_path)
    resumed = Trainer(specification, True)
    network = resumed.network.state_dict()
    load_distributed({"timesteps": PackedState(resumed.timesteps), "network": network}, tmp_path)
    resumed.network.load_state_dict(network)
    state = resumed.timesteps.state_dict()["strategy"]
    assert equal_bits({**state, "drawn": 0}, {**learned, "drawn": 0}) and state["drawn"] == [COUNT, 2 * COUNT]
    resumed.batches = trainer.batches
    resumed.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    trainer.optimizer.zero_grad()
    trainer.t, trainer.losses = [], []
    for continued in (trainer, resumed):
        for _ in range(2):
            continued.batch()
            continued.step()
    assert equal_bits(resumed.results(), trainer.results())


@IN_ONE_PROCESS
def test_a_distributed_checkpoint_without_values_that_were_learned_is_rejected(tmp_path):
    """torch.distributed.checkpoint restores only values that exist before the load: here no policy of `adaptive`."""
    trainer, resumed = Trainer(ADAPTIVE_EDM2, True), Trainer(ADAPTIVE_EDM2, True)
    trainer.batch()
    trainer.step()
    save_distributed({"timesteps": trainer.timesteps}, tmp_path)
    with pytest.raises(ConfigError, match=r"state: got no .*sampler.policy.*PackedState"):
        load_distributed({"timesteps": resumed.timesteps}, tmp_path)


def test_a_step_without_a_draw_is_not_counted():
    """torch.distributed.checkpoint creates the optimizer's state by such a step."""
    training = TinyTraining()
    training.optimizer.step()
    assert training.state["step"] == 0
    training.step()
    assert training.state["step"] == 1


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("specification", [Specification(), LOSS_RMS_EDM2, GRADIENT_NORM], ids=sampler_name)
def test_the_step_that_creates_the_optimizers_state_is_not_counted(specification, train):
    """torch.distributed.checkpoint calls `step` with gradients and learning rates of 0 before the first save."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # takes a second

    results = []
    for saved in (True, False):
        trainer = Trainer(
            specification,
            True,
            optimizer=lambda *arguments, **options: torch.optim.SGD(*arguments, **options, momentum=0.9),
        )
        trainer.batch(train=train, backward=False)
        if saved:
            assert get_optimizer_state_dict(trainer.network, trainer.optimizer)["state"]
        for _ in range(2):
            trainer.batch()
            trainer.step()
        results.append(trainer.results())
    assert results[0]["state"]["step"] == 2 and equal_bits(*results)


@pytest.mark.trainers
@pytest.mark.parametrize("resume", [None, 1, 3])
def test_accelerate_accumulates_and_stores_the_state(tmp_path, resume):
    accelerate = pytest.importorskip("accelerate")

    def build():
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        network = TinyNetwork()
        network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=0.1))
        options = {"frequency": 1, "start": 1}
        timesteps = attach("loss_rms", "linear", optimizer, network, sampler=options, accelerator=accelerator)
        return accelerator, network, optimizer, timesteps

    accelerator, network, optimizer, timesteps = build()
    explicit = Strategy("loss_rms", "linear", sampler={"frequency": 1, "start": 1})
    draws = []
    for number in range(10):
        x0 = IMAGES[number % 2 * 4 :][:4]
        with accelerator.accumulate(network):
            t = timesteps(x0)
            draws.append(explicit.draw(x0))
            assert equal_bits(t, draws[-1].t)
            errors = (network(x0, t) - 1).square().mean((1, 2, 3))
            loss = timesteps.loss(errors)
            assert equal_bits(loss, explicit.loss(draws[-1], errors))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number % 2:
            with explicit.observe(draws):
                draws = []
            if number // 2 == resume:
                accelerator.save_state(tmp_path / "state")
                accelerator, network, optimizer, timesteps = build()
                accelerator.load_state(tmp_path / "state")
        assert equal_bits(timesteps.strategy.state_dict(), explicit.state_dict())

"""attach with GradScaler and fused optimizers: skipped steps are not observed, and no value is read early."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attached_training import ADAPTIVE, GRADIENT_NORM, LOSS_RMS_EDM2, Trainer, sampler_name
from kairos_timesteps import attach
from small_loop import IMAGES, TinyNetwork, equal_bits

OPTIMIZERS = {
    f"{cls.__name__}, fused={fused}": lambda parameters, lr, cls=cls, fused=fused: cls(parameters, lr, fused=fused)
    for cls in (torch.optim.Adam, torch.optim.AdamW)
    for fused in (True, False)
}
# by step; True: gradients overflow, so that GradScaler skips the step
OVERFLOWS = [True, True, False, False, True, False, False]


def train_in_mixed_precision(specification, optimizer, attached, scaled, resume=None, to_none=True):
    """Train with GradScaler if `scaled`, with a resume after step `resume`, and return the results."""

    def build():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
        return Trainer(specification, attached, optimizer=OPTIMIZERS[optimizer], scaler=scaler, to_none=to_none)

    trainer = build()
    for number, overflow in enumerate(OVERFLOWS):
        for _ in range(2):
            trainer.batch(factor=math.inf if overflow and scaled else 1.0)
        trainer.step(skipped=overflow and scaled)
        if number == resume:
            trainer = build().load(trainer.checkpoint(), trainer)
    return trainer.results()


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("specification", [LOSS_RMS_EDM2, GRADIENT_NORM, ADAPTIVE], ids=sampler_name)
def test_a_step_that_grad_scaler_skips_is_not_observed(specification, optimizer, scaled):
    explicit = train_in_mixed_precision(specification, optimizer, False, scaled)
    results = train_in_mixed_precision(specification, optimizer, True, scaled)
    assert results["state"]["step"] == (4 if scaled else 7)
    assert equal_bits(results, explicit)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("resume", range(len(OVERFLOWS)))
def test_a_resume_after_any_attempt_is_exact(fused, resume):
    optimizer = f"AdamW, fused={fused}"
    whole, resumed = (train_in_mixed_precision(LOSS_RMS_EDM2, optimizer, True, True, at) for at in (None, resume))
    assert equal_bits(whole, resumed)


def test_fused_and_unfused_optimizers_draw_the_same():
    results = [train_in_mixed_precision(LOSS_RMS_EDM2, f"Adam, fused={fused}", True, True) for fused in (True, False)]
    assert equal_bits(results[0]["t"], results[1]["t"]) and equal_bits(results[0]["losses"], results[1]["losses"])


def test_a_fused_step_is_skipped_whether_or_not_gradients_are_set_to_none():
    explicit, results = (
        train_in_mixed_precision(LOSS_RMS_EDM2, "Adam, fused=True", attached, True, to_none=False)
        for attached in (False, True)
    )
    assert results["state"]["step"] == 4 and equal_bits(results, explicit)


class ValueReads(TorchDispatchMode):
    """Counts values that are read from tensors, which would synchronise with a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), by_name=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(by_name or {}))


@pytest.mark.parametrize("name", ["uniform", "loss_rms", "info_rate+min_snr"])
@pytest.mark.parametrize("fused", [True, False])
def test_one_number_is_read_per_fused_step_and_only_by_the_next_draw(name, fused):
    network, scaler = TinyNetwork(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    timesteps = attach(name, "linear", optimizer, network)
    t = timesteps(IMAGES)
    for _ in range(3):
        errors = (network(IMAGES, t) - 1).square().mean((1, 2, 3))
        with ValueReads() as within:
            loss = timesteps.loss(errors)
            if fused:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        with ValueReads() as between:
            t = timesteps(IMAGES)
        assert (within.count, between.count) == (0, int(fused))

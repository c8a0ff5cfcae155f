"""attach: shapes, weights and masks of the loss."""

import pytest
import torch

from attached_training import WEIGHTS, TinyTraining
from kairos_timesteps import Strategy
from kairos_timesteps.errors import ConfigError
from small_loop import IMAGES, equal_bits


def test_the_loss_of_uniform_without_weights_is_the_plain_mean_to_the_last_bit():
    training = TinyTraining("uniform+none")
    training.timesteps(IMAGES)
    for seed in range(20):
        errors = torch.rand(8, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 10)
        assert equal_bits(training.timesteps.loss(errors), errors.mean())
        assert equal_bits(
            training.timesteps.loss(errors, weights=WEIGHTS.repeat(2)), (errors * WEIGHTS.repeat(2)).mean()
        )


def test_errors_of_elements_are_averaged():
    training = TinyTraining("uniform+min_snr")
    training.timesteps(IMAGES)
    elements = torch.rand(8, 3, 4, 5)
    torch.testing.assert_close(training.timesteps.loss(elements), training.timesteps.loss(elements.mean((1, 2, 3))))


def test_several_times_of_a_sample_have_weights_of_samples_or_of_times():
    training = TinyTraining("log_normal+min_snr")
    t = training.timesteps(IMAGES, times=(3,))
    errors, weights = torch.rand(8, 3), torch.rand(8)
    explicit = Strategy("log_normal+min_snr")
    draw = explicit.draw(IMAGES, times=(3,))
    assert equal_bits(t, draw.t)
    expected = (explicit.weighted(draw, errors) * weights[:, None]).mean()
    assert equal_bits(training.timesteps.loss(errors, weights=weights), expected)
    assert equal_bits(training.timesteps.loss(errors, weights=weights[:, None].expand(8, 3)), expected)


def test_the_weights_attribute_contains_the_weights_of_the_loss():
    training = TinyTraining("log_normal+min_snr", sampler={"importance": True})
    with pytest.raises(ConfigError, match="weights: got no draw"):
        _ = training.timesteps.weights
    training.timesteps(IMAGES)
    errors = torch.rand(8)
    assert equal_bits(training.timesteps.loss(errors), (errors * training.timesteps.weights).mean())
    training.network.eval()
    training.timesteps(IMAGES)
    assert equal_bits(training.timesteps.weights, torch.ones(()))


@pytest.mark.parametrize("name", ["loss_rms", "info_rate+coarse_to_fine", "loss_second_moment"])
def test_weights_change_only_the_gradient_and_masks_only_the_statistics(name):
    """The statistics ignore samples whose mask is False; the gradient is that of all samples."""
    mask, weights = torch.arange(8) < 5, torch.rand(8)
    training, masked, weighted, fewer = (TinyTraining(name) for _ in range(4))
    errors = torch.rand(8, generator=torch.Generator().manual_seed(0))
    losses = {}
    for trainer, arguments in ((training, {}), (masked, {"mask": mask}), (weighted, {"weights": weights})):
        t = trainer.timesteps(IMAGES)
        scale = trainer.network.layer.bias * 0 + 1
        losses[trainer] = trainer.timesteps.loss(errors * scale, **arguments)
        losses[trainer].backward()
        trainer.optimizer.step()
    assert equal_bits(losses[training], losses[masked])
    assert equal_bits(training.state, weighted.state) and not equal_bits(
        training.state["sampler"], masked.state["sampler"]
    )
    draw = fewer.timesteps.strategy.draw(IMAGES).rows(0, 5)
    fewer.timesteps.strategy.loss(draw, errors[:5])
    with fewer.timesteps.strategy.observe(draw):
        pass
    assert equal_bits(fewer.state["sampler"], masked.state["sampler"]) and len(t) == 8
    assert equal_bits(fewer.state["weighting"], masked.state["weighting"])


@pytest.mark.parametrize(
    ("errors", "arguments", "words"),
    [
        (torch.ones(7), {}, r"got shape \(7,\)"),
        (torch.ones(()), {}, r"got shape \(\)"),
        (torch.ones(8), {"weights": torch.ones(7)}, r"weights: got shape \(7,\), allowed: \(8,\)"),
        (torch.ones(8), {"weights": torch.ones(8, 1, 1)}, r"weights: got shape \(8, 1, 1\), allowed: \(8,\)"),
        (torch.ones(8), {"mask": torch.ones(8)}, r"mask: got torch.float32, shape \(8,\), allowed: bool, \(8,\)"),
        (torch.ones(8), {"mask": torch.ones(7, dtype=torch.bool)}, r"mask: got .*\(7,\), allowed: bool, \(8,\)"),
    ],
)
def test_losses_weights_and_masks_of_wrong_shapes_are_rejected(errors, arguments, words):
    training = TinyTraining()
    training.timesteps(IMAGES)
    with pytest.raises(ConfigError, match=words):
        training.timesteps.loss(errors, **arguments)


def test_a_loss_needs_a_draw():
    with pytest.raises(ConfigError, match=r"loss: got no draw"):
        TinyTraining().timesteps.loss(torch.ones(8))

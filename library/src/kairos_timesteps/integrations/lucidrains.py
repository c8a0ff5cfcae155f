"""Strategies in lucidrains' trainers, denoising-diffusion-pytorch and rectified-flow-pytorch, which stay unmodified.

    class Diffusion(StrategyDiffusion, GaussianDiffusion): ...

    diffusion = Diffusion(unet, image_size=64)
    trainer = Trainer(diffusion, folder)
    diffusion.attach("loss_rms", trainer.opt)

The trainers' checkpoints contain the state of the strategy; attach it before ``trainer.load``.
"""

from typing import Any

from torch import Tensor, nn

from kairos_timesteps.attached import Attached, attach
from kairos_timesteps.errors import demand, rejection

_PREDICTIONS = {"pred_noise": "epsilon", "pred_x0": "x0", "pred_v": "v"}


class _WithStrategy(nn.Module):
    """Mixin of a module whose checkpoints contain the state of its strategy."""

    strategy: Attached | None = None

    def get_extra_state(self) -> Any:
        """Return the state of the strategy; None for the copy of an exponential moving average."""
        return self.strategy.state_dict() if self.strategy else None

    def set_extra_state(self, state: Any) -> None:
        """Restore the state of the strategy; None changes nothing.

        Raises:
            ConfigError: no strategy is attached.
        """
        if state is not None:
            if self.strategy is None:
                raise rejection("load: strategy", "none", "a strategy, attached before the checkpoint is loaded")
            self.strategy.load_state_dict(state)


class StrategyDiffusion(_WithStrategy):
    """Mixin of denoising-diffusion-pytorch's GaussianDiffusion: ``class D(StrategyDiffusion, GaussianDiffusion)``."""

    def attach(self: Any, name: str, optimizer: Any, **options: Any) -> Attached:
        """Attach a strategy, whose weights replace ``loss_weight``. Options are those of `kairos_timesteps.attach`.

        Weighting ``p2`` with gamma 0 has the weights that ``loss_weight`` has by default, for all objectives.
        Attribute ``strategy`` is then the strategy that the method returns.
        """
        self.loss_weight.fill_(1.0)
        self.strategy = strategy = attach(
            name, self.alphas_cumprod, optimizer, self, prediction=_PREDICTIONS[self.objective],
            predict=lambda x_t, t: self.model(x_t, t), **options,
        )  # fmt: skip
        return strategy

    def forward(self: Any, img: Tensor, *args: Any, times: Tensor | None = None, **options: Any) -> Tensor:
        """Return the loss of images in [0, 1], (batch, channels, height, width).

        An attached strategy draws the times, unless `times` are given; without one, the trainer does.
        """
        if self.strategy is None or times is not None:
            loss: Tensor = super().forward(img, *args, times=times, **options)
            return loss
        strategy: Attached = self.strategy
        t = strategy(self.normalize(img))
        return strategy.loss(super().forward(img, *args, times=t, **{**options, "loss_reduction": "none"}))


class _StrategyLoss(nn.Module):
    """Loss function of RectifiedFlow for the last draw of a strategy."""

    def __init__(self, strategy: Attached):
        super().__init__()
        self.strategy = strategy

    def forward(self, pred: Tensor, target: Tensor, **_: Any) -> Tensor:
        return self.strategy.loss((pred - target).square())


class StrategyFlow(_WithStrategy):
    """Mixin of rectified-flow-pytorch's RectifiedFlow: ``class F(StrategyFlow, RectifiedFlow)``."""

    def attach(self: Any, name: str, optimizer: Any, **options: Any) -> Attached:
        """Attach a strategy, whose loss replaces ``loss_fn``. Options are those of `kairos_timesteps.attach`.

        Attribute ``strategy`` is then the strategy that the method returns.

        Raises:
            ConfigError: RectifiedFlow does not predict the flow.
        """
        demand(self.predict == "flow", "attach: RectifiedFlow.predict", repr(self.predict), "'flow'")
        self.strategy = strategy = attach(
            name, "flow", optimizer, self, time="data_is_one",
            predict=lambda x_t, t: self.predict_flow(self.model, x_t, times=t)[1], **options,
        )  # fmt: skip
        self.loss_fn = _StrategyLoss(strategy)
        return strategy

    def forward(self: Any, data: Tensor, noise: Tensor | None = None, **options: Any) -> Any:
        """Return the loss of images in [0, 1], (batch, channels, height, width).

        An attached strategy draws the times; without one, the trainer does.

        Raises:
            ConfigError: a strategy is attached and times are given.
        """
        if self.strategy is not None:
            demand(options.get("times") is None, "RectifiedFlow: times", "given", "none: the strategy draws them")
            options["times"] = self.strategy(self.data_normalize_fn(data))
        return super().forward(data, noise, **options)

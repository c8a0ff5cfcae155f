"""Strategies in Lightning: a callback that attaches a strategy to the optimizer of a LightningModule."""

from typing import Any

from kairos_timesteps.attached import Attached, attach

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class StrategyCallback(Callback):
    """Callback that attaches a strategy, and sets it as attribute ``strategy`` of the module.

    The module draws by ``self.strategy(latents)`` and returns ``self.strategy.loss(errors)``. Lightning's checkpoints
    contain the state of the strategy.

    Args:
        name: name of the strategy.
        process: forward process.
        options: options of `kairos_timesteps.attach`.

    Attributes:
        strategy: the attached strategy; None before ``fit``.
    """

    def __init__(self, name: str, process: Any, **options: Any):
        self.name, self.process, self.options = name, process, options
        self.strategy: Attached | None = None
        self._restored: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the strategy to the optimizer, and restore the state of a checkpoint or of an earlier fit.

        Raises:
            ConfigError: there are several optimizers.
        """
        optimizers = trainer.optimizers
        optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
        if self.strategy is not None:  # a second fit has a new optimizer
            self._restored = self._restored or self.strategy.state_dict()
            self.strategy.detach()
        self.strategy = pl_module.strategy = attach(self.name, self.process, optimizer, pl_module, **self.options)
        if self._restored is not None:
            self.strategy.load_state_dict(self._restored)
            self._restored = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the strategy."""
        return self.strategy.state_dict() if self.strategy else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the strategy; if it is not attached yet, keep the state until `on_fit_start`.

        By default Lightning loads the states of callbacks before it creates the optimizer.
        """
        if self.strategy:
            self.strategy.load_state_dict(state_dict)
        else:
            self._restored = state_dict

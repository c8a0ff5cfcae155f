"""State of an attached strategy in torch.distributed.checkpoint.

    torch.distributed.checkpoint.save({"timesteps": PackedState(timesteps)}, checkpoint_id=folder)
    torch.distributed.checkpoint.load({"timesteps": PackedState(timesteps)}, checkpoint_id=folder)

``torch.distributed.checkpoint.load`` restores only values that the state contains before the load. Strategies add
values while they learn, such as the policy of ``adaptive``. `PackedState` therefore stores the state as one value.
"""

import io
from typing import Any

import torch

from kairos_timesteps.attached import Attached


class PackedState:
    """State of an attached strategy as one value of type bytes.

    Args:
        timesteps: the attached strategy.
    """

    def __init__(self, timesteps: Attached):
        self.timesteps = timesteps

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the strategy as bytes."""
        file = io.BytesIO()
        torch.save(self.timesteps.state_dict(), file)
        return {"state": file.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned; see `Attached.load_state_dict`."""
        state = torch.load(io.BytesIO(state_dict["state"]), map_location="cpu", weights_only=True)
        self.timesteps.load_state_dict(state)

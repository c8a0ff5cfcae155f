"""The DDPM U-Net: diffusers' UNet2DModel, padded to sizes that its levels can halve."""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d import UNet2DModel
from torch import Tensor, nn

from kairos.errors import KairosError
from kairos.models.backbone import Backbone, Descriptions
from kairos.models.registries import UNetOptions


class UNet(Backbone):
    """diffusers' UNet2DModel; arguments as of `Backbone`. Its config.json and weights are diffusers' own.

    Raises:
        KairosError: the levels cannot halve the size and padding is off; widths do not fit the group normalisation.
    """

    def __init__(self, options: UNetOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        _, height, width = shape
        factor = 2 ** (len(options.multipliers) - 1)
        if not options.pad and (height % factor or width % factor):
            raise KairosError(
                f"model.pad: got false with images of {height}x{width}, allowed: sizes that are multiples of {factor} "
                f"({len(options.multipliers)} levels), or pad: true"
            )
        widths = [options.channels * multiplier for multiplier in options.multipliers]
        if any(width % options.norm_groups for width in widths):
            raise KairosError(
                f"model.norm_groups: got {options.norm_groups}, allowed: a divisor of every width of {widths}"
            )
        padded = -(-height // factor) * factor
        attention = [padded // 2**level in options.attention for level in range(len(widths))]
        self.unet = UNet2DModel(
            sample_size=padded,
            in_channels=self.inputs,
            out_channels=outputs,
            block_out_channels=widths,
            layers_per_block=options.blocks,
            down_block_types=["AttnDownBlock2D" if here else "DownBlock2D" for here in attention],
            up_block_types=["AttnUpBlock2D" if here else "UpBlock2D" for here in reversed(attention)],
            dropout=options.dropout,
            norm_num_groups=options.norm_groups,
            norm_eps=1e-6,
            attention_head_dim=None,
            downsample_padding=0,
            flip_sin_to_cos=False,
            freq_shift=1,
            num_class_embeds=conditions["class"]["num_classes"] + 1 if "class" in conditions else None,
        )
        if options.init == "ddpm":
            self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """As DDPM's code: weights uniform by fan average, biases 0, and the last layer of every branch 0."""
        for module in self.unet.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        branches = [module.conv2 for module in self.unet.modules() if isinstance(module, ResnetBlock2D)]
        branches += [module.to_out[0] for module in self.unet.modules() if isinstance(module, Attention)]
        for last in (*branches, self.unet.conv_out):
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Prediction (batch, outputs, height, width)."""
        factor = 2 ** (len(self.unet.config["block_out_channels"]) - 1)
        x = self.joined(x, conditions)
        height, width = x.shape[-2:]
        bottom, right = -height % factor, -width % factor
        if bottom or right:
            x = nn.functional.pad(x, (right // 2, right - right // 2, bottom // 2, bottom - bottom // 2))
        output = self.unet(x, t, class_labels=conditions.get("class"), return_dict=False)[0]
        if bottom or right:
            output = output[..., bottom // 2 : bottom // 2 + height, right // 2 : right // 2 + width]
        return output

    def config(self) -> dict[str, Any]:
        """What diffusers writes to config.json, without library versions (they are in the provenance)."""
        kept = {key: value for key, value in self.unet.config.items() if not key.startswith("_")}
        return {"_class_name": "UNet2DModel", **kept}

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers under diffusers' names."""
        return dict(self.unet.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load what `weights` gave."""
        self.unet.load_state_dict(weights)

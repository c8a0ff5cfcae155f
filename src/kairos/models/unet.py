"""The U-Nets of DDPM, latent diffusion and ADM: diffusers' UNet2DModel, padded to sizes that its levels can halve."""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d import UNet2DModel
from torch import Tensor, nn

from kairos.models.backbone import Backbone, Descriptions, apply_padded
from kairos.models.registries import UNetOptions
from kairos.models.unet_names import to_diffusers_names
from kairos_timesteps.errors import KairosError


class UNet(Backbone):
    """diffusers' UNet2DModel; arguments as of `Backbone`.

    Its config.json and weights are diffusers' own, and open there where the first of the multipliers is 1.

    Raises:
        KairosError: the levels cannot halve the size and padding is off.
    """

    def __init__(self, options: UNetOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        _, height, width = shape
        self._factor = factor = 2 ** (len(options.widths) - 1)
        if not options.pad and (height % factor or width % factor):
            raise KairosError(
                f"model.pad: got false with images of {height}x{width}, allowed: sizes that are multiples of {factor} "
                f"({len(options.widths)} levels), or pad: true"
            )
        side = -(-height // factor) * factor
        blocks = ["Attn" if side // 2**level in options.attention else "" for level in range(len(options.widths))]
        plain = "Resnet" if options.resample == "resnet" else ""
        down, up = ("Downsample", "Upsample") if plain else ("Down", "Up")
        adm = options.embedding == "adm"
        self.unet = UNet2DModel(
            sample_size=side,
            in_channels=self.inputs,
            out_channels=outputs,
            block_out_channels=options.widths,
            layers_per_block=options.blocks,
            down_block_types=[f"{name}DownBlock2D" if name else f"{plain}{down}Block2D" for name in blocks],
            up_block_types=[f"{name}UpBlock2D" if name else f"{plain}{up}Block2D" for name in reversed(blocks)],
            downsample_type=options.resample,
            upsample_type=options.resample,
            resnet_time_scale_shift="scale_shift" if options.scale_shift else "default",
            dropout=options.dropout,
            norm_num_groups=options.norm_groups,
            attn_norm_num_groups=options.norm_groups,
            norm_eps=options.norm_eps,
            attention_head_dim=options.head_channels or None,
            downsample_padding=options.padding,
            time_embedding_dim=4 * options.channels,
            flip_sin_to_cos=adm,
            freq_shift=0 if adm else 1,
            num_class_embeds=conditions["class"]["num_classes"] + options.null_class if "class" in conditions else None,
        )
        if options.widths[0] != options.channels:  # of ADM for 512: diffusers embeds t in the first level's width
            self.unet.time_proj.num_channels = options.channels
            self.unet.time_embedding.linear_1 = nn.Linear(options.channels, 4 * options.channels)
        if options.init != "diffusers":
            self._initialise(options.init == "ddpm")

    @torch.no_grad()
    def _initialise(self, ddpm: bool) -> None:
        """The last layer of every branch 0; before, as DDPM's code: weights uniform by fan average, biases 0."""
        modules = list(self.unet.modules())
        for module in modules if ddpm else ():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        branches = [module.conv2 for module in modules if isinstance(module, ResnetBlock2D)]
        branches += [module.to_out[0] for module in modules if isinstance(module, Attention)]
        for last in (*branches, self.unet.conv_out):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Prediction (batch, outputs, height, width)."""
        labels = conditions.get("class")
        return apply_padded(
            lambda x: self.unet(x, t, class_labels=labels, return_dict=False)[0],
            self.with_image_conditions(x, conditions),
            self._factor,
        )

    def config(self) -> dict[str, Any]:
        """Return the content of config.json as diffusers writes it, without library versions (see the provenance)."""
        kept = {key: value for key, value in self.unet.config.items() if not key.startswith("_")}
        return {"_class_name": "UNet2DModel", **kept}

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers under diffusers' names."""
        return dict(self.unet.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load what `weights` gave."""
        self.unet.load_state_dict(weights)

    def to_kairos_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights under the names of ddpm-torch, or of ADM and latent diffusion, under diffusers'."""
        return to_diffusers_names(self.weights(), weights, self.options)

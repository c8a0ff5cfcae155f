"""The U-Nets of DDPM, latent diffusion and ADM: diffusers' UNet2DModel, padded to sizes that its levels can halve."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kairos.models.backbone import Backbone, Descriptions, apply_padded
from kairos.models.settings import UNetOptions
from kairos.models.unet_names import to_diffusers_names
from kairos.quick_imports import without_pipeline_packages
from kairos.shapes import Images, Inputs, Output, Rows, Times
from kairos_timesteps.errors import KairosError

with without_pipeline_packages():
    from diffusers.models.attention_processor import Attention
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.unets.unet_2d import UNet2DModel


class UNet(Backbone):
    """diffusers' UNet2DModel; see `Backbone` for the arguments.

    Its config.json and weights have the format of diffusers, which opens them if the first multiplier is 1. For images
    that are not square, `options.attention` refers to the height.

    Raises:
        KairosError: the levels cannot halve the size and padding is off.
    """

    def __init__(self, options: UNetOptions, shape: tuple[int, int, int], conditions: Descriptions, outputs: int):
        super().__init__(options, shape, conditions, outputs)
        _, height, width = shape
        factor = 2 ** (len(options.widths) - 1)  # the levels halve sides that it divides
        self._factor = factor
        if not options.pad and (height % factor or width % factor):
            raise KairosError(
                f"model.pad: got false with images of {height}x{width}, allowed: sizes that are multiples of {factor} "
                f"({len(options.widths)} levels), or pad: true"
            )

        # types of blocks, by level
        padded_height = math.ceil(height / factor) * factor
        has_attention = [padded_height // 2**level in options.attention for level in range(len(options.widths))]
        if options.resample == "resnet":
            plain_down, plain_up = "ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D"
        else:
            plain_down, plain_up = "DownBlock2D", "UpBlock2D"

        class_rows = None  # rows of the table of classes; None: no table
        if "class" in conditions:
            class_rows = conditions["class"]["num_classes"]
            if options.null_class:
                class_rows += 1  # the row after the last class means no class

        is_adm = options.embedding == "adm"  # cosines first; the smallest rate is one step above 1/10,000
        self.unet = UNet2DModel(
            sample_size=padded_height,
            in_channels=self.inputs,
            out_channels=outputs,
            block_out_channels=options.widths,
            layers_per_block=options.blocks,
            down_block_types=["AttnDownBlock2D" if attends else plain_down for attends in has_attention],
            up_block_types=["AttnUpBlock2D" if attends else plain_up for attends in reversed(has_attention)],
            downsample_type=options.resample,
            upsample_type=options.resample,
            resnet_time_scale_shift="scale_shift" if options.scale_shift else "default",
            dropout=options.dropout,
            norm_num_groups=options.norm_groups,
            attn_norm_num_groups=options.norm_groups,
            norm_eps=options.norm_eps,
            attention_head_dim=options.head_channels or None,  # None: one head of the full width
            downsample_padding=options.padding,
            time_embedding_dim=4 * options.channels,
            flip_sin_to_cos=is_adm,
            freq_shift=0 if is_adm else 1,
            num_class_embeds=class_rows,
        )

        if options.widths[0] != options.channels:
            # ADM for 512 pixels embeds t in the width `channels`, diffusers in the width of the first level
            self.unet.time_proj.num_channels = options.channels
            self.unet.time_embedding.linear_1 = nn.Linear(options.channels, 4 * options.channels)
        if options.init != "diffusers":
            self._initialise(all_layers=options.init == "ddpm")

    @torch.no_grad()
    def _initialise(self, all_layers: bool) -> None:
        """Set weights and biases of the last layer of the network, each residual block and each attention to 0.

        With `all_layers`, also initialise the other convolutions and linear layers as DDPM's code: weights uniform by
        fan average (Xavier), biases 0. Without it, those layers keep torch's initialisation.
        """
        modules = list(self.unet.modules())
        for module in modules:
            if all_layers and isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        last_layers = [module.conv2 for module in modules if isinstance(module, ResnetBlock2D)]
        last_layers += [module.to_out[0] for module in modules if isinstance(module, Attention)]
        last_layers.append(self.unet.conv_out)
        for layer in last_layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Images, t: Times, conditions: dict[str, Rows]) -> Output:
        """Return the prediction, (batch, outputs, height, width).

        Images are padded to sides that the levels can halve, and the output is cropped. ``conditions["class"]``
        contains indices of classes; with option `null_class`, the number of classes is the index of no class.
        """
        labels = conditions.get("class")

        def apply_unet(padded: Inputs) -> Output:
            output: Output = self.unet(padded, t, class_labels=labels, return_dict=False)[0]
            return output

        return apply_padded(apply_unet, self.with_image_conditions(x, conditions), self._factor)

    def config(self) -> dict[str, Any]:
        """Return the content of config.json in the format of diffusers, without versions (the provenance has them)."""
        arguments = {key: value for key, value in self.unet.config.items() if not key.startswith("_")}
        return {"_class_name": "UNet2DModel", **arguments}

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of parameters and buffers, not copies, by diffusers' names."""
        return dict(self.unet.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace all weights by those of a dictionary as `weights` returns; raise RuntimeError if it does not fit."""
        self.unet.load_state_dict(weights)

    def convert_published(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return weights of ddpm-torch, ADM or latent diffusion by diffusers' names, see `to_diffusers_names`."""
        return to_diffusers_names(self.weights(), weights, self.options)

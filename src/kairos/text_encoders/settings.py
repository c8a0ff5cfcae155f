"""Section `text_encoder`."""

from itertools import chain
from typing import Literal

from kairos.section import Section, field
from kairos_timesteps.errors import ValueRejected

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # one of these; the latter is the form of older files
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",), ("vocab.txt",))  # one of these
FILES = ("config.json", WEIGHTS[0], "tokenizer_config.json", "special_tokens_map.json", *chain(*TOKENIZERS))
PREPROCESSOR = "preprocessor_config.json"  # of CLIP's images


class TextEncoderConfig(Section):
    """Text encoder of the captions, for a model with text conditions."""

    path: str = field(..., "folder or hub id of a text encoder of transformers, with its tokenizer")
    output: Literal["auto", "tokens", "pooled"] = field("auto", "a state per token, or one; auto: the model's")
    dropped: Literal["auto", "empty", "learned", "random"] = field(  # `null` would be YAML's own
        "auto", 'without text: state of "", trained, or a fixed draw; auto: tokens empty, pooled random'
    )
    length: int | None = field(None, "tokens that texts are padded to; null: all that the encoder takes", ge=2)
    too_long: Literal["truncate", "refuse"] = field("truncate", "texts with more tokens")
    batch_size: int = field(64, "texts per encoding step", ge=1)
    dtype: Literal["float32", "float16"] = field("float32", "of the states on disk")

    def settled(self, takes: str | None) -> "TextEncoderConfig":
        """The section without ``auto``, for a model that takes ``tokens`` or ``pooled`` states (None: either).

        Raises:
            ValueRejected: the model takes the other.
        """
        if takes and self.output not in ("auto", takes):
            raise ValueRejected(f"text_encoder.output: got {self.output}, allowed with this model: {takes} or auto")
        output = takes or "tokens" if self.output == "auto" else self.output
        dropped = {"tokens": "empty", "pooled": "random"}[output] if self.dropped == "auto" else self.dropped
        return self.model_copy(update={"output": output, "dropped": dropped})

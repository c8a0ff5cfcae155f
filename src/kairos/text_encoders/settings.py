"""Section `text_encoder` of an experiment file, and the names of the files of a text encoder."""

from itertools import chain
from typing import Literal

from kairos.section import Section, field
from kairos_timesteps.errors import ValueRejected

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # one of these; older networks have the latter
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",), ("vocab.txt",))  # one of these
FILES = ("config.json", WEIGHTS[0], "tokenizer_config.json", "special_tokens_map.json", *chain(*TOKENIZERS))
PREPROCESSOR = "preprocessor_config.json"  # only with the image encoder of CLIP


class TextEncoderConfig(Section):
    """Section `text_encoder`: the text encoder of the captions, for a model with text conditions."""

    path: str = field(..., "folder or hub id of a text encoder of transformers, with its tokenizer")
    output: Literal["auto", "tokens", "pooled"] = field("auto", "a state per token, or one; auto: the model's")
    dropped: Literal["auto", "empty", "learned", "random"] = field(  # named `null` in YAML, it would be no text
        "auto", 'without text: state of "", trained, or a fixed draw; auto: tokens empty, pooled random'
    )
    length: int | None = field(None, "tokens that texts are padded to; null: all that the encoder takes", ge=2)
    too_long: Literal["truncate", "refuse"] = field("truncate", "texts with more tokens")
    batch_size: int = field(64, "texts per encoding step", ge=1)
    dtype: Literal["float32", "float16"] = field("float32", "of the states on disk")

    def resolve_auto(self, model_input: str | None) -> "TextEncoderConfig":
        """Return a copy of the section where ``auto`` is replaced in `output` and `dropped`.

        In `output` it becomes the model's input, or ``tokens`` if the model takes either. In `dropped` it becomes
        ``empty`` if the output is ``tokens``, and ``random`` if it is ``pooled``.

        Args:
            model_input: states that the model takes, ``tokens`` or ``pooled``; None: either.

        Raises:
            ValueRejected: the configured output is not what the model takes.
        """
        if model_input and self.output not in ("auto", model_input):
            raise ValueRejected(
                f"text_encoder.output: got {self.output}, allowed with this model: {model_input} or auto"
            )
        output: str = self.output
        if output == "auto":
            output = model_input or "tokens"
        dropped: str = self.dropped
        if dropped == "auto":
            dropped = {"tokens": "empty", "pooled": "random"}[output]
        return self.model_copy(update={"output": output, "dropped": dropped})

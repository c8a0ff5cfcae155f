"""Names of random streams are hashed into every random number of the pipeline, so a rename would change all results."""

import ast
from pathlib import Path

import kairos

STREAMS = {
    "analysed images",
    "analysed latents",
    "analysed noise",
    "analysed times",
    "augment",
    "augment normal",
    "autoencoder/flips",
    "autoencoder/latent",
    "autoencoder/order",
    "autoencoder/weights",
    "bootstrap",
    "captions",
    "condition_dropout",
    "dropout",
    "dropout {}",
    "flips",
    "gaussian draws",
    "gaussian images",
    "gaussian latents",
    "heldout",
    "latents",
    "limit",
    "mask",
    "masked noise",
    "noise",
    "noise images",
    "order",
    "sample",
    "sample_captions",
    "sample_conditions",
    "selfsupervised turns",
    "validation images",
    "validation latents",
    "weights",
    "{} order",
    "{} weights",
}


def texts_of(node: ast.expr) -> set[str]:
    """Return the strings that an expression may be: a constant, an f-string with {} for its values, or one of two."""
    if isinstance(node, ast.IfExp):
        return texts_of(node.body) | texts_of(node.orelse)
    if isinstance(node, ast.JoinedStr):
        return {"".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)}
    return {node.value} if isinstance(node, ast.Constant) else set()


def test_random_streams_keep_their_names():
    names = set()
    for path in Path(kairos.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_argument = isinstance(node, ast.keyword) and node.arg == "stream"
            is_assignment = isinstance(node, ast.Assign) and "stream" in ast.unparse(node.targets[0])
            if is_argument or is_assignment:
                names |= texts_of(node.value)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Stream", "derived_seed"):
                names |= texts_of(node.args[1])
    assert names == STREAMS

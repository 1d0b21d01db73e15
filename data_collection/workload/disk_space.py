"""How much room a collection takes on the disk, before it starts."""

import shutil
from pathlib import Path

import numpy as np

from data_collection.workload.engine_options import RecordOptions

__all__ = ["hidden_size", "room_on_disk"]


def hidden_size(model: str) -> int | None:
    """Return the width d of the states that are captured, by the model's configuration.

    Args:
        model: what `resolve_model` returned.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    except (OSError, ValueError):
        return None  # the engine says what is wrong with it
    # OPT projects its states before the output matrix.
    width = getattr(config, "word_embed_proj_dim", None) or getattr(config, "hidden_size", None)
    return width if isinstance(width, int) else None


def room_on_disk(out: Path, d: int, answers: int, max_tokens: int, record: RecordOptions) -> str:
    r"""Return in words how much the hidden states can take, and how much is free.

    .. math:: \text{answers} \cdot \lceil \text{max\_tokens} / k \rceil \cdot d \cdot
        \text{bytes of a number}

    Answers that end by themselves take less, prompts with a ``max_tokens`` of their own perhaps
    more; tokens and counts are a few percent of it.
    """
    rows = answers * -(-max_tokens // record.k)
    most, free = rows * d * np.dtype(record.dtype).itemsize, shutil.disk_usage(out).free
    said = (
        f"up to about {most / 1e9:.1f} GB of hidden states ({answers:,} answers of up to "
        f"{max_tokens:,} tokens, {d:,} numbers of {record.dtype} every {record.k}); "
        f"{free / 1e9:.1f} GB are free"
    )
    if most < free:
        return said
    return f"warning: {said}. A larger --record.k or a smaller --limit needs less"

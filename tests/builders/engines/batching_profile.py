"""A profile of the embedded model on this machine, with times a small CPU may well take."""

from pathlib import Path

from data_collection.models import identify
from data_collection.versions import machine, vllm_version
from rescheduler.step_time.profile import (
    BatchTime,
    EngineDescription,
    FitQuality,
    Gradients,
    Profile,
    write_profile,
)


def profile_of(model: Path, path: Path, batch: BatchTime, where: str | None = None) -> Path:
    """Write a profile that says that batches of the model take so long."""
    identity = identify(str(model))
    engine = EngineDescription(
        model=identity.name,
        revision=identity.revision or "",
        dtype="float32",
        machine=where or machine(),
        engine_version=vllm_version() or "",
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        max_model_len=512,
    )
    quality = FitQuality(steps=9, error_p50=0.1, error_p95=0.2, new_only_error_p50=0.1, r2=0.9)
    slopes = Gradients(prompt=batch.per_new, decode=batch.per_context)
    write_profile(Profile(engine=engine, batch=batch, gradients=slopes, quality=quality), path)
    return path

"""A picture of how linear a machine is."""

from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt

from data_collection.atomic_file import replace_file
from rescheduler.step_time.profile import Profile

__all__ = ["draw_profile"]


def draw_profile(profile: Profile, steps: npt.NDArray[np.float64], out: Path) -> None:
    """Draw estimated over measured seconds, and the errors, of steps [n, 3] as a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    new, context, seconds = steps.T
    batch = profile.batch
    estimate = batch.constant + batch.per_new * new + batch.per_context * context
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    decodes = new <= profile.engine.max_num_seqs
    for kind, name in ((decodes, "decode"), (~decodes, "with a prompt")):
        left.loglog(1e3 * seconds[kind], 1e3 * estimate[kind], ".", label=name, alpha=0.6)
        right.semilogx(
            1e3 * seconds[kind], 100 * (estimate / seconds - 1)[kind], ".", label=name, alpha=0.6
        )
    ends = 1e3 * np.array([seconds.min(), seconds.max()])
    left.plot(ends, ends, "k-", linewidth=0.8)
    right.axhline(0.0, color="k", linewidth=0.8)
    left.set(xlabel="measured, ms", ylabel="a + b·new + c·context, ms")
    right.set(xlabel="measured, ms", ylabel="error, %")
    left.legend()
    engine = profile.engine
    figure.suptitle(f"{engine.model}, {engine.dtype}, {engine.machine}: seconds of a step")
    with replace_file(out) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    pyplot.close(figure)

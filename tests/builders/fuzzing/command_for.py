"""The command that a configuration file of `configs/` is for."""

from pathlib import Path


def command_for(config: Path) -> list[str]:
    """Return a verb and its required arguments."""
    if config.parent.name == "serve":
        return ["serve"]
    if config.parent.name == "collect":
        return ["collect", "out"]
    if config.parent.name == "prompt_length":
        return ["papers", "train-length", "dataset", "prompts"]
    if config.name.startswith("evaluate"):
        return ["evaluate", "dataset", "checkpoint"]
    if config.parent.name == "predictor":
        return ["train", "fit", "--data.dataset", "dataset"]
    words = config.read_text().partition("headway ")[2].split()  # as its first lines say
    arguments = words[: words.index("--config")]
    return arguments if arguments == ["simulate"] else [*arguments, "--out", "out"]

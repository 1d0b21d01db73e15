"""YAML files that people write."""

from pathlib import Path
from typing import Any

import yaml

from data_collection.text_file import read_text

__all__ = ["read_yaml"]


class _Loader(yaml.SafeLoader):
    """Refuses text that holds half of a surrogate pair."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        text = super().construct_scalar(node)
        text.encode()
        return text


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises:
        ValueError: the file cannot be read; says why in one line.
    """
    text = read_text(path)
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError(f"{path}: invalid YAML: it is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # PyYAML's, as for 2001-13-01
        raise ValueError(f"{path}: invalid YAML: {error}") from error
    except (LookupError, AttributeError) as error:  # PyYAML's, as for "!!bool x"
        raise ValueError(f"{path}: invalid YAML: a value does not fit its tag") from error

"""Names in vLLM's source, read without importing it: some of its modules need a GPU's libraries."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def _source_of(module: str) -> ast.Module:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text())


def _class_of(module: str, name: str) -> ast.ClassDef:
    for node in _source_of(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{module} has no class {name}")


def fields_of(module: str, name: str) -> set[str]:
    """Annotated fields of a class, read from the source."""
    return {
        item.target.id
        for item in _class_of(module, name).body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


@cache
def attributes_set_in(module: str, class_name: str) -> set[str]:
    """Names that the methods of a class assign on ``self``."""
    return {
        item.attr
        for item in ast.walk(_class_of(module, class_name))
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and isinstance(item.value, ast.Name)
        and item.value.id == "self"
    }


def metric_labels() -> dict[str, set[str]]:
    """The labels of every sample that an engine's own statistics export, by its name."""
    suffixes = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    found: dict[str, set[str]] = {}
    for call in ast.walk(_source_of("v1.metrics.loggers")):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        kind = call.func.attr.removeprefix("_").removesuffix("_cls")
        options = {one.arg: one.value for one in call.keywords}
        if kind not in suffixes or not {"name", "labelnames"} <= options.keys():
            continue
        name = options["name"]
        if not isinstance(name, ast.Constant):
            continue
        strings = {
            node.value
            for node in ast.walk(options["labelnames"])
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        variables = {
            node.id for node in ast.walk(options["labelnames"]) if isinstance(node, ast.Name)
        }
        labels = strings | ({"model_name", "engine"} if "labelnames" in variables else set())
        for suffix in suffixes[kind]:
            more = {"le"} if suffix == "_bucket" else set()
            found[f"{name.value}{suffix}"] = labels | more
    return found

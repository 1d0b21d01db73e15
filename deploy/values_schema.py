"""The schema of the chart's values: `python -m deploy.values_schema` writes Headway's options.

The rest of `charts/headway/values.schema.json` is the chart's own, and written by hand.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from deploy.json_text import json_text
from rescheduler.engines.deployment import CoordinatorOptions, EngineOptions
from rescheduler.engines.proxy_options import ProxyOptions

SCHEMA = Path(__file__).parents[1] / "charts" / "headway" / "values.schema.json"


def with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of the chart's values with the options that Headway has now."""
    values = schema["properties"]
    values["engine"]["properties"] = _options(EngineOptions)
    # The chart itself decides these.
    proxy = _options(ProxyOptions, "host", "port", "admin_port", "engine_key_file")
    values["proxy"]["properties"]["options"]["properties"] = proxy
    coordinator = _options(CoordinatorOptions, "endpoint", "host", "port")
    values["coordinator"]["properties"]["options"]["properties"] = coordinator
    return schema


def _options(options: type[msgspec.Struct], *left_out: str) -> dict[str, Any]:
    """Return what JSON schema says of a struct's fields, less what Helm says badly."""
    components = msgspec.json.schema_components([options])[1]
    fields = _fields(components, options.__name__)
    return {name: field for name, field in fields.items() if name not in left_out}


def _fields(components: dict[str, Any], of: str) -> dict[str, Any]:
    fields = {}
    for name, field in components[of]["properties"].items():
        # A value that is null in Helm is not there.
        choices = [c for c in field.get("anyOf", [field]) if c.get("type") != "null"]
        (field,) = choices
        if "$ref" in field:
            inner = field["$ref"].rpartition("/")[2]
            required = components[inner]["required"]
            fields[name] = {
                "type": "object",
                "properties": _fields(components, inner),
                "additionalProperties": False,
            } | ({"required": required} if required else {})
            continue
        if field.get("type") == "integer" and field.pop("exclusiveMinimum", None) == 0:
            field["minimum"] = 1
        fields[name] = {key: value for key, value in field.items() if key != "default"}
    return fields


if __name__ == "__main__":
    SCHEMA.write_text(json_text(with_options(json.loads(SCHEMA.read_text()))))

"""Reduce the schema of a Kubernetes custom resource to the fields that a manifest uses.

`python scripts/reduce_crd.py CRD.yaml VERSION REVISION MANIFEST.json > SCHEMA.json` keeps types,
required fields, patterns and bounds of these fields and forbids all others. Run it to update
`tests/launchers/kubernetes/*.schema.json` when an API changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KEPT = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "format")


def reduce(schema: dict[str, Any], used: Any) -> dict[str, Any]:
    """Return the part of the schema that the value uses.

    Args:
        schema: OpenAPI schema of the CRD.
        used: A value with every field to keep; the items of a list are merged.
    """
    kept = {name: schema[name] for name in KEPT if name in schema}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    properties = schema.get("properties")
    if isinstance(used, dict) and properties:
        kept["properties"] = {
            name: reduce(properties[name], value)
            for name, value in used.items()
            if name in properties
        }
        kept["required"] = schema.get("required", [])
        kept["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = reduce(schema["additionalProperties"], None)
    if "items" in schema:
        merged: Any = None
        for item in used or []:
            merged = {**merged, **item} if isinstance(merged, dict) else item
        kept["items"] = reduce(schema["items"], merged)
    return kept


def main() -> None:
    """Print the reduced schema."""
    crd, version, revision, manifest = sys.argv[1:]
    resource = yaml.safe_load(Path(crd).read_text(encoding="utf-8"))
    versions = {item["name"]: item for item in resource["spec"]["versions"]}
    whole = versions[version]["schema"]["openAPIV3Schema"]
    used = json.loads(Path(manifest).read_text(encoding="utf-8"))
    reduced = reduce(whole, {**used, "metadata": {}})
    reduced["required"] = ["apiVersion", "kind", "metadata", "spec"]
    reduced["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    reduced["properties"]["apiVersion"] = {"const": used["apiVersion"]}
    reduced["properties"]["kind"] = {"const": used["kind"]}
    source = f"{resource['metadata']['name']} {version}, as of {revision}; the fields that are used"
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": source}
    print(json.dumps({**document, **reduced}, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()

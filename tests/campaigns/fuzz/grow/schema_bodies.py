"""Request bodies grown from the schemas of `/openapi.json`: valid by type, random by value."""

import random
from dataclasses import dataclass
from typing import Any

from tests.campaigns.fuzz.grow import hostile
from tests.campaigns.fuzz.grow.hostile import Json
from tests.support.workloads import prose

REF = "#/components/schemas/"
MAX_DEPTH = 7
OPTIONAL_FIELDS = 4  # about, of an object: a request has up to 60
# Fields without which most requests are refused, and types that wire formats know.
EXPECTED = frozenset(
    {"input", "messages", "function", "name", "text", "parameters", "input_schema"}
)
TYPES = (
    *("text", "text", "input_text", "output_text", "function", "message", "function_call", "image"),
    *(
        "function_call_output",
        "tool_use",
        "tool_result",
        "thinking",
        "reasoning",
        "image_url",
        "file",
    ),
    *("input_image", "item_reference", "custom", "auto", "json_schema", "json_object", "ephemeral"),
)
REFUSED = "Not supported, refused."  # how the description of such a field begins
REFUSED_SHARE = 0.02
HOSTILE_TEXT_SHARE = 0.15
METHODS = ("get", "post", "delete")


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str  # with names of parameters in braces
    schema: Json | None  # of its body


def operations(document: Json) -> list[Operation]:
    """Return every operation of the document, with the schema of its body."""
    return [
        Operation(method, path, _body_schema(details))
        for path, methods in document["paths"].items()
        for method, details in methods.items()
        if method in METHODS
    ]


class Grower:
    """Grows values of schemas. Deep down, and for most texts, values are small."""

    def __init__(self, document: Json) -> None:
        self._schemas = document["components"]["schemas"]

    def grow(self, schema: Json, noise: random.Random, depth: int = 0) -> Json:
        if "$ref" in schema:
            return self.grow(self._schemas[schema["$ref"].removeprefix(REF)], noise, depth)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self._grow_one_of(schema[union], noise, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return noise.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._grow_object(schema, noise, depth)
            case "array":
                return self._grow_array(schema, noise, depth)
            case "string":
                return _text(noise, schema)
            case "integer":
                return _number(noise, schema, is_whole=True)
            case "number":
                return _number(noise, schema, is_whole=noise.random() < 0.5)
            case "boolean":
                return noise.random() < 0.5
            case "null":
                return None
            case _:
                return hostile.value(noise, depth)

    def _grow_one_of(self, choices: list[Json], noise: random.Random, depth: int) -> Json:
        plain = [each for each in choices if each.get("type") not in ("null", "array", "object")]
        is_deep = depth >= MAX_DEPTH
        return self.grow(noise.choice(plain if is_deep and plain else choices), noise, depth + 1)

    def _grow_object(self, schema: Json, noise: random.Random, depth: int) -> Json:
        required = schema.get("required", ())
        fields = schema.get("properties", {})
        n_fields = len(fields) if depth < MAX_DEPTH else 1_000
        share = OPTIONAL_FIELDS / (n_fields + OPTIONAL_FIELDS)
        grown = {
            name: noise.choice(TYPES)
            if name == "type" and inner.get("type") == "string" and "enum" not in inner
            else self.grow(inner, noise, depth + 1)
            for name, inner in fields.items()
            if name in required or noise.random() < share * _welcome(name, inner)
        }
        if grown.get("input", "") is None:
            grown["input"] = _text(noise, {})
        if isinstance(more := schema.get("additionalProperties"), dict):
            for _ in range(noise.randrange(3)):
                grown[_key(noise)] = self.grow(more, noise, depth + 1)
        elif not schema.get("properties") and noise.random() < 0.7:
            grown[_key(noise)] = hostile.value(noise, depth)
        return grown

    def _grow_array(self, schema: Json, noise: random.Random, depth: int) -> Json:
        if "prefixItems" in schema:
            return [self.grow(each, noise, depth + 1) for each in schema["prefixItems"]]
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", 4), 4) if depth < MAX_DEPTH else least
        n_items = noise.randint(least, max(least, most))
        return [self.grow(schema.get("items", {}), noise, depth + 1) for _ in range(n_items)]


def _body_schema(details: dict[str, Any]) -> Json | None:
    body = details.get("requestBody")
    return body["content"]["application/json"]["schema"] if body else None


def _welcome(name: str, schema: Json) -> float:
    if name in EXPECTED:
        return 1e9
    return REFUSED_SHARE if schema.get("description", "").startswith(REFUSED) else 1.0


def _key(noise: random.Random) -> str:
    return noise.choice(("type", "role", "1", "name", "properties", "city", hostile.text(noise)))


def _text(noise: random.Random, schema: Json) -> str:
    if noise.random() < HOSTILE_TEXT_SHARE:
        return hostile.text(noise)
    words = prose(str(noise.randrange(50)), noise.randrange(1, 12))
    return words if not schema.get("pattern") else words.split()[0]


def _number(noise: random.Random, schema: Json, *, is_whole: bool) -> int | float:
    if noise.random() < 0.1:
        return noise.choice(hostile.NUMBERS)
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    most = min(schema.get("maximum", 20), least + 1000)
    number = noise.uniform(least, max(least, most))
    return int(number) if is_whole else number

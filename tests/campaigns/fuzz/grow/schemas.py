"""JSON Schemas grown for grammars: keywords that are known, unknown, contradictory or expensive."""

import random

from tests.campaigns.fuzz.grow import hostile
from tests.campaigns.fuzz.grow.hostile import Json

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
NAMES = (
    *("a", "b", "city", "n", "", "\u00e9", "\x1b[1m", '"', "\\"),
    # Also keywords of JSON Schema: a walk must not take such a property for the keyword.
    *("items", "type", "$ref", "title", "properties", "enum", "pattern", "multipleOf"),
)
MULTIPLES = (2, 0.1, 0, -1, 1e-300, 7, 2**31 - 1, 10**15 + 37, 2**63, -(2**63), 1e300, "2")
PATTERNS = (
    *(
        "^a+$",
        "^[a-z]{3}$",
        "[0-9]{1,5}",
        "(a|b)*c",
        "^(a+)+$",
        "a{1000}",
        "[^x]",
        "\\d+\\s?",
        "(?=a)",
    ),
    *(
        "(?P<n>a)\\1",
        "[",
        "(",
        "a{2,1}",
        "\\p{L}+",
        "^$",
        ".*.*.*x",
        "(a{50}){50}",
        "\\u0041",
        "[z-a]",
    ),
)
FORMATS = ("date", "date-time", "uuid", "email", "ipv4", "uri", "regex", "none")
MAX_DEPTH = 5


def grown_schema(noise: random.Random, depth: int = 0) -> Json:
    """Return a schema, valid or not."""
    if noise.random() < 0.03:
        return hostile.value(noise)
    if noise.random() < 0.02:
        return _large(noise)
    schema = _typed(noise, depth)
    if depth == 0 and noise.random() < 0.3:
        schema["$defs"] = {"x": grown_schema(noise, 2), "y": {"$ref": "#/$defs/x"}}
    if noise.random() < 0.1:
        schema = hostile.mutated(schema, noise) if schema else schema
    return schema


def _typed(noise: random.Random, depth: int) -> dict[str, Json]:
    kind = noise.choice(TYPES if depth < MAX_DEPTH else TYPES[:5])
    if depth < MAX_DEPTH and noise.random() < 0.15:
        union = noise.choice(("anyOf", "oneOf", "allOf"))
        return {union: [grown_schema(noise, depth + 1) for _ in range(noise.randrange(4))]}
    if noise.random() < 0.08:
        target = ("#", "#/$defs/x", "#/$defs/y", "#/$defs/none", "http://x/y", "#/properties/a")
        return {"$ref": noise.choice(target)}
    if noise.random() < 0.12:
        return {"enum": [hostile.value(noise, 2) for _ in range(noise.randrange(6))]}
    if noise.random() < 0.05:
        return {"const": hostile.value(noise, 2)}
    schema: dict[str, Json] = {"type": kind}
    match kind:
        case "string":
            _some(schema, noise, minLength=_size(noise), maxLength=_size(noise))
            _some(schema, noise, pattern=noise.choice(PATTERNS), format=noise.choice(FORMATS))
        case "integer" | "number":
            number = noise.choice(hostile.NUMBERS)
            _some(schema, noise, minimum=number, maximum=noise.choice(hostile.NUMBERS))
            _some(schema, noise, multipleOf=noise.choice(MULTIPLES))
        case "array":
            schema["items"] = grown_schema(noise, depth + 1)
            _some(schema, noise, minItems=_size(noise), maxItems=_size(noise))
            _some(schema, noise, prefixItems=[grown_schema(noise, depth + 1)], uniqueItems=True)
        case "object":
            names = [noise.choice(NAMES) for _ in range(noise.randrange(5))]
            schema["properties"] = {name: grown_schema(noise, depth + 1) for name in names}
            _some(schema, noise, required=[*names, noise.choice(NAMES)])
            more = noise.choice((True, False, grown_schema(noise, depth + 1)))
            _some(schema, noise, additionalProperties=more, minProperties=_size(noise))
    return schema


def _some(schema: dict[str, Json], noise: random.Random, **keywords: Json) -> None:
    schema |= {name: value for name, value in keywords.items() if noise.random() < 0.3}


def _size(noise: random.Random) -> Json:
    return noise.choice((0, 1, 2, 5, 50, 1_000, 100_000, 2**31, 2**63, -1, 1.5, "1"))


def _large(noise: random.Random) -> Json:
    n = noise.choice((*[500] * 6, *[3_000] * 3, 10_000))
    match noise.randrange(4):
        case 0:
            return {"enum": [f"value {i}" for i in range(n)]}
        case 1:
            return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}}
        case 2:
            return {"anyOf": [{"type": "string", "maxLength": i} for i in range(n // 10)]}
        case _:
            schema: Json = {"type": "string"}
            for _ in range(noise.choice((20, 60, 150))):
                schema = {"type": "array", "items": schema}
            return schema

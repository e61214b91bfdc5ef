"""The fields of items and their parts that this server knows. Others are not stored."""

from typing import Any

from rekindle.api.body import WireModel
from rekindle.api.requests.media import MEDIA_FIELDS

# Fields of items and parts of unknown types that their readers use.
ALSO_READ = MEDIA_FIELDS | {"call_id", "action", "operation", "arguments", "output", "status"}


def known_fields(part: WireModel) -> dict[str, Any]:
    """Return the fields that the client has sent and that this server knows."""
    fields = type(part).model_fields
    known = {
        fields[name].alias or name: _plain(value)
        for name, value in part.__dict__.items()
        if name in part.model_fields_set
    }
    return known | {
        name: value for name, value in (part.model_extra or {}).items() if name in ALSO_READ
    }


def _plain(value: object) -> object:
    if isinstance(value, WireModel):
        return known_fields(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value

"""Sampling that the files of a model recommend: values that no setting could have are left out."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from rekindle.config.declare import About
from rekindle.config.sampling import SamplingSettings

_log = logging.getLogger(__name__)

_SETTINGS = {each.name: each for each in fields(SamplingSettings)}


def recommended(keys: Mapping[str, str], values: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of a file, which are texts or numbers, by the names of settings.

    `keys` has the key in the file for each setting.
    """
    taken: dict[str, Any] = {}
    for name, key in keys.items():
        if (value := values.get(key)) is None:
            continue
        about: About = _SETTINGS[name].metadata["about"]
        number = _number(about.words.get(str(value), value))
        if number is not None and about.minimum <= number <= about.maximum:
            taken[name] = int(number) if int in get_args(_SETTINGS[name].type) else number
        else:
            least, most = f"{about.minimum:g}", f"{about.maximum:g}"
            _log.warning(
                "sampling: the model's file has %s=%.40s, which is left out; %s to %s are allowed",
                *(key, value, least, most),
            )
    return taken


def _number(value: object) -> float | None:
    """Return None for what is no number. NaN is returned: no limits contain it."""
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        return None

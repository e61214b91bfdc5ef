"""Scales of LoRA adapters that requests name. The scales are set at the start of the server."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from rekindle.api.body import WireModel, fault
from rekindle.errors import InvalidRequest
from rekindle.models.card import LoraCard


class AdapterScale(WireModel):
    id: int
    scale: Annotated[float, Field(ge=-1e6, le=1e6)]


def check_scales(
    wanted: Sequence[AdapterScale], adapters: Sequence[LoraCard], field: str = ""
) -> None:
    """Raise InvalidRequest unless every adapter has the wanted scale: stored rows depend on it.

    As in llama-server, the wanted scale of an adapter that is not listed is 0. `field` has the
    list; empty: the body is the list.
    """
    prefix = f"{field}." if field else ""
    for index, each in enumerate(wanted):
        if not 0 <= each.id < len(adapters):
            raise fault(f"{prefix}{index}.id", f": this model has no LoRA adapter {each.id}.")
        if each.scale != adapters[each.id].scale:
            raise fault(f"{prefix}{index}.scale", f": {_is_set(each.id, adapters[each.id])}")
    listed = {each.id for each in wanted}
    for number, adapter in enumerate(adapters):
        if number not in listed and adapter.scale != 0:
            raise InvalidRequest(
                f"The LoRA adapter {number} is not listed, which means the scale 0:"
                f" {_is_set(number, adapter)}",
                field or None,
            )


def _is_set(number: int, adapter: LoraCard) -> str:
    return (
        f"adapter {number} has the scale {adapter.scale:g}. Scales are set at the start, with"
        " `--lora-scaled FILE:SCALE`."
    )

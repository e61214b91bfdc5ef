"""The ids of the calls in a request: which call a result belongs to."""

from collections.abc import Sequence

from rekindle.errors import InvalidRequest


class CallIds:
    """The ids of the calls so far, by what clients leave of them: one makes `call_1` `call1`."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._by_core: dict[str, str] = {}
        self._lone_without_id = False

    def add(self, ids: Sequence[str]) -> None:
        """Those of one message."""
        if not ids:
            return
        self._exact.update(ids)
        self._by_core.update((_core(each), each) for each in ids if _core(each))
        self._lone_without_id = list(ids) == [""]

    def find(self, call_id: str) -> str | None:
        """The id of the call that is meant, as the call has it."""
        if call_id in self._exact:
            return call_id
        if found := self._by_core.get(_core(call_id)):
            return found
        return "" if self._lone_without_id else None

    def resolve(self, call_id: str, path: str) -> str:
        """As `find`, but raise InvalidRequest for an id that no call has."""
        found = self.find(call_id)
        if found is None:
            raise InvalidRequest(
                f"`{path}`: no earlier tool call in this request has the id `{call_id}`.", path
            )
        return found


def _core(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id)).lower()

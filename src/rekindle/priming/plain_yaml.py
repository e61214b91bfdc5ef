"""YAML without aliases, deep nesting and endless numbers.

Nine lines of aliases can stand for a billion values. Files that people write to prime have none.
"""

from typing import Any

import yaml

MAX_BYTES = 2**20  # a parser in Python reads 100 KB in a second; picked
_MAX_DEPTH = 100  # as deep as the server reads JSON; picked
_MAX_NUMBER = 400  # characters; picked


def load(text: str) -> object:
    """Return the value of the only document. Raises YAMLError."""
    try:
        value: object = yaml.load(text, _PlainLoader)
    except (ValueError, RecursionError) as error:  # such as a date with 13 months
        raise yaml.YAMLError(str(error)) from error
    return value


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise self._refusal("aliases are not read", self.peek_event())
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def fetch_more_tokens(self) -> Any:
        if max(self._depth, self.flow_level, len(self.indents)) > _MAX_DEPTH:
            raise self._refusal(f"values are nested more than {_MAX_DEPTH} deep", None)
        return super().fetch_more_tokens()

    def construct_number(self, node: Any) -> Any:
        if len(node.value) > _MAX_NUMBER:
            raise yaml.constructor.ConstructorError(
                None, None, "a number is too long", node.start_mark
            )
        is_float = node.tag.endswith(":float")
        return self.construct_yaml_float(node) if is_float else self.construct_yaml_int(node)

    def _refusal(self, problem: str, event: Any) -> yaml.MarkedYAMLError:
        mark = event.start_mark if event is not None else self.get_mark()
        return yaml.composer.ComposerError(None, None, problem, mark)


for _tag in ("int", "float"):
    _PlainLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _PlainLoader.construct_number)

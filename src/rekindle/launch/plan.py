"""What an agent gets for one run: arguments, variables and files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.launch.overlay import FolderOverlay

_OUTPUT_SHARE = 4  # a reply may take a quarter of the context; picked
_MAX_OUTPUT_TOKENS = 32_000  # what Claude Code and qwen-code ask for by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server, and the model that the agent uses."""

    url: str  # without /v1
    key: str
    model: str
    n_ctx: int | None  # None: the server did not tell

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def n_output(self) -> int | None:
        """Return the tokens that a reply may have. Agents reserve them within the context."""
        return None if self.n_ctx is None else min(self.n_ctx // _OUTPUT_SHARE, _MAX_OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    arguments: Sequence[str] = ()  # before those of the user
    environment: Mapping[str, str] = field(default_factory=dict)
    prepended: Mapping[str, str] = field(default_factory=dict)  # to variables that list paths
    removed: Sequence[str] = ()  # variables that would lead the agent to another server
    files: Mapping[str, str] = field(default_factory=dict)  # by name, in a folder of this run
    overlay: FolderOverlay | None = None


MakePlan = Callable[[Endpoint, Path], LaunchPlan]  # the folder of this run


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAgent:
    name: str  # on our command line
    title: str
    program: str
    install: str  # the command that installs it
    api: str
    n_first_prompt: int  # tokens of the first request, about; 0: it depends on the user
    plan: MakePlan

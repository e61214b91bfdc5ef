"""Every error that crosses a module boundary, as one tree, ordered by who can act on it."""

from collections.abc import Sequence

MAX_NAMES_SHOWN = 20  # names of models in one error; picked


class RekindleError(Exception):
    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class RequestError(RekindleError):
    """The client can fix it: 4xx."""


class InvalidRequest(RequestError):
    """A field is wrong, unsupported, or contradicts another.

    `param` is the field's path, as the client wrote it (`messages.0.role`).
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt alone exceeds the context."""

    def __init__(self, *, n_prompt: int, n_ctx: int) -> None:
        # Agents compact on words of OpenAI ("maximum context length is") and llama-server.
        super().__init__(
            f"This model's maximum context length is {n_ctx} tokens, with at least one for the"
            f" reply. The prompt has {n_prompt} tokens, which exceeds the available context size."
            " Send a shorter prompt, or start the server with a larger --ctx-size. --overflow trim,"
            ' or "overflow": "trim" in the request, leaves out the oldest turns of a chat, but cuts'
            " no message."
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class UnknownModel(RequestError):
    """This server has no model of that name: 404."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        shown = ", ".join(f"`{each}`" for each in known[:MAX_NAMES_SHOWN])
        more = f" and {len(known) - MAX_NAMES_SHOWN} more" if len(known) > MAX_NAMES_SHOWN else ""
        super().__init__(f"The model `{name:.200}` is not served here. Available: {shown}{more}.")


class ClientLeft(RequestError):
    """Nobody waits for the answer any more."""


class NotSupported(RequestError):
    """This model or this server cannot do it: 501, as llama-server answers."""


class ModelInUse(RequestError):
    """The model cannot be unloaded now: 409."""


class PromptDeleted(RequestError):
    """A deletion came while the prompt was being stored: 409."""


class Overloaded(RekindleError):
    """Try later: 429."""

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ShuttingDown(RekindleError):
    """The server is shutting down: 503."""


class EngineFailed(RekindleError):
    """The engine process dies again and again: 503."""

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineError(RekindleError):
    """Nobody can fix it in this request: 500."""


class ContextFull(EngineError):
    """Every cell is in use. Nothing was decoded, so freeing cells helps."""


class DecodeFailed(EngineError):
    """llama.cpp failed to compute a batch.

    `rows_intact`: the slots still hold the rows from before the batch.
    """

    def __init__(self, message: str, *, rows_intact: bool = False) -> None:
        super().__init__(message)
        self.rows_intact = rows_intact


class EngineDied(EngineError):
    """The process of the engine ended before it could be used."""


class RequestCrashed(EngineError):
    """The request was in the batch at several deaths of the engine process: 500."""


class CallBroken(EngineError):
    """The beginning of a tool call was sent, and the call cannot be finished: 500."""


class ModelLoadFailed(EngineError):
    """The model that the request names cannot be loaded."""


class UpstreamFailed(RekindleError):
    """The engine behind us failed: 502."""


class UpstreamTimedOut(UpstreamFailed):
    """The upstream did not answer in time: 504."""


class CacheError(RekindleError):
    """Never reaches a client: it becomes a miss, and is counted."""


class EntryCorrupt(CacheError):
    """The stored bytes differ from the written ones."""


class EntryMissing(CacheError):
    """The entry is no longer there."""


class TierFailed(CacheError):
    """The store cannot be read or written now."""


class TierDamaged(TierFailed):
    """The store holds something else than was written. It will begin anew."""


class TierFull(TierFailed):
    """The store works, but has no room for this entry."""


class EntryForgotten(TierFull):
    """A deletion covers the entry: the store does not take it."""


class StoreUnreachable(TierFailed):
    """Nothing listens there: the next call would fail as well."""


class PrimeError(RekindleError):
    """A prompt was not computed ahead. The message names the file or the reason."""


class StartupError(RekindleError):
    """The operator can fix it: one sentence on stderr, exit code 2."""


class UnreadableFile(StartupError):
    """A file that the user named cannot be read, or is too large. The message names it."""


class UpstreamsAway(StartupError):
    """No upstream answers yet, and a retry may help: exit code 1."""

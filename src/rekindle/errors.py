"""Every error that crosses a module boundary, as one tree, ordered by who can act on it.

RekindleError
  RequestError           the client can fix it: 4xx
    InvalidRequest         a field is wrong, unsupported, or contradicts another
    PromptTooLong          the prompt alone exceeds the context
    UnknownModel           this server has no model of that name: 404
    ModelInUse             the model cannot be unloaded now: 409
  Overloaded             try later: 429
  ShuttingDown           the server is shutting down: 503
  EngineError            nobody can fix it in this request: 500
    ContextFull            every cell is in use; nothing was decoded, so freeing cells helps
    DecodeFailed           llama.cpp failed to compute a batch
    ModelLoadFailed        the model that the request names cannot be loaded
  UpstreamFailed         the engine behind us failed: 502
    UpstreamTimedOut       it did not answer in time: 504
  CacheError             never reaches a client: it becomes a miss, and is counted
    EntryCorrupt           the stored bytes differ from the written ones
    EntryMissing           the entry is no longer there
    TierFailed             the store cannot be read or written now
      TierFull               the store works, but has no room for this entry
      StoreUnreachable       nothing listens there: the next call would fail as well
  PrimeError             a prompt was not computed ahead; the message names the file or the reason
  StartupError           the operator can fix it: one sentence on stderr, exit code 2
    UpstreamsAway          no upstream answers yet, and a retry may help: exit code 1
"""

from collections.abc import Sequence

MAX_NAMES_SHOWN = 20  # names of models in one error; picked


class RekindleError(Exception):
    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class RequestError(RekindleError):
    pass


class InvalidRequest(RequestError):
    """`param` is the path of the wrong field, as the client wrote it (`messages.0.role`)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    def __init__(self, *, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"The prompt has {n_prompt} tokens, but the context holds {n_ctx}, with at least one"
            " for the reply. Send a shorter prompt, or start the server with a larger --ctx-size,"
            " or with --overflow trim to leave out the oldest turns."
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class UnknownModel(RequestError):
    def __init__(self, name: str, known: Sequence[str]) -> None:
        shown = ", ".join(f"`{each}`" for each in known[:MAX_NAMES_SHOWN])
        more = f" and {len(known) - MAX_NAMES_SHOWN} more" if len(known) > MAX_NAMES_SHOWN else ""
        super().__init__(f"The model `{name:.200}` is not served here. Available: {shown}{more}.")


class ModelInUse(RequestError):
    pass


class Overloaded(RekindleError):
    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ShuttingDown(RekindleError):
    pass


class EngineError(RekindleError):
    pass


class ContextFull(EngineError):
    pass


class DecodeFailed(EngineError):
    """`rows_intact`: the slots still hold the rows from before the batch."""

    def __init__(self, message: str, *, rows_intact: bool = False) -> None:
        super().__init__(message)
        self.rows_intact = rows_intact


class ModelLoadFailed(EngineError):
    pass


class UpstreamFailed(RekindleError):
    pass


class UpstreamTimedOut(UpstreamFailed):
    pass


class CacheError(RekindleError):
    pass


class EntryCorrupt(CacheError):
    pass


class EntryMissing(CacheError):
    pass


class TierFailed(CacheError):
    pass


class TierFull(TierFailed):
    pass


class StoreUnreachable(TierFailed):
    pass


class PrimeError(RekindleError):
    pass


class StartupError(RekindleError):
    pass


class UpstreamsAway(StartupError):
    pass

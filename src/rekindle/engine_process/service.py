"""An engine behind a link: it loads, begins, serves orders and stops.

The main thread loads the model and becomes the engine thread. The thread `link-reader` receives
orders, tells that the process lives, and answers what needs no engine thread.
"""

import gc
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from rekindle.engine.loop import CLOSE_SECONDS, EngineLoop
from rekindle.engine.orders import Ask, Cancel, Delivery, FailAll, Stop, Wake
from rekindle.engine.scheduler.sampler_queue import PreparingThreads
from rekindle.engine_process.grammar_checks import GrammarChecks
from rekindle.engine_process.loaded import LoadedEngine
from rekindle.engine_process.prefixes import PrefixStores
from rekindle.errors import EngineError, RekindleError, ShuttingDown, StartupError
from rekindle.generation.events import (
    Embedded,
    Finished,
    PrefillProgress,
    PromptEvaluated,
    TokenEvent,
    TokenSampled,
)
from rekindle.link.activity_page import ActivityPage
from rekindle.link.encoding import decode_order, encode, error_message, kind_and_number
from rekindle.link.frames import FrameSender, can_receive, receive
from rekindle.link.messages import (
    Answer,
    AskPrefixes,
    AskStatus,
    Begin,
    CancelCheck,
    CancelRequest,
    CheckGrammar,
    Embed,
    End,
    Evaluated,
    Event,
    FailRequests,
    Failure,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    Logged,
    NoAnswer,
    Order,
    Progress,
    Report,
    SetMemoryBudget,
    Started,
    StatusReport,
    Step,
    StopEngine,
    Submit,
    Token,
    Vectors,
)

_log = logging.getLogger(__name__)

BEAT_SECONDS = 0.25  # between two heartbeats of an idle link; picked
SEND_SECONDS = 5.0  # for the server to read the last reports; picked


class LoadEngine(Protocol):
    """Loads a model. Raises StartupError."""

    def __call__(self, order: Load, *, on_progress: Callable[[float], bool]) -> LoadedEngine: ...


GiveUp = Callable[[], None]
LogTo = Callable[[logging.Handler, int], None]


class EngineService:
    """Serves one engine over a link. `load` loads the model that the first order names.

    `log_to` gets the handler that sends log lines to the server, and the level of the log.
    `give_up` is called if the engine does not stop soon after the server has left.
    """

    def __init__(
        self,
        sock: socket.socket,
        page: ActivityPage,
        *,
        load: LoadEngine,
        log_to: LogTo,
        give_up: GiveUp,
    ) -> None:
        self._log_to = log_to
        self._load_engine = load
        self._give_up = give_up
        self._sock = sock
        self._page = page
        self._sender = FrameSender(sock)
        self._setup: SimpleQueue[Load | Begin | None] = SimpleQueue()
        self._numbers: dict[str, int] = {}  # of requests that have not ended, by id
        self._loop: EngineLoop | None = None
        self._n_steps_reported = -1
        self._status_lock = threading.Lock()
        self._is_ready = threading.Event()  # `_loop` takes orders
        self._stores: PrefixStores | None = None
        self._loaded: LoadedEngine | None = None
        self._has_ended = threading.Event()
        self._checks: GrammarChecks | None = None

    def run(self) -> None:
        """Serve until the server sends `StopEngine`, or leaves."""
        threading.Thread(target=self._read, name="link-reader", daemon=True).start()
        try:
            order = self._setup.get()
            if isinstance(order, Load) and self._load(order):
                begin = self._setup.get()
                if isinstance(begin, Begin):
                    self._serve(begin)
        finally:
            self._has_ended.set()
            if self._checks is not None:
                self._checks.close()
            self._sender.close(SEND_SECONDS)

    def _load(self, order: Load) -> bool:
        self._log_to(_LinkLog(self._send), order.log_level)
        try:
            self._loaded = self._load_engine(order, on_progress=self._report_progress)
        except StartupError as error:
            self._send(LoadFailed(error.message))
            return False
        self._send(Loaded(self._loaded.about))
        threading.Thread(target=self._prepare_grammars, name="grammars", daemon=True).start()
        return True

    def _prepare_grammars(self) -> None:
        """Spare the first reply under a grammar a wait, while the server gets ready."""
        assert self._loaded is not None
        try:
            self._loaded.backend.prepare_grammars()
        except Exception as error:  # a request with a grammar will get the error
            _log.warning("engine: grammars do not work with this model: %s", error)

    def _report_progress(self, fraction: float) -> bool:
        self._send(Loading(fraction))
        return True

    def _serve(self, order: Begin) -> None:
        loaded = self._loaded
        assert loaded is not None
        self._stores = PrefixStores(order, on_open=lambda traits: self._send(Started(traits)))
        loop = EngineLoop(
            loaded.backend,
            self._deliver,
            partial(self._stores.open, partial(loaded.identity, order.weights, order.adapters)),
            queue_size=loaded.queue_size,
            embedder=loaded.embedder,
            preparer=PreparingThreads(),
            activity=self._page,
        )
        self._loop = loop
        self._is_ready.set()
        gc.freeze()
        loop.run()
        self._send(StatusReport(0, loop.status()))

    # -- orders, on the thread `link-reader` --

    def _read(self) -> None:
        try:
            while (order := self._next_order()) is not None:
                self._obey(order)
        except Exception:
            # As a crash, so that the next process continues every reply.
            _log.exception("engine: link failed")
            self._sender.close(SEND_SECONDS)
            self._give_up()
            return
        self._end()

    def _next_order(self) -> Order | None:
        while True:
            while not can_receive(self._sock, BEAT_SECONDS):
                self._page.beat()
                self._report_steps()
            self._page.beat()
            message = receive(self._sock)
            if message is None:
                return None
            try:
                return decode_order(message)
            except msgspec.ValidationError as error:
                self._refuse(message, error)

    def _refuse(self, message: bytes, error: msgspec.ValidationError) -> None:
        """Fail the one request. A crash would meet it again."""
        _log.error("engine: order not understood: %s", error)
        kind, number = kind_and_number(message)
        failure = error_message(EngineError(f"The engine cannot read the request: {error}"))
        if kind in (Submit, Embed):
            self._send(Step([Failure(number, failure)]))
        elif kind in (AskPrefixes, CheckGrammar):
            self._send(NoAnswer(number, failure))
        else:
            raise error

    def _report_steps(self) -> None:
        """Report the status unasked after some steps: the counters outlive this process."""
        n_steps = self._page.pulse().n_steps
        if self._loop is not None and n_steps != self._n_steps_reported:
            self._n_steps_reported = n_steps
            self._report_status(self._loop)

    def _report_status(self, loop: EngineLoop, number: int = 0) -> None:
        with self._status_lock:  # an older status must not follow a newer one
            self._send(StatusReport(number, loop.status()))

    def _end(self) -> None:
        """End with the server: store the rows of every slot, but do not take for ever."""
        self._setup.put(None)
        seconds = 0.0
        if self._loop is not None:
            self._loop.inbox.put(Stop())
            seconds = CLOSE_SECONDS + SEND_SECONDS
        if not self._has_ended.wait(seconds):
            self._give_up()

    @property
    def _engine(self) -> EngineLoop:
        while not self._is_ready.wait(BEAT_SECONDS):
            self._page.beat()
        assert self._loop is not None
        return self._loop

    def _obey(self, order: Order) -> None:
        match order:
            case Load() | Begin():
                self._setup.put(order)
            case Submit(number, request):
                self._numbers[request.id] = number
                self._engine.inbox.put(request)
            case Embed(number, embedding):
                self._numbers[embedding.id] = number
                self._engine.inbox.put(embedding)
            case CancelRequest(request_id):
                self._numbers.pop(request_id, None)
                self._engine.inbox.put(Cancel(request_id))
            case AskPrefixes(number, question):
                asked: Ask[Any] = Ask(question, number)
                asked.outcome.add_done_callback(partial(self._answer, number))
                self._engine.inbox.put(asked)
            case CheckGrammar(number, grammar):
                check = self._grammar_checks.submit(number, grammar)
                check.add_done_callback(partial(self._answer, number))
            case CancelCheck(number):
                self._grammar_checks.cancel(number)
            case AskStatus(number):
                self._report_status(self._engine, number)
            case SetMemoryBudget(n_bytes):
                engine = self._engine
                assert self._stores is not None
                self._stores.set_memory_budget(n_bytes)
                engine.inbox.put(Wake())
            case FailRequests(message):
                self._engine.inbox.put(FailAll(ShuttingDown(message)))
            case StopEngine():
                self._engine.inbox.put(Stop())

    @property
    def _grammar_checks(self) -> GrammarChecks:
        if self._checks is None:
            assert self._loaded is not None
            backend = self._loaded.backend
            self._checks = GrammarChecks(
                backend.check_grammar, backend.compiles_quickly, self._page
            )
        return self._checks

    def _answer(self, number: int, outcome: Future[Any]) -> None:
        if outcome.cancelled():
            return
        error = outcome.exception()
        if error is None:
            self._send(Answer(number, msgspec.Raw(encode(outcome.result()))))
            return
        if not isinstance(error, RekindleError):
            _log.error("engine: question failed", exc_info=error)
            error = EngineError(f"The engine could not answer: {error}")
        self._send(NoAnswer(number, error_message(error)))

    # -- events, on the engine thread --

    def _deliver(self, deliveries: list[Delivery]) -> None:
        events: list[Event] = []
        ends: list[Event] = []
        for request_id, event in deliveries:
            number = self._numbers.get(request_id)
            if number is None:
                continue  # cancelled a moment ago
            if isinstance(event, TokenSampled | PrefillProgress | PromptEvaluated):
                events.append(_event(number, event))
            else:
                ends.append(_event(number, event))
                self._numbers.pop(request_id, None)
        if events:
            self._send(Step(events))
        if ends:
            # First: when a client has its whole reply, the status does not show it as running.
            if self._loop is not None:
                self._report_status(self._loop)
            self._send(Step(ends))

    def _send(self, report: Report) -> None:
        self._sender.send(encode(report))


def _event(number: int, event: TokenEvent | Embedded | RekindleError) -> Event:
    match event:
        case TokenSampled(token, logprobs, lands, drafted, state):
            return Token(number, token, logprobs, lands, drafted, state)
        case PrefillProgress():
            return Progress(number, event)
        case PromptEvaluated():
            return Evaluated(number, event)
        case Finished():
            return End(number, event)
        case Embedded():
            return Vectors(number, event)
        case RekindleError():
            return Failure(number, error_message(event))


class _LinkLog(logging.Handler):
    """Sends log lines to the server, which writes them to its own log."""

    def __init__(self, send: Callable[[Report], None]) -> None:
        super().__init__()
        self._send = send
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).encode("utf-8", "replace").decode()
        self._send(Logged(record.name, record.levelno, text))

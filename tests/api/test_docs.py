"""`docs/wire-apis.md` lists every endpoint and every field, with what becomes of it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

from starlette.routing import Route

from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.body import Ignored, Refused, WireModel
from rekindle.api.cache.bodies import (
    CacheStories,
    DraftTokens,
    MissBody,
    NeutralisedText,
    OmittedMediaBody,
    Span,
    StickyToolsBody,
    TierProps,
    TierTokens,
)
from rekindle.api.completion.schema import InfillRequest, NativeRequest
from rekindle.api.gemini.schema import CachedContentRequest, GenerateContentRequest
from rekindle.api.native.schema import (
    CacheProps,
    DetokenizeRequest,
    DialectProps,
    RekindleProps,
    SlotFile,
    TokenizeRequest,
)
from rekindle.api.native.vector_schema import NativeEmbeddingRequest, RerankRequest
from rekindle.api.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from rekindle.api.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingsRequest,
)
from rekindle.api.requests.sampling import SHARED_FIELDS
from rekindle.api.responses.schema import CreateResponseRequest
from tests.api.client import app_of
from tests.api.fakes import FakeResponder

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire-apis.md").read_text()
# Fields of OpenAI's completions that llama-server's own lack.
NOT_NATIVE = {
    *("response_format", "stream_options", "user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("echo", "best_of", "suffix"),
}
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \|", re.MULTILINE)


def documented(heading: str) -> dict[str, str]:
    return dict(ROW.findall(section(heading)))


def keys(heading: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", section(heading), re.MULTILINE))


def section(heading: str) -> str:
    _, _, after = DOCUMENT.partition(f"\n### {heading}\n")
    return re.split(r"^##", after, maxsplit=1, flags=re.MULTILINE)[0]


def fields_of(model: type[WireModel], path: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        where = path + (field.alias or name)
        fates = {Ignored: "ignored", Refused: "refused"}
        marks = [fates[type(mark)] for mark in field.metadata if type(mark) in fates]
        yield where, marks[0] if marks else "honoured"
        for inner, brackets in models_in(field.annotation):
            yield from fields_of(inner, f"{where}{brackets}.")


def models_in(annotation: object, brackets: str = "") -> Iterator[tuple[type[WireModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, WireModel):
        yield annotation, brackets
    for part in get_args(annotation):
        yield from models_in(part, brackets + "[]" if get_origin(annotation) is list else brackets)


def test_every_field_is_documented_with_its_fate() -> None:
    chat = dict(fields_of(ChatCompletionRequest))
    completions = dict(fields_of(CompletionRequest))
    shared = chat.items() & completions.items()
    assert documented("Both completion endpoints") == dict(shared)
    assert documented("Chat completions, and `/apply-template`") == dict(chat.items() - shared)
    assert documented("Completions") == dict(completions.items() - shared)
    native = dict(fields_of(NativeRequest)) | dict(fields_of(InfillRequest))
    native["prompt"] = "honoured"
    own = dict(native.items() - completions.items())
    assert documented("Completion and infill") == {**own, "prompt": "honoured"}
    not_native = completions.keys() - native.keys()
    assert {name.partition(".")[0] for name in not_native} == NOT_NATIVE
    assert documented("Embeddings") == dict(fields_of(EmbeddingsRequest))
    assert documented("Responses") == dict(fields_of(CreateResponseRequest))
    assert documented("Messages") == dict(fields_of(MessagesRequest))
    gemini = dict(fields_of(GenerateContentRequest))
    assert documented("Gemini") == gemini
    cached = dict(fields_of(CachedContentRequest))
    assert documented("Cached contents") == dict(cached.items() - gemini.items())
    ollama_chat = dict(fields_of(OllamaChatRequest))
    ollama_generate = dict(fields_of(OllamaGenerateRequest))
    shared = ollama_chat.items() & ollama_generate.items()
    assert documented("Ollama's chat and generate") == dict(shared)
    assert documented("Ollama's chat") == dict(ollama_chat.items() - shared)
    assert documented("Ollama's generate") == dict(ollama_generate.items() - shared)
    assert documented("Ollama's embed") == dict(fields_of(OllamaEmbedRequest))
    assert documented("Ollama's embeddings") == dict(fields_of(OllamaEmbeddingsRequest))
    assert documented("Ollama's show and pull") == dict(fields_of(OllamaShowRequest))
    assert documented("Embedding") == dict(fields_of(NativeEmbeddingRequest))
    assert documented("Rerank") == dict(fields_of(RerankRequest))
    assert documented("Slots") == dict(fields_of(SlotFile))
    assert documented("Tokenize") == dict(fields_of(TokenizeRequest))
    assert documented("Detokenize") == dict(fields_of(DetokenizeRequest))


def test_every_key_about_the_cache_is_documented() -> None:
    story = CacheStories.__annotations__.keys() | {
        *(f"cached[].{key}" for key in TierTokens.__annotations__),
        *(f"drafts[].{key}" for key in DraftTokens.__annotations__),
        *(f"spans[].{key}" for key in Span.__annotations__),
        *(f"neutralised[].{key}" for key in NeutralisedText.__annotations__),
        *(f"media_omitted[].{key}" for key in OmittedMediaBody.__annotations__),
        *(f"sticky_tools.{key}" for key in StickyToolsBody.__annotations__),
        *(f"miss.{key}" for key in MissBody.__annotations__),
    }
    tiers = {f"tiers[].{key}" for key in TierProps.__annotations__}
    assert keys("Where the prompt came from") == story
    dialect = {f"dialect.{key}" for key in DialectProps.__annotations__}
    server = RekindleProps.__annotations__.keys() - {"version", "dialect", "cache"}
    assert keys("Props") == CacheProps.__annotations__.keys() | tiers | dialect | server


def test_every_endpoint_is_documented() -> None:
    _, _, after = DOCUMENT.partition("\n## Endpoints\n")
    cells = re.findall(r"^\| (`.+?`) \|", after.split("\n## ")[0], re.MULTILINE)
    listed = {path for cell in cells for path in re.findall(r"/[\w./{}:-]*", cell)}
    served = {
        route.path.replace(":path", "")
        for route in app_of(FakeResponder()).routes
        if isinstance(route, Route)
    }
    assert listed == served


def test_no_field_that_is_ignored_or_refused_has_the_name_of_a_sampling_setting() -> None:
    """`sampling_of` takes such names from any body, and marked fields have unchecked values."""
    for model in _subclasses(WireModel):
        for name in SHARED_FIELDS & model.model_fields.keys():
            marks = [type(each) for each in model.model_fields[name].metadata]
            assert Ignored not in marks, f"{model.__name__}.{name}"
            assert Refused not in marks, f"{model.__name__}.{name}"


def _subclasses(model: type[WireModel]) -> Iterator[type[WireModel]]:
    for each in model.__subclasses__():
        yield each
        yield from _subclasses(each)

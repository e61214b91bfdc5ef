"""What it takes to find the shortest end of a call: `python -m bench.parts.landing [MODEL.gguf]`.

The grammars are those of tools with many members. The search runs on the engine thread, so its
longest time is a pause of every stream. Times are those of the processor.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.families import HERMES, LFM2
from rekindle.chat.dialects.syntax.lark import literals
from rekindle.generation.request import Grammar, GrammarKind, Landing
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.model import VocabularyFile
from rekindle.models.source import resolve_model
from tests.support.dialects import GEMMA4, QWEN_XML

N_TIMES = 20
DIALECTS = {"JSON": HERMES, "tags": QWEN_XML, "Python": LFM2, "braces": GEMMA4}


def schema(n_required: int, n_optional: int) -> dict[str, Any]:
    required = [f"required_{i}" for i in range(n_required)]
    inner = {"type": "object", "properties": {"deep": {"type": "string"}}, "required": ["deep"]}
    properties: dict[str, Any] = {}
    for index in range(max(n_required, n_optional)):
        if index < n_optional:
            properties[f"optional_{index}"] = inner
        if index < n_required:
            properties[required[index]] = {"type": "string"}
    return {"type": "object", "properties": properties, "required": required}


SCHEMAS = {"2 required": schema(2, 2), "20 required": schema(20, 20), "50 required": schema(50, 50)}


def measure(compiler: GrammarCompiler, dialect: Dialect, arguments: dict[str, Any]) -> str:
    source = dialect.grammar({"call": arguments}, parallel=True, literal=literals({}))
    landing = Landing(tuple(arguments["required"]))
    grammar = Grammar(GrammarKind.LARK, source, landing=landing)
    matcher = compiler.matcher(grammar).copy()
    began = time.thread_time()
    finder = compiler.end_finder(grammar)
    made = time.thread_time() - began
    end = finder.find(matcher)
    times = []
    for _ in range(N_TIMES):
        began = time.thread_time()
        finder.find(matcher)
        times.append(time.thread_time() - began)
    found = "nothing" if end is None else f"{len(end)} tokens"
    usual, longest = statistics.median(times), max(times)
    return (
        f"{found}, search {1e3 * usual:.1f} ms, at most {1e3 * longest:.1f}, make {1e3 * made:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="any GGUF file with a vocabulary")
    arguments = parser.parse_args()
    path = Path(arguments.model) if arguments.model else resolve_model(None).path
    file = VocabularyFile(path)
    compiler = GrammarCompiler(file.vocabulary)
    compiler.prepare()
    console = Console(highlight=False)
    console.print(f"{file.vocabulary.n_vocab:,} tokens in the vocabulary")
    for size, members in SCHEMAS.items():
        for form, dialect in DIALECTS.items():
            console.print(f"{size}, {form}: {measure(compiler, dialect, members)}")
    file.close()


if __name__ == "__main__":
    main()

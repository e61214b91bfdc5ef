"""Numbers in the README and the guides are those of their sources."""

import csv
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from rekindle.config.choices import KvType
from rekindle.generation.model_state import ModelClass
from rekindle.llama.placement.footprint import Footprint, Layer, RowFormat
from rekindle.observe.request_record import MissReason

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
MODELS = (ROOT / "docs" / "guides" / "models.md").read_text("utf-8")
SLOW = (ROOT / "docs" / "guides" / "slow.md").read_text("utf-8")
RESULTS = ROOT / "docs" / "results"
COMPARISON = "## What others compute again"  # in the README
MAX_README_WORDS = 750
BITS = {
    "Q4_K_M": 4.89,
    "Q8_0": 8.5,
    "MXFP4 gpt-oss-20b": 4.6,
    "MXFP4 gpt-oss-120b": 4.3,
}
FREE_GB = 3  # for the system and for buffers


class Shape(NamedTuple):
    parameters: float  # 10^9
    n_layers: int
    n_windowed: int
    window: int
    n_kv_heads: int
    head_size: int
    n_ctx_train: int
    mb: int  # for 10,000 tokens
    mb_q8: int
    checkpoint_mb: int

    @property
    def footprint(self) -> Footprint:
        values = self.n_kv_heads * self.head_size
        layers = (
            Layer(weight_bytes=0, n_k=values, n_v=values, is_windowed=number < self.n_windowed)
            for number in range(self.n_layers)
        )
        return Footprint(
            model_class=ModelClass.SLIDING_WINDOW if self.n_windowed else ModelClass.DENSE,
            n_ctx_train=self.n_ctx_train,
            window=self.window,
            layers=tuple(layers),
            input_bytes=0,
            output_bytes=0,
            n_vocab=0,
            n_embd=0,
            n_ff=0,
            n_heads=0,
            rope_depends_on_n_ctx=False,
        )


def table(document: str, heading: str) -> list[list[str]]:
    section = re.split(r"^#", document.partition(f"\n{heading}\n")[2], flags=re.MULTILINE)[0]
    lines = re.findall(r"^\|(.+)\|$", section, re.MULTILINE)[2:]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def number(cell: str) -> float:
    [found] = re.findall(r"[\d,]+(?:\.\d+)?", cell)
    return float(found.replace(",", ""))


def rows_as(kv_type: KvType) -> RowFormat:
    return RowFormat(type_k=kv_type, type_v=kv_type, swa_full=False, n_sequences=4, n_ubatch=512)


def shapes() -> dict[str, Shape]:
    rows = table(MODELS, "## Shapes")
    return {
        name: Shape(number(parameters), *(int(number(cell)) for cell in cells))
        for name, parameters, *cells in rows
    }


@pytest.mark.parametrize(("name", "shape"), shapes().items(), ids=shapes())
def test_bytes_in_the_table_of_shapes_are_those_of_the_server(name: str, shape: Shape) -> None:
    per_10k = {
        kv_type: 10_000 * shape.footprint.row_bytes(rows_as(kv_type)) / 1e6
        for kv_type in (KvType.F16, KvType.Q8_0)
    }
    assert round(per_10k[KvType.F16]) == shape.mb
    assert round(per_10k[KvType.Q8_0]) == shape.mb_q8
    assert round(shape.footprint.checkpoint_bytes(rows_as(KvType.F16)) / 1e6) == shape.checkpoint_mb


def test_each_choice_for_a_memory_size_fits_by_the_sums_of_the_page() -> None:
    known, chosen = shapes(), table(MODELS, "## By memory")
    assert len(chosen) >= 6
    for memory, name, quantisation, n_ctx, weights, context, stored, cache in chosen:
        shape = known[name]
        bits = BITS.get(quantisation) or BITS[f"{quantisation} {name}"]
        assert number(weights) == round(shape.parameters * bits / 8, 1), name
        row_bytes = shape.footprint.row_bytes(rows_as(KvType.F16))
        assert number(context) == round(number(n_ctx) * row_bytes / 1e9, 1), name
        assert number(stored) == shape.mb
        assert number(n_ctx) <= shape.n_ctx_train
        assert number(weights) + number(context) + number(cache) + FREE_GB <= number(memory), name


def test_each_command_for_a_memory_size_has_the_values_of_its_row() -> None:
    commands = re.findall(r"^rekindle serve (hf:\S+) --ctx-size (\d+)(.*)# (\d+ GB)$", MODELS, re.M)
    chosen = {memory: row for memory, *row in table(MODELS, "## By memory")}
    assert [memory for *_, memory in commands] == list(chosen)
    for source, n_ctx, flags, memory in commands:
        name, quantisation, documented, *_, cache = chosen[memory]
        assert name.replace(" ", "-").lower() in source.lower()
        assert quantisation == "MXFP4" or source.endswith(f":{quantisation}")
        assert int(n_ctx) == number(documented)
        named = re.findall(r"--cache-ram (\d+)GB", flags)
        quarter = number(memory) / 4  # the default
        assert number(cache) == (float(named[0]) if named else quarter)


def test_the_readme_can_be_read_in_some_minutes() -> None:
    assert len(README.split()) <= MAX_README_WORDS


def test_the_table_of_the_readme_has_the_numbers_of_the_recorded_runs() -> None:
    recorded = {
        (row["workload"], row["server"]): float(row["amplification"])
        for row in csv.DictReader((RESULTS / "workloads.csv").read_text("utf-8").splitlines())
    }
    classes = (RESULTS / "model-classes.md").read_text("utf-8")
    [hybrid] = [row for row in table(classes, "### hybrid") if row[0] == "windows-8"]
    shown = [(number(ours), number(theirs)) for _, ours, theirs in table(README, COMPARISON)]
    expected = [
        (recorded[workload, "rekindle"], recorded[workload, "llama-server"])
        for workload in ("windows-8", "fan-out", "restart")
    ]
    expected.append((number(hybrid[1]), number(hybrid[5])))
    assert shown == [(round(ours, 2), round(theirs, 2)) for ours, theirs in expected]


def test_there_is_a_cure_for_every_reason_of_a_miss() -> None:
    cured = [row[0].strip("`") for row in table(SLOW, "## From the miss to the cure")]
    assert sorted(cured) == sorted(MissReason)

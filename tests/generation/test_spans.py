"""Spans: adjoining parts of a prompt, by the source they were found in."""

from rekindle.generation.events import NO_SPANS, CachedSpan, CacheSource, Spans

LIVE, MEMORY, DISK = CacheSource.LIVE, CacheSource.MEMORY, CacheSource.DISK


def test_neighbours_of_one_source_become_one_span() -> None:
    spans = NO_SPANS.extended(LIVE, 256).extended(DISK, 512).extended(DISK, 600)
    assert spans.n_tokens == 600
    assert spans == (CachedSpan(LIVE, 0, 256), CachedSpan(DISK, 256, 600))


def test_a_position_that_is_covered_already_changes_nothing() -> None:
    spans = NO_SPANS.extended(LIVE, 256)
    assert spans.extended(DISK, 256) is spans
    assert NO_SPANS.extended(DISK, 0) is NO_SPANS


def test_tokens_are_summed_per_source_in_order_of_first_appearance() -> None:
    spans = NO_SPANS.extended(DISK, 256).extended(MEMORY, 512).extended(DISK, 600)
    assert list(spans.by_source().items()) == [(DISK, 344), (MEMORY, 256)]
    assert Spans().by_source() == {}

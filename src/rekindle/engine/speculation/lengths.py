"""How many drafted tokens of each reply a step should check. Pure."""

from collections.abc import Callable, Sequence

LEAST_GAIN = 1.03  # below it, drafts are not worth their risk; picked
KEPT = 0.98  # of its speed, that each reply in the step keeps: docs/decisions/0042


# How much longer a step takes with so many drafted tokens, of which so many will be right.
Cost = Callable[[int, float], float]


def draft_lengths(chances: Sequence[Sequence[float]], n_room: int, cost: Cost) -> list[int]:
    """Return a length for each reply of the step, for the most expected tokens per second.

    `chances` has for each reply the chance of each drafted token and all before it to be right;
    none for a reply without a draft.
    """
    best = [0] * len(chances)
    # Equal chances are taken in turn from each reply: all forced tokens are sure.
    likely = sorted(
        (-chance, depth, index)
        for index, each in enumerate(chances)
        for depth, chance in enumerate(each)
    )
    lengths = [0] * len(chances)
    expected = [1.0] * len(chances)
    total = float(len(chances))
    best_gain = LEAST_GAIN
    for n_drafted, (less, _, index) in enumerate(likely[:n_room], start=1):
        lengths[index] += 1
        expected[index] -= less
        total -= less
        longer = cost(n_drafted, total - len(chances))
        gain = total / len(chances) / longer
        if gain > best_gain and min(expected) >= KEPT * longer:
            best, best_gain = list(lengths), gain
    return best

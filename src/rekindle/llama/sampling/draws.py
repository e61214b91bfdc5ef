"""Random numbers of a reply: each depends on the request's seed and the token's position alone.

llama.cpp draws from one stream per reply, and draws nothing when one candidate is left. The
position in such a stream cannot be told from the reply's tokens, so a resumed reply could not
continue it. Here each token gets a stream of its own.
"""

_WORD = 2**64 - 1
_N_SEEDS = 2**32 - 1  # llama.cpp takes the last 32-bit seed for "random"


def draw_seed(seed: int, position: int) -> int:
    """Return llama.cpp's seed for the reply's token at `position`, counted from 0.

    One round of splitmix64: neighbouring seeds and positions give unrelated results.
    """
    mixed = ((seed << 32 | position) + 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _WORD
    return ((mixed ^ mixed >> 31) >> 32) % _N_SEEDS

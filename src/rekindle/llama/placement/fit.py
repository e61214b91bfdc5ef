"""Chooses context and GPU layers so that a model fits in memory. Pure: the memory is an argument.

The order is llama.cpp's: a shorter context, then experts on the host, then whole layers there.
What the operator has set is never changed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rekindle.llama.placement.footprint import Footprint, RowFormat

_STEP = 1024  # of a chosen context, in tokens; picked


@dataclass(frozen=True, slots=True)
class Memory:
    """Free bytes, after what must stay free."""

    host: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the operator says, and what is left open."""

    n_ctx: int  # 0: open
    min_ctx: int
    gpu_layers: int  # -1: open
    n_cpu_moe: int = 0
    cpu_moe: bool = False
    kv_offload: bool = True
    n_outputs: int = 1
    places_tensors: bool = False  # by name: then neither layers nor experts are moved here
    extra_bytes: int = 0  # adapters


@dataclass(frozen=True, slots=True)
class Choice:
    n_ctx: int
    gpu_layers: int
    n_cpu_moe: int


@dataclass(frozen=True, slots=True)
class Needs:
    host: int
    gpu: int  # of all GPUs together, without the buffers
    buffers: int = 0  # for computing, on each GPU; 0: nothing is on a GPU
    layer: int = 0  # the largest one on a GPU

    def shares(self, memory: Memory) -> tuple[int, ...]:
        """Return what each GPU has left beside its buffers; 0: less than a layer needs."""
        left = [free - self.buffers for free in memory.gpus]
        return tuple(each if each >= self.layer else 0 for each in left)

    def gpu_bytes(self, memory: Memory) -> int:
        """Return what the GPUs hold in all, with the buffers of each one that is used."""
        n_used = sum(map(bool, self.shares(memory))) or 1
        return self.gpu + n_used * self.buffers

    def fit_gpus(self, memory: Memory) -> bool:
        return self.gpu <= sum(self.shares(memory))


@dataclass(frozen=True, slots=True)
class Fitted:
    choice: Choice
    needs: Needs
    fits: bool
    shares: tuple[int, ...]  # bytes that each GPU has for weights and rows


def fit(model: Footprint, rows: RowFormat, wishes: Wishes, memory: Memory) -> Fitted:
    """Return the largest choice that fits.

    If none does, return the shortest context with as much on the GPUs as they can hold. A host
    without memory maps the weights and swaps. A GPU without memory ends the start.
    """
    n_wanted = wishes.n_ctx or model.n_ctx_train
    n_all = len(model.layers) + 1  # the output counts as a layer
    gpu_layers = n_all if wishes.gpu_layers < 0 else min(wishes.gpu_layers, n_all)
    if not memory.gpus:
        gpu_layers = 0
    wanted = Choice(n_wanted, gpu_layers, wishes.n_cpu_moe)

    def needs(choice: Choice) -> Needs:
        return needs_of(model, rows, wishes, choice)

    def fits(choice: Choice) -> bool:
        needed = needs(choice)
        return needed.host <= memory.host and needed.fit_gpus(memory)

    def found(choice: Choice, *, fits: bool) -> Fitted:
        needed = needs(choice)
        return Fitted(choice, needed, fits, needed.shares(memory))

    smallest = replace(wanted, n_ctx=_smallest_context(wishes, n_wanted))
    choices = _candidates(model, wishes, wanted, fits, has_gpu=bool(memory.gpus))
    if fitting := next(filter(fits, choices), None):
        return found(fitting, fits=True)
    short = [each for each in choices if each.n_ctx == smallest.n_ctx]
    on_gpus = (each for each in short if needs(each).fit_gpus(memory))
    return found(next(on_gpus, smallest), fits=False)


def needs_of(model: Footprint, rows: RowFormat, wishes: Wishes, choice: Choice) -> Needs:
    """Return the bytes that a choice takes."""
    first_on_gpu = len(model.layers) + 1 - choice.gpu_layers
    host, gpu, largest = model.input_bytes + wishes.extra_bytes, 0, 0
    for number, layer in enumerate(model.layers):
        context = model.context_bytes(layer, choice.n_ctx, rows)
        if number < first_on_gpu:
            host += layer.weight_bytes + context
            continue
        on_host = layer.host_bytes
        on_host += layer.expert_bytes if wishes.cpu_moe or number < choice.n_cpu_moe else 0
        on_gpu = layer.weight_bytes - on_host + (context if wishes.kv_offload else 0)
        gpu += on_gpu
        largest = max(largest, on_gpu)
        host += on_host + (0 if wishes.kv_offload else context)
    computing = _computing_bytes(model, rows, wishes, choice.n_ctx)
    if choice.gpu_layers:
        return Needs(host + computing, gpu + model.output_bytes, computing, largest)
    return Needs(host + model.output_bytes + computing, 0)


def _candidates(
    model: Footprint,
    wishes: Wishes,
    wanted: Choice,
    fits: Callable[[Choice], bool],
    *,
    has_gpu: bool,
) -> list[Choice]:
    choices = [wanted]
    if not wishes.n_ctx:
        n_ctx = _longest_context(model, wishes, wanted, fits)
        choices.append(replace(wanted, n_ctx=n_ctx))
    smallest = replace(wanted, n_ctx=_smallest_context(wishes, wanted.n_ctx))
    if not has_gpu or wishes.gpu_layers >= 0 or wishes.places_tensors:
        return choices
    if model.has_experts and not wishes.cpu_moe and not wishes.n_cpu_moe:
        choices += [replace(smallest, n_cpu_moe=n + 1) for n in range(len(model.layers))]
    choices += [replace(smallest, gpu_layers=n) for n in reversed(range(wanted.gpu_layers))]
    return choices


def _longest_context(
    model: Footprint, wishes: Wishes, wanted: Choice, fits: Callable[[Choice], bool]
) -> int:
    """Return the longest context that fits, or the shortest one that may be chosen."""
    smallest = _smallest_context(wishes, wanted.n_ctx)
    if model.rope_depends_on_n_ctx:
        # The size changes the fingerprint of stored rows, so few sizes are possible.
        sizes = [wanted.n_ctx >> halvings for halvings in range(32)]
        sizes = [size for size in sizes if size >= smallest][::-1] or [smallest]
    else:
        sizes = [smallest, *range((smallest // _STEP + 1) * _STEP, wanted.n_ctx, _STEP)]
    low, high = 0, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(replace(wanted, n_ctx=sizes[middle])):
            low = middle
        else:
            high = middle
    return sizes[low]


def _smallest_context(wishes: Wishes, n_wanted: int) -> int:
    return n_wanted if wishes.n_ctx else min(wishes.min_ctx, n_wanted)


def _computing_bytes(model: Footprint, rows: RowFormat, wishes: Wishes, n_ctx: int) -> int:
    """Estimate llama.cpp's buffers: logits, activations of a batch, the mask of the attention.

    Measured with the embedded model and the tiny ones: 1.5 to 3 times what llama.cpp allocates.
    """
    logits = wishes.n_outputs * model.n_vocab * 4
    activations = rows.n_ubatch * (6 * model.n_embd + 3 * model.n_ff) * 4
    mask = rows.n_ubatch * n_ctx * 6
    return logits + activations + mask

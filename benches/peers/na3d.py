"""Neighborhood attention of a grid on the GPU: ms, median by CUDA events. comfy-kitchen, the fastest of its backends, if it is
there; else torch's flex_attention, compiled, over boxes of 4 x 4 x 8 positions, whose gathering is not timed.

Usage: na3d.py JSON, an object of grid [T, H, W], window [T, H, W], heads, width. bf16, batch 1."""

import json
import statistics
import sys

import torch

RUNS = 5
BOX = (4, 4, 8)
torch.manual_seed(0)


def milliseconds(call) -> float:
    pairs = []
    for _ in range(RUNS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs[2:])


def kitchen(q, k, v, window: list[int]) -> tuple[float, str]:
    """Ms, and who it was."""
    import importlib.metadata

    import comfy_kitchen

    version = importlib.metadata.version("comfy-kitchen")
    times = {}
    for backend in ("cuda", "triton"):
        if comfy_kitchen.registry.is_available(backend):
            with comfy_kitchen.registry.use_backend(backend):
                times[backend] = milliseconds(lambda: comfy_kitchen.na3d(q, k, v, window, scale=1.0))
    print(f"comfy-kitchen: {times}", file=sys.stderr)
    fastest = min(times, key=times.get)
    return times[fastest], f"comfy-kitchen {version} {fastest}"


def starts(extent: int, window: int) -> torch.Tensor:
    """First key that each position of an axis sees."""
    return (torch.arange(extent) - window // 2).clamp(0, extent - window)


def box_mask(grid: list[int], window: list[int], device: str):
    """A block mask over positions that are sorted by boxes, each a block, the grid filled up to whole ones."""
    from torch.nn.attention.flex_attention import BlockMask

    window = [min(w, extent) for w, extent in zip(window, grid)]
    counts = [-(-extent // side) for extent, side in zip(grid, BOX)]
    # The boxes that each box along an axis sees: how many, and the first.
    ranges = []
    for extent, w, side, count in zip(grid, window, BOX, counts):
        first = starts(extent, w)
        heads = torch.arange(count) * side
        tails = (heads + side - 1).clamp(max=extent - 1)
        low, high = first[heads] // side, (first[tails] + w - 1) // side
        ranges.append((low, high - low + 1))
    widest = [int(n.max()) for _, n in ranges]
    at = torch.cartesian_prod(*(torch.arange(n) for n in counts))
    step = torch.cartesian_prod(*(torch.arange(n) for n in widest))
    low = torch.stack([low[at[:, i]] for i, (low, _) in enumerate(ranges)], 1)
    many = torch.stack([n[at[:, i]] for i, (_, n) in enumerate(ranges)], 1)
    boxes = low[:, None] + step[None]
    inside = (step[None] < many[:, None]).all(-1)
    indices = (boxes[..., 0] * counts[1] + boxes[..., 1]) * counts[2] + boxes[..., 2]
    # Those inside first.
    order = (~inside).to(torch.int8).argsort(dim=1, stable=True)
    indices = torch.where(inside, indices, 0).gather(1, order).to(torch.int32)
    size = BOX[0] * BOX[1] * BOX[2]

    def place(i):
        box, rest = i // size, i % size
        return (
            box // (counts[1] * counts[2]) * BOX[0] + rest // (BOX[1] * BOX[2]),
            box // counts[2] % counts[1] * BOX[1] + rest // BOX[2] % BOX[1],
            box % counts[2] * BOX[2] + rest % BOX[2],
        )

    def sees(b, h, query, key):
        seen = query >= 0
        for q, k, extent, w in zip(place(query), place(key), grid, window):
            # Queries beyond the grid are those of its end.
            first = (q - w // 2).clamp(0, extent - w)
            seen = seen & (k >= first) & (k < first + w)
        return seen

    return BlockMask.from_kv_blocks(
        inside.sum(1).to(torch.int32)[None, None].to(device),
        indices[None, None].to(device),
        BLOCK_SIZE=size,
        mask_mod=sees,
        seq_lengths=(len(at) * size, len(at) * size),
        compute_q_blocks=False,
    )


def flex(q, k, v, grid: list[int], window: list[int]) -> tuple[float, str]:
    """Ms, and who it was. The values are random, so that they stand for their boxes."""
    from torch.nn.attention.flex_attention import flex_attention

    size = BOX[0] * BOX[1] * BOX[2]
    boxes = 1
    for extent, side in zip(grid, BOX):
        boxes *= -(-extent // side)
    heads, width = q.shape[-2:]
    q, k, v = (torch.randn(1, heads, boxes * size, width, dtype=q.dtype, device=q.device) for _ in range(3))
    mask = box_mask(grid, window, q.device.type)
    call = torch.compile(flex_attention, dynamic=False)
    return milliseconds(lambda: call(q, k, v, block_mask=mask, scale=1.0)), "flex_attention"


def main() -> None:
    problem = json.loads(sys.argv[1])
    grid, window = problem["grid"], problem["window"]
    shape = (1, *grid, problem["heads"], problem["width"])
    with torch.inference_mode():
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        try:
            ms, name = kitchen(q, k, v, window)
        except ModuleNotFoundError:
            ms, name = flex(q, k, v, grid, window)
    print(json.dumps({"peer": f"{name} torch {torch.__version__.split('+')[0]}", "ms": ms}))


if __name__ == "__main__":
    main()

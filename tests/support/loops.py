"""Routing, the passes between tokens and rows, and gradients of a scaled bias, as loops in Python."""

import block
import torch
from leaves import leaves_of


def loop_route(ids, num_experts):
    """(expert_offsets, routed part of row_to_slot, slot_to_row) as lists."""
    flat = ids.flatten().tolist()
    slots_of = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(flat):
        if 0 <= expert < num_experts:
            slots_of[expert].append(slot)
    offsets, order, places = [0], [], [-1] * len(flat)
    for slots in slots_of:
        order += slots
        offsets.append(len(order))
    for row, slot in enumerate(order):
        places[slot] = row
    return offsets, order, places


def loop_gather(x, routing):
    """(S, H) in fp64, differentiable."""
    rows = int(routing.expert_offsets[-1])
    picked = x[routing.row_to_slot[:rows].long() // routing.top_k]
    return torch.cat([picked, x.new_zeros(routing.row_to_slot.shape[0] - rows, x.shape[1])])


def loop_combine(y, weights, routing):
    """(T, H) in fp64, differentiable."""
    places = routing.slot_to_row.view(-1, routing.top_k).tolist()
    parts = [[weights[t, k] * y[row] for k, row in enumerate(line) if row >= 0] for t, line in enumerate(places)]
    zero = y.new_zeros(1, y.shape[1])
    return torch.stack([sum(line, zero[0]) for line in parts]) if parts else zero[:0]


def loop_bias_grads(dy, scales, bias, sizes):
    """(dbias, dscales) in fp64."""
    dy, scales, bias = (t.double() for t in (dy, scales, bias))
    dbias, dscales, start = torch.zeros_like(bias), torch.zeros_like(scales), 0
    for group, size in enumerate(sizes.tolist()):
        rows = slice(start, start + size)
        dbias[group], dscales[rows] = scales[rows] @ dy[rows], dy[rows] @ bias[group]
        start += size
    return dbias, dscales


def differentiate(function, tensors, dout):
    """[output, *gradients], zeros for what takes no part."""
    leaves = leaves_of(dict(enumerate(tensors)))
    return [*block.differentiate(function(*leaves.values()), leaves, dout).values()]

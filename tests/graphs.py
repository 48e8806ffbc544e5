"""CUDA graphs of what tests call."""

from typing import Callable, Tuple, TypeVar

import torch

Made = TypeVar("Made")


def capture(function: Callable[[], Made]) -> Tuple[torch.cuda.CUDAGraph, Made]:
    """(graph of a call, what the call returned), after a call that compiles."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        made = function()
    return graph, made

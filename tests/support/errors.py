"""Errors that come before anything is launched."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Nothing(TorchDispatchMode):
    """Fails on any operation that reaches a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was launched before the error")


def raises(error, message, function, *args, **kwargs):
    """The error comes, its message matches, and nothing was launched."""
    with pytest.raises(error, match=message), Nothing():
        function(*args, **kwargs)

"""Device memory that is known to be uninitialised, across dispatches of the checked host."""

from __future__ import annotations

import weakref

import numpy as np

_tracked: dict[int, tuple[weakref.ref, np.ndarray]] = {}


def empty(shape, dtype) -> np.ndarray:
    """An array whose bytes count as never written until a checked kernel writes them.

    Reading one of them in a checked kernel is a fault, in whichever dispatch. Values put into the
    array by Python do not count. bfloat arrays are uint16.
    """
    array = np.zeros(shape, dtype)
    address = array.ctypes.data
    _tracked[address] = (
        weakref.ref(array, lambda _: _tracked.pop(address, None)),
        np.zeros(array.nbytes, np.uint8),
    )
    return array


class Initialised:
    """Looks up which bytes of an array have been written."""

    def of(self, array: np.ndarray) -> np.ndarray | None:
        """Flags, a byte each, of a tracked array or of a contiguous view into one; else None."""
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        for address, (_, flags) in _tracked.items():
            if address <= start and end <= address + flags.nbytes:
                return flags[start - address : end - address]
        return None

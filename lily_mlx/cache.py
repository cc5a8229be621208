"""mlx-lm's cache objects, which may lend their arrays to a decode session.

While a session owns a cache's arrays they live in C++ and are written in place. Reading them here
takes them back first: the steps built so far are run, the arrays return, and the next step takes
them over again, copying whatever somebody else has come to share.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock


class _Lender:
    """Gives the arrays back before anybody sees them."""

    _loan: tuple[Any, int] | None = None  # (session, layer) while the arrays are lent

    def _take_back(self) -> None:
        if self._loan is None:
            return
        session, layer = self._loan
        arrays = session.take(layer)  # runs steps, which may fail: then the loan stands
        self._loan = None
        self._restore(*arrays)

    def __getstate__(self) -> dict[str, Any]:
        # copy, deepcopy and pickle read the state through here.
        self._take_back()
        return self.__dict__.copy()

    def _lend(self, session: Any, layer: int) -> None:
        """Hand the arrays to `session.state`, which may refuse them: then they stay here."""
        self._take_back()
        arrays = self._surrender()
        try:
            session.state.put(layer, *arrays)
        except BaseException:
            self._restore(*arrays)
            raise
        self._loan = (session, layer)


def _lent(name: str) -> property:
    """An attribute that is taken back before it is read or replaced."""

    def read(self: Any) -> Any:
        self._take_back()
        return self.__dict__[name]

    def write(self: Any, value: Any) -> None:
        self._take_back()
        self.__dict__[name] = value

    return property(read, write)


class _KeysAndValues(_Lender):
    keys = _lent("keys")
    values = _lent("values")

    def _surrender(self) -> tuple[mx.array | None, mx.array | None]:
        held = self.__dict__
        arrays = held["keys"], held["values"]
        held["keys"] = held["values"] = None
        return arrays

    def _restore(self, keys: mx.array | None, values: mx.array | None) -> None:
        self.__dict__.update(keys=keys, values=values)


# The names are mlx-lm's own: save_prompt_cache stores a class's name and looks it up there.
class KVCache(_KeysAndValues, stock.KVCache):
    """mlx_lm's KVCache."""

    @property
    def tokens(self) -> int:
        """How many tokens the keys and values hold."""
        return self.offset

    def one_sequence(self, dtype: mx.Dtype) -> bool:
        """Whether this holds one sequence, without padding, in `dtype`, or nothing yet."""
        return _one_row(self.keys, dtype)

    def count_one(self) -> None:
        """Count the token that a step has added."""
        self.offset += 1


class BatchKVCache(_KeysAndValues, stock.BatchKVCache):
    """mlx_lm's BatchKVCache, which its server uses for a single sequence too."""

    @property
    def tokens(self) -> int:
        """How many tokens the keys and values hold."""
        return self._idx

    def one_sequence(self, dtype: mx.Dtype) -> bool:
        """Whether this holds one sequence, without padding, in `dtype`, or nothing yet."""
        # The padding last: reading it waits for the device.
        return (
            self.left_padding.size == 1
            and self._right_padding is None
            and _one_row(self.keys, dtype)
            and self.left_padding.item() == 0
        )

    def count_one(self) -> None:
        """Count the token that a step has added."""
        self.offset = self.offset + 1
        self._idx += 1


class ArraysCache(_Lender, stock.ArraysCache):
    """mlx_lm's ArraysCache, as a DeltaNet layer uses it: [conv state, state]."""

    cache = _lent("cache")

    def _surrender(self) -> tuple[mx.array | None, mx.array | None]:
        arrays = tuple(self.__dict__["cache"])
        self.__dict__["cache"] = [None, None]
        return arrays

    def _restore(self, conv_state: mx.array | None, state: mx.array | None) -> None:
        self.__dict__["cache"] = [conv_state, state]

    def one_sequence(self, dtype: mx.Dtype) -> bool:
        """Whether this holds one sequence, without padding, in `dtype`, or nothing yet."""
        conv_state, state = self.cache
        if self.lengths is not None or (conv_state is None) != (state is None):
            return False
        if not _one_row(conv_state, dtype) or not _one_row(state, mx.float32):
            return False
        padding = self.left_padding
        return padding is None or (padding.size == 1 and padding.item() <= 0)

    def count_one(self) -> None:
        """Count the token that a step has added."""
        self.advance(1)


def _one_row(array: mx.array | None, dtype: mx.Dtype) -> bool:
    return array is None or (array.shape[0] == 1 and array.dtype == dtype)


_OURS = {
    stock.KVCache: KVCache,
    stock.BatchKVCache: BatchKVCache,
    stock.ArraysCache: ArraysCache,
}


def adopt(cache: Any) -> bool:
    """Make mlx-lm's own cache object (loaded from a file, say) one that can lend.

    The object stays the same, since others may hold it; only its class becomes ours.

    Returns:
        Whether `cache` can lend its arrays.
    """
    if type(cache) in _OURS:
        cache.__class__ = _OURS[type(cache)]
    return type(cache) in (KVCache, BatchKVCache, ArraysCache)

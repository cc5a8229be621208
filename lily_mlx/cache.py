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
        loan = self.__dict__.pop("_loan", None)
        if loan is not None:
            session, layer = loan
            self._restore(*session.take(layer))

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


# The names are mlx-lm's own: save_prompt_cache stores a class's name and looks it up there.
class KVCache(_Lender, stock.KVCache):
    """mlx_lm's KVCache."""

    keys = _lent("keys")
    values = _lent("values")

    def _surrender(self) -> tuple[mx.array | None, mx.array | None]:
        held = self.__dict__
        arrays = held["keys"], held["values"]
        held["keys"] = held["values"] = None
        return arrays

    def _restore(self, keys: mx.array | None, values: mx.array | None) -> None:
        self.__dict__.update(keys=keys, values=values)


class ArraysCache(_Lender, stock.ArraysCache):
    """mlx_lm's ArraysCache, as a DeltaNet layer uses it: [conv state, state]."""

    cache = _lent("cache")

    def _surrender(self) -> tuple[mx.array | None, mx.array | None]:
        arrays = tuple(self.__dict__["cache"])
        self.__dict__["cache"] = [None, None]
        return arrays

    def _restore(self, conv_state: mx.array | None, state: mx.array | None) -> None:
        self.__dict__["cache"] = [conv_state, state]


_OURS = {stock.KVCache: KVCache, stock.ArraysCache: ArraysCache}


def adopt(cache: Any) -> bool:
    """Make mlx-lm's own cache object (loaded from a file, say) one that can lend.

    The object stays the same, since others may hold it; only its class becomes ours.

    Returns:
        Whether `cache` can lend its arrays.
    """
    if type(cache) in _OURS:
        cache.__class__ = _OURS[type(cache)]
    return type(cache) in (KVCache, ArraysCache)

"""What the kernels must compute, in numpy: the numerics contract, with sums in float64.

Arrays travel as float32 (or float64) values; `Dtype` stores them in the activation dtype. A value
is rounded to it only where the contract says so, by `Dtype.rnd`.
"""

from .attention import *  # noqa: F403
from .gated_delta import *  # noqa: F403
from .linear import *  # noqa: F403
from .moe import *  # noqa: F403
from .numbers import *  # noqa: F403

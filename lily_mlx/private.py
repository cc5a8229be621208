"""mlx-lm's own code with other names in it, and mlx-lm itself left as it is."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def private_copy(name: str, purpose: str = "own") -> ModuleType:
    """A second instance of a module of mlx-lm, whose names may be set without anybody noticing.

    mlx-lm's commands look `load` and `generate` up in their own module. Setting those names in a
    private instance runs the very same code with our loader, and leaves the module that anybody
    else imports as it is.

    Args:
        name: the module's name inside mlx_lm, such as "server".
        purpose: keeps the copies of one module apart.
    """
    origin = importlib.util.find_spec(f"mlx_lm.{name}").origin
    # In the package, so that relative imports resolve.
    own_name = f"mlx_lm._lily_mlx_{purpose}_{name}"
    spec = importlib.util.spec_from_file_location(own_name, origin)
    module = importlib.util.module_from_spec(spec)
    sys.modules[own_name] = module  # pickle and dataclasses look classes up by module
    spec.loader.exec_module(module)
    return module

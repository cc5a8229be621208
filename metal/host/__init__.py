"""Compiles, checks and runs Metal kernels without a Mac; see README.md."""

from .coverage import Branch
from .faults import Fault, KernelFault
from .library import Kernel, Library, Result
from .memory import empty
from .toolchain import CompileError, HostError

__all__ = [
    "Branch",
    "CompileError",
    "Fault",
    "HostError",
    "Kernel",
    "KernelFault",
    "Library",
    "Result",
    "empty",
]

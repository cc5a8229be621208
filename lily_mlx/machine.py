"""What machine this is, and with which versions: the heading of every measurement."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import mlx.core as mx


def _first_value(path: str, key: str) -> str | None:
    try:
        with open(path) as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        return None
    return None


def _sysctl(name: str) -> str | None:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    """The CPU's name as its system gives it."""
    name = (
        _sysctl("machdep.cpu.brand_string")
        if sys.platform == "darwin"
        else _first_value("/proc/cpuinfo", "model name")
    )
    return name or platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Physical memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def model_memory_bytes() -> int:
    """Memory that a model can use: physical memory, or the GPU's own where that is less."""
    info = mx.device_info(mx.default_device())
    own = info.get("memory_size") or info.get("total_memory")
    return min(memory_bytes(), int(own)) if own else memory_bytes()


def cpu_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def version(distribution: str) -> str | None:
    """The installed version of a distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of everything a measurement depends on."""
    from lily_mlx import __version__

    names = ("mlx", "mlx-lm", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
    found = {name: version(name) for name in names}
    found = {name: v for name, v in found.items() if v is not None}
    return {"lily_mlx": __version__, **found, "python": platform.python_version()}


def machine() -> dict[str, Any]:
    """The machine: processor, cores, memory in bytes, system, MLX's default device."""
    device = mx.default_device()
    info = mx.device_info(device)
    release = re.match(r"[\d.]*", platform.release()).group()
    return {
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {release} {platform.machine()}",
        "device": "gpu" if device.type == mx.DeviceType.gpu else "cpu",
        "device_name": str(info.get("device_name", "unknown")),
    }


def load_average() -> float | None:
    """Runnable tasks over the last minute: what else the machine is doing."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def busy(report: dict[str, Any]) -> bool:
    """Had the machine other work when a report's run began: over a quarter of its cores?"""
    load = report["load_before"]
    return load is not None and load > 0.25 * report["machine"]["cores"]


def one_line(found: dict[str, Any]) -> str:
    """A machine() as one line of text."""
    device = found["device_name"] + " GPU" if found["device"] == "gpu" else "CPU only"
    gib = found["memory_bytes"] / 2**30
    return (
        f"{found['cpu']}, {found['cores']} cores, {gib:.0f} GiB, {found['system']}, MLX: {device}"
    )

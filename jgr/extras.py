# SPDX-License-Identifier: Apache-2.0
"""The extras: packages that only some commands need, by the name with which pip installs them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from jgr.fields import UserError

MODULES: Mapping[str, tuple[str, ...]] = {
    "train": ("grain", "matplotlib", "optax", "orbax"),
    "controller": ("flax", "matplotlib", "optax", "sklearn"),
    "plot": ("matplotlib",),
    "parquet": ("pyarrow",),
    "placement": ("pymetis",),
    "otel": ("opentelemetry",),
    "redis": ("redis",),
    "cluster": ("ray",),
    "library": ("faiss",),
    "nixl": ("nixl_cu12",),
    "tune": ("optuna",),
}
"""The modules of each extra."""


def require(extra: str, what: str) -> None:
    """Raise UserError, which says how to install them, unless the modules of `extra` are there; imports none of them.

    what: the command or flag that needs them.
    """
    missing = [name for name in MODULES[extra] if find_spec(name) is None]
    if missing:
        raise UserError(f"{what} needs {', '.join(missing)}: {command(extra)}")


def advice(error: ModuleNotFoundError) -> str | None:
    """What a user can do about a module that is missing: the line to show, or None where it is of no extra."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if module in modules:
            return f"{module} is not installed: {command(extra)}"
    return None


def command(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'jgr[{extra}]'"

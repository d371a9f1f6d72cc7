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


def require(extra: str, what: str, *more: str) -> None:
    """Raise UserError, which says how to install them, unless the modules of `extra`, and of the extras in `more`, are
    there; imports none of them.

    what: the command or flag that needs them.
    """
    lacking = {
        name: [module for module in MODULES[name] if find_spec(module) is None] for name in (extra, *more)
    }
    missing = dict.fromkeys(module for modules in lacking.values() for module in modules)
    if missing:
        wanted = ",".join(name for name, modules in lacking.items() if modules)
        raise UserError(f"{what} needs {', '.join(missing)}: {command(wanted)}")


def advice(error: ModuleNotFoundError) -> str | None:
    """What a user can do about a module that is missing: the line to show, or None where it is of no extra."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if module in modules:
            return f"{module} is not installed: {command(extra)}"
    return None


def command(extra: str) -> str:
    """The command that installs an extra, or several with commas between."""
    return f"pip install 'jgr[{extra}]'"

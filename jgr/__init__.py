# SPDX-License-Identifier: Apache-2.0
"""jgr: a JAX serving engine for generative recommenders. Importing it loads nothing and touches no device.

`jgr.Engine` serves a model folder in this process, `jgr.Client` asks a server; `__init__.pyi` lists all that is public.
"""

from __future__ import annotations

__version__ = "0.1.0"

_PUBLIC = {
    "Engine": "jgr.client.embedded",
    "Client": "jgr.client.remote",
    "Answer": "jgr.serving.api",
    "Prefilled": "jgr.serving.prefill",
    "Item": "jgr.serving.api",
    "Filters": "jgr.serving.api",
    "ModelInfo": "jgr.serving.api",
    "Config": "jgr.config",
    "Error": "jgr.client.errors",
    "RequestFailed": "jgr.client.errors",
    "InvalidRequest": "jgr.client.errors",
    "Unauthorized": "jgr.client.errors",
    "NotFound": "jgr.client.errors",
    "Overloaded": "jgr.client.errors",
    "DeadlineExceeded": "jgr.client.errors",
    "Unavailable": "jgr.client.errors",
    "InternalError": "jgr.client.errors",
}


def __getattr__(name: str) -> object:
    """What is public, imported when it is first asked for: jax takes seconds."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jgr' has no attribute {name!r}")
    from importlib import import_module

    return globals().setdefault(name, getattr(import_module(_PUBLIC[name]), name))


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]

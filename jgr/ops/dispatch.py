# SPDX-License-Identifier: Apache-2.0
"""How an op picks its implementation: a named one runs or raises, "auto" takes the first that fits the call.

The choice is made at trace time from shapes, dtypes and the platform that the program is for. Each implementation is
asked whether it can run; no exception is caught. A named implementation may run on any platform: an interpreted kernel
on a CPU, or a kernel that is compiled here for a GPU elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jgr.ops import native, split

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    supports(*args, **kwargs) gives the reason why the implementation cannot run, or None. platforms: the platforms on
    which "auto" may take it ("cpu", "gpu", "tpu"); None: all. is_kernel: whether XLA cannot divide it over devices, so
    that "auto" takes it only within what one device runs (jgr.ops.split). is_wanted: whether "auto" may take it now.
    """

    name: str
    call: Callable[..., Any]
    supports: Callable[..., str | None] = lambda *args, **kwargs: None
    platforms: frozenset[str] | None = None
    is_kernel: bool = False
    is_wanted: Callable[[], bool] = lambda: True


def target_platform() -> str:
    """The platform that the traced program is for: the abstract device's, the default device's or the backend's."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    device = getattr(jax.config, "jax_default_device", None)
    if abstract is not None and abstract.platform is not None:
        platform = str(abstract.platform)
    elif device is not None:
        platform = device if isinstance(device, str) else str(device.platform)
    else:
        platform = jax.default_backend()
    return "gpu" if platform in ("cuda", "rocm") else platform


def dispatch(
    op: str, implementations: Sequence[Implementation], implementation: str, *args: Any, **kwargs: Any
) -> Any:
    """Run `op` by the named implementation, or by the first in order that fits platform and arguments ("auto").

    Raises ValueError for an unknown name, and for a named implementation that does not support the arguments.
    """
    if implementation == "auto":
        chosen = _first_that_fits(op, implementations, *args, **kwargs)
    else:
        named = {i.name: i for i in implementations}
        if implementation not in named:
            raise ValueError(
                f"{op}: no implementation {implementation!r}; there are {sorted(named)} and 'auto'"
            )
        chosen = named[implementation]
        reason = chosen.supports(*args, **kwargs)
        if reason is not None:
            raise ValueError(f"{op}: implementation {implementation!r} cannot run: {reason}")
    _log.debug("%s runs as %s", op, chosen.name)  # at trace time, so once per compiled program
    return chosen.call(*args, **kwargs)


def fits(candidate: Implementation, *args: Any, **kwargs: Any) -> str | None:
    """Why "auto" passes an implementation over for these arguments and this program's platform, or None."""
    platform = target_platform()
    if candidate.platforms is not None and platform not in candidate.platforms:
        return f"it is not for {platform}"
    if candidate.is_kernel and split.devices() > 1:
        return "several devices share the program"
    if not candidate.is_wanted():
        return "it is switched off"
    return candidate.supports(*args, **kwargs)


def _first_that_fits(
    op: str, implementations: Sequence[Implementation], *args: Any, **kwargs: Any
) -> Implementation:
    for candidate in implementations:
        reason = fits(candidate, *args, **kwargs)
        if reason is None:
            return candidate
        _log.debug("%s does not run as %s: %s", op, candidate.name, reason)
    raise ValueError(f"{op}: no implementation fits {target_platform()} and these arguments")


CPU, GPU = frozenset({"cpu"}), frozenset({"gpu"})
NEVER: frozenset[str] = frozenset()
"""Platforms of kernels, and of one that runs only when it is named."""


def kernel(
    call: Callable[..., Any], interpreted: Callable[..., Any], supports: Callable[..., str | None]
) -> tuple[Implementation, Implementation]:
    """A Pallas kernel's two implementations: "pallas" on GPUs; "pallas_interpret", step by step on any platform."""
    return (
        Implementation("pallas", call, supports, GPU, is_kernel=True),
        Implementation("pallas_interpret", interpreted, supports, NEVER, is_kernel=True),
    )


def on_cpu(call: Callable[..., Any], supports: Callable[..., str | None]) -> Implementation:
    """The form "native", by the library of kernels for CPUs (jgr.ops.native)."""
    return Implementation("native", call, supports, CPU, is_kernel=True, is_wanted=native.wanted)

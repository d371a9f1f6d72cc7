# SPDX-License-Identifier: Apache-2.0
"""What a model's deployment serves, as a few words that another process can serve the same by.

A process that starts has what is configured. What the others of a fleet serve by now, after reloads, catalogs and ways
back, is their state; `begin_as` makes the same of what was just loaded.
"""

from __future__ import annotations

import logging
import tempfile
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jgr.catalog.catalog import Catalog, load_catalog
from jgr.fields import UserError
from jgr.models.model_files import ModelFiles
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.engine.opening import Again
from jgr.serving.versions.deployment import Beginning, Deployment
from jgr.serving.versions.sources import Loaded

_log = logging.getLogger(__name__)


class State(NamedTuple):
    """What one model serves. version, catalog: as answers name them. folder: where the model was loaded from; "": from
    none. before, before_folder: the version that a rollback goes to, "": there is none. previous: the catalog that
    a rollback of catalogs goes to, "": none. uploads: the uploaded catalogs that are held, the oldest first. settings,
    before_settings: of both versions, see `settings_digest`.
    """

    version: str
    catalog: str
    folder: str = ""
    before: str = ""
    before_folder: str = ""
    previous: str = ""
    uploads: tuple[str, ...] = ()
    settings: str = ""
    before_settings: str = ""

    @property
    def served(self) -> tuple[str, str, str]:
        """What answers come from: the versions of the model and of its catalog, and the settings."""
        return self.version, self.catalog, self.settings


def state_of(deployment: Deployment) -> State:
    """The state of a deployment, without its uploads."""
    info, rebuild, before = deployment.engine.info, deployment.engine.rebuild, deployment.before
    again = None if rebuild is None else rebuild.again
    return State(
        info.version,
        info.catalog_version,
        "" if again is None else again.folder,
        "" if before is None else before.version,
        "" if before is None else before.folder,
        deployment.lost if deployment.previous is None else deployment.previous.version,
        settings=info.settings,
        before_settings="" if before is None else before.settings,
    )


def begin_as(loaded: Loaded, state: State, bodies: Mapping[str, bytes]) -> tuple[AnyEngine, Beginning]:
    """The engine that serves as the state says, made of the loaded one, and where its deployment begins.

    bodies: compressed JSON lines of uploaded catalogs by their versions. Raises UserError where it cannot be served.
    """
    engine = loaded.engine
    if engine.info.version != state.version:
        engine.served.close(True)
        raise UserError(
            f"the fleet serves {state.version}, and {state.folder or loaded.config.model.path} holds "
            f"{engine.info.version} by now: reload the model, or put the folder back"
        )
    if engine.info.settings != state.settings:
        engine.served.close(True)
        raise UserError(
            f"the fleet serves {state.version} with settings {state.settings}, and "
            f"{state.folder or loaded.config.model.path} has {engine.info.settings} by now: reload the model, or put "
            "serving.json back"
        )
    own = engine.catalog
    held = {version: _read(bodies[version]) for version in state.uploads if version in bodies}
    known = {own.version: own, **held}
    activated = None
    if state.catalog != own.version:
        activated = held.get(state.catalog)
        if activated is None or engine.rebuild is None:
            engine.served.close(True)
            raise UserError(
                f"the fleet serves {state.version} over catalog {state.catalog}, and the one of its folder is "
                f"{own.version} by now: upload and activate it again, or put the folder back"
            )
        first, engine = engine, engine.rebuild.engine(activated)
        first.served.close(idle=True)
    before = _before(loaded, state)
    previous = known.get(state.previous)
    lost = state.previous if previous is None else ""
    return engine, Beginning(activated, previous, before, tuple(held.values()), lost)


def packed(body: bytes) -> bytes:
    """A catalog's JSON lines as they are kept."""
    return zlib.compress(body, 1)


def _read(body: bytes) -> Catalog:
    with tempfile.TemporaryDirectory(prefix="jgr-catalog-") as folder:
        path = Path(folder) / "body.jsonl"
        path.write_bytes(zlib.decompress(body))
        return load_catalog(path)


def _before(loaded: Loaded, state: State) -> Again | None:
    """How the version before is loaded; None: there is none."""
    if not state.before:
        return None
    folder, files = state.before_folder, None
    try:
        files = ModelFiles(Path(folder)) if Path(folder).is_dir() else None
    except (OSError, UserError) as error:
        _log.warning("%s cannot be gone back to: %s", state.before, error)
    load = partial(loaded.load_from, folder)
    return Again(state.before, files, load, folder, state.before_settings)

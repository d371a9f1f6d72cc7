# SPDX-License-Identifier: Apache-2.0
"""The catalogs that are held for a model: the one it was started with, uploads, and which of them is served.

The one idea: a catalog's version is its content. An upload is checked against the model before it has a version; from
then on it can be activated without a doubt, and be rolled back from, while `jgr.serving.versions.deployment` does the
swap. The active catalog and the one before it are never dropped; of the others, the oldest goes when there are too
many.

Uploads live as long as the process: a start serves what is configured.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from jgr.catalog.catalog import Catalog, CatalogError, load_catalog
from jgr.config import UserError
from jgr.serving.catalog_api import CatalogInfo, CatalogList, CatalogState
from jgr.serving.errors import RequestError, quoted
from jgr.serving.versions.deployment import Deployment, now


@dataclass(frozen=True, eq=False)
class _Entry:
    catalog: Catalog
    uploaded_at: str | None


class Catalogs:
    """The catalogs that one deployment holds. Belongs to the event loop."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._max_versions = deployment.catalogs.max_versions
        self._max_bytes = deployment.catalogs.max_upload_bytes
        self._entries = {catalog.version: _Entry(catalog, now()) for catalog in deployment.uploaded}
        self._uploading = False

    def listing(self) -> CatalogList:
        self._add_served()
        change = self._deployment.changes["catalog"]
        data = [self._info(entry) for entry in self._entries.values()]
        return CatalogList(data=data, activation=change.state, activation_error=change.error)

    async def upload(self, chunks: AsyncIterator[bytes]) -> CatalogInfo:
        """Read, check and keep a catalog of JSON lines. RequestError tells what is wrong with it, and where."""
        rebuild = self._deployment.engine.rebuild
        if self._deployment.status != "ready":
            raise RequestError("unavailable", f"the server is {self._deployment.status}")
        if rebuild is None:
            raise RequestError(
                "conflict", f"model {self._deployment.name!r} takes no catalog but the one it was loaded with"
            )
        if self._uploading:
            raise RequestError("conflict", "another catalog is being uploaded")
        depth = self._deployment.engine.info.depth
        self._uploading = True
        try:
            with tempfile.TemporaryDirectory(prefix="jgr-catalog-") as folder:
                path = Path(folder) / "body.jsonl"
                await self._receive(chunks, path)

                def read() -> Catalog:
                    catalog = load_catalog(path)
                    if catalog.depth != depth:
                        raise CatalogError(f"its ids have {catalog.depth} levels, the model's {depth}")
                    rebuild.check(catalog)
                    return catalog

                try:
                    catalog = await self._deployment.in_thread(read)
                except UserError as error:
                    message = str(error).replace(f"{path}: ", "").replace(f"{path}:", "line ")
                    raise RequestError(
                        "invalid_request", f"the catalog cannot be served: {message}"
                    ) from None
        except OSError as error:  # the disk is full, or there is no folder for temporary files
            raise RequestError(
                "unavailable", f"the upload cannot be kept while it is read: {error.strerror or error}"
            ) from error
        finally:
            self._uploading = False
        self._add_served()
        entry = self._entries.get(catalog.version)
        if entry is None or entry.uploaded_at is None:  # it is held as what a start or a reload brought
            held = catalog if entry is None else self._entries.pop(catalog.version).catalog
            entry = self._entries[catalog.version] = _Entry(held, now())
            self._deployment.keep(held)
        self._drop_oldest()
        return self._info(entry)

    def activate(self, version: str) -> CatalogInfo:
        """Begin to serve a catalog that is held. RequestError where it is not, or another change runs."""
        self._add_served()
        entry = self._entries.get(version)
        if entry is None:
            raise RequestError("not_found", f"there is no catalog {quoted(version)}", "version")
        self._deployment.activate(entry.catalog, uploaded=entry.uploaded_at is not None)
        return self._info(entry)

    def cancel(self, version: str) -> CatalogInfo:
        """Tell the activation of a catalog to stop. RequestError where it is not going on, or serves already."""
        entry, change = self._entries.get(version), self._deployment.changes["catalog"]
        if entry is None:
            raise RequestError("not_found", f"there is no catalog {quoted(version)}", "version")
        if change.state == "running" and change.to != version:
            raise RequestError("conflict", f"catalog {change.to!r} is being activated, and not this one")
        self._deployment.cancel("catalog")
        return self._info(entry)

    def rollback(self) -> CatalogInfo:
        """Begin to serve the catalog before the active one."""
        previous = self._deployment.previous
        if previous is None and self._deployment.lost:
            raise RequestError(
                "conflict",
                f"catalog {self._deployment.lost!r} was active before, and is not held here: upload it and activate it",
            )
        if previous is None:
            raise RequestError("conflict", "no other catalog was active before")
        return self.activate(previous.version)

    async def _receive(self, chunks: AsyncIterator[bytes], path: Path) -> None:
        size = 0
        with path.open("wb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > self._max_bytes:
                    raise RequestError(
                        "body_too_large", f"a catalog may have at most {self._max_bytes} bytes"
                    )
                file.write(chunk)

    def _add_served(self) -> None:
        """Add to the list what a start or a reload brought."""
        for catalog in (self._deployment.previous, self._deployment.engine.catalog):
            if catalog is not None:
                self._entries.setdefault(catalog.version, _Entry(catalog, None))
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        idle = [version for version in self._entries if self._state(version) == "idle"]
        newest = next(reversed(self._entries))
        for version in idle:
            if len(self._entries) > self._max_versions and version != newest:
                del self._entries[version]

    def _info(self, entry: _Entry) -> CatalogInfo:
        catalog = entry.catalog
        return CatalogInfo(
            version=catalog.version,
            items=catalog.n_items,
            state=self._state(catalog.version),
            uploaded_at=entry.uploaded_at,
        )

    def _state(self, version: str) -> CatalogState:
        deployment, change = self._deployment, self._deployment.changes["catalog"]
        if version == deployment.engine.info.catalog_version:
            return "active"
        if change.state == "running" and change.to == version:
            return "activating"
        if deployment.previous is not None and version == deployment.previous.version:
            return "previous"
        return "idle"

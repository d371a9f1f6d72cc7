# SPDX-License-Identifier: Apache-2.0
"""Models by their name on the Hugging Face hub: `hf://org/name`, or `hf://org/name@revision` for a branch, a tag or a
commit.

The one idea: a name stands for a folder. The files are fetched into huggingface_hub's cache, and from there on
everything reads a folder. Only weights as safetensors, config.json and tokenizer.json are fetched: nothing that would
have to be unpickled or run. A path is never taken for a name, so that nobody's typing error asks the hub.

huggingface_hub is an extra (`pip install jgr[hub]`). It reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from jgr.config import Config, ConfigError
from jgr.fields import one_line

FILES = ("config.json", "adapter_config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json")
COMMIT_DIGITS = 8
SCHEME = "hf://"
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>(?!.*\.\.)[\w][\w./-]{0,199}))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_log = logging.getLogger(__name__)


def local(name: str, field: str = "model.path") -> Path:
    """The folder that a path or a name of the hub stands for; a name's files are fetched unless they are here.

    field: what the errors call it. A path is returned as it is. Raises ConfigError for a name that is none, and where
    the hub cannot be asked or has no such model.
    """
    if not name.startswith(SCHEME):
        return Path(name)
    found = _NAME.fullmatch(name.removeprefix(SCHEME))
    if found is None:
        raise ConfigError(
            f"{field}: {name!r} is no name of the Hugging Face hub, such as {SCHEME}org/name@revision"
        )
    missing = f"{field}: {name} is not on this machine"
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError:
        raise ConfigError(f"{missing}; to fetch it from the Hugging Face hub: pip install jgr[hub]") from None
    repo, revision = found["repo"], found["revision"]
    try:
        folder = Path(
            hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(FILES),
                ignore_patterns=["*/*"],
                library_name="jgr",
            )
        )
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{missing}, and {repo} on the Hugging Face hub has no revision {revision}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{missing}, and the Hugging Face hub has no model of this name, or it needs a token (HF_TOKEN)"
        ) from None
    except errors.GatedRepoError:
        raise ConfigError(
            f"{missing}, and {repo} on the Hugging Face hub needs a token that may read it"
        ) from None
    except Exception as error:  # the HTTP client's own errors, a full disk, a damaged cache
        found_none = isinstance(
            error, errors.LocalEntryNotFoundError
        )  # says at length that nothing is here either
        why = (error.__cause__ or error.__context__ or error) if found_none else error
        words = one_line(why).split(". ")[0][:200]
        raise ConfigError(f"{missing}, and the Hugging Face hub could not be asked: {words}") from None
    if not (folder / "config.json").exists():
        raise ConfigError(f"{missing}, and {repo} on the Hugging Face hub has no config.json")
    _log.info("%s is commit %s of the Hugging Face hub: %s", name, folder.name, folder)
    return folder


def hint(path: str | os.PathLike[str]) -> str:
    """For an error about a folder that is not there: how the hub's model of that name is asked for, if it is a name."""
    looks = _NAME.fullmatch(str(path)) is not None
    return f"; a model of the Hugging Face hub is named {SCHEME}{path}" if looks else ""


def located(config: Config) -> Config:
    """The configuration with model.path as a folder of this machine; see `local`."""
    if not config.model.path.startswith(SCHEME):
        return config
    return replace(config, model=replace(config.model, path=str(local(config.model.path))))


def commit_of(folder: Path) -> str:
    """The first digits of the commit that a folder of the hub's cache holds; "" for any other folder."""
    cached = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.name[:COMMIT_DIGITS] if cached and _COMMIT.fullmatch(folder.name) else ""

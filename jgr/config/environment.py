# SPDX-License-Identifier: Apache-2.0
"""Fields from environment variables: JGR_SERVER__PORT is server.port, and so for every field.

JGR_SERVER__API_KEY_FILE names a file that holds the value. That is the convention for the secrets of Docker and
Kubernetes, which are files: what takes a key from a variable takes its file from the variable with _FILE. So no value
of `--set` has a second meaning, and neither `ps` nor the environment shows a key.

Two underscores tell our variables from others that begin alike, such as JGR_SERVICE_HOST, which Kubernetes sets for a
service called jgr. One that is no field's is refused, since a mistyped key would leave a server open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jgr.config.tree import RENAMED, field_types, secret_fields
from jgr.fields import ConfigError, describe, nearest, parse, require
from jgr.files import read_whole

PREFIX, SEPARATOR, OF_FILE = "JGR_", "__", "_FILE"
MAX_BYTES = 1 << 16


def variable(key: str) -> str:
    """The environment variable of a field, JGR_SERVER__PORT for "server.port"."""
    return PREFIX + key.upper().replace(".", SEPARATOR)


def assignments(environ: Mapping[str, str], tree: type) -> dict[str, str]:
    """What the environment says of the fields of `tree`: "section.field=value", as `override` takes it, by variable.

    Raises ConfigError for a variable of no field, a value that its field cannot have, and a file that cannot be used;
    the message names the variable, and never shows a secret.
    """
    hints, secrets = field_types(tree), secret_fields(tree)
    fields = {variable(key): key for key in hints}
    found: dict[str, str] = {}
    given: dict[str, str] = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or SEPARATOR not in name.removeprefix(PREFIX):
            continue
        by_file = name not in fields and name.removesuffix(OF_FILE) in fields
        key = fields.get(name.removesuffix(OF_FILE) if by_file else name)
        if key is None:
            raise ConfigError(_unknown(name, fields))
        other = given.setdefault(key, name)
        require(other == name, f"{other} and {name} both give {key}: leave out one of them")
        text = _content(name, environ[name]) if by_file else environ[name]
        if key in secrets:
            require(
                bool(text), f"{name}: {'its file' if by_file else 'it'} is empty, where a secret should stand"
            )
            require(text.isprintable(), f"{name}: a secret must be one line of printable characters")
        try:
            parse(text, hints[key])
        except ValueError:
            raise ConfigError(f"{name} must be {describe(hints[key])}, not '{text}'") from None
        found[name] = f"{key}={text}"
    return found


def _unknown(name: str, fields: Mapping[str, str]) -> str:
    renamed = {variable(old): variable(new) for old, new in RENAMED.items()}
    if name.removesuffix(OF_FILE) in renamed:
        return f"there is no variable {name} any more; it is called {renamed[name.removesuffix(OF_FILE)]} now"
    return f"{name} is no field of the configuration; the nearest is {nearest(name, fields)}"


def _content(name: str, path: str) -> str:
    """The text of a file without the line end that editors and `echo` put behind it."""
    try:
        text = read_whole(Path(path), ConfigError, MAX_BYTES).decode()
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {path} is not UTF-8 text") from None
    return text.removesuffix("\n").removesuffix("\r")


def variables_named(message: str, environ: Mapping[str, str], tree: type) -> list[str]:
    """The variables that are set for the fields that an error names, so that it can say where a value came from."""
    named = [
        key for key in field_types(tree) if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)", message)
    ]
    names = [name for key in named for name in (variable(key), variable(key) + OF_FILE)]
    return [name for name in names if name in environ]

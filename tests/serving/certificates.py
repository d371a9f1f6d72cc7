# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, of an authority that nobody else trusts."""

from __future__ import annotations

from pathlib import Path

import trustme


def make_pems(folder: Path) -> dict[str, Path]:
    """A certificate for 127.0.0.1 with its key, the authority that signed it, and another certificate's key."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1", "localhost")
    paths = {name: folder / f"{name}.pem" for name in ("certificate", "key", "authority", "other")}
    made.private_key_pem.write_to_path(str(paths["key"]))
    for blob in made.cert_chain_pems:
        blob.write_to_path(str(paths["certificate"]), append=True)
    authority.cert_pem.write_to_path(str(paths["authority"]))
    authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(str(paths["other"]))
    return paths


def tls(pems: dict[str, Path], key: str = "key") -> tuple[str, str]:
    """The settings of a server that is asked by https."""
    return f"server.tls_certificate={pems['certificate']}", f"server.tls_key={pems[key]}"

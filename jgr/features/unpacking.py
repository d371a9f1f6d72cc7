# SPDX-License-Identifier: Apache-2.0
"""Records of features on the device: a record is words of a buffer, and many records are one input."""

from __future__ import annotations

import jax
import numpy as np

from jgr.features.schema import Schema
from jgr.models.words import WORD, seen_as


def unpack_records(schema: Schema, records: jax.Array) -> dict[str, jax.Array]:
    """Each feature as [n, width] of its dtype, inside a jitted function. records: [n, record_bytes / 4] uint32."""
    features = {}
    fields = schema.dtype.fields
    assert fields is not None
    for feature in schema.features:
        dtype, offset = np.dtype(feature.dtype), int(fields[feature.name][1])
        first, last = offset // WORD, -(-(offset + feature.width * dtype.itemsize) // WORD)
        numbers = seen_as(records[:, first:last], dtype)
        skipped = offset % WORD // dtype.itemsize
        features[feature.name] = numbers[:, skipped : skipped + feature.width]
    return features
